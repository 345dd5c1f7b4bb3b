"""Decoders that run transformers' modelling code, against transformers alone: logits, greedy tokens, batches.

Every checkpoint is a small random one, written by `save_pretrained` and read as a server reads it. In float32 the two
differ by rounding alone.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedModel
from transformers.models.vaultgemma import modeling_vaultgemma

from roseinfer.cli.models import outline
from roseinfer.config.options import CacheConfig, Config, ModelConfig, RunnerConfig
from roseinfer.engine.core.batch import ScheduledBatch, SlotBinding
from roseinfer.errors import ConfigError
from roseinfer.messages import SamplingParams
from roseinfer.model.device import Placement
from roseinfer.model.families import registry
from roseinfer.model.families import transformers_loading as loading
from roseinfer.model.families.tested import REFUSED, TESTED
from roseinfer.model.families.transformers import TransformersModel
from roseinfer.model.families.transformers_layers import Layers
from roseinfer.model.kernels.library import levels_here
from roseinfer.model.runner import ModelRunner, load_runner
from roseinfer.model.weights import packed_cache
from roseinfer.model.weights.checkpoint import Checkpoint
from roseinfer.model.weights.packed_cache import PackedCache
from tests.conftest import BuiltKernels
from tests.unit.model.quantised import MXFP4, Method, methods, quantise

TOLERANCE = 1e-4
MAX_LEN = 192
BLOCKS = MAX_LEN // 16  # of one sequence
SMALL: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_LEN,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WINDOW = {"sliding_window": 24}
HEADS = {"head_dim": 16}
ROPE_192 = {
    "rope_type": "yarn",
    "rope_theta": 150_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 48,
    "truncate": False,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
FAMILIES: dict[str, dict[str, Any]] = {
    "apertus": {},
    "arcee": {},
    "bitnet": {},
    "cohere": {"logit_scale": 1.0},
    "cohere2": WINDOW | {"logit_scale": 1.0},
    "deepseek_v3": EXPERTS
    | {"num_key_value_heads": 4, "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "kv_lora_rank": 16}
    | {"q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16, "first_k_dense_replace": 1},
    "ernie4_5": {},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32},
    "exaone4": WINDOW,
    "gemma": HEADS,
    "gemma2": WINDOW | HEADS | {"query_pre_attn_scalar": 16},
    "gemma3_text": WINDOW | HEADS | {"query_pre_attn_scalar": 16, "num_hidden_layers": 7},
    "glm": HEADS,
    "glm4": HEADS,
    "glm4_moe": EXPERTS | HEADS | {"n_routed_experts": 4, "first_k_dense_replace": 1},
    "gpt_neox": {},
    "gpt_oss": WINDOW | HEADS | {"num_local_experts": 4, "num_experts_per_tok": 2} | {"rope_parameters": ROPE_192},
    "granite": {
        "logits_scaling": 3.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.7,
        "embedding_multiplier": 2.0,
    },
    "granitemoe": {"num_local_experts": 4},
    "helium": HEADS,
    "hunyuan_v1_dense": HEADS,
    "llama": {},
    "mistral": WINDOW,
    "mixtral": WINDOW | {"num_local_experts": 4},
    "nemotron": {},
    "olmo": {},
    "olmo2": {},
    "olmo3": WINDOW,
    "olmoe": EXPERTS | {"num_experts": 4},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "persimmon": {},
    "phi": {},
    "phi3": {},
    "phimoe": WINDOW | {"num_local_experts": 4},
    "qwen2": {},
    "qwen2_moe": EXPERTS
    | WINDOW
    | {"num_experts": 4, "shared_expert_intermediate_size": 32, "use_sliding_window": True},
    "qwen3": HEADS | {"tie_word_embeddings": True},
    "qwen3_moe": EXPERTS | HEADS | {"num_experts": 4},
    "seed_oss": HEADS,
    "smollm3": {"no_rope_layer_interval": 2},
    "stablelm": {},
    "starcoder2": WINDOW,
}


def random_model(model_type: str, **changes: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **SMALL | FAMILIES.get(model_type, {}) | changes)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().float()
    for parameter in model.parameters():  # biases and norms are born at 0 and 1, where a mistake would not show
        if parameter.dim() == 1:
            parameter.data += torch.randn(parameter.shape) * 0.1
    return model


@pytest.fixture(autouse=True)
def no_file_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Types with a file of ours are computed by transformers' code too: it is what ours is measured against."""
    monkeypatch.setattr(registry, "FAMILIES", {})


