"""`roseinfer serve --model DIR` over small checkpoints of other families, and what it says of a broken one."""

import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from tests.e2e.conftest import StartServer
from tests.e2e.server import Server
from tests.e2e.test_start import assert_one_line, run
from tests.unit.server.harness import EOS, VOCAB_SIZE, write_checkpoint

pytestmark = pytest.mark.e2e

SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5}
TEMPLATE = "{{ bos_token }}{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"


def write_model(directory: Path, model: PreTrainedModel, template: str | None, **generation: Any) -> Path:
    """Weights in several files, a vocabulary of bytes that puts BOS before a text, and generation_config.json."""
    model.save_pretrained(directory, max_shard_size="100KB")
    write_checkpoint(directory, template=template, with_bos=True)
    (directory / "generation_config.json").write_text(json.dumps(generation))
    return directory


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    directory = tmp_path / "tiny-llama"
    return write_model(directory, LlamaForCausalLM(LlamaConfig(**SHAPE)), None, eos_token_id=[EOS, 0], temperature=0.0)


@pytest.fixture
def qwen3(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    config = Qwen3Config(**SHAPE, head_dim=32, tie_word_embeddings=True)
    directory = tmp_path / "tiny-qwen3"
    return write_model(directory, Qwen3ForCausalLM(config), TEMPLATE, eos_token_id=EOS, temperature=0.7, top_k=40)


def check_answers(server: Server, chat_prompt: str) -> None:
    """Greedy, since only then does the text not depend on a seed."""
    body = {"prompt": "Once", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    status, whole = server.post("/v1/completions", body)
    assert status == 200, whole
    assert (whole["usage"]["prompt_tokens"], whole["usage"]["completion_tokens"]) == (1 + len("Once"), 12)
    stream = json.dumps(body | {"stream": True}).encode()
    request = urllib.request.Request(f"{server.url}/v1/completions", stream, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        events = [line.removeprefix(b"data: ") for line in response.read().split(b"\n") if line]
    assert events.pop() == b"[DONE]"
    assert "".join(json.loads(event)["choices"][0]["text"] for event in events) == whole["choices"][0]["text"]
    status, answer = server.post("/v1/chat/completions", CHAT)
    assert status == 200, answer
    assert answer["usage"]["prompt_tokens"] == 1 + len(chat_prompt), "one BOS, the template's"


def test_qwen3(qwen3: Path, start_server: StartServer) -> None:
    server = start_server("--model", str(qwen3))
    check_answers(server, "<user>Hi")
    body = {"prompt": "Once", "max_tokens": 12, "ignore_eos": True}
    texts = {server.post("/v1/completions", body | {"seed": seed})[1]["choices"][0]["text"] for seed in range(4)}
    assert len(texts) > 1, "the checkpoint asks for temperature 0.7"


def test_llama_with_a_template_from_a_file(llama: Path, tmp_path: Path, start_server: StartServer) -> None:
    (tmp_path / "template.jinja").write_text("{{ bos_token }}mine: {{ messages[0].content }}")
    server = start_server("--model", str(llama), "--chat-template", str(tmp_path / "template.jinja"))
    check_answers(server, "mine: Hi")
    body = {"prompt": "Once", "max_tokens": 12, "ignore_eos": True}
    texts = {server.post("/v1/completions", body | {"seed": seed})[1]["choices"][0]["text"] for seed in range(4)}
    assert len(texts) == 1, "the checkpoint asks for temperature 0"


def test_a_broken_file_gets_one_line(llama: Path, tmp_path: Path) -> None:
    serve = ("serve", "--model", str(llama), "--port", "0", "--ops-port", "0")
    assert_one_line(run(*serve, "--chat-template", str(tmp_path / "none")), "server.chat_template", "none")
    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps(config | {"rope_parameters": {"rope_type": "longrope"}}))
    assert_one_line(run(*serve), "model.path", "config.json", "longrope")
    (llama / "config.json").write_text(json.dumps(config))
    shard = sorted(llama.glob("model-*.safetensors"))[1]
    shard.rename(tmp_path / "elsewhere")
    assert_one_line(run(*serve), "model.path", shard.name, "missing")
