"""Finds races between the host and copies that it has queued: none has run for sure before the host has waited for it.

There are one stream and one thread of the host, so that a vector clock is two numbers: how much was queued, and up to
where the host knows that it has run, since it has waited for a mark behind it. A copy between the two may run at any
time. So the memory that it reads must keep its numbers, and in the memory that it writes may be anything.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

ANYTHING = 0xA5  # each byte of memory that a copy may be writing


class _Copy(NamedTuple):
    """A queued copy from or to host memory."""

    time: int
    memory: npt.NDArray[np.uint8]
    numbers: npt.NDArray[np.uint8]  # that it is to read there, or to write
    place: str


class Copies:
    """What was queued, and what the host knows of it."""

    def __init__(self, on_race: Callable[[str], None]) -> None:
        self.time = 0  # of what was queued last
        self._on_race = on_race
        self._reads: list[_Copy] = []
        self._writes: list[_Copy] = []

    def read(self, memory: torch.Tensor, place: str) -> None:
        """A copy that reads host memory is queued."""
        self.time += 1
        self._reads.append(_Copy(self.time, _bytes(memory), _bytes(memory).copy(), place))

    def write(self, memory: torch.Tensor, numbers: torch.Tensor, place: str) -> None:
        """A copy that writes `numbers` into host memory is queued."""
        self.time += 1
        self._writes.append(_Copy(self.time, _bytes(memory), _bytes(numbers), place))
        _bytes(memory)[:] = ANYTHING

    def learn(self, time: int) -> None:
        """The host has waited: what was queued up to that time has run."""
        self.look()
        for copy in self._writes:
            if copy.time <= time:
                copy.memory[:] = copy.numbers
        self._reads = [copy for copy in self._reads if copy.time > time]
        self._writes = [copy for copy in self._writes if copy.time > time]

    def look(self) -> None:
        """Report memory that was written since a copy was queued that may still read it."""
        sound = []
        for copy in self._reads:
            if np.array_equal(copy.memory, copy.numbers):
                sound.append(copy)
            else:
                self._on_race(f"memory was written before its copy has run, which was queued by {copy.place}")
        self._reads = sound


def _bytes(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    """Its memory, which has no holes."""
    array: npt.NDArray[np.uint8] = tensor.numpy().reshape(-1).view(np.uint8)
    return array