@pytest.fixture(params=sorted(FAMILIES), scope="module")
def reference(request: pytest.FixtureRequest) -> PreTrainedModel:
    return random_model(request.param)


def load(reference: PreTrainedModel, directory: Path, num_slots: int = 1, **runner: Any) -> ModelRunner:
    reference.save_pretrained(directory)
    return load_directory(directory, num_slots, **runner)


def load_directory(
    directory: Path, num_slots: int = 1, model: dict[str, Any] | None = None, **runner: Any
) -> ModelRunner:
    config = Config(
        model=ModelConfig(path=str(directory), dtype="float32", **(model or {})),
        cache=CacheConfig(num_blocks=num_slots * BLOCKS),
        runner=RunnerConfig(device="cpu", num_threads=1, **({"kernels": "off"} | runner)),
    )
    return load_runner(config, num_slots, lambda *_: None)


def logits_of(runner: ModelRunner, *rows: tuple[int, int, list[int]]) -> torch.Tensor:
    """One step of rows of (slot, start, token ids) -> logits behind the last token of each."""
    slots, starts, token_ids = zip(*rows, strict=True)
    batch = ScheduledBatch(
        step_id=0,
        slots=np.array(slots, np.int32),
        starts=np.array(starts, np.int32),
        num_new_tokens=np.array([len(ids) for ids in token_ids], np.int32),
        samples=np.ones(len(rows), bool),
        num_device_rows=0,
        token_ids=np.concatenate(token_ids).astype(np.int32),
        block_table=np.arange((max(slots) + 1) * BLOCKS, dtype=np.int32).reshape(-1, BLOCKS),
        bindings=tuple(SlotBinding(slot, SamplingParams(temperature=0.0), 1, ()) for slot in slots),
    )
    return runner.logits(batch)


def text_of(length: int, seed: int = 3) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(3, SMALL["vocab_size"], length).tolist()
    return tokens


def test_every_tested_type_is_tested() -> None:
    assert FAMILIES.keys() == TESTED.keys()


@torch.inference_mode()
def test_pieces_of_a_prompt_and_64_greedy_tokens(
    reference: PreTrainedModel, tmp_path: Path, built_kernels: BuiltKernels
) -> None:
    """Across the edges of windows, and of what a cached prefix would leave to compute."""
    level = levels_here()[-1].name
    runner = load(reference, tmp_path, kernels=level, kernels_dir=str(built_kernels(level)))
    num_parameters = sum(parameter.numel() for parameter in reference.parameters())
    foreseen = outline(tmp_path)
    assert (runner.info.num_parameters, foreseen["parameters"]) == (num_parameters, num_parameters)
    token_bytes = runner._model.attention_spec.bytes_per_token(torch.float32)
    assert (foreseen["served_by"], foreseen["types"][0]["kv_bytes_per_token"]) == ("transformers", token_bytes)
    text, position = text_of(100), 0
    for end in (60, 61, 80, 100):
        row = logits_of(runner, (0, position, text[position:end]))[0]
        position = end
        expected = reference(torch.tensor([text[:end]]), use_cache=False).logits[0, -1]
        torch.testing.assert_close(row, expected, atol=TOLERANCE, rtol=0)
    while len(text) < 164:
        text.append(int(row.argmax()))
        row = logits_of(runner, (0, len(text) - 1, text[-1:]))[0]
    expected = reference(torch.tensor([text]), use_cache=False).logits[0]
    assert text[100:] == expected[99:-1].argmax(-1).tolist()
    torch.testing.assert_close(row, expected[-1], atol=TOLERANCE, rtol=0)


