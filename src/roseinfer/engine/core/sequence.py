"""The state of a sequence, and the arrays of everything that changes each step, one row a slot.

A sequence that holds KV blocks owns a slot. Lengths, token ids and block ids are in `SlotTable`, where they are changed
in place for the whole batch at once and read by the runner without a copy.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from roseinfer.engine.core.batch import BoolArray, Int32Array, Pooled, PooledRow, ScoredRow, Scores, SlotBinding
from roseinfer.engine.core.constraint import Constraint
from roseinfer.engine.core.prefix_cache import BlockChain
from roseinfer.messages import Request
from roseinfer.records import EngineTimes

NO_SLOT = -1
_MOST_UNWRITTEN = 16  # steps


class SequenceStatus(Enum):
    """The stages of a sequence. It holds a slot and blocks from `PREFILLING` on, until no launched step contains it."""

    WAITING = "waiting"
    PREFILLING = "prefilling"  # some of its known tokens are not in the KV cache yet
    DECODING = "decoding"  # all but the last token are, and the runner holds that one
    ENDING = "ending"  # the step of its last token has been launched
    FINISHED = "finished"  # its last output has been built


@dataclass(slots=True, eq=False, weakref_slot=True)
class Sequence:
    """One request in the engine."""

    request: Request
    inbox_ns: int
    token_ids: Int32Array  # all known tokens while it waits; while it holds a slot they are in the table
    chain: BlockChain
    constraint: Constraint | None = None  # if it has a grammar
    status: SequenceStatus = SequenceStatus.WAITING
    slot: int = NO_SLOT
    age: int = -1  # order of first admission; the smallest is preempted last
    scheduled_ns: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    preempted_ns: int = 0
    resumed_ns: int = 0
    turn_ns: int = 0  # orders newcomers in the waiting queue
    has_failed: bool = False  # what it computed may be wrong and is not published
    num_prefix_wait_steps: int = 0
    num_published_blocks: int = 0  # blocks of the chain below this index are in the prefix cache
    num_announced_blocks: int = 0  # and those from there up to this index are announced, if there are any
    scores: list[Scores] | None = None  # of the prompt's tokens so far; None: not asked for, or output already
    pooled: Pooled | None = None  # of the prompt so far, where its embedding is asked for

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def may_match(self) -> bool:
        """Whether a cached prefix will do: not where something is made of each token of the prompt."""
        return self.scores is None and self.request.params.pooling != "mean"

    def binding(self, eos_token_ids: tuple[int, ...]) -> SlotBinding:
        """What the runner must know of the new owner of its slot."""
        params = self.request.params
        return SlotBinding(
            slot=self.slot,
            params=params if self.constraint is None else replace(params, min_tokens=0),  # its masks see to that
            num_prompt_tokens=self.num_prompt_tokens,
            eos_token_ids=() if params.ignore_eos else eos_token_ids,
            token_ids=self.token_ids if params.has_penalties else None,
        )

    @property
    def times(self) -> EngineTimes:
        return EngineTimes(
            self.inbox_ns,
            self.scheduled_ns,
            self.num_cached_tokens,
            self.num_preemptions,
            self.preempted_ns,
            self.resumed_ns,
        )


class SlotTable:
    """The state of every sequence that holds a slot, as arrays of [slots], [slots, max_model_len] or [slots, blocks].

    Counts are as of the step launched last; token ids are filled in when a step's result is read. So the last tokens
    that `num_tokens` counts may have no id yet, while the step that samples them is under way.
    """

    def __init__(self, num_slots: int, max_model_len: int, block_size: int) -> None:
        self._token_ids: Int32Array = np.zeros((num_slots, max_model_len), np.int32)
        self._unwritten: list[tuple[npt.NDArray[np.intp], Int32Array, Int32Array]] = []  # see `add_tokens`
        # Counts are columns: numpy gathers or writes a few slots of one in a tenth of the time of rows of a table.
        self.num_given: Int32Array = np.zeros(num_slots, np.int32)  # tokens known when the slot got its owner
        self.num_computed: Int32Array = np.zeros(num_slots, np.int32)  # tokens in the KV cache
        self.last_positions: Int32Array = np.zeros(num_slots, np.int32)  # of the last token that the request allows
        self.capacities: Int32Array = np.zeros(num_slots, np.int32)  # tokens that the slot's blocks hold
        self.ignores_eos = np.zeros(num_slots, np.bool_)
        self.stop_token_ids: dict[int, frozenset[int]] = {}  # by slot, of those that have any
        self.constraints: dict[int, Constraint] = {}  # likewise
        self.block_size = block_size
        self.block_ids: Int32Array = np.zeros((num_slots, -(-max_model_len // block_size)), np.int32)
        self.owners: list[Sequence | None] = [None] * num_slots
        self._free = list(range(num_slots - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def bind(self, sequence: Sequence, block_ids: list[int], num_computed: int) -> None:
        """Give the sequence a slot with these blocks, of which the first `num_computed` tokens are filled."""
        slot, params, num_tokens = self._free.pop(), sequence.request.params, len(sequence.token_ids)
        self._token_ids[slot, :num_tokens] = sequence.token_ids
        self.num_given[slot], self.num_computed[slot] = num_tokens, num_computed
        self.last_positions[slot] = sequence.num_prompt_tokens + params.max_tokens - 1
        self.capacities[slot] = len(block_ids) * self.block_size
        self.ignores_eos[slot] = params.ignore_eos
        if params.stop_token_ids:
            self.stop_token_ids[slot] = frozenset(params.stop_token_ids)
        if sequence.constraint is not None:
            self.constraints[slot] = sequence.constraint
        self.block_ids[slot, : len(block_ids)] = block_ids
        self.owners[slot] = sequence
        sequence.slot = slot

    def unbind(self, sequence: Sequence) -> list[int]:
        """Free the slot; the sequence keeps its token ids. Returns the block ids it held."""
        slot = sequence.slot
        sequence.token_ids = self.known_tokens(slot).copy()
        sequence.slot = NO_SLOT
        self.owners[slot] = None
        self.stop_token_ids.pop(slot, None)
        self.constraints.pop(slot, None)
        self._free.append(slot)
        block_ids = self.blocks_of(slot)
        self.capacities[slot] = 0
        return block_ids

    def blocks_of(self, slot: int) -> list[int]:
        return [*self.block_ids[slot, : self.capacities[slot] // self.block_size].tolist()]

    def append_blocks(self, slots: list[int], block_ids: list[int]) -> None:
        """Give each of the slots one more block; a loop, since in most steps they are few."""
        for slot, block_id in zip(slots, block_ids, strict=True):
            capacity = self.capacities.item(slot)
            self.block_ids[slot, capacity // self.block_size] = block_id
            self.capacities[slot] = capacity + self.block_size

    @property
    def token_ids(self) -> Int32Array:
        """Known tokens of all slots [slots, max_model_len]; what was added is written before it is read."""
        if self._unwritten:
            index, positions, token_ids = map(np.concatenate, zip(*self._unwritten, strict=True))
            self._token_ids[index, positions] = token_ids
            self._unwritten.clear()
        return self._token_ids

    def add_tokens(self, index: npt.NDArray[np.intp], positions: Int32Array, token_ids: Int32Array) -> None:
        """Add a step's tokens. Several steps are written at once: behind a forward pass no slot's row is in a cache."""
        self._unwritten.append((index, positions, token_ids))
        if len(self._unwritten) == _MOST_UNWRITTEN:
            _ = self.token_ids

    def num_tokens(self, slot: int) -> int:
        """Known tokens, prompt and generated: once those given are computed, the one sampled after them is known."""
        return max(self.num_given.item(slot), self.num_computed.item(slot) + 1)

    def known_tokens(self, slot: int) -> Int32Array:
        """A view of the slot's token ids."""
        tokens: Int32Array = self.token_ids[slot, : self.num_tokens(slot)]
        return tokens

    def scored_rows(self, chunks: Iterable[tuple[Sequence, int]], first_row: int) -> tuple[ScoredRow, ...]:
        """The chunks of a step whose prompts are scored; the chunks are in the rows from `first_row` on."""
        scored = []
        for row, (sequence, length) in enumerate(chunks, first_row):
            num_likeliest = sequence.request.params.num_prompt_logprobs
            if sequence.scores is not None and num_likeliest is not None:
                start = int(self.num_computed[sequence.slot]) + 1
                end = min(start + length, sequence.num_prompt_tokens)
                if end > start:
                    scored.append(ScoredRow(row, self.token_ids[sequence.slot, start:end].copy(), num_likeliest))
        return tuple(scored)

    def pooled_rows(self, slots: Int32Array, samples: BoolArray, first_row: int) -> tuple[PooledRow, ...]:
        """The rows from `first_row` on whose hidden rows are pooled in this step."""
        wanted = ((row, self.owner(slots[row]).request.params.pooling) for row in range(first_row, len(slots)))
        return tuple(PooledRow(row, kind) for row, kind in wanted if kind == "mean" or (kind and samples[row]))

    def owner(self, slot: int) -> Sequence:
        sequence = self.owners[slot]
        assert sequence is not None, f"slot {slot} has no owner"
        return sequence
