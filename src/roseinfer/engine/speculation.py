"""Speculative decoding without a second model: drafts what a grammar forces, or what repeats the text of a sequence.

A repeating draft, elsewhere called prompt lookup, continues the earlier place that resembles the end of the text most.
Nothing is kept of it: the search is a few comparisons over the token ids in the slot table. What is learned is how
often drafts of a slot held; what a further row adds to the time of a step is known from the steps before. Both decide
how many drafted tokens a step verifies.
"""

from collections import Counter
from collections.abc import Callable
from math import log

import numpy as np

from roseinfer.engine.core.batch import MAX_STEP_DRAFTS, IndexArray, Int32Array, SampledTokens
from roseinfer.engine.core.sequence import SlotTable
from roseinfer.engine.core.steps import SampledRows, ScheduledStep
from roseinfer.engine.pace import Pace
from roseinfer.records import FinishReason

MAX_DRAFT_TOKENS = 16  # of one row
_MIN_MATCH, _MAX_MATCH = 3, 8  # tokens at the end of the text that the earlier place must share, and that are compared
_REPEATED, _FORCED = range(2)  # where a draft comes from
_PRIORS = (0.5, 0.9)  # share of drafted tokens of each kind that hold, before anything is known
_WEIGHT = 0.2  # of a newer token in that share
_RECOVERY = 0.01  # by which it returns to the prior at each search, so that a slot is tried again now and then
_LONGEST_REST = 16  # steps: a slot whose text repeats nothing is searched less and less often
_NOTHING: Int32Array = np.zeros(0, np.int32)
_LEAST_LIKELY = 0.03  # that a drafted token holds: below, none is worth its row, however little rows cost


def find_draft(token_ids: Int32Array, most: int) -> Int32Array:
    """The tokens that followed the earlier place most like the end of the text; none without such a place.

    A text that repeats a short piece goes on repeating it.
    """
    num_tokens, size = len(token_ids), _MIN_MATCH
    # Most texts share nothing: a search of bytes says so in a microsecond, in which numpy has hardly begun.
    if num_tokens <= size or token_ids[:-1].tobytes().find(token_ids[-size:].tobytes()) < 0:
        return token_ids[:0]
    is_match = token_ids[size - 1 : -1] == token_ids[-1]
    for back in range(1, size):
        is_match &= token_ids[size - 1 - back : -1 - back] == token_ids[-1 - back]
    ends = is_match.nonzero()[0] + size  # where the text goes on behind each match
    if not len(ends):
        return token_ids[:0]
    for back in range(size, min(_MAX_MATCH, num_tokens)):
        if len(ends) == 1:
            break
        longer = ends[(ends > back) & (token_ids[ends - 1 - back] == token_ids[-1 - back])]
        ends = longer if len(longer) else ends
    return np.resize(token_ids[ends[-1] :], most)


def drop_rejected(
    rows: SampledRows, last: dict[int, FinishReason], drafted: list[int]
) -> tuple[SampledRows, dict[int, FinishReason], list[int]]:
    """Return the rows that hold, those of them that end their sequences, and those that were of drafted tokens.

    A row of a drafted token holds if the row before it holds, sampled that very token and did not end its sequence.
    """
    token_ids, kept, accepted, holds = rows.token_ids, list[int](), list[int](), True
    for row, draft in enumerate(drafted[: len(token_ids)]):  # those after them are chunks that sample nothing
        holds = draft < 0 or (holds and row - 1 not in last and token_ids[row - 1] == draft)
        if holds:
            if draft >= 0:
                accepted.append(len(kept))
            kept.append(row)
    logprobs = rows.sampled.logprobs
    sampled = SampledTokens(rows.sampled.token_ids[kept], logprobs and [logprobs[row] for row in kept])
    first = range(len(kept) - len(rows.first), len(kept))  # chunks are the last rows, and all of them hold
    held = [token_ids[row] for row in kept]
    slots, index, ends = rows.slots[kept], rows.index[kept], rows.ends[kept]
    rows = SampledRows(slots, index, ends, sampled, held, first, rows.has_last, frozenset())
    return rows, {row: last[old] for row, old in enumerate(kept) if old in last}, accepted


