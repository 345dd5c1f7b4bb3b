"""Requests into tokens through a runner, scheduled at random: who runs, in what chunks, who is preempted. For tests.

It launches a step before it has read the one before, as far as `depth` allows, and asks of nobody what a token was
unless it has to: only a sequence that comes back after preemption brings its tokens along.
"""

from collections import deque
from dataclasses import dataclass, field

import numpy as np
from hypothesis import strategies as st

from roseinfer.engine.core.batch import Launched, Runner, ScheduledBatch, SlotBinding
from roseinfer.engine.core.stopwatch import unwatched
from roseinfer.messages import EngineInfo, SamplingParams


@dataclass(frozen=True)
class Ask:
    """One request."""

    prompt: list[int]
    num_tokens: int
    params: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=0.0))


@dataclass(frozen=True)
class Plan:
    """How requests are run. Whatever is chosen here must not change a token."""

    seed: int = 0
    depth: int = 0
    max_rows: int = 8
    chunk: int = 1000
    preempt_every: int = 0  # steps, and five times at most; 0: never


def plans(num_slots: int, max_chunk: int) -> st.SearchStrategy[Plan]:
    """Any plan of whole steps."""
    return st.builds(
        Plan,
        seed=st.integers(0, 1000),
        depth=st.integers(0, 1),
        max_rows=st.integers(1, num_slots),
        chunk=st.integers(1, max_chunk),
        preempt_every=st.integers(0, 9),
    )


@dataclass(eq=False)
class _Sequence:
    ask: Ask
    tokens: list[int]  # known to the host
    slot: int = -1
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_ahead: int = 0  # sampled, and not yet read
    is_new: bool = True
    is_on_device: bool = False  # the last token is the one sampled last for the slot

    @property
    def num_known(self) -> int:
        """Tokens that exist, wherever they are."""
        return len(self.tokens) + self.num_ahead

    @property
    def is_done(self) -> bool:
        return self.num_known == len(self.ask.prompt) + self.ask.num_tokens


class Driver:
    """Hands out slots and blocks, in an order of its own, and builds batches."""

    def __init__(self, runner: Runner, info: EngineInfo, num_slots: int, plan: Plan) -> None:
        self._runner = runner
        self._plan = plan
        self._block_size = info.block_size
        self._random = np.random.default_rng(plan.seed)
        self._free_slots = self._random.permutation(num_slots).tolist()
        self._free_blocks = self._random.permutation(info.num_blocks).tolist()
        self._table = np.zeros((num_slots, -(-info.max_model_len // info.block_size)), np.int32)
        self._running: list[_Sequence] = []
        self._waiting: deque[_Sequence] = deque()
        self._in_flight: deque[tuple[Launched, list[_Sequence]]] = deque()
        self._num_preemptions = 0
        self.graph_rows: list[int] = []  # of each step

    def generate(self, asks: list[Ask]) -> list[list[int]]:
        """The tokens that each request got."""
        sequences = [_Sequence(ask, list(ask.prompt)) for ask in asks]
        self._waiting.extend(sequences)
        step = 0
        while any(not sequence.is_done for sequence in sequences):
            step += 1
            if self._plan.preempt_every and step % self._plan.preempt_every == 0 and self._num_preemptions < 5:
                self._num_preemptions += 1
                self._preempt()
            self._enter()
            self._launch()
            while len(self._in_flight) > self._plan.depth:
                self._read()
        while self._in_flight:
            self._read()
        return [sequence.tokens[len(sequence.ask.prompt) :] for sequence in sequences]

    def _enter(self) -> None:
        while self._waiting and self._free_slots:
            needed = -(-(len(self._waiting[0].ask.prompt) + self._waiting[0].ask.num_tokens) // self._block_size)
            if needed > len(self._free_blocks):
                return
            sequence = self._waiting.popleft()
            sequence.slot = self._free_slots.pop()
            sequence.blocks = [self._free_blocks.pop() for _ in range(needed)]
            sequence.num_computed, sequence.is_new, sequence.is_on_device = 0, True, False
            self._table[sequence.slot] = self._random.integers(1 << 20)  # what is not valid yet must not be read
            self._running.append(sequence)

    def _leave(self, sequence: _Sequence) -> None:
        self._running.remove(sequence)
        self._free_slots.append(sequence.slot)
        self._free_blocks.extend(sequence.blocks)

    def _preempt(self) -> None:
        while self._in_flight:
            self._read()
        if self._running:
            sequence = self._running[self._random.integers(len(self._running))]
            self._leave(sequence)
            self._waiting.append(sequence)

    def _launch(self) -> None:
        candidates = [sequence for sequence in self._running if not sequence.is_done]
        self._random.shuffle(candidates)
        chosen = candidates[: self._random.integers(1, self._plan.max_rows + 1)]
        decoding = [s for s in chosen if s.is_on_device]
        others = [s for s in chosen if s not in decoding]
        rows = decoding + others
        if not rows:
            self._read()
            return
        counts = [1] * len(decoding) + [min(self._plan.chunk, s.num_known - s.num_computed) for s in others]
        batch = self._batch(rows, counts, len(decoding))
        launched = self._runner.launch(batch, unwatched)
        self.graph_rows.append(launched.graph_rows)
        sampled = [s for s, samples in zip(rows, batch.samples, strict=True) if samples]
        for sequence, count in zip(rows, counts, strict=True):
            sequence.num_computed += count
            sequence.is_new = False
        for sequence in sampled:
            sequence.num_ahead += 1
            sequence.is_on_device = True
        self._in_flight.append((launched, sampled))

    def _batch(self, rows: list[_Sequence], counts: list[int], num_device_rows: int) -> ScheduledBatch:
        token_ids: list[int] = []
        for index, (sequence, count) in enumerate(zip(rows, counts, strict=True)):
            end = sequence.num_computed + count
            num_blocks = -(-end // self._block_size)
            self._table[sequence.slot, :num_blocks] = sequence.blocks[:num_blocks]
            if index >= num_device_rows:
                token_ids += sequence.tokens[sequence.num_computed : end]
        return ScheduledBatch(
            step_id=0,
            slots=np.array([s.slot for s in rows], np.int32),
            starts=np.array([s.num_computed for s in rows], np.int32),
            num_new_tokens=np.array(counts, np.int32),
            samples=np.array([s.num_computed + n == s.num_known for s, n in zip(rows, counts, strict=True)]),
            num_device_rows=num_device_rows,
            token_ids=np.array(token_ids, np.int32),
            block_table=self._table,
            bindings=tuple(
                SlotBinding(s.slot, s.ask.params, len(s.ask.prompt), (), np.array(s.tokens, np.int32))
                for s in rows
                if s.is_new
            ),
        )

    def _read(self) -> None:
        launched, sampled = self._in_flight.popleft()
        for sequence, token_id in zip(sampled, launched.wait().token_ids.tolist(), strict=True):
            sequence.tokens.append(token_id)
            sequence.num_ahead -= 1
            if sequence.is_done and not sequence.num_ahead:
                self._leave(sequence)
