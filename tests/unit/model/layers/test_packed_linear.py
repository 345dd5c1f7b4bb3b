"""The linears in registers, at every type and level of them that this processor has, or that are emulated."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal

import pytest
import torch
from torch.nn import functional

from roseinfer.model.device import DTYPES
from roseinfer.model.kernels.library import Kernels
from roseinfer.model.layers.activation import ACTIVATIONS
from roseinfer.model.layers.int8 import IntegerLinear
from roseinfer.model.layers.packed_linear import RegisterLinear
from tests.conftest import BuiltKernels
from tests.unit.model.layers.test_linear import random, reference
from tests.unit.model.setups import LEVELS_HERE, TESTED_LEVELS, Setup

Dtype = Literal["float32", "bfloat16"]
PAIR_LEVELS = ("avx512_bf16", "amx", "neon", "neon_dotprod", "neon_i8mm")  # of bfloat16; `amx` prefers its tiles
KINDS: list[tuple[Dtype, str]] = [
    *(("float32", level) for level in TESTED_LEVELS),
    *(("bfloat16", level) for level in TESTED_LEVELS if level in PAIR_LEVELS),
]
every_kind = pytest.mark.parametrize(("dtype", "level"), KINDS)

# Inputs and outputs: less than a piece, less than a panel, edges of both, odd rows, several chunks, a vocabulary.
SHAPES = [(3, 1), (8, 17), (100, 48), (763, 49), (1543, 95), (3072, 145), (37, 50257)]
EMULATED_SHAPES = [(3, 1), (8, 17), (100, 48), (1543, 25), (3100, 13)]


def linear_of(
    built_kernels: BuiltKernels, kind: tuple[Dtype, str], num_inputs: int, num_outputs: int, *, has_bias: bool = True
) -> RegisterLinear:
    dtype, level = kind
    placement = Setup(dtype, "none", level).placement(built_kernels)
    weight, bias = random(num_outputs, num_inputs, seed=1), random(num_outputs, seed=2)
    return RegisterLinear([weight], bias if has_bias else None, "none", torch.float32, placement)


def shapes_of(level: str, shapes: Sequence[tuple[int, int]] = SHAPES) -> Sequence[tuple[int, int]]:
    return shapes if level in LEVELS_HERE else EMULATED_SHAPES


def rows_of(num_rows: int, num_inputs: int, dtype: Dtype, seed: int = 3) -> torch.Tensor:
    return random(num_rows, num_inputs, seed=seed).to(DTYPES[dtype])


@every_kind
@pytest.mark.parametrize("has_bias", [True, False])
def test_sums_are_near_those_in_float64(built_kernels: BuiltKernels, dtype: Dtype, level: str, has_bias: bool) -> None:
    """Products of bfloat16 are exact in float32, so both types' sums have the roundings of float32."""
    for num_inputs, num_outputs in shapes_of(level):
        linear = linear_of(built_kernels, (dtype, level), num_inputs, num_outputs, has_bias=has_bias)
        weight = random(num_outputs, num_inputs, seed=1).to(DTYPES[dtype]).double()
        bias = random(num_outputs, seed=2).double()
        for num_rows in (1, 6, 70):
            x = rows_of(num_rows, num_inputs, dtype)
            expected = functional.linear(x.double(), weight, bias if has_bias else None)
            # A sum of n products of about 1 is about √n, and so is what its n roundings add up to, in their unit.
            torch.testing.assert_close(linear(x).double(), expected, atol=3e-7 * num_inputs, rtol=1e-6)


@every_kind
def test_activations_follow_the_sum(built_kernels: BuiltKernels, dtype: Dtype, level: str) -> None:
    placement = Setup(dtype, "none", level).placement(built_kernels)
    weight, bias, x = (random(61, 40, seed=1) / 4).to(placement.dtype), random(61, seed=2), rows_of(9, 40, dtype)
    for activation in ACTIVATIONS:
        linear = RegisterLinear([weight], bias, activation, torch.float32, placement)
        expected = reference(x, weight, bias, activation)
        torch.testing.assert_close(linear(x).double(), expected, atol=3e-6, rtol=1e-5)


@every_kind
def test_a_result_of_the_weights_type_is_rounded_once(built_kernels: BuiltKernels, dtype: Dtype, level: str) -> None:
    placement = Setup(dtype, "none", level).placement(built_kernels)
    weight, bias, x = random(61, 40, seed=1).to(placement.dtype), random(61, seed=2), rows_of(9, 40, dtype)
    whole = RegisterLinear([weight], bias, "gelu", torch.float32, placement)
    rounded = RegisterLinear([weight], bias, "gelu", placement.dtype, placement)
    assert torch.equal(rounded(x), whole(x).to(placement.dtype))


