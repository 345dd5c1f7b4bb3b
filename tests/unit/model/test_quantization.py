"""What int8 makes of weights and rows; what it, int4, an int8 cache and quantised checkpoints cost in accuracy."""

import hashlib
import importlib
import inspect
import json
import math
import re
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM

import roseinfer
from roseinfer.model.attention.base import Attend, AttentionSpec, PackedTokens
from roseinfer.model.attention.kv_cache import KVCache
from roseinfer.model.attention.registry import choose_attention
from roseinfer.model.device import DTYPES, Placement, Quantization
from roseinfer.model.families.registry import build_model
from roseinfer.model.layers.int8 import IntegerLinear, quantized_piece, quantized_rows
from roseinfer.model.layers.linear import Linear
from roseinfer.model.weights.checkpoint import Checkpoint
from tests.conftest import BuiltKernels
from tests.unit.model.quantised import Method, methods
from tests.unit.model.setups import LEVELS_HERE, SETUPS, TESTED_LEVELS, Setup

DEMO = Path(roseinfer.__file__).parent / "demo"
FLOAT32 = Placement(torch.device("cpu"), torch.float32)
WINDOW = 512
NUM_WINDOWS = 8

# Modules whose docstrings tools/demo_model/corpus.py holds out, by a hash of their names.
HELD_OUT = ("http.cookiejar", "http.server", "mailbox", "calendar", "email.utils", "dataclasses", "site")


def test_the_largest_number_of_a_row_becomes_127() -> None:
    x = torch.tensor([[0.5, -1.27, 0.014, 0.005, -0.005], [0.0] * 5, [1e30, -1e30, 0, 5e29, 1.0]])
    quantized, scales = quantized_rows(x)
    assert quantized.dtype == torch.int8
    assert quantized.tolist() == [[50, -127, 1, 0, 0], [0] * 5, [127, -127, 0, 64, 0]]
    torch.testing.assert_close(scales, torch.tensor([0.01, 0.0, 1e30 / 127]))


def test_the_scale_shows_what_is_not_finite() -> None:
    x = torch.ones(4, 3)
    x[1, 2], x[2, 0], x[3, 1] = torch.nan, torch.inf, -torch.inf
    assert quantized_rows(x)[1].isfinite().tolist() == [True, False, False, False]


def test_a_row_that_is_too_small_for_a_factor_is_a_row_of_zeros() -> None:
    """127 / 3.7321e-37 is more than the largest float32, 127 / 3.7323e-37 less."""
    x = torch.tensor([[3.7323e-37, -1e-37, 0.0], [3.7321e-37, -1e-37, 0.0], [-1e-38, 1e-38, 0.0], [1e-45, 0.0, 0.0]])
    quantized, scales = quantized_rows(x)
    assert quantized.tolist() == [[127, -34, 0], [0] * 3, [0] * 3, [0] * 3]
    assert scales.tolist() == [pytest.approx(3.7323e-37 / 127, rel=1e-6), 0.0, 0.0, 0.0]


def rows_of_every_size(dtype: torch.dtype) -> torch.Tensor:
    """[rows, 83], whose numbers are as large, as small and as little finite as numbers can be."""
    sizes = (1.0, 3e38, 1e-30, 4e-37, 3.7323e-37, 3.7321e-37, 1e-37, 1e-38, 1e-45, 0.0)
    rows = torch.rand(len(sizes) + 5, 83, generator=torch.Generator().manual_seed(0)) * 2 - 1
    rows[: len(sizes)] *= torch.tensor(sizes)[:, None]
    rows[-5, 7], rows[-4, 82], rows[-3, 0], rows[-2], rows[-1] = math.nan, math.inf, -math.inf, math.nan, math.inf
    return rows.to(dtype)


