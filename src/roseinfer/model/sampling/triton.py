"""Samples tokens on a GPU with Triton: one launch of two kernels for rows of every kind."""

import numpy as np
import torch

from roseinfer.engine.core.batch import Int32Array
from roseinfer.model.device_stream import to_device
from roseinfer.model.sampling.edit_table import EditTable
from roseinfer.model.sampling.slot_table import SlotTable
from roseinfer.model.sampling.torch import TorchSampling
from roseinfer.model.triton_kernels import sampling as kernels


class TritonSampling(TorchSampling):
    """The `SamplingBackend` on a GPU with Triton; log-probabilities are torch's."""

    def __init__(self, table: SlotTable, device: torch.device, edits: EditTable) -> None:
        super().__init__(table, device)
        self._edits = edits

    def tokens(self, logits: torch.Tensor, slots: Int32Array, positions: Int32Array) -> torch.Tensor:
        return self.choose(logits, *self._wide(slots, positions))

    def tokens_of_edited(self, logits: torch.Tensor, slots: Int32Array, positions: Int32Array) -> torch.Tensor:
        wide_slots, wide_positions = self._wide(slots, positions)
        return kernels.choose(logits, wide_slots, wide_positions, self._table, self._edits, are_changed=False)

    def _wide(self, slots: Int32Array, positions: Int32Array) -> tuple[torch.Tensor, torch.Tensor]:
        """In the type that a graph brings them in: one build of the kernels serves both."""
        return to_device(slots.astype(np.int64), self._device), to_device(positions.astype(np.int64), self._device)

    def choose(self, logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return kernels.choose(logits, slots, positions, self._table, self._edits)
