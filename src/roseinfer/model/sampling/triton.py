"""Samples tokens on a GPU with Triton: one launch of two kernels for rows of every kind."""

import numpy as np
import torch

from roseinfer.engine.core.batch import MAX_STEP_DRAFTS, Int32Array
from roseinfer.model.device_stream import to_device
from roseinfer.model.sampling.edit_table import EditTable
from roseinfer.model.sampling.logprobs import SCORE_WIDTH, PackedLogprobs
from roseinfer.model.sampling.slot_table import SamplingTable
from roseinfer.model.sampling.torch import TorchSampling
from roseinfer.model.triton_kernels import sampling as kernels


class TritonSampling(TorchSampling):
    """The `SamplingBackend` on a GPU with Triton. Log-probabilities come with the tokens; other ones are torch's."""

    def __init__(self, table: SamplingTable, device: torch.device, edits: EditTable) -> None:
        super().__init__(table, device)
        self._edits = edits
        num_rows = len(table.host) + MAX_STEP_DRAFTS
        self._numbers = torch.zeros(num_rows, SCORE_WIDTH, dtype=torch.float64, device=device)

    def tokens(self, logits: torch.Tensor, slots: Int32Array, positions: Int32Array) -> torch.Tensor:
        return self.choose(logits, *self._wide(slots, positions))

    def tokens_of_edited(self, logits: torch.Tensor, slots: Int32Array, positions: Int32Array) -> torch.Tensor:
        return kernels.choose(logits, *self._wide(slots, positions), self._table, self._edits)

    def _wide(self, slots: Int32Array, positions: Int32Array) -> tuple[torch.Tensor, torch.Tensor]:
        """In the type that a graph brings them in: one build of the kernels serves both."""
        return to_device(slots.astype(np.int64), self._device), to_device(positions.astype(np.int64), self._device)

    def choose(self, logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return kernels.choose(logits, slots, positions, self._table, self._edits, self._numbers)

    def last_logprobs(self, counts: Int32Array) -> PackedLogprobs:
        return PackedLogprobs(counts, self._numbers[: len(counts)])
