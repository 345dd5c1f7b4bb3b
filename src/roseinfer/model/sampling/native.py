"""Samples tokens and computes log-probabilities with the compiled CPU kernels, in one call for all rows.

The call reads each row once from memory, copies none, and needs no grouping by need, as `sampling/torch.py` does.
"""

import ctypes
from collections.abc import Sequence

import numpy as np
import torch

from roseinfer.engine.core.batch import Int32Array
from roseinfer.model.kernels.library import Kernels
from roseinfer.model.sampling.logprobs import LogprobRows, Logprobs, rows_by_count
from roseinfer.model.sampling.slot_table import Int64Array, SamplingTable

_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_int64
_LOGITS = (_POINTER, _SIZE, _SIZE, _SIZE, _SIZE)  # numbers, whether they are bfloat16, stride, rows, vocabulary


class NativeSampling:
    """The `SamplingBackend` on a CPU with kernels."""

    def __init__(self, table: SamplingTable, kernels: Kernels) -> None:
        self._table = table
        self._draw = kernels.function("sampling_tokens", *_LOGITS, *[_POINTER] * 4)
        self._score = kernels.function("sampling_logprobs", *_LOGITS, _POINTER, _POINTER, _SIZE, *[_POINTER] * 4)

    def tokens(self, logits: torch.Tensor, slots: Int32Array, positions: Int32Array) -> torch.Tensor:
        slots, positions = np.ascontiguousarray(slots, np.int32), np.ascontiguousarray(positions, np.int32)
        ids = torch.empty(len(slots), dtype=torch.int64)
        self._draw(
            *_arguments(logits, len(slots)),
            self._table.host.ctypes.data,
            slots.ctypes.data,
            positions.ctypes.data,
            ids.data_ptr(),
        )
        return ids

    tokens_of_edited = tokens

    def last_logprobs(self, _counts: Int32Array) -> Logprobs | None:
        return None

    def logprobs(self, logits: torch.Tensor, tokens: torch.Tensor, rows: Int64Array, counts: Int32Array) -> LogprobRows:
        chosen = tokens.numpy()[rows]
        width = int(counts.max())
        logprobs, ranks = np.empty(len(rows), np.float64), np.empty(len(rows), np.int64)
        top_ids, top_logprobs = np.empty((len(rows), width), np.int64), np.empty((len(rows), width), np.float64)
        self._score(
            *_arguments(logits, len(rows)),
            *(rows.ctypes.data, chosen.ctypes.data, width),
            *(array.ctypes.data for array in (logprobs, ranks, top_ids, top_logprobs)),
        )
        likeliest = []
        for count, same in rows_by_count(counts):
            ids, values = torch.from_numpy(top_ids[same, :count]), torch.from_numpy(top_logprobs[same, :count])
            likeliest.append((same.tolist(), ids, values))
        return LogprobRows(rows.tolist(), torch.from_numpy(logprobs), torch.from_numpy(ranks), likeliest)

    def score(
        self, logits: torch.Tensor, tokens: torch.Tensor, counts: Int32Array, _same: Sequence[torch.Tensor]
    ) -> LogprobRows:
        return self.logprobs(logits, tokens, np.arange(len(counts)), counts)

    def choose(self, logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self.tokens(logits, slots.int().numpy(), positions.int().numpy())


def _arguments(logits: torch.Tensor, num_rows: int) -> tuple[int, int, int, int, int]:
    assert logits.stride(1) == 1 or logits.shape[1] == 1, "a row's logits lie side by side"
    is_bfloat16 = logits.dtype == torch.bfloat16
    return logits.data_ptr(), int(is_bfloat16), logits.stride(0), num_rows, logits.shape[1]