@torch.inference_mode()
def test_a_row_among_sixteen(reference: PreTrainedModel, tmp_path: Path, built_kernels: BuiltKernels) -> None:
    """Prompts of different lengths in one step, then a token each: the bits of a row alone."""
    level = levels_here()[-1].name
    runner = load(reference, tmp_path, 16, kernels=level, kernels_dir=str(built_kernels(level)))
    texts = [text_of(5 + 3 * slot, slot) for slot in range(16)]
    together = [
        logits_of(runner, *((slot, 0, text[:-1]) for slot, text in enumerate(texts))),
        logits_of(runner, *((slot, len(text) - 1, text[-1:]) for slot, text in enumerate(texts))),
    ]
    singles = [
        (logits_of(runner, (slot, 0, text[:-1])), logits_of(runner, (slot, len(text) - 1, text[-1:])))
        for slot, text in enumerate(texts)
    ]
    for slot, alone in enumerate(singles):
        assert all(torch.equal(some[slot], one[0]) for some, one in zip(together, alone, strict=True))


@torch.inference_mode()
def test_without_compiled_kernels(reference: PreTrainedModel, tmp_path: Path) -> None:
    runner, text = load(reference, tmp_path), text_of(90)
    for start, end in ((0, 70), (70, 89), (89, 90)):
        row = logits_of(runner, (0, start, text[start:end]))[0]
    expected = reference(torch.tensor([text]), use_cache=False).logits[0, -1]
    torch.testing.assert_close(row, expected, atol=TOLERANCE, rtol=0)


class NoHost(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises where a device (here `meta`, which has no numbers) would wait for the host, or be sent some."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        results = function(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        on_device = [
            leaf for leaf in (*tensors, *tree_leaves(results)) if isinstance(leaf, torch.Tensor) and leaf.is_meta
        ]
        from_host = [tensor for tensor in tensors if not tensor.is_meta]
        is_number = all(tensor.dim() == 0 for tensor in from_host) and "copy" not in function._schema.name
        if on_device and from_host and not is_number:
            raise RuntimeError(f"{function._schema.name} takes {from_host} from the host")
        return results


@torch.inference_mode()
def test_what_of_a_step_a_cuda_graph_can_hold(reference: PreTrainedModel, tmp_path: Path) -> None:
    """All of it, or, where experts get their rows by numbers that the host reads, nothing."""
    reference.save_pretrained(tmp_path)
    device, is_capturable = torch.device("meta"), True
    ids = torch.zeros(5, dtype=torch.long, device=device)
    try:
        with Checkpoint(tmp_path) as checkpoint:
            model = TransformersModel(checkpoint, Placement(device, torch.bfloat16))
        with NoHost():  # type: ignore[no-untyped-call]
            hidden = model.forward(ids, ids, lambda _, q, *__: q.new_empty(5, q.shape[1] * q.shape[2]))
            assert model.logits(hidden).shape == (5, SMALL["vocab_size"])
    except (RuntimeError, ConfigError):
        is_capturable = False
    assert is_capturable == TESTED[reference.config.model_type].is_capturable


CHANGES: dict[str, dict[str, Any]] = {
    "gptj": {"rotary_dim": 8},
    "lfm2": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
    "llama4_text": HEADS | {"num_local_experts": 2, "attention_chunk_size": 16},
}


@pytest.mark.parametrize("model_type", sorted(REFUSED))
def test_what_no_cache_of_keys_can_serve_is_refused(model_type: str, tmp_path: Path) -> None:
    config = AutoConfig.for_model(model_type, **SMALL | CHANGES.get(model_type, {}))
    kind = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    kind.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=REFUSED[model_type]):
        load_directory(tmp_path)