@every_kind
@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_row_is_the_same_alone_and_among_others(
    built_kernels: BuiltKernels, dtype: Dtype, level: str, num_threads: int
) -> None:
    torch.set_num_threads(num_threads)
    most = 513 if level in LEVELS_HERE else 140
    for num_inputs, num_outputs in shapes_of(level, SHAPES[:-1]):
        linear = linear_of(built_kernels, (dtype, level), num_inputs, num_outputs)
        x = rows_of(most, num_inputs, dtype)
        whole = linear(x)
        for num_rows in (1, 2, 7, 64):
            for first in (0, most // 4, most - num_rows):
                rows = slice(first, first + num_rows)
                assert torch.equal(linear(x[rows]), whole[rows]), (num_inputs, num_outputs, num_rows)


@every_kind
def test_what_is_not_finite_stays_in_its_row(built_kernels: BuiltKernels, dtype: Dtype, level: str) -> None:
    linear = linear_of(built_kernels, (dtype, level), 101, 50)  # odd: what fills a row up must not spread either
    x = rows_of(5, 101, dtype)
    clean = linear(x)
    x[1, 100], x[3, 7] = math.nan, math.inf
    out = linear(x)
    assert torch.isnan(out[1]).all()
    assert torch.isinf(out[3]).all()
    assert torch.equal(out[[0, 2, 4]], clean[[0, 2, 4]])


def test_every_level_sums_in_the_same_order(built_kernels: BuiltKernels) -> None:
    """One chain over the inputs, in ascending order, whatever the width of a register."""
    for num_inputs, num_outputs in EMULATED_SHAPES:
        x = random(21, num_inputs)
        sums = [linear_of(built_kernels, ("float32", level), num_inputs, num_outputs)(x) for level in TESTED_LEVELS]
        assert all(torch.equal(of_level, sums[0]) for of_level in sums)


@pytest.mark.parametrize("level", TESTED_LEVELS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_int8_has_the_bits_that_it_has_by_torchs_product(built_kernels: BuiltKernels, dtype: Dtype, level: str) -> None:
    """Sums of integers are exact in any order, and what stands around them is computed in the same order."""
    placement = Setup(dtype, "int8", level).placement(built_kernels)
    for num_inputs, num_outputs in shapes_of(level, (*SHAPES[:-1], (70_000, 3))):  # in the last, sums wrap around
        weight = random(num_outputs, num_inputs, seed=1)
        weight[-1] = 1.0  # 127 everywhere
        x = rows_of(70, num_inputs, dtype)
        x[1], x[2, 0], x[3], x[4, 2] = 0.0, math.nan, 1.0, -math.inf  # the ones give the largest sums there are
        x[6], x[7] = x[0] * 1e-38, math.nan
        for out_dtype in (torch.float32, placement.dtype):
            ours, torchs = (
                kind([weight], random(num_outputs, seed=2), "silu", out_dtype, placement)
                for kind in (RegisterLinear, IntegerLinear)
            )
            torch.testing.assert_close(ours(x), torchs(x), rtol=0, atol=0, equal_nan=True)
            assert torch.equal(ours(x[5:6]), ours(x)[5:6])


def test_the_form_for_four_products_has_the_same_bits(built_kernels: BuiltKernels, model_of_fours: Kernels) -> None:
    """Unsigned rows and their surplus, which only levels with VNNI have, but for the instruction itself."""
    placement = Setup("float32", "int8", "avx2").placement(built_kernels)
    modelled = dataclasses.replace(placement, kernels=model_of_fours)
    for num_inputs, num_outputs in (*SHAPES[:-1], (70_000, 3)):
        weight, bias = random(num_outputs, num_inputs, seed=1), random(num_outputs, seed=2)
        weight[-1] = 1.0
        x = rows_of(70, num_inputs, "float32")
        x[1], x[2, 0], x[3] = 0.0, math.nan, 1.0
        expected, out = (
            RegisterLinear([weight], bias, "silu", torch.float32, each)(x) for each in (placement, modelled)
        )
        torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)


@every_kind
def test_nothing_but_the_outputs_is_written(built_kernels: BuiltKernels, dtype: Dtype, level: str) -> None:
    linear = linear_of(built_kernels, (dtype, level), 30, 50)
    guarded = torch.full((9, 50), 7.0)
    x = rows_of(5, 30, dtype)
    linear._multiply(linear._reference, x.data_ptr(), 5, guarded[2:].data_ptr())
    assert torch.equal(guarded[2:7], linear(x))
    assert (guarded[[0, 1, 7, 8]] == 7.0).all()
