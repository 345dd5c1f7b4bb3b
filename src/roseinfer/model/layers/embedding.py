"""Embedding: the vectors of token ids or positions."""

import torch
from torch.nn import functional

from roseinfer.model.device import Placement


class Embedding:
    """ids [rows] -> vectors [rows, width] float32; the table is held in the placement's dtype."""

    def __init__(self, table: torch.Tensor, placement: Placement) -> None:
        self.table = table.to(placement.device, placement.dtype, copy=True)

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        return functional.embedding(ids, self.table).float()

    def add_to(self, x: torch.Tensor, ids: torch.Tensor) -> None:
        """Add the vectors of ids [rows] to x [rows, width] float32."""
        x.add_(functional.embedding(ids, self.table))