@torch.inference_mode()
def test_rotations_that_change_with_the_longest_text_of_a_batch(tmp_path: Path) -> None:
    """Texts are as long as they do not change: the tokens of one request may not decide about another's."""
    factors = {"short_factor": [1.0, 1.5, 2.0, 2.5] * 2, "long_factor": [4.0] * 8}
    rope = {"rope_type": "longrope", "rope_theta": 10_000.0, "original_max_position_embeddings": 100, **factors}
    reference = random_model("phi3", rope_parameters=rope, original_max_position_embeddings=100)
    runner, text = load(reference, tmp_path), text_of(100)
    assert runner.info.max_model_len == 100
    expected = reference(torch.tensor([text]), use_cache=False).logits[0, -1]
    torch.testing.assert_close(logits_of(runner, (0, 0, text))[0], expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(("model_type", "more"), [("gemma", {}), ("hunyuan_v1_dense", {"alpha": 1000.0})])
@torch.inference_mode()
def test_dynamic_rotations_are_foreseen_as_they_are_served(
    model_type: str, more: dict[str, float], tmp_path: Path
) -> None:
    """Some code looks at the numbers of positions, which modules without numbers have not."""
    rope = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 1.0} | more
    reference = random_model(model_type, **HEADS, rope_parameters=rope)
    runner, text = load(reference, tmp_path), text_of(120)
    expected = reference(torch.tensor([text]), use_cache=False).logits[0, -1]
    torch.testing.assert_close(logits_of(runner, (0, 0, text))[0], expected, atol=TOLERANCE, rtol=0)
    foreseen = outline(tmp_path)
    assert (foreseen["served_by"], foreseen["positions"]) == ("transformers", runner.info.max_model_len)


@torch.inference_mode()
def test_rotations_of_one_type_of_layers_that_change_with_the_longest_text(tmp_path: Path) -> None:
    long = {"rope_type": "longrope", "original_max_position_embeddings": 100}
    long |= {"short_factor": [1.5] * 8, "long_factor": [4.0] * 8, "rope_theta": 10_000.0}
    plain = {"rope_type": "default", "rope_theta": 10_000.0}
    ropes = {"full_attention": long, "sliding_attention": plain}
    reference = random_model("gemma3_text", rope_parameters=ropes)
    runner, text = load(reference, tmp_path), text_of(100)
    assert runner.info.max_model_len == 100
    expected = reference(torch.tensor([text]), use_cache=False).logits[0, -1]
    torch.testing.assert_close(logits_of(runner, (0, 0, text))[0], expected, atol=TOLERANCE, rtol=0)


