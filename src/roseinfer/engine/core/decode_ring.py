"""Selects which decoding sequences are in a step; when they are too many for one step, they take turns."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np

from roseinfer.engine.core.batch import BoolArray, IndexArray, Int32Array


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
