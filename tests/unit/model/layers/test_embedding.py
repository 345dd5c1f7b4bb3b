"""Embeddings: ids into rows of float32."""

import pytest
import torch

from roseinfer.model.device import Placement
from roseinfer.model.layers.embedding import Embedding

TABLE = torch.randn(16, 32, generator=torch.Generator().manual_seed(0))
IDS = torch.tensor([3, 15, 3])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_float32_of_what_the_table_holds(dtype: torch.dtype) -> None:
    embedding = Embedding(TABLE, Placement(torch.device("cpu"), dtype))
    rows = embedding(IDS)
    assert torch.equal(rows, TABLE.to(dtype).float()[IDS])
    embedding.add_to(rows, torch.tensor([0, 1, 2]))
    assert torch.equal(rows, TABLE.to(dtype).float()[IDS] + TABLE.to(dtype).float()[:3])


def test_the_table_is_a_copy_and_the_rows_are_too() -> None:
    table = TABLE.clone()
    embedding = Embedding(table, Placement(torch.device("cpu"), torch.float32))
    table.zero_()
    rows = embedding(IDS)
    rows.zero_()
    assert torch.equal(embedding(IDS), TABLE[IDS])
