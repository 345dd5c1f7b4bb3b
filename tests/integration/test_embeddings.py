"""Embeddings: as transformers makes them, the same bits alone and in company, and what POST /v1/embeddings answers."""

import base64
import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from roseinfer.config.options import (
    DEMO_MODEL,
    CacheConfig,
    Config,
    EngineConfig,
    ModelConfig,
    RunnerConfig,
    SchedulerConfig,
)
from roseinfer.errors import ConfigError, InvalidRequest, PromptTooLong
from roseinfer.llm.llm import LLM
from roseinfer.messages import EmbeddingInfo, Pooling, Request, SamplingParams, TokenOutput
from roseinfer.model.pooling import read_embedding
from roseinfer.model.weights.checkpoint import resolve_checkpoint
from roseinfer.records import FinishReason
from tests.unit.server.harness import ScriptedEngine, engine_info, serving, times

SHAPE = {
    "vocab_size": 2048,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": 0,
}
PROMPTS = [[7 * i % 2048 + 1 for i in range(start, start + length)] for start, length in ((0, 1), (3, 40), (9, 130))]
POOLINGS: list[Pooling] = ["last", "mean"]
Vector = npt.NDArray[np.float32]


@pytest.fixture(scope="module", params=["qwen3", "phi3"])  # a file of its own, and transformers' code
def reference(request: pytest.FixtureRequest) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(request.param, **SHAPE)
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().float()


