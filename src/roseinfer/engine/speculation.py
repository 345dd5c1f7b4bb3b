"""Drafts tokens that repeat what a sequence has said before, and decides how many a step verifies.

A draft continues the earlier place that resembles the end of the text most. Nothing is kept of it: the search is a few
comparisons over the token ids in the slot table. What is learned is how often drafts of a slot held; what a further row
adds to the time of a step is known from the steps before.
"""

import numpy as np

from roseinfer.engine.core.batch import MAX_STEP_DRAFTS, Float64Array, IndexArray, Int32Array
from roseinfer.engine.core.sequence import SlotTable
from roseinfer.engine.pace import Pace

MAX_DRAFT_TOKENS = 16  # of one row
_MIN_MATCH, _MAX_MATCH = 3, 8  # tokens at the end of the text that the earlier place must share, and that are compared
_NOTHING: Int32Array = np.zeros(0, np.int32)
_PRIOR = 0.5  # share of drafted tokens that hold, before anything is known
_WEIGHT = 0.2  # of a newer token in that share
_RECOVERY = 0.01  # by which it returns to the prior at each search, so that a slot is tried again now and then
_LONGEST_REST = 16  # steps: a slot whose text repeats nothing is searched less and less often
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


class Speculation:
    """Chooses the drafts of each step. With `fixed` a row drafts so many whenever it can, whether it pays or not."""

    def __init__(self, pace: Pace, table: SlotTable, fixed: int | None = None) -> None:
        self._table = table
        self._pace = pace
        self._fixed = fixed
        self._shares: Float64Array = np.full(len(table.owners), _PRIOR)
        self._num_steps = 0
        self._due: IndexArray = np.zeros(len(table.owners), np.intp)  # the step at which each slot is searched again
        self._rests = [1] * len(table.owners)  # the steps until then
        self.stale = set[int]()  # slots whose last token the runner does not hold

    def bind(self, slot: int) -> None:
        """Forget the slot's last owner."""
        self._shares[slot] = _PRIOR
        self._due[slot], self._rests[slot] = 0, 1
        self.stale.discard(slot)

    def draft(self, index: IndexArray, budget: int) -> dict[int, Int32Array]:
        """Drafts by slot for some of the decoding slots `index`, of `budget` tokens at most in all."""
        budget, table, drafts = min(budget, MAX_STEP_DRAFTS), self._table, dict[int, Int32Array]()
        self._num_steps += 1
        num_rows = len(index)
        if budget <= 0:
            return drafts
        if self._fixed is None:
            index = index[self._due[index] <= self._num_steps]
            if not len(index):
                return drafts
        most = np.minimum(self._wanted(index, num_rows), table.max_tokens[index] - table.num_tokens[index] - 1)
        for slot, wanted in zip(index.tolist(), most.tolist(), strict=True):
            length = min(wanted, budget)
            can_draft = length > 0 and self._can_draft(slot)
            draft = find_draft(table.known_tokens(slot), length) if can_draft else _NOTHING
            if len(draft):
                drafts[slot] = draft
                budget -= len(draft)
                self._rests[slot] = 1
            else:
                self._due[slot] = self._num_steps + self._rests[slot]
                self._rests[slot] = min(2 * self._rests[slot], _LONGEST_REST)
        return drafts

    def _wanted(self, index: IndexArray, num_rows: int) -> IndexArray:
        """How many tokens each of these should draft, of `num_rows` in all: as many as are likely enough to hold."""
        if self._fixed is not None:
            return np.full(len(index), self._fixed)
        shares = self._shares[index]
        self._shares[index] += _RECOVERY * (_PRIOR - shares)
        # A step of decoding rows has a token for each; a drafted one must be as likely as its row is dear.
        least = min(max(num_rows * self._pace.row_share(num_rows), _LEAST_LIKELY), 0.99)
        lengths: IndexArray = (np.log(least) / np.log(shares)).astype(np.intp)
        return np.minimum(lengths, MAX_DRAFT_TOKENS)

    def _can_draft(self, slot: int) -> bool:
        """Whether each row of the slot sees the state that it would see alone.

        Masks of grammars, and the counts of penalties, are of the last token that is known, one for each slot.
        """
        return slot not in self._table.constraints and not self._table.owner(slot).request.params.has_penalties

    def learn(self, slot: int, num_drafted: int, num_accepted: int) -> None:
        """Note how many of a slot's drafted tokens held. The first one that did not is the last that tells anything."""
        share = self._shares[slot]
        for _ in range(num_accepted):
            share += _WEIGHT * (1 - share)
        if num_accepted < num_drafted:
            share -= _WEIGHT * share
        self._shares[slot] = min(max(share, 0.01), 0.98)
        self.stale.add(slot)