def test_rotations_of_a_type_of_layers_that_the_model_has_none_of(tmp_path: Path) -> None:
    """Transformers completes those alone that some layer has."""
    long = {"rope_type": "longrope", "short_factor": [1.5] * 8, "long_factor": [4.0] * 8, "rope_theta": 10_000.0}
    ropes = {"full_attention": long, "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0}}
    reference = random_model("gemma3_text", num_hidden_layers=2, rope_parameters=ropes)
    assert load(reference, tmp_path).info.max_model_len == MAX_LEN


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_an_untested_type_is_compared_at_load(
    quantization: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In floats where int4 is asked for, which moves random models farther than a mistake would."""
    assert "vaultgemma" not in TESTED
    random_model("vaultgemma", **WINDOW, **HEADS).save_pretrained(tmp_path)
    load_directory(tmp_path, model={"quantization": quantization})
    monkeypatch.setattr("roseinfer.model.families.transformers_layers._ACTIVATIONS", {"GELUTanh": "silu"})
    with pytest.raises(ConfigError, match="comes out otherwise than in transformers"):
        load_directory(tmp_path, model={"quantization": quantization})


def test_the_logits_of_an_untested_type_are_compared_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are made by the head's own code, of hidden rows that are there already."""
    reference, logits = random_model("vaultgemma", **WINDOW, **HEADS), TransformersModel.logits
    monkeypatch.setattr(TransformersModel, "logits", lambda model, hidden: 1.1 * logits(model, hidden))
    with pytest.raises(ConfigError, match="comes out otherwise than in transformers"):
        load(reference, tmp_path)


@pytest.mark.parametrize(
    ("model_type", "shape", "reason"),
    [
        ("gemma4_text", WINDOW | {"global_head_dim": 16, "vocab_size_per_layer_input": 128}, "does not run with other"),
        ("llama4_text", {"num_local_experts": 2, "layer_types": ["full_attention"] * 4}, "are not apart from its head"),
    ],
)
def test_a_head_that_needs_more_than_hidden_rows_is_refused(
    model_type: str, shape: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=f"is a {model_type}, wh.*{reason}"):
        load(random_model(model_type, **HEADS | shape), tmp_path)


def test_an_untested_type_whose_head_passes_over_its_base(tmp_path: Path) -> None:
    """Whisper's decoder is within the base, and its head calls that alone."""
    shape = {"d_model": 64, "decoder_layers": 4, "decoder_attention_heads": 4, "decoder_ffn_dim": 96}
    runner = load(random_model("whisper", **shape, max_target_positions=64, max_position_embeddings=64), tmp_path)
    assert runner.info.model_type == "whisper"


@torch.inference_mode()
def test_yarn_stretches_the_context_it_was_trained_on(tmp_path: Path) -> None:
    """As in the families with files of ours: config.json may still name the context of the training."""
    yarn = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 32}
    reference = random_model("qwen3_moe", rope_parameters=yarn, max_position_embeddings=40)
    runner, text = load(reference, tmp_path), text_of(120)
    assert runner.info.max_model_len == 128
    expected = reference(torch.tensor([text]), use_cache=False).logits[0, -1]
    torch.testing.assert_close(logits_of(runner, (0, 0, text))[0], expected, atol=TOLERANCE, rtol=0)


@torch.inference_mode()
def test_a_rope_of_all_layers_where_each_type_of_layers_has_its_own_is_unread(tmp_path: Path) -> None:
    """Transformers adds the ropes of the types, computes with those, and leaves the other one beside them."""
    reference = random_model("gemma3_text", max_position_embeddings=60)
    reference.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    yarn = {"rope_type": "yarn", "factor": 4.0}
    for original in ({}, {"original_max_position_embeddings": 60}):
        (tmp_path / "config.json").write_text(json.dumps(config | {"rope_parameters": yarn | original}))
        assert load_directory(tmp_path).info.max_model_len == 60


def test_an_untested_type_that_counts_positions_itself_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone and from its first token on it would come out right."""
    reference, rotations = random_model("vaultgemma", **WINDOW, **HEADS), modeling_vaultgemma.VaultGemmaRotaryEmbedding
    forward = rotations.forward
    counted = lambda module, x, position_ids: forward(module, x, torch.arange(position_ids.shape[1])[None])  # noqa: E731
    monkeypatch.setattr(rotations, "forward", counted)
    with pytest.raises(ConfigError, match="comes out otherwise than in transformers"):
        load(reference, tmp_path)


def test_an_untested_type_whose_first_position_is_not_0_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="comes out otherwise than in transformers"):
        load(random_model("roberta", is_decoder=True), tmp_path)


@pytest.mark.parametrize(
    ("model_type", "changes", "reason"),
    [
        ("gemma2", {"attention_bias": "x"}, "'attention_bias' expected bool, got str"),
        ("gemma2", {"hidden_activation": "x"}, "KeyError .*x"),
        ("gemma2", {"num_attention_heads": 0}, "transformers cannot load it: "),
        ("gemma2", {"architectures": 5}, "architectures 5 is no list of names"),
        ("gemma2", {"text_config": {"head_dim": 8}}, "is a gemma2, which has no text_config"),
        ("gemma2", {"sliding_window": 0}, "has a window without keys"),
        ("gemma2", {"is_causal": False}, "sees the tokens behind each token too \\(is_causal in config.json"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "too \\(use_bidirectional_attention in config.json"),
        ("phi3", {"num_hidden_layers": 0}, "has no layers"),
        ("gemma2", {"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}}, "needs code of its own"),
        ("deepseek_v2", {"num_key_value_heads": 2}, "is a deepseek_v2, which transformers cannot compute"),
    ],
    ids=str,
)
def test_a_configuration_that_makes_no_model(
    model_type: str, changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    """One line about a field of the wrong type or value, at start and from `roseinfer models`."""
    shape = FAMILIES["deepseek_v3"] if model_type == "deepseek_v2" else WINDOW | HEADS
    random_model(model_type, **shape).save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    with pytest.raises(ConfigError, match=reason) as caught:
        load_directory(tmp_path)
    assert "\n" not in caught.value.message
    assert "\n" not in outline(tmp_path).get("reason", "")


def test_an_expert_of_another_shape_is_named(tmp_path: Path) -> None:
    random_model("qwen3_moe").save_pretrained(tmp_path)
    tensors, name = load_file(tmp_path / "model.safetensors"), "model.layers.1.mlp.experts.2.up_proj.weight"
    save_file(tensors | {name: tensors[name].t().contiguous()}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=f"has {name} in another shape than the tensors of its kind"):
        load_directory(tmp_path)


@pytest.mark.parametrize("model_type", ["gemma2", "mixtral"])
def test_a_head_of_another_shape_than_the_table_it_is_tied_to_is_named(model_type: str, tmp_path: Path) -> None:
    """As of a vocabulary that grew in one of the two. Transformers would compare them; Mixtral's w1 and w2 differ."""
    random_model(model_type, tie_word_embeddings=True).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    table = tensors["model.embed_tokens.weight"]
    save_file(tensors | {"lm_head.weight": table[:-1].clone()}, tmp_path / "model.safetensors")
    rows, columns = table.shape
    expected = re.escape(f"has lm_head.weight as {[rows - 1, columns]} where config.json asks for {[rows, columns]}")
    with pytest.raises(ConfigError, match=expected):
        load_directory(tmp_path)


@pytest.mark.parametrize("name", ["torch_dtype", "dtype"])
def test_a_type_that_torch_does_not_know_has_no_effect(name: str, tmp_path: Path) -> None:
    """Nor has one that it knows: `model.dtype` says what weights become."""
    random_model("gemma2").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "dtype": None, name: "bf16"}))
    assert load_directory(tmp_path).info.dtype == "float32"
    assert outline(tmp_path)["served_by"] == "transformers"


