"""Sequences that hold no slot, in the order in which they are tried. Knows no blocks, budgets or steps."""

from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice

from roseinfer.engine.core.sequence import Sequence, SequenceStatus
from roseinfer.messages import Request

Turn = Callable[[Request, int], int]
"""(request, when the engine took it) -> a moment in nanoseconds: among newcomers the earliest is the first."""


class WaitingQueue:
    """Who was preempted comes first, in the order of its return; then newcomers by their turns."""

    def __init__(self, turn_of: Turn) -> None:
        self._turn_of = turn_of
        self._sequences: deque[Sequence] = deque()

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def add(self, sequence: Sequence) -> None:
        """A newcomer: behind all whose turn is not after its own. Those that came before nearly always are."""
        sequence.turn_ns = self._turn_of(sequence.request, sequence.inbox_ns)
        place, waiting = len(self._sequences), self._sequences
        while place and not waiting[place - 1].num_preemptions and waiting[place - 1].turn_ns > sequence.turn_ns:
            place -= 1
        waiting.insert(place, sequence)

    def put_back(self, sequence: Sequence) -> None:
        """It was preempted: nobody goes before it."""
        self._sequences.appendleft(sequence)

    def remove(self, sequence: Sequence) -> None:
        self._sequences.remove(sequence)

    def window(self, size: int) -> list[Sequence]:
        """The first so many."""
        return list(islice(self._sequences, size))

    def drop_admitted(self, window: list[Sequence]) -> None:
        """Those of the window that do not wait any more leave; the others keep their places."""
        for _ in window:
            self._sequences.popleft()
        self._sequences.extendleft(left for left in reversed(window) if left.status is SequenceStatus.WAITING)
