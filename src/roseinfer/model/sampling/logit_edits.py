"""Rows of logits into what a token is drawn from, where a request wants them changed first. Knows no distribution.

Few rows want it, so it costs the others nothing: a row that does is copied to float32, changed with torch operators on
any device, and drawn from by the same backend as all. The model's own logits stay as they are, for log-probabilities.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from roseinfer.engine.core.batch import Int32Array, SlotBinding
from roseinfer.model.device_stream import sent
from roseinfer.model.sampling.slot_table import Int64Array
from roseinfer.model.scratch import Scratch

GROUP = 32  # rows that are changed at a time: what bounds the memory of copies


class LogitsEdit(Protocol):
    """One kind of change, with what it keeps of each slot."""

    def bind(self, binding: SlotBinding) -> bool:
        """The slot has a new owner: forget the last one. Whether the owner's rows want this change."""

    def apply(self, logits: torch.Tensor, slots: Int32Array, positions: Int32Array) -> None:
        """Change logits [rows, vocab_size] float32 in place; each row is of a slot that wants it, and all differ.

        `positions` say where the token to be drawn will stand: so many are known, the last perhaps to the device alone.
        """

    def note(self, tokens: torch.Tensor, slots: Int32Array, positions: Int32Array) -> None:
        """The tokens [rows] int64, on the device, that were drawn for rows that want this, and where they stand."""


class LogitsEdits:
    """All changes, in the order in which they are made."""

    def __init__(self, edits: Sequence[LogitsEdit], num_slots: int, device: torch.device) -> None:
        self._edits = edits
        self._device = device
        self._scratch = Scratch(device)
        self._wanted: npt.NDArray[np.bool_] = np.zeros((num_slots, len(edits)), np.bool_)
        self._num_wanting = 0  # slots

    def bind(self, binding: SlotBinding) -> None:
        """The slot has a new owner."""
        wanted = [edit.bind(binding) for edit in self._edits]  # it may raise, and then the row is as it was
        row = self._wanted[binding.slot]
        self._num_wanting += int(any(wanted)) - int(row.any())
        row[:] = wanted

    def rows(self, slots: Int32Array) -> Int64Array:
        """Which of the rows want any change."""
        if not self._num_wanting:
            return _NO_ROWS
        return np.flatnonzero(self._wanted[slots].any(axis=1))

    def edited(self, logits: torch.Tensor, rows: Int64Array, slots: Int32Array, positions: Int32Array) -> torch.Tensor:
        """A changed copy of some rows of logits [all rows, vocab_size] -> float32 [len(rows), vocab_size].

        Slots and positions are those of the rows. The copy is valid until the next one.
        """
        changed = self._scratch.take("rows", (len(rows), logits.shape[1]))
        if logits.dtype == changed.dtype:
            torch.index_select(logits, 0, self._tensor(rows), out=changed)
        else:
            changed.copy_(logits[self._tensor(rows)])
        for edit, mine in zip(self._edits, self._wanted[slots].T, strict=True):
            if mine.all():
                edit.apply(changed, slots, positions)
            elif mine.any():
                some = self._tensor(np.flatnonzero(mine))
                part = changed[some]
                edit.apply(part, slots[mine], positions[mine])
                changed[some] = part
        return changed

    def note(self, tokens: torch.Tensor, slots: Int32Array, positions: Int32Array) -> None:
        """The tokens [rows] that were drawn for some rows, all of which want a change."""
        for edit, mine in zip(self._edits, self._wanted[slots].T, strict=True):
            if mine.any():
                of_these = tokens if mine.all() else tokens[self._tensor(np.flatnonzero(mine))]
                edit.note(of_these, slots[mine], positions[mine])

    def _tensor(self, array: Int64Array) -> torch.Tensor:
        return sent(array, self._device)


_NO_ROWS: Int64Array = np.zeros(0, np.int64)