class Speculation:
    """Chooses the drafts of each step. With `fixed` a row drafts as many whenever it can, whether it pays or not."""

    def __init__(
        self,
        pace: Pace,
        table: SlotTable,
        fixed: int | None = None,
        find: Callable[[Int32Array, int], Int32Array] = find_draft,
    ) -> None:
        """`find` continues a text by a number of tokens at most."""
        self._table = table
        self._pace = pace
        self._fixed = fixed
        self._find = find
        self._shares = [[prior] * len(table.owners) for prior in _PRIORS]
        self._num_steps = 0
        self._due: IndexArray = np.zeros(len(table.owners), np.intp)  # the step at which each slot is searched again
        self._rests = [1] * len(table.owners)  # the steps until then
        self._next_due = 0  # the first of them, of slots that decode
        self._newcomers = set[int]()  # slots that have not decoded yet
        self._drafting = dict[int, int]()  # by slot, the kind of its draft in the step under way
        self._stale = set[int]()  # slots whose last token the runner does not hold

    def bind(self, slot: int) -> None:
        """See Drafter."""
        for shares, prior in zip(self._shares, _PRIORS, strict=True):
            shares[slot] = prior
        self._due[slot], self._rests[slot] = 0, 1
        self._newcomers.add(slot)
        self._stale.discard(slot)
        self._drafting.pop(slot, None)

    def draft(self, index: IndexArray, budget: int) -> dict[int, Int32Array]:
        """See Drafter."""
        table = self._table
        self._num_steps += 1
        # Most steps of a chat end here. Behind a forward pass the rest would be read from memory: some microseconds.
        if self._num_steps < self._next_due and not (self._newcomers or self._stale or table.constraints):
            return {}
        drafts: dict[int, Int32Array] = {}
        budget, num_rows = min(budget, MAX_STEP_DRAFTS), len(index)
        if budget > 0:
            if table.constraints:
                drafts = self._draft_forced(index, budget)
                budget -= sum(map(len, drafts.values()))
                index = index[[slot not in drafts for slot in index.tolist()]] if drafts else index
            drafts |= self._draft_repeated(index, num_rows, budget)
            if self._fixed is None and len(index):
                self._next_due = int(self._due[index].min())
        if self._stale:
            stale = self._stale.intersection(index.tolist()).difference(drafts)
            drafts |= {slot: table.token_ids[slot, :0] for slot in stale}
            self._stale = self._owned(self._stale.difference(drafts))
        if self._newcomers:
            self._newcomers = self._owned(self._newcomers.difference(index.tolist()))
        return drafts

    def _owned(self, slots: set[int]) -> set[int]:
        return {slot for slot in slots if self._table.owners[slot] is not None}

    def _draft_forced(self, index: IndexArray, budget: int) -> dict[int, Int32Array]:
        """Drafts of the slots whose grammars leave no choice, in which a token may still be spelled otherwise."""
        constraints, drafts, least = self._table.constraints, dict[int, Int32Array](), self._least_likely(len(index))
        for slot in filter(constraints.__contains__, index.tolist()):
            if (length := min(self._wanted(_FORCED, slot, least), budget)) > 0:
                forced = constraints[slot].matcher.copy().forced()[:length]
                if draft := forced[: constraints[slot].look_ahead(forced)] if forced else forced:
                    drafts[slot] = np.array(draft, np.int32)
                    budget -= len(draft)
                    self._drafting[slot] = _FORCED
        return drafts

    def _draft_repeated(self, index: IndexArray, num_rows: int, budget: int) -> dict[int, Int32Array]:
        """Drafts of the slots whose texts repeat themselves, as far as their grammars allow."""
        constraints, drafts = self._table.constraints, dict[int, Int32Array]()
        if self._fixed is None:
            index = index[self._due[index] <= self._num_steps]
        if not len(index):
            return drafts
        least = self._least_likely(num_rows)
        for slot in index.tolist():
            length = min(self._wanted(_REPEATED, slot, least), budget)
            draft = self._find(self._table.known_tokens(slot), length) if length > 0 else _NOTHING
            if len(draft) and slot in constraints:
                draft = draft[: constraints[slot].look_ahead(draft.tolist())]
            if len(draft):
                drafts[slot] = draft
                budget -= len(draft)
                self._rests[slot] = 1
                self._drafting[slot] = _REPEATED
            else:
                self._due[slot] = self._num_steps + self._rests[slot]
                self._rests[slot] = min(2 * self._rests[slot], _LONGEST_REST)
        return drafts

    def _least_likely(self, num_rows: int) -> float:
        """How likely a drafted token must be in a step of `num_rows`: as its row is dear, beside a token for each."""
        return min(max(num_rows * self._pace.row_share(num_rows), _LEAST_LIKELY), 0.99)

    def _wanted(self, kind: int, slot: int, least: float) -> int:
        """How many tokens the slot may draft: as many as are likely enough to hold."""
        most = self._table.last_positions.item(slot) - self._table.num_tokens(slot)
        if self._fixed is not None:
            return min(most, self._fixed)
        share = self._shares[kind][slot]
        self._shares[kind][slot] += _RECOVERY * (_PRIORS[kind] - share)
        return min(int(log(least) / log(share)), MAX_DRAFT_TOKENS, most)

    def judge(
        self, step: ScheduledStep, rows: SampledRows, last: dict[int, FinishReason]
    ) -> tuple[SampledRows, dict[int, FinishReason], list[int]]:
        """See Drafter. What held is learned."""
        drafted = step.batch.drafted
        assert drafted is not None
        rows, last, accepted = drop_rejected(rows, last, drafted.tolist())
        held = Counter(rows.index[accepted].tolist())
        for slot, num_drafted in Counter(step.index[drafted >= 0].tolist()).items():
            self.learn(slot, num_drafted, held[slot])
        return rows, last, accepted

    def learn(self, slot: int, num_drafted: int, num_accepted: int) -> None:
        """Note how many of a slot's drafted tokens held. The first one that did not is the last that tells anything."""
        shares = self._shares[self._drafting.pop(slot, _REPEATED)]
        share = shares[slot]
        for _ in range(num_accepted):
            share += _WEIGHT * (1 - share)
        if num_accepted < num_drafted:
            share -= _WEIGHT * share
        shares[slot] = min(max(share, 0.01), 0.98)
        self._stale.add(slot)
        self._next_due = 0
