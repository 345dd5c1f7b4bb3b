"""Frequencies and rotations as `transformers` has them, and the rope sections of config.json in all their spellings."""

import math
from typing import Any

import msgspec
import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from roseinfer.model.attention.base import AttentionSpec
from roseinfer.model.device import Placement
from roseinfer.model.families.llama import LlamaSpec
from roseinfer.model.kernels.library import Kernels
from roseinfer.model.layers.rope import (
    DynamicRope,
    LinearRope,
    Llama3Rope,
    QueryKeyRotation,
    Rope,
    RotationTable,
    YarnRope,
    normalise_rope,
)
from tests.conftest import BuiltKernels
from tests.unit.model.setups import LEVELS_WITHOUT_PRODUCTS, kernels_at

CPU = torch.device("cpu")
SHAPE: dict[str, Any] = {
    "vocab_size": 8,
    "hidden_size": 512,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "max_position_embeddings": 131072,
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama 3.1": LLAMA3 | {"original_max_position_embeddings": 8192},
    "llama 3.2": LLAMA3 | {"factor": 32.0, "original_max_position_embeddings": 8192},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    "yarn with betas": {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 16,
        "beta_slow": 2,
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
    },
    "yarn, not truncated": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 2048,
        "attention_factor": 1.25,
        "truncate": False,
    },
}


def spec_of(**fields: Any) -> LlamaSpec:
    return msgspec.convert(normalise_rope(SHAPE | fields), LlamaSpec)


def refusal(**fields: Any) -> str:
    with pytest.raises(msgspec.ValidationError) as caught:
        spec_of(**fields)
    return str(caught.value)


@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
@pytest.mark.parametrize("name", SCALINGS)
def test_frequencies_are_those_of_transformers(name: str, theta: float) -> None:
    scaling = SCALINGS[name] | {"rope_theta": theta}
    reference = LlamaConfig(**SHAPE, rope_parameters=dict(scaling))
    expected, magnitude = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](reference, torch.device("cpu"))
    rope = spec_of(rope_parameters=scaling).rope
    torch.testing.assert_close(rope.frequencies(128), expected, rtol=1e-6, atol=0)
    assert rope.magnitude == pytest.approx(magnitude)


def test_without_scaling() -> None:
    rope = spec_of(rope_theta=500_000).rope
    assert type(rope) is Rope
    expected = [500_000 ** (-2 * i / 128) for i in range(64)]
    torch.testing.assert_close(rope.frequencies(128), torch.tensor(expected))
    assert spec_of().rope == Rope(rope_theta=10_000.0)


def test_all_spellings_of_the_section_are_the_same() -> None:
    scaling = LLAMA3 | {"original_max_position_embeddings": 8192}
    expected = Llama3Rope(
        rope_theta=500_000.0,
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )
    old = {"type" if name == "rope_type" else name: value for name, value in scaling.items()}
    assert spec_of(rope_theta=500_000, rope_scaling=scaling).rope == expected
    assert spec_of(rope_theta=500_000, rope_scaling=old).rope == expected
    assert spec_of(rope_theta=500_000, rope_scaling=old | {"rope_type": "llama3"}).rope == expected
    assert spec_of(rope_parameters=scaling | {"rope_theta": 500_000}).rope == expected
    assert spec_of(rope_parameters=scaling | {"rope_theta": 500_000}, rope_scaling=None).rope == expected
    assert spec_of(rope_theta=500_000, rope_scaling=LLAMA3, original_max_position_embeddings=8192).rope == expected
    assert spec_of(rope_scaling={"type": "dynamic", "factor": 2}).rope == DynamicRope(rope_theta=10_000.0, factor=2.0)


@pytest.mark.parametrize("empty", [{}, False, None], ids=str)
def test_an_empty_section_is_none(empty: Any) -> None:
    linear = {"rope_type": "linear", "factor": 2.0, "rope_theta": 7.0}
    assert spec_of(rope_scaling=empty, rope_theta=500_000).rope == Rope(rope_theta=500_000.0)
    assert spec_of(rope_scaling=empty, rope_parameters=linear).rope == LinearRope(rope_theta=7.0, factor=2.0)


def test_the_original_context_is_the_models_where_nothing_else_is_said() -> None:
    rope = spec_of(rope_scaling={"rope_type": "yarn", "factor": 1.0}).rope
    assert isinstance(rope, YarnRope)
    assert rope.original_max_position_embeddings == 131072


def test_yarn_stretches_the_context_it_was_trained_on() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    assert spec_of(max_position_embeddings=40960, rope_scaling=yarn).max_positions == 131072
    assert spec_of(max_position_embeddings=262144, rope_scaling=yarn).max_positions == 262144
    assert spec_of(max_position_embeddings=4096, rope_scaling={"type": "linear", "factor": 4}).max_positions == 4096


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"rope_scaling": {"rope_type": "longrope", "factor": 4}}, "Invalid value 'longrope' - at `$.rope_scaling"),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [1]}}, "Invalid value 'mrope' - at `$.rope_scaling"),
        ({"rope_scaling": {"type": "linear"}}, "missing required field `factor` - at `$.rope_scaling`"),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "at `$.rope_scaling.factor`"),
        ({"rope_scaling": {"type": "linear", "factor": "two"}}, "at `$.rope_scaling.factor`"),
        ({"rope_scaling": ["linear"]}, "at `$.rope_scaling`"),
        ({"rope_scaling": {"type": "linear", "factor": 2, "new": 1}}, "unknown field `new` - at `$.rope_scaling`"),
        ({"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}}, "high_freq_factor is not above low_freq_factor"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "unknown field `full_attention`"),
        ({"rope_theta": 0}, "at `$.rope_parameters.rope_theta`"),
        ({"partial_rotary_factor": 0.5}, "unknown field `partial_rotary_factor`"),
        ({"rope_parameters": {"partial_rotary_factor": 0.25}}, "unknown field `partial_rotary_factor`"),
    ],
    ids=str,
)
def test_what_is_not_supported_is_named(fields: dict[str, Any], told: str) -> None:
    assert told in refusal(**fields)