def test_tensors_that_do_not_fit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """A line that names one, and none of the tables that transformers writes."""
    random_model("gemma2", **WINDOW, **HEADS).save_pretrained(tmp_path)
    file, name = tmp_path / "model.safetensors", "model.layers.1.mlp.up_proj.weight"
    tensors = load_file(file)
    save_file(tensors | {"model.layers.0.mlp.lora_A.weight": torch.ones(2)}, file)
    load_directory(tmp_path)
    assert "the file's model.layers.0.mlp.lora_A.weight: no module of the model reads it" in caplog.text
    save_file(tensors | {name: tensors[name][:50].contiguous()}, file)
    with pytest.raises(ConfigError, match=rf"has {name} as \[50, 64\] where config.json asks for \[96, 64\]"):
        load_directory(tmp_path)
    save_file({each: tensor for each, tensor in tensors.items() if each != name}, file)
    with pytest.raises(ConfigError, match=f"has no tensor {name}"):
        load_directory(tmp_path)
    assert "REPORT" not in caplog.text + "".join(capfd.readouterr())


@pytest.mark.parametrize("model_type", ["gemma2", "qwen3_moe"])
def test_neither_a_compiler_nor_distributed_tensors_are_imported(model_type: str, tmp_path: Path) -> None:
    """They would be 121 MB in every engine, for decorators and names."""
    random_model(model_type).save_pretrained(tmp_path)
    program = f"""
import sys
from roseinfer.config.options import CacheConfig, Config, ModelConfig, RunnerConfig
from roseinfer.model.runner import load_runner

config = Config(ModelConfig({str(tmp_path)!r}), CacheConfig(num_blocks=99), runner=RunnerConfig(kernels="off"))
assert load_runner(config, 1, print).info.model_type == {model_type!r}
assert not sys.modules.keys() & {{"torch._dynamo", "torch.distributed.tensor"}}

import torch

assert torch.distributed.is_available()
assert torch.compiler.disable(len) is not len
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_weights_stay_in_the_file_until_a_layer_copies_them(tmp_path: Path) -> None:
    random_model("qwen3_moe").bfloat16().save_pretrained(tmp_path)
    with Checkpoint(tmp_path) as checkpoint:
        layers = Layers(Placement(torch.device("cpu"), torch.float32), checkpoint.let_go)
        model = loading.load(checkpoint, torch.float32, layers.take_experts)
        [(first, last)] = checkpoint._lent.values()
        matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
        joined = [parameter for parameter in matrices if parameter.is_meta]
        assert len(joined) == 2 * SMALL["num_hidden_layers"], "experts are packed as soon as they are there"
        assert all(first <= matrix.data_ptr() < last for matrix in matrices if not matrix.is_meta)
        layers.replace_in(model)
        assert not any(left.is_meta or first <= left.data_ptr() < last for left in model.parameters())


@torch.inference_mode()
def test_outputs_that_a_training_asked_for_are_not_made(tmp_path: Path) -> None:
    """A tuple would have no logits, and the rows of all layers would be held until a step ends."""
    reference = random_model("olmoe")
    reference.save_pretrained(tmp_path)
    wishes = {"return_dict": False, "output_hidden_states": True, "output_router_logits": True}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | wishes))
    runner, text = load_directory(tmp_path), text_of(40)
    expected = reference(torch.tensor([text]), use_cache=False).logits[0, -1]
    torch.testing.assert_close(logits_of(runner, (0, 0, text))[0], expected, atol=TOLERANCE, rtol=0)
    assert isinstance(runner._model, TransformersModel)
    config = runner._model._base.config
    assert not config.output_hidden_states
    assert not config.output_router_logits


QUANTISED = [
    (model_type, method)
    for model_type, names in {
        "phi3": ("gptq, order",),
        "qwen3_moe": ("awq", "fp8, blocks"),
        "gpt_oss": ("mxfp4",),
    }.items()
    for method in [*methods(group=32, block=24), MXFP4]
    if method.name in names
]


@pytest.mark.parametrize(("model_type", "method"), QUANTISED, ids=str)
@torch.inference_mode()
def test_quantised_checkpoints(model_type: str, method: Method, tmp_path: Path) -> None:
    """Linears, experts that are modules in the file and one tensor in the model, and experts that are one in both."""
    random_model(model_type).save_pretrained(tmp_path / "model")
    experts = ("experts.gate_up_proj", "experts.down_proj")
    quantised, floats = quantise(tmp_path / "model", method, experts if method is MXFP4 else ("proj.weight",))
    expected = AutoModelForCausalLM.from_pretrained(floats, dtype=torch.float32)(torch.tensor([text_of(90)]))
    row = logits_of(load_directory(quantised), (0, 0, text_of(90)))[0]
    torch.testing.assert_close(row, expected.logits[0, -1], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
@pytest.mark.parametrize("model_type", ["gemma2", "qwen3_moe"])
def test_a_later_start_finds_packed_weights(
    model_type: str, quantization: str, tmp_path: Path, built_kernels: BuiltKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of linears and those of experts, which are packed while the file is read."""
    monkeypatch.setattr(packed_cache, "LEAST_BYTES", 0)
    monkeypatch.setattr(PackedCache, "write_soon", PackedCache.write)
    find, found = PackedCache.find, list[bool]()

    def noting(cache: PackedCache, kind: str, parts: Sequence[torch.Tensor], sizes: Sequence[int]) -> Any:
        pieces = find(cache, kind, parts, sizes)
        found.append(pieces is not None)
        return pieces

    monkeypatch.setattr(PackedCache, "find", noting)
    random_model(model_type).save_pretrained(tmp_path / "model")
    model = {"quantization": quantization, "packed_cache": str(tmp_path / "cache")}
    level, starts = levels_here()[-1].name, []
    for _ in range(2):
        found.clear()
        runner = load_directory(tmp_path / "model", model=model, kernels=level, kernels_dir=str(built_kernels(level)))
        runner.warm_up(40)
        starts.append(logits_of(runner, (0, 0, text_of(40))))
    num_experts = FAMILIES[model_type].get("num_experts", 0)
    assert all(found)
    assert len(found) >= SMALL["num_hidden_layers"] * (2 + 2 * max(num_experts, 1))
    assert torch.equal(*starts)


