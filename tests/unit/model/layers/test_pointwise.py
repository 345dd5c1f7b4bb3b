"""Heads and gates: the compiled kernels against torch, and rows that do not depend on their neighbours."""

import pytest
import torch

from roseinfer.config.tree import RunnerConfig
from roseinfer.model.kernels.levels import levels_here
from roseinfer.model.kernels.library import Kernels, load_kernels
from roseinfer.model.layers.embedding import Placement
from roseinfer.model.layers.pointwise import HeadCounts, HeadNorms, HeadTurner, SiluGate
from roseinfer.model.layers.rope import Rope, RotationTable
from tests.conftest import BuiltKernels

CPU = torch.device("cpu")
LEVELS = [level.name for level in levels_here()]
# The kernel rounds once, torch between norm and rotation too: a unit in bfloat16's last place, of numbers up to 4.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 0.04}
every_dtype = pytest.mark.parametrize("dtype", TOLERANCES, ids=lambda dtype: str(dtype).removeprefix("torch."))


@pytest.fixture(params=["torch", *LEVELS])
def kernels(request: pytest.FixtureRequest) -> Kernels | None:
    if request.param == "torch":
        return None
    built: BuiltKernels = request.getfixturevalue("built_kernels")
    return load_kernels(RunnerConfig(kernels=request.param, kernels_dir=str(built(request.param))))


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def norms_of(head_dim: int) -> HeadNorms:
    return HeadNorms(1 + random(head_dim, seed=1) / 4, 1 + random(head_dim, seed=2) / 4, 1e-6)


@every_dtype
@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize("counts", [HeadCounts(4, 2, 64), HeadCounts(3, 3, 10), HeadCounts(16, 2, 128)], ids=str)
def test_heads(kernels: Kernels | None, counts: HeadCounts, has_norms: bool, dtype: torch.dtype) -> None:
    """Against the formulas in float32: RMSNorm of each head, then the rotation of pairs."""
    norms = norms_of(counts.head_dim) if has_norms else None
    rows = random(21, counts.total * counts.head_dim).to(dtype)
    table = RotationTable(Rope(rope_theta=100.0), counts.head_dim, 30, CPU)
    rotation = table.at(torch.arange(21).flip(0))
    turn = HeadTurner(counts, norms, Placement(CPU, dtype, kernels=kernels))
    q, k, v = (part.clone() for part in turn(rows.clone(), rotation))
    heads = rows.float().view(21, counts.total, counts.head_dim)
    cuts = [counts.num_heads, counts.num_heads + counts.num_kv_heads]
    wide_q, wide_k, wide_v = heads.tensor_split(cuts, 1)
    if norms is not None:
        wide_q, wide_k = (
            x * (x.square().mean(-1, keepdim=True) + norms.epsilon).rsqrt() * weight
            for x, weight in ((wide_q, norms.query), (wide_k, norms.key))
        )
    for part, expected in ((q, rotation(wide_q)), (k, rotation(wide_k))):
        assert part.dtype == dtype
        torch.testing.assert_close(part.float(), expected, atol=TOLERANCES[dtype], rtol=0)
    assert torch.equal(v.float(), wide_v)


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
def test_a_row_has_the_same_bits_in_any_company(kernels: Kernels | None, dtype: torch.dtype, num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    counts, inner = HeadCounts(6, 2, 48), 777
    placement = Placement(CPU, dtype, kernels=kernels)
    turn, gate = HeadTurner(counts, norms_of(48), placement), SiluGate(placement)
    table = RotationTable(Rope(rope_theta=100.0), 48, 100, CPU)
    merged, gates = random(99, counts.total * 48).to(dtype), random(99, 2 * inner).to(dtype)
    positions = torch.arange(99)
    together = [part.clone() for part in turn(merged.clone(), table.at(positions))] + [gate(gates)]
    for rows in (slice(0, 1), slice(98, 99), slice(3, 20), slice(17, 82)):
        parts = [*turn(merged[rows].clone(), table.at(positions[rows])), gate(gates[rows])]
        for part, whole in zip(parts, together, strict=True):
            assert torch.equal(part, whole[rows])