def test_a_whole_rotary_part_is_no_part() -> None:
    assert spec_of(partial_rotary_factor=1.0).rope == spec_of().rope


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotations_are_those_of_transformers(dtype: torch.dtype) -> None:
    rope = YarnRope(rope_theta=100.0, factor=2.0, original_max_position_embeddings=64)
    generator = torch.Generator().manual_seed(0)
    heads = torch.randn(5, 3, 16, generator=generator).to(dtype)
    positions = torch.tensor([0, 1, 7, 99, 30])
    angles = positions[:, None] * rope.frequencies(16)
    cos, sin = (torch.cat((f(angles), f(angles)), -1) * rope.magnitude for f in (torch.cos, torch.sin))
    expected, _ = apply_rotary_pos_emb(heads.float(), heads.float(), cos, sin)
    turned = RotationTable(rope, 16, 100, torch.device("cpu")).at(positions)(heads)
    assert turned.dtype == dtype
    torch.testing.assert_close(turned.float(), expected, atol=1e-5 if dtype == torch.float32 else 2e-2, rtol=0)


def test_a_quarter_turn() -> None:
    """By hand: the first half of a head becomes its second, the second the first with its sign changed."""
    table = RotationTable(Rope(rope_theta=1.0), 4, 2, CPU)
    table.cos[1], table.sin[1] = math.cos(math.pi / 2), math.sin(math.pi / 2)
    turned = table.at(torch.tensor([1]))(torch.tensor([[[1.0, 2.0, 3.0, 4.0]]]))
    torch.testing.assert_close(turned, torch.tensor([[[-3.0, -4.0, 1.0, 2.0]]]))


# The kernel rounds once, torch between norm and rotation too: a unit in bfloat16's last place, of numbers up to 4.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 0.04}
every_dtype = pytest.mark.parametrize("dtype", TOLERANCES, ids=lambda dtype: str(dtype).removeprefix("torch."))


@pytest.fixture(params=["torch", *LEVELS_WITHOUT_PRODUCTS])
def kernels(request: pytest.FixtureRequest, built_kernels: BuiltKernels) -> Kernels | None:
    return None if request.param == "torch" else kernels_at(request.param, built_kernels)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def heads_of(num_heads: int, num_kv_heads: int, head_dim: int) -> AttentionSpec:
    return AttentionSpec(num_heads, num_kv_heads, head_dim, scale=1.0, windows=(None,))


def norms_of(head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    return 1 + random(head_dim, seed=1) / 4, 1 + random(head_dim, seed=2) / 4


@every_dtype
@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize("spec", [heads_of(4, 2, 64), heads_of(3, 3, 10), heads_of(16, 2, 128)], ids=str)
def test_heads(kernels: Kernels | None, spec: AttentionSpec, has_norms: bool, dtype: torch.dtype) -> None:
    """Against the formulas in float32: RMSNorm of each head, then the rotation of pairs."""
    norms = norms_of(spec.head_dim) if has_norms else None
    rows = random(21, spec.num_merged_heads * spec.head_dim).to(dtype)
    rows[:3] *= 1e-3  # where epsilon counts
    table = RotationTable(Rope(rope_theta=100.0), spec.head_dim, 30, CPU)
    rotation = table.at(torch.arange(21).flip(0))
    turn = QueryKeyRotation(spec, norms, 1e-6, Placement(CPU, dtype, kernels=kernels))
    q, k, v = (part.clone() for part in turn(rows.clone(), rotation))
    heads = rows.float().view(21, spec.num_merged_heads, spec.head_dim)
    cuts = [spec.num_heads, spec.num_heads + spec.num_kv_heads]
    wide_q, wide_k, wide_v = heads.tensor_split(cuts, 1)
    if norms is not None:
        wide_q, wide_k = (
            x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight
            for x, weight in ((wide_q, norms[0]), (wide_k, norms[1]))
        )
    for part, expected in ((q, rotation(wide_q)), (k, rotation(wide_k))):
        assert part.dtype == dtype
        torch.testing.assert_close(part.float(), expected, atol=TOLERANCES[dtype], rtol=0)
    assert torch.equal(v.float(), wide_v)


@every_dtype
@pytest.mark.parametrize("num_threads", [1, 2])
def test_heads_have_the_same_bits_in_any_company(kernels: Kernels | None, dtype: torch.dtype, num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    spec, positions = heads_of(6, 2, 48), torch.arange(99)
    rotate = QueryKeyRotation(spec, norms_of(48), 1e-6, Placement(CPU, dtype, kernels=kernels))
    table = RotationTable(Rope(rope_theta=100.0), 48, 100, CPU)
    merged = random(99, spec.num_merged_heads * 48).to(dtype)
    together = [part.clone() for part in rotate(merged.clone(), table.at(positions))]
    for rows in (slice(0, 1), slice(98, 99), slice(3, 20), slice(17, 82)):
        parts = rotate(merged[rows].clone(), table.at(positions[rows]))
        for part, whole in zip(parts, together, strict=True):
            assert torch.equal(part, whole[rows])
