"""Selects the decoding sequences of a step, round robin when they are too many for one, and looks ahead for them."""

from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import numpy as np

from roseinfer.engine.core.batch import BoolArray, IndexArray, Int32Array
from roseinfer.engine.core.sequence import SlotTable

_NUM_UNPLANNED = 3  # steps of the same rows: others are likely to follow soon where some have just come or gone


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """Rows of one new token each. Never changed in place: a launched step may still hold them."""

    slots: Int32Array
    index: IndexArray  # the same, as numpy indexes with
    num_new_tokens: Int32Array  # ones
    samples: BoolArray  # all of them


def rows_of(slots: list[int]) -> DecodeRows:
    made = np.array(slots, np.int32)
    return DecodeRows(made, made.astype(np.intp), np.ones(len(made), np.int32), np.ones(len(made), np.bool_))


class DecodeRing:
    """Decoding slots in the order of their turns; at most `limit` of them in one step."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._slots: deque[int] = deque()
        self._rows: DecodeRows | None = None  # the last selection, while nothing changes, as in most steps

    def __len__(self) -> int:
        return len(self._slots)

    def __iter__(self) -> Iterator[int]:
        return iter(self._slots)

    def append(self, slot: int) -> None:
        self._slots.append(slot)
        self._rows = None

    def remove(self, slot: int) -> None:
        self._slots.remove(slot)
        self._rows = None

    def select(self) -> DecodeRows:
        """The slots whose turn it is, until `pass_turn`."""
        if self._rows is None:
            self._rows = rows_of(list(islice(self._slots, self._limit)))
        return self._rows

    def pass_turn(self, count: int) -> None:
        """Move the first `count` slots behind the others, if there are others."""
        if count < len(self._slots):
            self._slots.rotate(-count)
            self._rows = None


class PlannedStep(NamedTuple):
    starts: Int32Array  # tokens in each row's KV cache before the step
    ends: Int32Array  # and after it
    num_context_tokens: int  # all of `ends`
    has_last: bool  # some row computes the last token that its request allows


class Plan:
    """What the next steps hold while the same rows decode: all that numpy finds for one step it finds for many."""

    def __init__(self, table: SlotTable) -> None:
        self._table, self._step = table, 0
        self._rows: DecodeRows | None = None

    def full_slots(self, rows: DecodeRows) -> list[int]:
        """The slots that need one more block for the next step, if it has these rows."""
        table, index = self._table, rows.index
        if rows is not self._rows:
            self._rows, self._step = rows, -_NUM_UNPLANNED
        if self._step <= 0:
            self._starts, capacities = table.num_computed[index], table.capacities[index]
            if self._step < 0:
                return [*index[self._starts == capacities].tolist()]
            self._num_tokens = sum(self._starts.tolist())
            self._last_step = min((table.last_positions[index] - self._starts).tolist(), default=0) - 1
            self._full = defaultdict[int, list[int]](list)  # by step
            for slot, step in zip(index.tolist(), (capacities - self._starts).tolist(), strict=True):
                self._full[step].append(slot)
        return self._full.get(self._step, [])

    def pass_step(self, rows: DecodeRows | None) -> PlannedStep | None:
        """Go on to the step after one of these rows alone, and return what that one holds; None if it is not known."""
        step, size, self._step = self._step, self._table.block_size, self._step + 1
        self._rows = rows if rows is self._rows else None
        if self._rows is None or step < 0:
            return None
        at = step % size
        if not at:
            self._positions = self._starts + np.arange(step, step + size + 1, dtype=np.int32)[:, None]
        if step in self._full:
            self._full[step + size] += self._full.pop(step)  # they will have filled the next block
        self._num_tokens += len(self._rows.slots)
        return PlannedStep(self._positions[at], self._positions[at + 1], self._num_tokens, step == self._last_step)
