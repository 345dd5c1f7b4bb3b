"""Linears: what they compute, and that a row does not depend on how many others there are."""

import pytest
import torch
from torch.nn import functional

from roseinfer.model.layers import Activation, Embedding, LayerNorm, Linear, Placement, padded_rows

CPU = torch.device("cpu")
FLOAT32, BFLOAT16 = Placement(CPU, torch.float32), Placement(CPU, torch.bfloat16)


def weights(num_inputs: int, num_outputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(num_inputs)
    return torch.randn(num_outputs, num_inputs, generator=generator), torch.randn(num_outputs, generator=generator)


def test_rows_are_padded_to_few_sizes() -> None:
    sizes = {num_rows: padded_rows(num_rows) for num_rows in range(1, 2049)}
    assert all(size >= max(2, num_rows) for num_rows, size in sizes.items())
    assert all(size <= max(num_rows + 1, num_rows * 9 / 8) for num_rows, size in sizes.items())
    assert all(padded_rows(size) == size for size in sizes.values())
    assert len({size for size in sizes.values() if size > 16}) == 8 * 7  # eight to each doubling


@pytest.mark.parametrize("activation", ["none", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("is_packed", [True, False])
def test_a_linear_with_its_activation(monkeypatch: pytest.MonkeyPatch, activation: Activation, is_packed: bool) -> None:
    weight, bias = weights(48, 40)
    x = torch.randn(6, 48, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(Placement, "packs_linears", is_packed)
    linear = Linear(weight, bias, FLOAT32, activation)
    expected = functional.linear(x, weight, bias)
    if activation != "none":
        expected = functional.gelu(expected, approximate="tanh" if activation == "gelu_tanh" else "none")
    torch.testing.assert_close(linear(x), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("is_packed", [True, False])
def test_weights_may_be_given_transposed_and_are_copied(monkeypatch: pytest.MonkeyPatch, is_packed: bool) -> None:
    monkeypatch.setattr(Placement, "packs_linears", is_packed)
    weight, bias = weights(32, 16)
    mapped = weight.t().contiguous()
    linears = [Linear(mapped.t(), bias, FLOAT32), Linear(weight, bias, FLOAT32)]
    x = torch.eye(32)
    before = linears[0](x)
    for tensor in (mapped, weight, bias):
        tensor.zero_()
    assert all(torch.equal(linear(x), before) for linear in linears)


def test_a_tied_head_shares_the_table_unless_it_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Placement, "packs_linears", False)
    embedding = Embedding(weights(32, 16)[0], FLOAT32)
    head = Linear(embedding.table, None, FLOAT32, is_mapped=False)
    embedding.table.zero_()
    assert torch.equal(head(torch.ones(2, 32)), torch.zeros(2, 16))


@pytest.mark.parametrize("placement", [FLOAT32, BFLOAT16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("num_inputs", "num_outputs"), [(32, 96), (192, 576), (768, 192), (192, 2048), (96, 97)])
@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_row_is_the_same_in_any_number_of_rows(
    placement: Placement, num_inputs: int, num_outputs: int, num_threads: int
) -> None:
    torch.set_num_threads(num_threads)
    linear = Linear(*weights(num_inputs, num_outputs), placement)
    x = torch.randn(300, num_inputs, generator=torch.Generator().manual_seed(0)).to(placement.dtype)
    whole = linear(x)
    for num_rows in (2, 3, 4, 8, 17, 33, 64, 100, 299):
        assert torch.equal(linear(x[:num_rows]), whole[:num_rows])
        assert torch.equal(linear(x[-num_rows:].contiguous()), whole[-num_rows:])


def test_a_norm_computes_in_float32_and_gives_the_type_of_the_linears() -> None:
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)) * 100
    weight, bias = weights(1, 64)[0][:, 0], weights(1, 64)[1]
    expected = functional.layer_norm(x, (64,), weight, bias, 1e-5)
    assert torch.equal(LayerNorm(weight, bias, 1e-5, FLOAT32)(x), expected)
    assert torch.equal(LayerNorm(weight, bias, 1e-5, BFLOAT16)(x), expected.bfloat16())
