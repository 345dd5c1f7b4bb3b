"""The committed demo model: its files agree with each other, with its card, and with what `transformers` reads."""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

import roseinfer

DEMO = Path(roseinfer.__file__).parent / "demo"
SPECIALS = ["<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>"]
CONTEXT = 1024


@pytest.fixture(scope="module")
def config() -> dict[str, Any]:
    return dict(json.loads((DEMO / "config.json").read_text()))


@pytest.fixture(scope="module")
def card() -> str:
    return (DEMO / "README.md").read_text()


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(DEMO / "tokenizer.json"))


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()


def shapes() -> dict[str, tuple[int, ...]]:
    with safe_open(DEMO / "model.safetensors", framework="pt") as tensors:
        return {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118


def test_folder_is_small() -> None:
    assert sum(path.stat().st_size for path in DEMO.iterdir()) < 8_000_000


def test_weights_are_gpt2_of_one_to_three_million_parameters(config: dict[str, Any]) -> None:
    width, layers = config["n_embd"], config["n_layer"]
    found = shapes()
    assert found["transformer.wte.weight"] == (config["vocab_size"], width)
    assert found["transformer.wpe.weight"] == (CONTEXT, width)
    assert found["transformer.h.0.attn.c_attn.weight"] == (width, 3 * width)
    assert found["transformer.h.0.mlp.c_proj.weight"] == (4 * width, width)
    assert len(found) == 4 + 12 * layers  # tied: no lm_head
    assert 1_000_000 <= sum(torch.Size(shape).numel() for shape in found.values()) <= 3_000_000


def test_config_names_the_context_and_the_end(config: dict[str, Any], tokenizer: Tokenizer) -> None:
    assert config["n_positions"] == CONTEXT
    assert config["vocab_size"] == tokenizer.get_vocab_size() >= 2048
    assert tokenizer.id_to_token(config["eos_token_id"]) == "<|endoftext|>"


def test_every_byte_and_every_script_survives_the_tokenizer(tokenizer: Tokenizer) -> None:
    text = "".join(map(chr, range(256))) + "\tdef f():\r\n日本語 Ελληνικά 👩‍🚀 \u202e"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert len({tokenizer.token_to_id(special) for special in SPECIALS}) == len(SPECIALS)


def test_chat_template_marks_roles_and_asks_for_an_answer() -> None:
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "Bye"},
    ]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert prompt == "<|system|>Be brief.<|user|>Hi<|assistant|>Hello<|endoftext|><|user|>Bye<|assistant|>"
    ids = tokenizer(prompt)["input_ids"]
    assert ids[0] == tokenizer.convert_tokens_to_ids("<|system|>")
    assert ids[-1] == tokenizer.convert_tokens_to_ids("<|assistant|>")
    answered = tokenizer.apply_chat_template([{"role": "tool", "content": "4"}], tokenize=False)
    assert answered == "<|user|>4"  # it was trained without tools: what a function says comes from the user's side
    thought = {"role": "assistant", "content": "Hello", "reasoning_content": "A greeting."}
    thinking = tokenizer.apply_chat_template(
        [messages[1], thought, messages[3]], tokenize=False, add_generation_prompt=True, enable_thinking=True
    )
    told = "<think>\nA greeting.\n</think>\nHello"
    assert thinking == f"<|user|>Hi<|assistant|>{told}<|endoftext|><|user|>Bye<|assistant|><think>\n"
    with pytest.raises(Exception, match="critic"):
        tokenizer.apply_chat_template([{"role": "critic", "content": "4"}], tokenize=False)


def test_card_numbers_are_those_of_the_files(card: str) -> None:
    parameters = sum(torch.Size(shape).numel() for shape in shapes().values())
    assert f"{parameters:,} parameters" in card
    for path in DEMO.iterdir():
        if path.name != "README.md":
            assert (
                f"| `{path.name}` | {path.stat().st_size:,} | `{hashlib.sha256(path.read_bytes()).hexdigest()}` |"
                in card
            )


def test_card_loss_beats_the_frequency_of_tokens(card: str) -> None:
    losses = [float(loss) for loss in re.findall(r"^\| (?:trained on|held out) \| ([\d.]+) \|", card, re.MULTILINE)]
    assert len(losses) == 2
    assert all(1.0 < loss < 4.5 for loss in losses)


def test_every_position_is_trained(model: Any, tokenizer: Tokenizer, card: str) -> None:
    """English scores well wherever it stands; an untrained position embedding would score near ln(2048) = 7.6."""
    ids = tokenizer.encode(card.partition("## Samples")[0]).ids[:128]
    positions = torch.stack([torch.arange(first, first + len(ids)) for first in range(0, CONTEXT - len(ids) + 1, 64)])
    with torch.inference_mode():
        batch = torch.tensor([ids]).expand(len(positions), -1)
        logits = model(batch, position_ids=positions).logits
        losses = torch.nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), batch[:, 1:], reduction="none").mean(
            dim=1
        )
    assert losses.max() < losses[0] + 0.4
    assert losses[0] < 5.5


def test_greedy_sample_of_the_card_is_what_transformers_continues(model: Any, tokenizer: Tokenizer, card: str) -> None:
    """The first answer of the card, a frequent one, has no near ties that rounding could turn."""
    prompt, continuation = re.findall(r"^````text\n(<\|user\|>[^⏵]*)⏵(.*)\n````", card, re.MULTILINE)[0]
    ids = torch.tensor([tokenizer.encode(prompt).ids])
    answer = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=60, do_sample=False)[0]
    told = tokenizer.decode(answer[ids.shape[1] :].tolist(), skip_special_tokens=False)
    assert told.removesuffix("<|endoftext|>") == continuation
