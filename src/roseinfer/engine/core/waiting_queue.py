"""The queues of sequences that hold no slot: one for those to be admitted, one for those whose grammars compile."""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from itertools import islice

from roseinfer.engine.core.constraint import Constraint, Grammars, Matcher
from roseinfer.engine.core.sequence import Sequence, SequenceStatus


class WaitingQueue:
    """Preempted sequences first, the last one preempted before the others; then newcomers by their turns.

    Each level of priority counts as having arrived `priority_wait_ns` later. So a request is overtaken only by those
    that arrive within that time, times the difference of their levels, after it: its wait is bounded.
    """

    def __init__(self, priority_wait_ns: int) -> None:
        self._priority_wait_ns = priority_wait_ns
        self._sequences: deque[Sequence] = deque()

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def add_newcomer(self, sequence: Sequence) -> None:
        """Insert behind all whose turn is not later; the search starts at the end, where most newcomers belong."""
        sequence.turn_ns = sequence.inbox_ns + sequence.request.priority * self._priority_wait_ns
        place, waiting = len(self._sequences), self._sequences
        while place and not waiting[place - 1].num_preemptions and waiting[place - 1].turn_ns > sequence.turn_ns:
            place -= 1
        waiting.insert(place, sequence)

    def add_preempted(self, sequence: Sequence) -> None:
        """Insert before all others."""
        self._sequences.appendleft(sequence)

    def remove_sequence(self, sequence: Sequence) -> None:
        self._sequences.remove(sequence)

    def window(self, size: int) -> list[Sequence]:
        """The first `size` sequences."""
        return list(islice(self._sequences, size))

    def drop_admitted(self, window: list[Sequence]) -> None:
        """Remove those of the window that no longer wait; the others keep their places."""
        for _ in window:
            self._sequences.popleft()
        self._sequences.extendleft(left for left in reversed(window) if left.status is SequenceStatus.WAITING)


class CompilingQueue:
    """Sequences whose grammars are being compiled, in order of arrival. Without `grammars`, every grammar fails."""

    def __init__(self, grammars: Grammars | None, eos_token_ids: tuple[int, ...]) -> None:
        self._grammars = grammars
        self._eos_token_ids = eos_token_ids
        self._constraints: dict[Sequence, Constraint] = {}

    def __len__(self) -> int:
        return len(self._constraints)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._constraints)

    def add_sequence(self, sequence: Sequence) -> bool:
        """Begin to compile the sequence's grammar. Returns False for a sequence without one."""
        params = sequence.request.params
        if params.grammar is None:
            return False
        if self._grammars is None:
            pending: Future[Matcher] = Future()
            pending.set_exception(ValueError("This engine has no grammars."))
        else:
            pending = self._grammars.open(params.grammar)
        vocab_size = 0 if self._grammars is None else self._grammars.vocab_size
        sequence.constraint = Constraint(pending, params, self._eos_token_ids, vocab_size)
        self._constraints[sequence] = sequence.constraint
        return True

    def remove_sequence(self, sequence: Sequence) -> bool:
        """Forget a sequence that has ended. Returns False for one that is not in the queue."""
        constraint = self._constraints.pop(sequence, None)
        if constraint is not None:
            constraint.pending.cancel()  # a client that asks and leaves must not fill the compiler's queue
        return constraint is not None

    def pop_compiled(self) -> list[tuple[Sequence, BaseException | None]]:
        """Remove and return the sequences whose compilation is over, each with its error if it failed."""
        done = [(s, c.pending.exception()) for s, c in self._constraints.items() if c.pending.done()]
        for sequence, _ in done:
            del self._constraints[sequence]
        return done

    def wait(self, timeout_s: float) -> None:
        """Return when a compilation ends, or after `timeout_s`."""
        if self._constraints:
            wait([constraint.pending for constraint in self._constraints.values()], timeout_s, FIRST_COMPLETED)
