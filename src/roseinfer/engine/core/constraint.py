"""Masks over the vocabulary: which tokens a sequence's grammar allows next.

A sequence with a grammar owns a `Constraint`, which keeps its state over a preemption. A mask depends on the token
before it, so such a sequence is in at most one launched step at a time; drafted tokens are followed on a copy.
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

    def copy(self) -> "Matcher":
        """One at the same place, to look ahead with."""

    def forced(self) -> list[int]:
        """Tokens that spell what must come next; others may spell it too. Empty where there is a choice."""


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
        self._barred = set(eos_token_ids) if params.ignore_eos else set()
        self._barred_at_first = {*eos_token_ids, *params.stop_token_ids}
        self._min_tokens = params.min_tokens
        self._num_tokens = 0
        self._allows_nothing = False
        self._ahead: list[MaskArray] = []  # of the next token and of those behind drafted ones, until a token comes

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

    def fill(self, allowed: MaskArray, num_drafted: int = 0) -> None:
        """Write the mask of the next token, or of that behind drafted ones, which `look_ahead` has followed.

        Where there can be no token, all are allowed and `has_failed` holds.
        """
        if self._ahead:
            allowed[:] = self._ahead[num_drafted]
        elif not self._fill(self.matcher, allowed, self._num_tokens):
            self._allows_nothing = not allowed.any()
            allowed[:] = 0xFFFFFFFF

    def _fill(self, matcher: Matcher, allowed: MaskArray, num_tokens: int) -> bool:
        """Write the mask behind a number of tokens. Returns whether the sequence can go on."""
        matcher.fill(allowed)
        if matcher.has_failed or not allowed.any():
            return False
        _bar(self._barred_at_first if num_tokens < self._min_tokens else self._barred, allowed)
        return True

    def look_ahead(self, draft: list[int]) -> int:
        """How many of the drafted tokens may come, none of them the last; the masks behind each are kept."""
        matcher, masks = self.matcher.copy(), list[MaskArray]()
        for token_id in [*draft, None]:
            allowed: MaskArray = np.zeros(-(-self.vocab_size // 32), np.uint32)
            if not self._fill(matcher, allowed, self._num_tokens + len(masks)):
                break  # a step without drafts finds it there
            masks.append(allowed)
            if token_id is None or not allowed[token_id // 32] >> (token_id % 32) & 1:
                break
            matcher.accept(token_id)
            if matcher.is_over:
                break
        self._ahead = masks
        return max(len(masks) - 1, 0)

    def accept(self, token_id: int) -> None:
        """Advance over the token that was sampled."""
        self._num_tokens += 1
        self._ahead = []
        self.matcher.accept(token_id)


def _bar(token_ids: set[int], allowed: MaskArray) -> None:
    """Take the tokens out of the mask, unless nothing would be left: where the grammar can only end, it ends."""
    rest = allowed.copy()
    for token_id in token_ids:
        if token_id // 32 < len(rest):
            rest[token_id // 32] &= ~np.uint32(1 << (token_id % 32))
    if rest.any():
        allowed[:] = rest


class TokenMasks:
    """The masks of a batch's rows that have grammars, computed on first use, when the forward pass is under way."""

    def __init__(self, rows: dict[tuple[int, int], tuple[Constraint, int]]) -> None:
        self.rows = rows  # by slot and position of the token to be drawn: the constraint, and drafted tokens before it
        self._bits: MaskArray | None = None

    def bits(self) -> MaskArray:
        """[rows, ceil(vocab_size / 32)], in their order; the same array on each call."""
        if self._bits is None:
            (first, _), *_ = rows = self.rows.values()
            self._bits = np.zeros((len(rows), -(-first.vocab_size // 32)), np.uint32)
            for (constraint, num_drafted), allowed in zip(rows, self._bits, strict=True):
                constraint.fill(allowed, num_drafted)
        return self._bits
