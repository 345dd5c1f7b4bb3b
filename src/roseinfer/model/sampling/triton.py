"""Samples tokens on a GPU with Triton: one launch of two kernels for greedy rows and for draws from all tokens."""

import numpy as np
import torch

from roseinfer.engine.core.batch import Int32Array
from roseinfer.model.device_stream import to_device
from roseinfer.model.sampling.slot_table import TRUNCATED
from roseinfer.model.sampling.torch import TorchSampling
from roseinfer.model.triton_kernels import sampling as kernels


class TritonSampling(TorchSampling):
    """The `SamplingBackend` on a GPU with Triton; rows with top-k, top-p or min-p, and log-probabilities, by torch."""

    def tokens(self, logits: torch.Tensor, slots: Int32Array, positions: Int32Array) -> torch.Tensor:
        is_truncated = self._table.host["need"][slots] == TRUNCATED
        if is_truncated.all():
            return super().tokens(logits, slots, positions)
        # In the type that a graph brings them in: one build of the kernels serves both.
        wide_slots, wide_positions = (to_device(array.astype(np.int64), self._device) for array in (slots, positions))
        tokens = self.choose(logits, wide_slots, wide_positions)
        if is_truncated.any():
            rows = np.flatnonzero(is_truncated)
            on_device = to_device(rows, self._device)
            tokens[on_device] = super().tokens(logits[on_device], slots[rows], positions[rows])
        return tokens

    def choose(self, logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return kernels.choose(logits, slots, positions, self._table)
