"""Linears of every kind that this processor has: what they compute, and that a row depends on nothing but itself."""

import math

import pytest
import torch
from torch.nn import functional

from roseinfer.model.device import Placement
from roseinfer.model.layers.activation import ACTIVATIONS, Activation
from roseinfer.model.layers.linear import Embedding, Linear, OneDnnLinear, TorchLinear
from tests.conftest import BuiltKernels
from tests.unit.model.setups import SETUPS, Setup

FLOAT32 = Placement(torch.device("cpu"), torch.float32)
every_setup = pytest.mark.parametrize("setup", SETUPS, ids=str)

# Inputs and outputs: tiles and panels that are full and that are not, a row of tiles, sums longer than one chunk, and
# outputs that are so many that they pass the caches by.
SHAPES = [(96, 97), (192, 576), (33, 16), (70, 131), (768, 50), (1100, 200), (5, 17), (769, 1), (40, 2048)]
NUM_ROWS = [1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33, 47, 63, 64, 65, 96, 100, 128, 129, 200, 255, 256, 257, 299, 300]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def padded(x: torch.Tensor, placement: Placement) -> torch.Tensor:
    """The rows, the last one repeated as often as a runner repeats it."""
    num_more = placement.padded_rows(len(x)) - len(x)
    return torch.cat((x, x[-1:].expand(num_more, -1))) if num_more else x


def run(linear: Linear, x: torch.Tensor, placement: Placement) -> torch.Tensor:
    return linear(padded(x.contiguous(), placement))[: len(x)]


def reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, activation: Activation) -> torch.Tensor:
    y = functional.linear(x.double(), weight.double(), bias.double())
    if activation == "none":
        return y
    if activation == "silu":
        return functional.silu(y)
    return functional.gelu(y, approximate="tanh" if activation == "gelu_tanh" else "none")


def tolerance(setup: Setup, dtype: torch.dtype) -> float:
    """Of outputs of size 1 to 100: the roundings of weights, of activations and of the result."""
    if setup.quantization != "none":
        return {"int8": 0.05, "int4": 0.5}[setup.quantization]
    return 1e-4 if dtype == torch.float32 and setup.dtype == "float32" else 0.02


@every_setup
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_what_is_computed(built_kernels: BuiltKernels, setup: Setup, activation: Activation) -> None:
    placement = setup.placement(built_kernels)
    for num_inputs, num_outputs in (*SHAPES[:4], *SHAPES[6:8]):
        weight, bias = random(num_outputs, num_inputs, seed=1), random(num_outputs, seed=2)
        x = random(37, num_inputs, seed=3)
        expected = reference(x, weight, bias, activation).float()
        for given, dtype in ((bias, None), (bias, torch.float32)):
            linear = Linear(weight, given, placement, activation, dtype=dtype)
            out = run(linear, x.to(placement.dtype), placement)
            size = tolerance(setup, out.dtype)
            torch.testing.assert_close(out.float(), expected, atol=size * num_inputs**0.5, rtol=size)


@every_setup
def test_the_result_has_the_type_that_was_asked_for(built_kernels: BuiltKernels, setup: Setup) -> None:
    placement = setup.placement(built_kernels)
    head = Linear(random(40, 32), None, placement, dtype=torch.float32)
    plain = Linear(random(40, 32), None, placement)
    x = random(4, 32).to(placement.dtype)
    assert plain(x).dtype == placement.dtype
    has_choice = placement.linears in {"amx", "registers", "int8", "int4"}
    assert head(x).dtype == (torch.float32 if has_choice else placement.dtype)
    if has_choice and placement.dtype == torch.bfloat16 and setup.quantization != "int4":  # whose head is in int8
        assert torch.equal(head(x).bfloat16(), plain(x))  # rounded once, at the end


@every_setup
@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_row_depends_on_nothing_but_itself(built_kernels: BuiltKernels, setup: Setup, num_threads: int) -> None:
    placement = setup.placement(built_kernels)
    for index, (num_inputs, num_outputs) in enumerate(SHAPES if num_threads == 1 else SHAPES[5:6]):
        weight, bias = random(num_outputs, num_inputs, seed=1), random(num_outputs, seed=2)
        linear = Linear(weight, bias, placement, ACTIVATIONS[-1 - index % len(ACTIVATIONS)])
        x = random(300, num_inputs).to(placement.dtype)
        torch.set_num_threads(1)
        whole = run(linear, x, placement)
        torch.set_num_threads(num_threads)
        for num_rows in NUM_ROWS if num_threads == 1 else NUM_ROWS[::6]:
            chosen = torch.randperm(300, generator=torch.Generator().manual_seed(num_rows))[:num_rows]
            assert torch.equal(run(linear, x[chosen], placement), whole[chosen]), (num_inputs, num_outputs, num_rows)


@every_setup
def test_a_row_of_numbers_of_every_size_is_the_same_alone(built_kernels: BuiltKernels, setup: Setup) -> None:
    """Denormal numbers, products and sums among them, which instructions take differently."""
    placement = setup.placement(built_kernels)
    least, most, small = (-20, 5, -10) if placement.linears == "int4" else (-140, 50, -62)  # int4's scales are float16
    for num_inputs, num_outputs in SHAPES[:4]:
        sizes = torch.Generator().manual_seed(4)
        weight, x = (
            torch.ldexp(
                random(num, num_inputs, seed=num), torch.randint(least, most, (num, num_inputs), generator=sizes)
            )
            for num in (num_outputs, 40)
        )
        x[1::4] = torch.ldexp(random(10, num_inputs), torch.tensor(-70))  # with such weights, sums are denormal too
        weight[::2] = torch.ldexp(random(len(weight[::2]), num_inputs), torch.tensor(small))
        linear, x = Linear(weight, None, placement), x.to(placement.dtype)
        whole = run(linear, x, placement)
        for row in range(len(x)):
            alone = run(linear, x[row : row + 1], placement)
            assert torch.equal(alone[0], whole[row])
            assert alone.isfinite().all()