def test_a_quantised_weight_that_cannot_be_read(tmp_path: Path) -> None:
    random_model("phi3").save_pretrained(tmp_path / "model")
    gptq = next(method for method in methods(group=32, block=24) if method.name == "gptq")
    quantised, _ = quantise(tmp_path / "model", gptq, ("proj.weight",))
    config = json.loads((quantised / "config.json").read_text())
    config["quantization_config"]["group_size"] = 48
    (quantised / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"proj\.weight cannot be dequantised: .* in groups of 48 are not"):
        load_directory(quantised)


def test_scales_of_activations_are_refused(tmp_path: Path) -> None:
    """AutoAWQ divides the activations of GPT-NeoX and StarCoder2 by them; without, answers would be wrong."""
    random_model("starcoder2").save_pretrained(tmp_path / "model")
    awq = next(method for method in methods(group=32, block=24) if method.name == "awq")
    quantised, _ = quantise(tmp_path / "model", awq, ("proj.weight",))
    file, name = quantised / "model.safetensors", "model.layers.0.mlp.act.scales"
    save_file(load_file(file) | {name: torch.full((96,), 2.0)}, file)
    with pytest.raises(ConfigError, match=f"has {name}: AWQ scales an activation"):
        load_directory(quantised)


@pytest.mark.skipif("ROSEINFER_REQUIRE_ALL" not in os.environ, reason="long: in CI only")
@pytest.mark.parametrize("model_type", sorted(FAMILIES))
@torch.inference_mode()
def test_prompts_of_3000_tokens(tmp_path: Path, model_type: str) -> None:
    fewer = {} if "sliding_window" in FAMILIES[model_type] else {"num_hidden_layers": 2}  # one of each kind
    reference = random_model(model_type, max_position_embeddings=3200, **fewer)
    reference.save_pretrained(tmp_path)
    config = Config(
        model=ModelConfig(path=str(tmp_path), dtype="float32"),
        cache=CacheConfig(num_blocks=200),
        runner=RunnerConfig(device="cpu", num_threads=1),
    )
    runner, text = load_runner(config, 1, lambda *_: None), text_of(3000)
    expected = reference(torch.tensor([text]), use_cache=False, logits_to_keep=1).logits[0, -1]
    torch.testing.assert_close(_long(runner, 0, 0, text), expected, atol=TOLERANCE, rtol=0)


def _long(runner: ModelRunner, slot: int, start: int, token_ids: list[int]) -> torch.Tensor:
    batch = ScheduledBatch(
        step_id=0,
        slots=np.array([slot], np.int32),
        starts=np.array([start], np.int32),
        num_new_tokens=np.array([len(token_ids)], np.int32),
        samples=np.ones(1, bool),
        num_device_rows=0,
        token_ids=np.array(token_ids, np.int32),
        block_table=np.arange(200, dtype=np.int32)[None],
        bindings=(SlotBinding(slot, SamplingParams(temperature=0.0), 1, ()),),
    )
    return runner.logits(batch)[0]
