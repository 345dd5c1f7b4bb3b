"""Weights in int4: what is made of them, and that every form of their product has the same bits."""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from roseinfer.model.device import DTYPES, GroupCount, Placement
from roseinfer.model.kernels.library import Kernels
from roseinfer.model.layers.grouped_linear import GroupedLinear, TorchGroupedLinear
from roseinfer.model.layers.int4 import GROUP, Grouped, grouped_rows
from roseinfer.model.layers.linear import Linear
from roseinfer.model.weights.checkpoint import Checkpoint
from tests.conftest import BuiltKernels
from tests.unit.model.layers.test_linear import random
from tests.unit.model.quantised import awq, methods, of_module, write
from tests.unit.model.setups import LEVELS_HERE, TESTED_LEVELS, Setup

TORCH = Placement(torch.device("cpu"), torch.float32, "int4")
EMULATED_SHAPES = [(3, 1), (32, 48), (763, 25), (7000, 13)]
SHAPES = [(3, 1), (8, 17), (32, 48), (100, 48), (763, 49), (1543, 95), (3072, 145), (7000, 50)]
every_level = pytest.mark.parametrize("level", TESTED_LEVELS)


def meant(found: Grouped) -> torch.Tensor:
    zeros, scales = (each.float().repeat_interleave(GROUP, 1) for each in (found.zeros, found.scales))
    width = found.numbers.shape[1]
    return (found.numbers.float() - zeros[:, :width]) * scales[:, :width]


def of_every_kind() -> torch.Tensor:
    """Rows of 100 inputs: of all sizes, not finite, and with whole numbers around each zero."""
    weight = random(1000, 100)
    sizes = (1.0, 3e38, 1e-3, 5e-7, 1.5e-7, 1e-38, 1e-45, 0.0, 6e5, 5e5)
    weight[: len(sizes)] *= torch.tensor(sizes)[:, None]
    weight[10, 3], weight[11, 99], weight[12] = math.nan, -math.inf, 0.25
    whole = (random(50, 100) * 5).round()
    for zero in range(16):
        rows = slice(100 + 50 * zero, 150 + 50 * zero)
        weight[rows] = whole.clamp(-zero, 15 - zero) * torch.logspace(-24, 11, 50, 2).half().float()[:, None]
    return weight


@every_level
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_compiled_weights_are_those_of_torch(built_kernels: BuiltKernels, level: str, dtype: str) -> None:
    torch.set_num_threads(1)  # of many small steps
    weight = of_every_kind().to({**DTYPES, "float16": torch.float16}[dtype])
    placements = (
        Setup("float32", "int4", level).placement(built_kernels),
        dataclasses.replace(TORCH, groups=GroupCount()),
    )
    ids = torch.arange(1000)
    rows = [
        GroupedLinear([weight], None, "none", torch.float32, placements[0]).rows(ids),
        TorchGroupedLinear([weight], None, "none", torch.float32, placements[1]).rows(ids),
    ]
    torch.testing.assert_close(*rows, rtol=0, atol=0, equal_nan=True)
    counts = [(placement.groups.num_groups, placement.groups.num_exact) for placement in placements]
    assert counts[0] == counts[1]
    assert counts[0][1] > (3200 if dtype == "float32" else 100)
    assert rows[0][10, :32].isnan().all()
    assert rows[0][11, 96:].isnan().all()
    assert rows[0][10:12].isnan().sum() == 36
    assert torch.equal(rows[0][12], weight[12].float())


def test_whole_numbers_stay_what_they_are_around_every_zero() -> None:
    weight = of_every_kind()[100:900]
    found = grouped_rows(weight)
    assert torch.equal(meant(found), weight)
    assert found.num_exact == found.scales.numel()
    assert set(found.zeros.flatten().tolist()) == set(range(16)) - {7}  # which a negative scale makes 8


def test_the_search_is_better_than_the_largest_number_alone() -> None:
    weight = random(500, 256)
    found = grouped_rows(weight)
    groups = weight.view(-1, GROUP)
    plain = groups.abs().amax(1, keepdim=True) / 7
    rounded = ((groups / plain).round() * plain).view_as(weight)
    error, plain_error = ((each - weight).square().mean() for each in (meant(found), rounded))
    assert error < 0.85 * plain_error
    assert found.numbers.min() == 0
    assert found.numbers.max() == 15
    assert (found.zeros == 8).all()


@every_level
def test_checkpoints_of_four_bits_keep_their_numbers(built_kernels: BuiltKernels, level: str, tmp_path: Path) -> None:
    """Of every format, with zeros and with groups in any order, and in two parts."""
    stored = [method for method in methods(group=64, block=64) if method.name in FOUR_BITS]
    assert len(stored) == len(FOUR_BITS)
    for method in stored:
        parts: dict[str, torch.Tensor] = {}
        for name in ("a", "b"):
            weight = random(200, 256, seed=ord(name)) * 0.02 + 0.005
            parts |= of_module(name, method.store(weight)[0])
        write(tmp_path, parts, method.config)
        placement = Setup("float32", "int4", level).placement(built_kernels)
        with Checkpoint(tmp_path) as checkpoint:
            weights = [checkpoint.tensor(f"{name}.weight") for name in ("a", "b")]
            order = checkpoint.input_order("a.weight", "b.weight")
        assert ("order" in method.name) == (order is not None), method.name
        linear = Linear(weights, None, placement, order=order)
        assert torch.equal(linear.rows(torch.arange(400)), torch.cat(weights).float()), method.name
        assert placement.groups.num_exact == placement.groups.num_groups == 400 * 8
        x = random(5, 256)
        expected = TorchGroupedLinear(weights, None, "none", torch.float32, placement, order)(x)
        assert torch.equal(linear(x), expected), method.name


