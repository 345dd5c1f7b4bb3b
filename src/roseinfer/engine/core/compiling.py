"""Sequences whose grammars are being compiled: in with a request, out when it may wait for its turn like any other.

Knows futures and sequences; nothing of grammars, slots or steps.
"""

from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait

from roseinfer.engine.core.constraint import Constraint, Grammars, Matcher
from roseinfer.engine.core.sequence import Sequence
from roseinfer.errors import InvalidRequest


class Compiling:
    """In the order in which they came. Without `grammars`, what wants one fails."""

    def __init__(self, grammars: Grammars | None, eos_token_ids: tuple[int, ...]) -> None:
        self._grammars = grammars
        self._eos_token_ids = eos_token_ids
        self._sequences: dict[Sequence, Constraint] = {}

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def add(self, sequence: Sequence) -> bool:
        """Begin to compile the sequence's grammar. False for a sequence without one."""
        params = sequence.request.params
        if params.grammar is None:
            return False
        if self._grammars is None:
            pending: Future[Matcher] = Future()
            pending.set_exception(InvalidRequest("This engine has no grammars."))
        else:
            pending = self._grammars.open(params.grammar)
        vocab_size = 0 if self._grammars is None else self._grammars.vocab_size
        sequence.constraint = Constraint(pending, params, self._eos_token_ids, vocab_size)
        self._sequences[sequence] = sequence.constraint
        return True

    def remove(self, sequence: Sequence) -> bool:
        """Forget a sequence that has ended. False for one that is not here."""
        constraint = self._sequences.pop(sequence, None)
        if constraint is not None:
            constraint.pending.cancel()  # else whoever asks and leaves fills the compiler's queue
        return constraint is not None

    def take(self) -> list[tuple[Sequence, BaseException | None]]:
        """Those that are done, and why their grammar cannot be used, if it cannot."""
        done = [(s, c.pending.exception()) for s, c in self._sequences.items() if c.pending.done()]
        for sequence, _ in done:
            del self._sequences[sequence]
        return done

    def wait(self, timeout_s: float) -> None:
        """Return when one of them is done, or after a while."""
        if self._sequences:
            wait([constraint.pending for constraint in self._sequences.values()], timeout_s, FIRST_COMPLETED)
