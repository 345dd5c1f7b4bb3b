"""Norms, and what they add first: the kernels against torch."""

import pytest
import torch
from torch.nn import functional

from roseinfer.model.layers.norm import Norm
from tests.conftest import BuiltKernels
from tests.unit.model.setups import LEVELS_WITHOUT_PRODUCTS, Setup

LEVELS = ["off", *LEVELS_WITHOUT_PRODUCTS]
EPSILON = 1e-5


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("width", [64, 768, 50, 7, 47])
def test_both_norms(built_kernels: BuiltKernels, level: str, dtype: str, width: int) -> None:
    placement = Setup(dtype, "none", level).placement(built_kernels)  # type: ignore[arg-type]
    weight, bias = random(width, seed=1), random(width, seed=2)
    norms = (Norm(weight, bias, EPSILON, placement), Norm(weight, None, EPSILON, placement))
    for delta in (None, random(33, width, seed=4), random(33, width, seed=4).bfloat16()):
        for norm in norms:
            x = random(33, width, seed=3) * 100 + 50  # the residual stream has a mean, and it is large
            x[:3] *= 1e-4  # where epsilon counts
            expected_x = x if delta is None else x + delta
            if norm is norms[0]:
                expected = functional.layer_norm(expected_x.double(), (width,), weight.double(), bias.double(), EPSILON)
            else:
                expected = functional.rms_norm(expected_x.double(), (width,), weight.double(), EPSILON)
            out = norm(x, delta)
            assert out.dtype == placement.dtype
            assert torch.equal(x, expected_x)  # in place
            size = 1e-4 if dtype == "float32" else 1e-2
            torch.testing.assert_close(out.float(), expected.float(), atol=size, rtol=size)


@pytest.mark.parametrize("level", LEVELS)
def test_a_row_depends_on_nothing_but_itself(built_kernels: BuiltKernels, level: str) -> None:
    placement = Setup("bfloat16", "none", level).placement(built_kernels)
    norm = Norm(random(200, seed=1), random(200, seed=2), EPSILON, placement)
    x, delta = random(300, 200, seed=3), random(300, 200, seed=4).bfloat16()
    whole_x = x.clone()
    whole = norm(whole_x, delta)
    for num_threads, num_rows in ((1, 1), (1, 17), (2, 100), (2, 299)):
        torch.set_num_threads(num_threads)
        chosen = torch.randperm(300, generator=torch.Generator().manual_seed(num_rows))[:num_rows]
        some_x = x[chosen]
        assert torch.equal(norm(some_x, delta[chosen]), whole[chosen])
        assert torch.equal(some_x, whole_x[chosen])


@pytest.mark.parametrize("level", LEVELS)
def test_a_row_that_is_not_finite_stays_alone(built_kernels: BuiltKernels, level: str) -> None:
    norm = Norm(random(40, seed=1), None, EPSILON, Setup("float32", "none", level).placement(built_kernels))
    x = random(5, 40, seed=3)
    expected = norm(x)
    x[3, 7] = torch.nan
    out = norm(x)
    assert out[3].isnan().all()
    assert torch.equal(out[[0, 1, 2, 4]], expected[[0, 1, 2, 4]])