@pytest.fixture(scope="module")
def checkpoint(reference: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("embeddings")
    reference.save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(resolve_checkpoint(DEMO_MODEL) / name, directory)
    return directory


def open_llm(
    directory: Path,
    transport: Literal["process", "thread"] = "thread",
    kv_dtype: Literal["auto", "int8"] = "auto",
    **scheduler: Any,
) -> LLM:
    config = Config(
        engine=EngineConfig(transport=transport),
        model=ModelConfig(path=str(directory), dtype="float32"),
        cache=CacheConfig(num_blocks=256, dtype=kv_dtype),
        runner=RunnerConfig(device="cpu", num_threads=1),
        scheduler=SchedulerConfig(**scheduler),
    )
    return LLM(config=config)


def expected(reference: PreTrainedModel, token_ids: list[int], pooling: Pooling) -> Vector:
    with torch.inference_mode():
        rows = reference.base_model(torch.tensor([token_ids])).last_hidden_state[0]
    pooled = rows[-1] if pooling == "last" else rows.mean(0)
    vector: Vector = (pooled / pooled.norm()).numpy()
    return vector


@pytest.mark.parametrize(
    "options",
    [{"transport": "process"}, {"max_num_seqs": 8, "max_num_batched_tokens": 32}],
    ids=["whole, by a process", "in pieces, by a thread"],
)
def test_they_are_those_of_transformers(reference: PreTrainedModel, checkpoint: Path, options: dict[str, Any]) -> None:
    with open_llm(checkpoint, **options) as llm:
        for pooling in POOLINGS:
            found = llm.embed(PROMPTS, pooling=pooling)
            again = llm.embed(PROMPTS, pooling=pooling)  # from the prefix cache, where that is allowed
            for vector, repeated, prompt in zip(found, again, PROMPTS, strict=True):
                assert np.abs(vector - expected(reference, prompt, pooling)).max() < 1e-4
                assert vector.tobytes() == repeated.tobytes()


def test_a_model_that_was_saved_without_a_head(reference: PreTrainedModel, checkpoint: Path, tmp_path: Path) -> None:
    """As sentence-transformers saves it: other names of architecture and tensors."""
    reference.base_model.save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(checkpoint / name, tmp_path)
    with open_llm(tmp_path) as llm:
        found = llm.embed(PROMPTS)
    for vector, prompt in zip(found, PROMPTS, strict=True):
        assert np.abs(vector - expected(reference, prompt, "last")).max() < 1e-4


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_they_are_the_same_in_company(checkpoint: Path, kv_dtype: Literal["auto", "int8"]) -> None:
    """Sixteen at once, in pieces, beside generations that decode; and each alone, whole."""
    prompts = [[(11 * i * (k + 1)) % 2000 + 1 for i in range(5 + 13 * k)] for k in range(16)]
    with open_llm(checkpoint, kv_dtype=kv_dtype) as llm:
        alone = [[llm.embed([prompt], pooling=pooling)[0] for prompt in prompts] for pooling in POOLINGS]
    with open_llm(checkpoint, kv_dtype=kv_dtype, max_num_seqs=8, max_num_batched_tokens=48) as llm:
        busy = [llm.submit([5, 6, 7 + k], SamplingParams(max_tokens=150, temperature=0.0)) for k in range(4)]
        together = [llm.embed(prompts, pooling=pooling) for pooling in POOLINGS]
        texts = [llm.result(request_id).token_ids for request_id in busy]
    for found, wanted in zip(together, alone, strict=True):
        assert [vector.tobytes() for vector in found] == [vector.tobytes() for vector in wanted]
    assert all(len(text) > 0 for text in texts)


@pytest.mark.parametrize("reference", ["qwen3"], indirect=True)
def test_the_checkpoint_says_how(reference: PreTrainedModel, checkpoint: Path, tmp_path: Path) -> None:
    def with_modules(pooling: str, *more: str) -> EmbeddingInfo:
        directory = tmp_path / f"{pooling}{len(more)}"
        shutil.copytree(checkpoint, directory)
        names = ["Transformer", "Pooling", *more]
        paths = {"Transformer": "", "Pooling": "1_Pooling"}
        prefix = "sentence_transformers.models."
        modules = [{"type": prefix + name, "path": paths.get(name, f"2_{name}")} for name in names]
        (directory / "modules.json").write_text(json.dumps(modules))
        (directory / "1_Pooling").mkdir()
        (directory / "1_Pooling" / "config.json").write_text(
            json.dumps(
                {"word_embedding_dimension": 64, "pooling_mode_cls_token": False, f"pooling_mode_{pooling}": True}
            )
        )
        with open_llm(directory) as llm:
            if not llm.info.embedding.unserved:
                [vector] = llm.embed([PROMPTS[1]])
                wanted = expected(reference, PROMPTS[1], llm.info.embedding.pooling)
                length = np.linalg.norm(vector)
                assert np.abs(vector / length - wanted).max() < 1e-4
                assert (abs(length - 1) < 1e-6) == llm.info.embedding.is_normalized
            else:
                with pytest.raises(InvalidRequest, match="asks for"):
                    llm.embed([PROMPTS[1]])
                assert llm.embed([PROMPTS[1]], pooling="last")
            return llm.info.embedding

    assert with_modules("mean_tokens") == EmbeddingInfo(size=64, pooling="mean", is_normalized=False)
    assert with_modules("lasttoken", "Normalize") == EmbeddingInfo(size=64)
    assert with_modules("max_tokens").unserved == "the pooling pooling_mode_max_tokens"
    assert with_modules("lasttoken", "Dense", "Normalize").unserved == "the module Dense"


@pytest.mark.parametrize(
    ("config", "pooling", "unserved"),
    [
        ({"embedding_dimension": 64, "pooling_mode": "mean"}, "mean", ""),
        ({"pooling_mode": "lasttoken", "pooling_mode_cls_token": True}, "last", ""),
        ({"pooling_mode": ["mean", "lasttoken"]}, "last", "the pooling mean and lasttoken"),
        ({"pooling_mode": "cls"}, "last", "the pooling cls"),
        ({"pooling_mode_cls_token": False}, "mean", ""),
        ({"word_embedding_dimension": 64}, "mean", ""),
    ],
)
def test_the_words_of_newer_and_of_no_modes(
    config: dict[str, object], pooling: str, unserved: str, tmp_path: Path
) -> None:
    (tmp_path / "modules.json").write_text(json.dumps([{"type": "a.b.Pooling", "path": "1_Pooling"}]))
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(config))
    info = read_embedding(tmp_path, 64)
    assert (info.pooling, info.unserved) == (pooling, unserved)


