"""The float32 linear of our own at every level that this processor has."""

import pytest
import torch
from torch.nn import functional

from roseinfer.model.activation import ACTIVATIONS
from roseinfer.model.register_linear import RegisterLinear
from tests.conftest import BuiltKernels
from tests.unit.model.setups import LEVELS_HERE, Setup
from tests.unit.model.test_linear import random, reference

pytestmark = pytest.mark.skipif(not LEVELS_HERE, reason="no level of the kernels runs on this processor")
every_level = pytest.mark.parametrize("level", LEVELS_HERE)

# Inputs and outputs: less than a piece, less than a panel, edges of both, several chunks, a vocabulary.
SHAPES = [(3, 1), (8, 17), (100, 48), (763, 49), (1543, 95), (3072, 145), (37, 50257)]


def linear_of(
    built_kernels: BuiltKernels, level: str, num_inputs: int, num_outputs: int, *, has_bias: bool = True
) -> RegisterLinear:
    placement = Setup("float32", "none", level).placement(built_kernels)
    weight, bias = random(num_outputs, num_inputs, seed=1), random(num_outputs, seed=2)
    return RegisterLinear(weight, bias if has_bias else None, "none", placement)


@every_level
@pytest.mark.parametrize("has_bias", [True, False])
def test_sums_are_near_those_in_float64(built_kernels: BuiltKernels, level: str, has_bias: bool) -> None:
    for num_inputs, num_outputs in SHAPES:
        linear = linear_of(built_kernels, level, num_inputs, num_outputs, has_bias=has_bias)
        weight, bias = random(num_outputs, num_inputs, seed=1).double(), random(num_outputs, seed=2).double()
        for num_rows in (1, 6, 70):
            x = random(num_rows, num_inputs, seed=3)
            expected = functional.linear(x.double(), weight, bias if has_bias else None)
            # A sum of n products of about 1 is about √n, and so is what its n roundings add up to, in their unit.
            torch.testing.assert_close(linear(x).double(), expected, atol=3e-7 * num_inputs, rtol=1e-6)


@every_level
def test_activations_follow_the_sum(built_kernels: BuiltKernels, level: str) -> None:
    placement = Setup("float32", "none", level).placement(built_kernels)
    weight, bias, x = random(61, 40, seed=1) / 4, random(61, seed=2), random(9, 40, seed=3)
    for activation in ACTIVATIONS:
        linear = RegisterLinear(weight, bias, activation, placement)
        expected = reference(x, weight, bias, activation)
        torch.testing.assert_close(linear(x).double(), expected, atol=3e-6, rtol=1e-5)


@every_level
@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_row_is_the_same_alone_and_among_others(built_kernels: BuiltKernels, level: str, num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    for num_inputs, num_outputs in SHAPES[:-1]:
        linear = linear_of(built_kernels, level, num_inputs, num_outputs)
        x = random(513, num_inputs)
        whole = linear(x)
        for num_rows in (1, 2, 7, 64):
            for first in (0, 130, 513 - num_rows):
                rows = slice(first, first + num_rows)
                assert torch.equal(linear(x[rows]), whole[rows]), (num_inputs, num_outputs, num_rows)


def test_every_level_sums_in_the_same_order(built_kernels: BuiltKernels) -> None:
    """One chain over the inputs, in ascending order, whatever the width of a register."""
    for num_inputs, num_outputs in SHAPES[:-1]:
        x = random(21, num_inputs)
        sums = [linear_of(built_kernels, level, num_inputs, num_outputs)(x) for level in LEVELS_HERE]
        assert all(torch.equal(of_level, sums[0]) for of_level in sums)


@every_level
def test_nothing_but_the_outputs_is_written(built_kernels: BuiltKernels, level: str) -> None:
    linear = linear_of(built_kernels, level, 30, 50)
    guarded = torch.full((9, 50), 7.0)
    x = random(5, 30)
    linear._multiply(linear._address, x.data_ptr(), 5, guarded[2:].data_ptr())
    assert torch.equal(guarded[2:7], linear(x))
    assert (guarded[[0, 1, 7, 8]] == 7.0).all()