FOUR_BITS = (
    *("gptq", "gptq, zeros", "gptq, zeros of GPTQModel", "gptq_v2", "gptq, order", "awq"),
    *(f"compressed-tensors, W4A16{what}" for what in ("", ", zeros", ", order")),
)


def test_parts_in_different_orders_are_quantised_again(tmp_path: Path) -> None:
    """As are groups that are no multiple of 32."""
    [method] = [method for method in methods(group=64, block=64) if method.name == "gptq, order"]
    parts = of_module("a", method.store(random(64, 256))[0]) | of_module("b", method.store(random(64, 256))[0])
    parts["b.g_idx"] = parts["b.g_idx"].flip(0)
    write(tmp_path, parts, method.config)
    with Checkpoint(tmp_path) as checkpoint:
        assert checkpoint.input_order("a.weight") is not None
        assert checkpoint.input_order("a.weight", "b.weight") is None
    [small] = [method for method in methods(group=16, block=64) if method.name == "gptq, order"]
    write(tmp_path, of_module("a", small.store(random(64, 256))[0]), small.config)
    with Checkpoint(tmp_path) as checkpoint:
        assert checkpoint.input_order("a.weight") is None


def test_what_does_not_fit_is_counted() -> None:
    placement = dataclasses.replace(TORCH, groups=GroupCount())
    _, weight = awq(random(200, 256) * 0.02, group_size=16)
    Linear(weight, None, placement)
    assert placement.groups.num_groups == 200 * 8
    assert placement.groups.num_exact < 200


@pytest.mark.parametrize(
    ("level", "num_threads"), [*((level, 3) for level in TESTED_LEVELS), *((level, 1) for level in LEVELS_HERE)]
)
def test_the_bits_are_those_of_torch_alone_and_among_others(
    built_kernels: BuiltKernels, level: str, num_threads: int
) -> None:
    for dtype in DTYPES:
        placement = Setup(dtype, "int4", level).placement(built_kernels)  # type: ignore[arg-type]
        check_bits(placement, num_threads, *(() if level in LEVELS_HERE else (EMULATED_SHAPES, 140)))


def test_the_form_for_four_products_has_the_same_bits(built_kernels: BuiltKernels, model_of_fours: Kernels) -> None:
    """As levels with VNNI have it, but for the instruction itself."""
    placement = Setup("float32", "int4", "avx2").placement(built_kernels)
    check_bits(dataclasses.replace(placement, kernels=model_of_fours), 2)


def check_bits(
    placement: Placement, num_threads: int, shapes: Sequence[tuple[int, int]] = SHAPES, num_rows: int = 300
) -> None:
    torch.set_num_threads(num_threads)
    for num_inputs, num_outputs in shapes:
        weight, bias = random(num_outputs, num_inputs, seed=1), random(num_outputs, seed=2)
        weight[-1] = -1.0  # -8 everywhere
        order = None
        if num_outputs > 48:
            weight[3::2] = (weight[3::2] * 6 + 4).round().clamp(-2, 13) / 64  # with zeros elsewhere than in the middle
            order = torch.randperm(num_inputs, generator=torch.Generator().manual_seed(4))
        x = random(num_rows, num_inputs, seed=3).to(placement.dtype)
        x[1], x[2, 0], x[3], x[4, 2] = 0.0, math.nan, 1.0, -math.inf  # the ones give the largest sums there are
        for dtype in (torch.float32, placement.dtype):
            ours, torchs = (
                kind([weight], bias, "none", dtype, placement, order) for kind in (GroupedLinear, TorchGroupedLinear)
            )
            out = ours(x)
            torch.testing.assert_close(out, torchs(x), rtol=0, atol=0, equal_nan=True)
            for first, last in ((5, 6), (6, 8), (3, 4), (num_rows // 2, num_rows // 2 + 70)):
                assert torch.equal(ours(x[first:last].contiguous()), out[first:last])
        ids = torch.arange(num_outputs).flip(0)
        assert torch.equal(ours.rows(ids), torchs.rows(ids))


@every_level
def test_nothing_but_the_outputs_is_written(built_kernels: BuiltKernels, level: str) -> None:
    linear = GroupedLinear(
        [random(50, 30)], None, "none", torch.float32, Setup("float32", "int4", level).placement(built_kernels)
    )
    for num_rows in (5, 37):  # in registers, and in tiles where there are some
        guarded, x = torch.full((num_rows + 4, 50), 7.0), random(num_rows, 30)
        linear._multiply(linear._reference, x.data_ptr(), num_rows, guarded[2:].data_ptr())
        assert torch.equal(guarded[2:-2], linear(x))
        assert (guarded[[0, 1, -2, -1]] == 7.0).all()


@every_level
def test_the_head_is_in_int4_too(built_kernels: BuiltKernels, level: str) -> None:
    placement = Setup("bfloat16", "int4", level).placement(built_kernels)
    head = Linear(random(300, 64), None, placement, dtype=torch.float32)
    assert isinstance(head._multiply, GroupedLinear)
    assert head(random(4, 64).bfloat16()).dtype == torch.float32
