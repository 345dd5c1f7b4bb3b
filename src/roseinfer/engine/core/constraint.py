"""Masks over the vocabulary: which tokens a sequence's grammar allows next.

A sequence with a grammar owns a `Constraint`, which keeps its state over a preemption. A mask depends on the token
before it, so such a sequence is in at most one launched step at a time.
"""

from collections.abc import Iterable
from concurrent.futures import Future
from typing import Protocol

import numpy as np
import numpy.typing as npt

from roseinfer.messages import Grammar, SamplingParams

MaskArray = npt.NDArray[np.uint32]
"""Bit t % 32 of word t // 32 says that token t is allowed: [ceil(vocab_size / 32)], or a row of that each."""


class Matcher(Protocol):
    """Follows one sequence through its grammar: `text/grammar/compiler.py`, or a fake in tests."""

    @property
    def is_over(self) -> bool:
        """The text is complete and nothing can follow."""

    @property
    def has_failed(self) -> bool:
        """The matcher met a limit, or a token that it does not allow, and is of no further use."""

    @property
    def error(self) -> str:
        """Why it has failed, in one line; empty while it has not."""

    def fill(self, allowed: MaskArray) -> None:
        """Write which tokens may come next; end-of-sequence tokens where the text may end here."""

    def accept(self, token_id: int) -> None:
        """Advance over the token that was sampled."""


class Grammars(Protocol):
    """Compiles grammars outside the engine's thread: `text/grammar/compiler.py`."""

    @property
    def vocab_size(self) -> int:
        """Of the model."""

    def open(self, grammar: Grammar) -> "Future[Matcher]":
        """Begin to compile; the future's result is a matcher at the start of the text."""


class Constraint:
    """One sequence's matcher, and the tokens that are barred for other reasons."""

    def __init__(
        self, pending: "Future[Matcher]", params: SamplingParams, eos_token_ids: Iterable[int], vocab_size: int
    ) -> None:
        self.pending = pending
        self.vocab_size = vocab_size
        self._barred = sorted(set(eos_token_ids)) if params.ignore_eos else []
        self._barred_at_first = sorted({*eos_token_ids, *params.stop_token_ids})
        self._min_tokens = params.min_tokens
        self._num_tokens = 0
        self._allows_nothing = False

    @property
    def matcher(self) -> Matcher:
        """The matcher; only once `pending` is done and did not fail."""
        return self.pending.result(timeout=0)

    @property
    def is_over(self) -> bool:
        return self.matcher.is_over

    @property
    def has_failed(self) -> bool:
        """The sequence cannot go on: no token is allowed, or the matcher has failed."""
        return self._allows_nothing or self.matcher.has_failed

    @property
    def error(self) -> str:
        """Why it has failed, in one line for the log; empty while it has not."""
        return self.matcher.error or ("no token is allowed" if self._allows_nothing else "")

    def fill(self, allowed: MaskArray) -> None:
        """Write the mask of the next token. Where there can be none, all are allowed and `has_failed` holds."""
        matcher = self.matcher
        matcher.fill(allowed)
        self._allows_nothing = not allowed.any()
        if matcher.has_failed or self._allows_nothing:
            allowed[:] = 0xFFFFFFFF
        else:
            _bar(self._barred_at_first if self._num_tokens < self._min_tokens else self._barred, allowed)

    def accept(self, token_id: int) -> None:
        """Advance over the token that was sampled."""
        self._num_tokens += 1
        self.matcher.accept(token_id)


def _bar(token_ids: list[int], allowed: MaskArray) -> None:
    """Take the tokens out of the mask, unless nothing would be left: where the grammar can only end, it ends."""
    rest = allowed.copy()
    for token_id in token_ids:
        if token_id // 32 < len(rest):
            rest[token_id // 32] &= ~np.uint32(1 << (token_id % 32))
    if rest.any():
        allowed[:] = rest


class TokenMasks:
    """The masks of a batch's rows that have grammars, computed on first use, when the forward pass is under way."""

    def __init__(self, constraints: dict[int, Constraint]) -> None:
        self.constraints = constraints  # at least one, by the slot of its row
        self._bits: MaskArray | None = None

    def bits(self) -> MaskArray:
        """[constraints, ceil(vocab_size / 32)], in their order; the same array on each call."""
        if self._bits is None:
            constraints = list(self.constraints.values())
            self._bits = np.zeros((len(constraints), -(-constraints[0].vocab_size // 32)), np.uint32)
            for constraint, allowed in zip(constraints, self._bits, strict=True):
                constraint.fill(allowed)
        return self._bits
