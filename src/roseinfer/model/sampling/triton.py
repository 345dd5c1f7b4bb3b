"""Samples tokens on a GPU with Triton: one launch of two kernels for greedy rows and for draws from all tokens.

Rows with top-k, top-p or min-p, and log-probabilities, are left to `sampling/torch.py`.
"""

import numpy as np
import torch

from roseinfer.engine.core.batch import Int32Array
from roseinfer.model.device_stream import to_device
from roseinfer.model.sampling.logprobs import LogprobRows
from roseinfer.model.sampling.slot_table import TRUNCATED, Int64Array, SlotTable
from roseinfer.model.sampling.torch import TorchSampling
from roseinfer.model.triton_kernels import sampling as kernels


class TritonSampling:
    """The `SamplingBackend` on a GPU with Triton."""

    def __init__(self, table: SlotTable, device: torch.device) -> None:
        self._table = table
        self._device = device
        self._torch = TorchSampling(table, device)

    def tokens(self, logits: torch.Tensor, slots: Int32Array, positions: Int32Array) -> torch.Tensor:
        is_truncated = self._table.host["need"][slots] == TRUNCATED
        if is_truncated.all():
            return self._torch.tokens(logits, slots, positions)
        # In the type that a graph brings them in: one build of the kernels serves both.
        wide_slots, wide_positions = (to_device(array.astype(np.int64), self._device) for array in (slots, positions))
        tokens = self.choose(logits, wide_slots, wide_positions)
        if is_truncated.any():
            rows = np.flatnonzero(is_truncated)
            on_device = to_device(rows, self._device)
            tokens[on_device] = self._torch.tokens(logits[on_device], slots[rows], positions[rows])
        return tokens

    def logprobs(self, logits: torch.Tensor, tokens: torch.Tensor, rows: Int64Array, counts: Int32Array) -> LogprobRows:
        return self._torch.logprobs(logits, tokens, rows, counts)

    def choose(self, logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return kernels.choose(logits, slots, positions, self._table)
