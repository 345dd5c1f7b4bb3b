"""The SwiGLU gate: the compiled kernels against torch, and rows that do not depend on their neighbours."""

import pytest
import torch

from roseinfer.model.device import Placement
from roseinfer.model.kernels.library import Kernels
from roseinfer.model.layers.activation import SiluGate
from tests.conftest import BuiltKernels
from tests.unit.model.setups import LEVELS_WITHOUT_PRODUCTS, kernels_at

CPU = torch.device("cpu")
every_dtype = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16], ids=lambda dtype: str(dtype).removeprefix("torch.")
)


@pytest.fixture(params=["torch", *LEVELS_WITHOUT_PRODUCTS])
def kernels(request: pytest.FixtureRequest, built_kernels: BuiltKernels) -> Kernels | None:
    return None if request.param == "torch" else kernels_at(request.param, built_kernels)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@every_dtype
@pytest.mark.parametrize("inner", [64, 100, 2049])
def test_gate(kernels: Kernels | None, inner: int, dtype: torch.dtype) -> None:
    rows = (random(9, 2 * inner) * 4).to(dtype)
    rows[0, :4] = torch.tensor([1e4, -1e4, 0.0, -0.0])  # where a careless exponential overflows
    gate, up = rows.float().chunk(2, -1)
    out = SiluGate(Placement(CPU, dtype, kernels=kernels))(rows)
    assert out.dtype == dtype
    rtol = 1e-6 if dtype == torch.float32 else 2**-8
    torch.testing.assert_close(out.float(), torch.nn.functional.silu(gate) * up, atol=1e-5, rtol=rtol)


@every_dtype
@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_gated_row_has_the_same_bits_in_any_company(
    kernels: Kernels | None, dtype: torch.dtype, num_threads: int
) -> None:
    torch.set_num_threads(num_threads)
    gate, gates = SiluGate(Placement(CPU, dtype, kernels=kernels)), random(99, 2 * 777).to(dtype)
    together = gate(gates)
    for rows in (slice(0, 1), slice(98, 99), slice(3, 20), slice(17, 82)):
        assert torch.equal(gate(gates[rows]), together[rows])