@every_setup
def test_a_row_that_is_not_finite_is_reported_and_stays_alone(built_kernels: BuiltKernels, setup: Setup) -> None:
    placement = setup.placement(built_kernels)
    linear = Linear(random(48, 64, seed=1), None, placement)
    x = random(6, 64).to(placement.dtype)
    expected = linear(x)
    broken = x.clone()
    broken[2, 5], broken[4, 7] = torch.nan, torch.inf
    out = linear(broken)
    assert out[2].isnan().all()
    assert not out[4].isfinite().any()
    assert torch.equal(out[[0, 1, 3, 5]], expected[[0, 1, 3, 5]])


@every_setup
def test_weights_may_be_given_transposed_and_are_copied(built_kernels: BuiltKernels, setup: Setup) -> None:
    placement = setup.placement(built_kernels)
    weight, bias = random(16, 32).to(placement.dtype), random(16).to(placement.dtype)
    mapped = weight.t().contiguous()
    linears = [Linear(mapped.t(), bias, placement), Linear(weight, bias, placement)]
    x = torch.eye(32, dtype=placement.dtype)
    before = linears[0](x)
    for tensor in (mapped, weight, bias):
        tensor.zero_()
    assert all(torch.equal(linear(x), before) for linear in linears)
    assert before.any()


def test_no_rows_are_no_rows(built_kernels: BuiltKernels) -> None:
    for setup in SETUPS:
        placement = setup.placement(built_kernels)
        linear = Linear(random(48, 32), None, placement)
        assert linear(torch.empty(0, 32, dtype=placement.dtype)).shape == (0, 48)


def test_rows_may_be_given_strided(built_kernels: BuiltKernels) -> None:
    for setup in SETUPS:
        placement = setup.placement(built_kernels)
        linear = Linear(random(48, 32), None, placement)
        x = random(8, 64).to(placement.dtype)
        assert torch.equal(linear(x[:, :32]), linear(x[:, :32].contiguous()))


def test_a_plain_linear_has_a_copy_of_its_weight() -> None:
    weight = random(16, 32)
    linear = TorchLinear([weight], None, "none", FLOAT32)
    expected = linear(torch.ones(2, 32))
    weight.zero_()
    assert torch.equal(linear(torch.ones(2, 32)), expected)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_plain_kind_and_onednn_agree(activation: Activation) -> None:
    weight, bias, x = random(40, 48, seed=1), random(40, seed=2), random(6, 48)
    plain = TorchLinear([weight], bias, activation, FLOAT32)
    packed = OneDnnLinear([weight], bias, activation, torch.float32)
    torch.testing.assert_close(packed(x), plain(x), atol=1e-5, rtol=1e-5)


@every_setup
def test_a_weight_may_come_in_parts_and_gives_its_rows(
    built_kernels: BuiltKernels, setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts that end within a panel, pieces that end within a part, ids in any order and twice."""
    placement = setup.placement(built_kernels)
    monkeypatch.setattr("roseinfer.model.layers.pieces._PIECE_NUMBERS", 1 << 16)
    weight, ids = random(3000, 44, seed=1), torch.tensor([2999, 0, 47, 48, 1520, 1519, 23, 24, 0])
    x = random(5, 44).to(placement.dtype)
    parts = Linear(torch.split(weight, [1519, 1, 480, 1000]), None, placement)
    whole = Linear(weight, None, placement)
    assert torch.equal(run(parts, x, placement), run(whole, x, placement))
    assert parts.has_rows == (placement.linears != "onednn")
    if parts.has_rows:
        kept = weight.to(placement.dtype if setup.quantization == "none" else torch.float32)[ids].float()
        steps = {"none": math.inf, "int8": 127, "int4": 4}[setup.quantization]  # of int4 a group may clip its largest
        unit = kept.abs().amax(1, keepdim=True) / steps
        assert ((parts.rows(ids) - kept).abs() <= 0.5001 * unit).all()
        assert torch.equal(Embedding(weight, placement, parts)(ids), parts.rows(ids))


TABLE = torch.randn(16, 32, generator=torch.Generator().manual_seed(0))
IDS = torch.tensor([3, 15, 3])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_float32_of_what_the_table_holds(dtype: torch.dtype) -> None:
    embedding = Embedding(TABLE, Placement(torch.device("cpu"), dtype))
    assert torch.equal(embedding(IDS), TABLE.to(dtype).float()[IDS])
    added = embedding.plus(IDS, torch.tensor([0, 1, 2]), embedding)
    assert torch.equal(added, TABLE.to(dtype).float()[IDS] + TABLE.to(dtype).float()[:3])


def test_a_table_is_not_widened() -> None:
    embedding = Embedding(TABLE.half(), FLOAT32)
    assert embedding.table.dtype == torch.float16
    assert torch.equal(embedding(IDS), TABLE.half().float()[IDS])


def test_the_table_is_a_copy_and_the_rows_are_too() -> None:
    table = TABLE.clone()
    embedding = Embedding(table, Placement(torch.device("cpu"), torch.float32))
    table.zero_()
    rows = embedding(IDS)
    rows.zero_()
    assert torch.equal(embedding(IDS), TABLE[IDS])
