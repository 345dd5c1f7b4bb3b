"""Weights in int4: what is made of them, and that every form of their product has the same bits."""

import dataclasses
import math
from collections.abc import Sequence
from functools import partial

import pytest
import torch

from roseinfer.model.device import DTYPES, Placement
from roseinfer.model.kernels.library import Kernels
from roseinfer.model.layers.int4 import GROUP, grouped_piece, grouped_rows
from roseinfer.model.layers.linear import GroupedLinear, Linear, RegisterLinear, TorchGroupedLinear
from tests.conftest import BuiltKernels
from tests.unit.model.layers.test_linear import random
from tests.unit.model.quantised import awq, compressed_packed, gptq
from tests.unit.model.setups import LEVELS_HERE, TESTED_LEVELS, Setup

TORCH = Placement(torch.device("cpu"), torch.float32, "int4")
EMULATED_SHAPES = [(3, 1), (32, 48), (763, 25), (7000, 13)]
SHAPES = [(3, 1), (8, 17), (32, 48), (100, 48), (763, 49), (1543, 95), (3072, 145), (7000, 50)]
every_level = pytest.mark.parametrize("level", TESTED_LEVELS)


def meant(numbers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return numbers.float() * scales.float().repeat_interleave(GROUP, 1)[:, : numbers.shape[1]]


@every_level
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_compiled_numbers_are_those_of_torch(built_kernels: BuiltKernels, level: str, dtype: str) -> None:
    weight = random(3000 if level in LEVELS_HERE else 300, 100)
    sizes = (1.0, 3e38, 1e-3, 5e-7, 4e-7, 1e-38, 1e-45, 0.0, 6e5, 5e5)
    weight[: len(sizes)] *= torch.tensor(sizes)[:, None]
    weight[10, 3], weight[11, 99], weight[12] = math.nan, -math.inf, 0.25
    weight = weight.to({**DTYPES, "float16": torch.float16}[dtype])
    placement = Setup("float32", "int4", level).placement(built_kernels)
    numbers, scales, num_exact = grouped_piece(weight, placement)
    expected_numbers, expected_scales, expected_exact = grouped_rows(weight)
    assert torch.equal(numbers, expected_numbers)
    torch.testing.assert_close(scales, expected_scales, rtol=0, atol=0, equal_nan=True)
    assert num_exact == expected_exact > 0
    assert scales[10, 0].isnan()
    assert scales[11, 3].isnan()
    assert torch.equal(meant(numbers, scales)[12], weight[12].float())


def test_the_search_is_better_than_the_largest_number_alone() -> None:
    weight = random(500, 256)
    numbers, scales, _ = grouped_rows(weight)
    groups = weight.view(-1, GROUP)
    plain = groups.abs().amax(1, keepdim=True) / 7
    rounded = ((groups / plain).round() * plain).view_as(weight)
    error, plain_error = ((each - weight).square().mean() for each in (meant(numbers, scales), rounded))
    assert error < 0.85 * plain_error
    assert numbers.min() == -8
    assert numbers.max() == 7


STORES = {
    "gptq": partial(gptq, num_bits=4, group_size=64, kind="autogptq", has_zeros=False),
    "gptq, one group": partial(gptq, num_bits=4, group_size=-1, kind="autogptq", has_zeros=False),
    "compressed-tensors": partial(compressed_packed, num_bits=4, group_size=32),
}


@pytest.mark.parametrize("name", STORES)
def test_symmetric_formats_keep_their_numbers(name: str) -> None:
    _, weight = STORES[name](random(200, 256) * 0.02)
    numbers, scales, num_exact = grouped_rows(weight)
    assert torch.equal(meant(numbers, scales), weight)
    assert num_exact == scales.numel()


def test_what_does_not_fit_is_counted() -> None:
    placement = dataclasses.replace(TORCH)
    _, weight = awq(random(200, 256) * 0.02 + 0.01, group_size=64)  # with zeros elsewhere than in the middle
    Linear(weight, None, placement)
    assert placement.groups.num_groups == 200 * 8
    assert placement.groups.num_exact < 200 * 8


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
        x = random(num_rows, num_inputs, seed=3).to(placement.dtype)
        x[1], x[2, 0], x[3], x[4, 2] = 0.0, math.nan, 1.0, -math.inf  # the ones give the largest sums there are
        for dtype in (torch.float32, placement.dtype):
            ours, torchs = (
                kind([weight], bias, "none", dtype, placement) for kind in (GroupedLinear, TorchGroupedLinear)
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
    guarded, x = torch.full((9, 50), 7.0), random(5, 30)
    linear._multiply(linear._reference, x.data_ptr(), 5, guarded[2:].data_ptr())
    assert torch.equal(guarded[2:7], linear(x))
    assert (guarded[[0, 1, 7, 8]] == 7.0).all()


@every_level
def test_the_head_is_in_int8(built_kernels: BuiltKernels, level: str) -> None:
    weight, x = random(300, 64), random(4, 64)
    placement = Setup("float32", "int4", level).placement(built_kernels)
    head = Linear(weight, None, placement, dtype=torch.float32)
    as_int8 = dataclasses.replace(placement, quantization="int8")
    assert torch.equal(head(x), Linear(weight, None, as_int8)(x))
    if not placement.has_kernel("linear_int8_of_float32"):  # no tiles
        assert isinstance(head._multiply, RegisterLinear)