@pytest.mark.parametrize("level", TESTED_LEVELS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_compiled_rows_are_those_of_torch(
    built_kernels: BuiltKernels, dtype: Literal["float32", "bfloat16"], level: str
) -> None:
    largest_anywhere = (torch.rand(291, 291, generator=torch.Generator().manual_seed(0)) - 0.5).fill_diagonal_(-1)
    for x in (rows_of_every_size(DTYPES[dtype]), largest_anywhere.to(DTYPES[dtype])):
        expected, expected_scales = quantized_rows(x)
        quantized, scales = quantized_piece(x, Setup(dtype, "int8", level).placement(built_kernels))
        assert torch.equal(quantized, expected)
        torch.testing.assert_close(scales, expected_scales, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("setup", [setup for setup in SETUPS if setup.quantization == "int8"], ids=str)
def test_small_rows_count_as_zeros_and_rows_that_are_not_finite_are_reported(
    built_kernels: BuiltKernels, setup: Setup
) -> None:
    """A request is ended by name where its logits are not finite; a row of small numbers is none of these."""
    placement = setup.placement(built_kernels)
    weight = torch.randn(50, 83, generator=torch.Generator().manual_seed(1)) * 1e-3  # the largest rows stay finite
    linear = Linear(weight, None, placement, dtype=torch.float32)
    x = rows_of_every_size(placement.dtype)
    out, of_zeros = linear(x), linear(torch.zeros_like(x))
    small = (x.abs().amax(1) < 3.732e-37).nonzero()[:, 0]
    assert len(small) >= 4
    assert torch.equal(out[small], of_zeros[small])
    assert out[:-5].isfinite().all()
    assert out[-5:].isnan().all()


def test_a_weight_is_quantised_by_outputs_whatever_its_strides_size_and_parts() -> None:
    weight = torch.randn(7000, 250, generator=torch.Generator().manual_seed(0))
    for parts in ([weight.t().contiguous().t()], torch.split(weight, [4001, 1, 2998])):
        kept = IntegerLinear(parts, None, "none", torch.float32, Placement(torch.device("cpu"), torch.float32, "int8"))
        assert (kept._weight.abs().amax(0) == 127).all()
        error = (kept.rows(torch.arange(7000)) - weight).abs()
        assert (error <= 0.5001 * weight.abs().amax(1, keepdim=True) / 127).all()


@cache
def held_out_ids() -> torch.Tensor:
    """Docstrings of the public names of the held-out modules, as one text."""
    texts = []
    for name in HELD_OUT:
        assert int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % 16 == 0, "it was trained on"
        module = importlib.import_module(name)
        owners = [module, *(member for key, member in sorted(vars(module).items()) if not key.startswith("_"))]
        own = [owner for owner in owners if owner is module or getattr(owner, "__module__", "") == name]
        texts += [doc for owner in own if (doc := inspect.getdoc(owner))]
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    ids: list[int] = tokenizer.encode("\n\n".join(texts)).ids
    assert len(ids) > WINDOW * NUM_WINDOWS
    return torch.tensor(ids[: WINDOW * NUM_WINDOWS + 1])


def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """One whole sequence without a cache: what is measured here is the linears."""
    queries, keys, values = (part.float().transpose(0, 1) for part in (q, k, v))
    out = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)
    return out.transpose(0, 1).flatten(1).to(q.dtype)


def attend_by_cache(placement: Placement, spec: AttentionSpec, num_tokens: int) -> Attend:
    """One whole sequence by the attention that serves it, over a cache in int8."""
    cache = KVCache(spec, -(-num_tokens // 16), 16, placement, "int8")
    tokens = PackedTokens(
        slots=np.zeros(num_tokens, np.int32),
        positions=np.arange(num_tokens, dtype=np.int32),
        query_starts=np.array([0, num_tokens], np.int32),
        block_table=np.arange(cache.num_blocks, dtype=np.int32)[None],
        max_query_len=num_tokens,
        max_context_len=num_tokens,
    )
    return choose_attention("auto", cache, spec, placement.kernels).prepare(tokens)


def held_out_perplexity(placement: Placement, directory: Path = DEMO, *, has_int8_cache: bool = False) -> float:
    with Checkpoint(directory) as checkpoint, torch.inference_mode():
        model = build_model(checkpoint, placement)
        ids = held_out_ids()
        losses = []
        attention = attend_by_cache(placement, model.attention_spec, WINDOW) if has_int8_cache else attend
        for window, targets in zip(ids[:-1].view(-1, WINDOW), ids[1:].view(-1, WINDOW), strict=True):
            logits = model.logits(model.forward(window, torch.arange(WINDOW), attention))
            losses.append(functional.cross_entropy(logits.float(), targets))
        return math.exp(torch.stack(losses).mean().item())


@cache
def float_perplexity() -> float:
    return held_out_perplexity(FLOAT32)


@pytest.mark.parametrize(("quantization", "bound"), [("int8", 0.01), ("int4", 0.05)])
@pytest.mark.parametrize("level", LEVELS_HERE[-1:] or ["off"])
def test_held_out_perplexity_is_within_its_bound(
    built_kernels: BuiltKernels, level: str, quantization: Quantization, bound: float
) -> None:
    exact = float_perplexity()
    assert exact < 150  # it knows something of this text: there are 2,048 tokens to choose from
    for dtype in ("float32", "bfloat16"):
        quantized = held_out_perplexity(Setup(dtype, quantization, level).placement(built_kernels))
        assert abs(quantized / exact - 1) < bound, (dtype, quantized, exact)


@pytest.mark.parametrize("level", ["off", *LEVELS_HERE[-1:]])
def test_held_out_perplexity_with_an_int8_cache_is_within_a_thousandth(built_kernels: BuiltKernels, level: str) -> None:
    setup = Setup("float32", "none", level)
    quantized = held_out_perplexity(setup.placement(built_kernels), has_int8_cache=True)
    assert 0 < abs(quantized / float_perplexity() - 1) < 0.001, quantized


HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
LLAMA_LIKE = HEADS | {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 128, "n_layer": 4, "n_head": 4, "n_positions": 256},
    "qwen3": LLAMA_LIKE | {"max_position_embeddings": 256},
    "qwen3_moe": LLAMA_LIKE  # by transformers' code
    | {"max_position_embeddings": 256, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probabilities_of_random_models(tmp_path: Path, built_kernels: BuiltKernels, family: str) -> None:
    """Weights without any order are the worst case: four layers let each error grow. docs/performance.md has them."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, vocab_size=512, initializer_range=0.1, **FAMILIES[family])
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    level = LEVELS_HERE[-1] if LEVELS_HERE else "off"
    ids = torch.randint(0, 512, (128,), generator=torch.Generator().manual_seed(0))
    found = {}
    for quantization in ("none", "int8", "int4"):
        placement = Setup("float32", quantization, level).placement(built_kernels)
        with Checkpoint(tmp_path) as checkpoint, torch.inference_mode():
            model = build_model(checkpoint, placement)
            attentions: dict[str, Attend] = {quantization: attend}
            if quantization == "none":
                attentions["int8 cache"] = attend_by_cache(placement, model.attention_spec, 128)
            for name, attention in attentions.items():
                found[name] = model.logits(model.forward(ids, torch.arange(128), attention)).float().log_softmax(-1)
    int8_cache, int8, int4 = (
        (found[name] - found["none"]).abs().mean().item() for name in ("int8 cache", "int8", "int4")
    )
    assert 1.0 < found["none"].std() < 1.3
    assert 0.0 < int8_cache < int8
    assert 0.0 < int8 < 0.08
    assert int8 < int4 < 0.5


def dequantised_demo(directory: Path, method: Method) -> Path:
    """The embedded model with the values that its linears have after a way through files of the format."""
    tensors = load_file(DEMO / "model.safetensors")
    linears = {name: tensor for name, tensor in tensors.items() if re.search(r"(c_attn|c_proj|c_fc)\.weight$", name)}
    stored = {name.removesuffix("weight"): method.store(linear.float().t()) for name, linear in linears.items()}
    parts = {module + part: tensor for module, (parts, _) in stored.items() for part, tensor in parts.items()}
    save_file({name: tensor.contiguous() for name, tensor in parts.items()}, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps({"quantization_config": method.config}))
    with Checkpoint(directory) as checkpoint:
        read = {name: checkpoint.tensor(name, tuple(linear.t().shape)) for name, linear in linears.items()}
    save_file(
        tensors | {name: linear.t().contiguous() for name, linear in read.items()}, directory / "model.safetensors"
    )
    (directory / "config.json").write_bytes((DEMO / "config.json").read_bytes())
    return directory


MEASURED = {"fp8, blocks": 0.01, "gptq, order": 0.05, "awq": 0.05}


@pytest.mark.parametrize("method", [each for each in methods(group=64, block=64) if each.name in MEASURED], ids=str)
def test_held_out_perplexity_of_quantised_checkpoints(tmp_path: Path, method: Method) -> None:
    """As docs/log.md has it, for every format; a wrong zero, order or scale makes nonsense of the model."""
    exact = float_perplexity()
    quantized = held_out_perplexity(FLOAT32, dequantised_demo(tmp_path, method))
    assert abs(quantized / exact - 1) < MEASURED[method.name], (quantized, exact)