@pytest.mark.parametrize(
    ("modules", "config", "reason"),
    [
        ("x", "{}", r"modules\.json cannot be read: JSON is malformed"),
        ("{}", "{}", r"modules\.json cannot be read: Expected `array`, got `object`"),
        ('[{"path": ""}]', "{}", r"modules\.json cannot be read: Object missing required field `type`"),
        ('[{"type": "Pooling", "path": "1"}]', "{}", r"1/config\.json cannot be read: No such file"),
        ('[{"type": "Pooling", "path": ""}]', "[]", r"config\.json cannot be read: Expected `object`, got `array`"),
    ],
)
def test_modules_that_are_none_are_one_sentence(modules: str, config: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text(modules)
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(ConfigError, match=reason):
        read_embedding(tmp_path, 64)


@pytest.mark.parametrize("reference", ["qwen3"], indirect=True)
def test_fewer_dimensions_are_the_first_at_length_1(checkpoint: Path) -> None:
    with open_llm(checkpoint) as llm:
        [whole], [part] = llm.embed([PROMPTS[1]]), llm.embed([PROMPTS[1]], dimensions=5)
        for wrong, param in ((65, "dimensions"), (0, "dimensions")):
            with pytest.raises(InvalidRequest) as refused:
                llm.embed([PROMPTS[1]], dimensions=wrong)
            assert refused.value.param == param
        with pytest.raises(PromptTooLong, match="embeds up to 255 tokens"):
            llm.embed([[1] * 256])
    assert np.allclose(part, whole[:5] / np.linalg.norm(whole[:5]))


def embeds(request: Request) -> Iterable[TokenOutput]:
    """The length of the prompt, and 3 and 4 behind it."""
    raw = np.array([len(request.prompt_token_ids), 3.0, 4.0], np.float32).tobytes()
    yield TokenOutput(request.request_id, [], None, FinishReason.STOP, None, times(), embedding=raw)


async def ask(body: dict[str, Any]) -> tuple[int, Any]:
    info = engine_info(embedding=EmbeddingInfo(size=3, is_normalized=False))
    async with serving(ScriptedEngine(embeds, info=info)) as server:
        answer = await server.request("POST", "/v1/embeddings", json=body)
    return answer.status, answer.json


@pytest.mark.parametrize(
    ("given", "lengths"),
    [("abc", [3]), (["a", "abcd"], [1, 4]), ([5, 6], [2]), ([[5], [5, 6, 7]], [1, 3])],
)
async def test_every_kind_of_input(given: Any, lengths: list[int]) -> None:
    status, answer = await ask({"input": given})
    assert status == 200
    special = answer["data"][0]["embedding"][0] - lengths[0]  # what the tokenizer puts around a text
    assert [item["embedding"] for item in answer["data"]] == [[length + special, 3.0, 4.0] for length in lengths]
    assert [(item["object"], item["index"]) for item in answer["data"]] == [
        ("embedding", i) for i in range(len(lengths))
    ]
    num_tokens = sum(length + special for length in lengths)
    assert answer["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    assert (answer["object"], answer["model"]) == ("list", "scripted")


async def test_base64_is_the_same_numbers() -> None:
    _, answer = await ask({"input": [5, 6], "encoding_format": "base64", "dimensions": 2})
    [item] = answer["data"]
    assert np.frombuffer(base64.b64decode(item["embedding"]), "<f4").tolist() == [2.0, 3.0]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input[1]"),
        ({"input": ["a", 5]}, "input"),
        ({"input": [[5], []]}, "input[1]"),
        ({"input": [5, 999]}, "input[1]"),
        ({"input": "a" * 500}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": "a", "dimensions": 4}, "dimensions"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "pooling": "max"}, "pooling"),
        ({"input": "a", "temperature": 1}, "temperature"),
        ({"messages": []}, "messages"),
    ],
)
async def test_a_refusal_names_the_field(body: dict[str, Any], param: str) -> None:
    status, answer = await ask(body)
    assert (status, answer["error"]["param"]) == (400, param)
