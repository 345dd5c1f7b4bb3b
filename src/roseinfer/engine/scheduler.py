"""Decides, step by step, which sequences get how many tokens, and takes the sampled tokens back.

One token budget a step: first one token for each decoding sequence, then the next chunk of prompts being prefilled,
then newcomers. Knows sequences and counts; never sees text, tensors or a clock of its own.
"""

from collections import deque
from dataclasses import dataclass
from itertools import islice

import msgspec
import numpy as np

from roseinfer.config import CacheConfig, SchedulerConfig
from roseinfer.engine.admission import make_policy
from roseinfer.engine.batch import BoolArray, Int32Array, SampledTokens, ScheduledBatch, SlotBinding
from roseinfer.engine.residency import Residency
from roseinfer.engine.sequence import Sequence, SequenceStatus
from roseinfer.messages import Request, TokenOutput
from roseinfer.records import FinishReason

Chunk = tuple[Sequence, int]
"""A sequence and how many of its known tokens this step computes."""


@dataclass(slots=True)
class StepCounts:
    """What the scheduler counted in one step; part of its `StepRecord`."""

    num_decode_seqs: int = 0
    num_prefill_seqs: int = 0
    num_prefill_tokens: int = 0
    num_not_selected: int = 0
    num_preemptions: int = 0
    num_finished: int = 0
    num_prefix_queried_tokens: int = 0
    num_prefix_hit_tokens: int = 0


class Scheduler:
    """Owner of every sequence of one engine."""

    def __init__(
        self,
        config: SchedulerConfig,
        cache: CacheConfig,
        *,
        num_blocks: int,
        max_model_len: int,
        eos_token_ids: tuple[int, ...],
    ) -> None:
        assert num_blocks * cache.block_size >= max_model_len, "the pool does not hold one sequence: it could never run"
        self.limits = config.limits
        self.max_model_len = max_model_len
        self.eos_token_ids = eos_token_ids
        self.residency = Residency(
            cache, num_slots=self.limits.max_active_seqs, num_blocks=num_blocks, max_model_len=max_model_len
        )
        self.waiting: deque[Sequence] = deque()
        self.counts = StepCounts()
        self._table = self.residency.table
        self._policy = make_policy(config)
        self._window = max(config.lookahead, self.limits.max_prefill_seqs)
        self._max_prefix_wait_steps = config.max_prefix_wait_steps
        self._admission_turn = 0
        self._sequences: dict[str, Sequence] = {}  # every unfinished one by request id
        self._decode_ring: deque[int] = deque()  # slots that decode, the next to be selected first
        self._decode_slots: Int32Array | None = None  # the ring as an array, while nothing has changed
        self._bindings: list[SlotBinding] = []
        self._ended: list[TokenOutput] = []  # last outputs of sequences that ended outside a step

    @property
    def num_running(self) -> int:
        return len(self.residency.sequences)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    @property
    def has_work(self) -> bool:
        return bool(self._sequences or self._ended)

    # --- requests in, requests out ----------------------------------------------------------------------------------

    def add(self, request: Request, inbox_ns: int) -> None:
        """Queue a validated request: its prompt is not empty, and prompt and completion fit the context."""
        num_prompt_tokens = len(request.prompt_token_ids)
        assert 0 < num_prompt_tokens < num_prompt_tokens + request.params.max_tokens <= self.max_model_len
        assert request.request_id not in self._sequences, f"request id {request.request_id} is in use"
        sequence = Sequence(
            request=request,
            inbox_ns=inbox_ns,
            token_ids=np.asarray(request.prompt_token_ids, np.int32),
            chain=self.residency.new_chain(request.cache_salt),
        )
        self._sequences[request.request_id] = sequence
        self.waiting.append(sequence)

    def abort(self, request_id: str) -> None:
        """End a sequence wherever it is; its blocks are free at once. An unknown or finished id is no mistake."""
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return
        if sequence.status is SequenceStatus.WAITING:
            self.waiting.remove(sequence)
        else:
            self._leave(sequence)
        self._end(sequence)
        self._ended.append(TokenOutput(request_id, [], None, FinishReason.ABORT, None, sequence.times))

    def take_ended(self) -> list[TokenOutput]:
        """Last outputs of what was aborted since the last call. Each is handed out once."""
        ended, self._ended = self._ended, []
        self.counts.num_finished += len(ended)
        return ended

    def _leave(self, sequence: Sequence) -> None:
        if sequence.status is SequenceStatus.DECODING:
            self._decode_ring.remove(sequence.slot)
            self._decode_slots = None
        self.residency.leave(sequence)

    def _end(self, sequence: Sequence) -> None:
        sequence.status = SequenceStatus.FINISHED
        del self._sequences[sequence.request.request_id]

    # --- schedule ---------------------------------------------------------------------------------------------------

    def schedule(self, step_id: int, now_ns: int) -> ScheduledBatch | None:
        """The step's batch, or None when nothing can run. `now_ns` becomes newcomers' first scheduling."""
        self.counts = StepCounts()
        device_slots = self._make_room(self._select_decodes())
        budget = min(self.limits.max_num_batched_tokens - len(device_slots), self.limits.max_prefill_tokens)
        chunks = self._continue_prefills(budget)
        budget -= sum(length for _, length in chunks)
        chunks += self._admit(budget, now_ns)
        if not chunks and not len(device_slots):
            return None
        return self._build_batch(step_id, device_slots, chunks)

    def _select_decodes(self) -> Int32Array:
        """Slots that decode in this step; when there are more than a step decodes, they take turns."""
        ring = self._decode_ring
        self.counts.num_not_selected = max(0, len(ring) - self.limits.max_num_seqs)
        if self.counts.num_not_selected:
            selected = [ring.popleft() for _ in range(self.limits.max_num_seqs)]
            ring.extend(selected)
            return np.array(selected, np.int32)
        if self._decode_slots is None:
            self._decode_slots = np.array(ring, np.int32)
        return self._decode_slots

    def _make_room(self, slots: Int32Array) -> Int32Array:
        """A new block for every slot whose last one is full; the youngest sequences are preempted when none is left.

        Blocks go to the oldest first, and it is never preempted while others hold any, so it always progresses.
        Returns the slots that still decode.
        """
        residency, owners = self.residency, self._table.owners
        full = residency.find_full(slots)
        if len(full) <= residency.pool.num_available:
            residency.grow(full)
            return slots
        for sequence in sorted((self._table.owner(slot) for slot in full.tolist()), key=lambda owner: owner.age):
            while sequence.slot >= 0 and not residency.pool.num_available:
                self._preempt(residency.sequences[-1])
            if sequence.slot >= 0:
                residency.grow(np.array([sequence.slot], np.int32))
        return np.array([slot for slot in slots.tolist() if owners[slot] is not None], np.int32)

    def _preempt(self, sequence: Sequence) -> None:
        """Take the sequence's blocks; it computes its tokens again later, the prefix cache permitting."""
        self._leave(sequence)
        sequence.status = SequenceStatus.WAITING
        sequence.num_preemptions += 1
        self.counts.num_preemptions += 1
        self.waiting.appendleft(sequence)

    def _continue_prefills(self, budget: int) -> list[Chunk]:
        """Prompts begun in an earlier step, oldest first."""
        chunks: list[Chunk] = []
        if len(self._decode_ring) == self.num_running:
            return chunks
        for sequence in self.residency.sequences:
            if sequence.status is SequenceStatus.PREFILLING and budget > 0:
                length = min(budget, self.residency.num_missing(sequence))
                chunks.append((sequence, length))
                budget -= length
        return chunks

    def _admit(self, budget: int, now_ns: int) -> list[Chunk]:
        """Sequences from the waiting queue, in the policy's order, as long as there is room for them."""
        window = list(islice(self.waiting, self._window))
        order = self._policy(window, self._admission_turn)
        chunks: list[Chunk] = []
        for sequence in order.sequences:
            if budget <= 0 or len(chunks) == self.limits.max_prefill_seqs or not self._table.num_free:
                break
            matched = self.residency.match_prefix(sequence)
            if self._waits_for_prefix(sequence, len(matched)):
                continue
            if self.residency.fits(sequence, matched):
                self._enter(sequence, matched, now_ns)
                length = min(budget, self.residency.num_missing(sequence))
                chunks.append((sequence, length))
                budget -= length
            elif not order.may_overtake:
                break
        if chunks:
            self._admission_turn += 1
            for _ in window:
                self.waiting.popleft()
            self.waiting.extendleft(left for left in reversed(window) if left.status is SequenceStatus.WAITING)
        return chunks

    def _waits_for_prefix(self, sequence: Sequence, num_matched: int) -> bool:
        """Another sequence is computing the very block this one needs next: wait for it, but not for ever."""
        if sequence.num_prefix_wait_steps >= self._max_prefix_wait_steps:
            return False
        if not self.residency.is_prefix_pending(sequence, num_matched):
            return False
        sequence.num_prefix_wait_steps += 1
        return True

    def _enter(self, sequence: Sequence, matched: list[int], now_ns: int) -> None:
        """Slot and blocks for the sequence, and the news for the runner."""
        self.residency.enter(sequence, matched)
        sequence.status = SequenceStatus.PREFILLING
        if not sequence.scheduled_ns:
            sequence.scheduled_ns = now_ns
            sequence.num_cached_tokens = len(matched) * self.residency.block_size
            if self.residency.prefix_cache.is_enabled:
                self.counts.num_prefix_queried_tokens += sequence.num_prompt_tokens
                self.counts.num_prefix_hit_tokens += sequence.num_cached_tokens
        params = sequence.request.params
        eos_token_ids = () if params.ignore_eos else self.eos_token_ids
        self._bindings.append(SlotBinding(sequence.slot, params, sequence.num_prompt_tokens, eos_token_ids))

    def _build_batch(self, step_id: int, device_slots: Int32Array, chunks: list[Chunk]) -> ScheduledBatch:
        table, num_device_rows = self._table, len(device_slots)
        slots = np.concatenate([device_slots, np.array([s.slot for s, _ in chunks], np.int32)])
        num_new_tokens = np.ones(len(slots), np.int32)
        num_new_tokens[num_device_rows:] = [length for _, length in chunks]
        starts = table.num_computed[slots]
        ends = starts + num_new_tokens
        rows = range(num_device_rows, len(slots))
        self.counts.num_decode_seqs = num_device_rows
        self.counts.num_prefill_seqs = len(chunks)
        self.counts.num_prefill_tokens = int(num_new_tokens[num_device_rows:].sum())
        bindings, self._bindings = tuple(self._bindings), []
        return ScheduledBatch(
            step_id=step_id,
            slots=slots,
            starts=starts,
            num_new_tokens=num_new_tokens,
            samples=ends == table.num_tokens[slots],
            num_device_rows=num_device_rows,
            token_ids=concatenate([table.token_ids[slots[row], starts[row] : ends[row]] for row in rows]),
            block_table=table.blocks.ids,
            bindings=bindings,
        )

    # --- commit -----------------------------------------------------------------------------------------------------

    def commit(self, batch: ScheduledBatch, sampled: SampledTokens) -> list[TokenOutput]:
        """Take the sampled tokens in: lengths grow, full blocks are published, finished sequences give all back."""
        table = self._table
        self.residency.advance(batch.slots, batch.starts, batch.num_new_tokens)
        slots = batch.slots[batch.samples]
        table.token_ids[slots, table.num_tokens[slots]] = sampled.token_ids
        table.num_tokens[slots] += 1
        self._begin_decoding(slots[batch.num_device_rows :])
        outputs = self._outputs(slots, sampled)
        for row in range(batch.num_device_rows, len(slots)):
            outputs[row] = msgspec.structs.replace(outputs[row], times=table.owner(slots[row]).times)
        is_stop = self._is_stop(slots, sampled.token_ids)
        is_last = is_stop | (table.num_tokens[slots] >= table.max_tokens[slots])
        for row in np.flatnonzero(is_last).tolist():
            outputs[row] = self._finish(table.owner(slots[row]), outputs[row], is_stop=bool(is_stop[row]))
        return outputs

    def _outputs(self, slots: Int32Array, sampled: SampledTokens) -> list[TokenOutput]:
        """One for each sampled token, as if none were the last."""
        request_ids = self._table.request_ids
        rows = zip(slots.tolist(), sampled.token_ids.tolist(), strict=True)
        if sampled.logprobs is None:
            return [TokenOutput(request_ids[slot], [token_id]) for slot, token_id in rows]
        return [
            TokenOutput(request_ids[slot], [token_id], None if told is None else [told])
            for (slot, token_id), told in zip(rows, sampled.logprobs, strict=True)
        ]

    def _begin_decoding(self, slots: Int32Array) -> None:
        """Prompts whose last chunk was computed decode from the next step on."""
        for slot in slots.tolist():
            self._table.owner(slot).status = SequenceStatus.DECODING
            self._decode_ring.append(slot)
            self._decode_slots = None

    def _is_stop(self, slots: Int32Array, token_ids: Int32Array) -> BoolArray:
        """Rows whose token is an end-of-sequence id they heed, or one of their own stop ids."""
        table = self._table
        is_stop: BoolArray = np.zeros(len(slots), np.bool_)
        for eos_token_id in self.eos_token_ids:
            is_stop |= token_ids == eos_token_id
        is_stop &= ~table.ignores_eos[slots]
        for row in np.flatnonzero(table.has_stop_tokens[slots]).tolist():
            is_stop[row] |= int(token_ids[row]) in table.owner(slots[row]).request.params.stop_token_ids
        return is_stop

    def _finish(self, sequence: Sequence, output: TokenOutput, *, is_stop: bool) -> TokenOutput:
        """The sequence's output, now its last one; slot and blocks are free from here on."""
        self._leave(sequence)
        self._end(sequence)
        self.counts.num_finished += 1
        return msgspec.structs.replace(
            output,
            finish_reason=FinishReason.STOP if is_stop else FinishReason.LENGTH,
            stop_token_id=output.token_ids[-1] if is_stop else None,
            times=sequence.times,
        )

    def check_integrity(self) -> None:
        """Assert every invariant over sequences, slots and blocks. For tests, and for debugging when idle."""
        self.residency.check_integrity()
        assert self.num_running + self.num_waiting == len(self._sequences), "a sequence is lost, or in two places"
        decoding = {s.slot for s in self.residency.sequences if s.status is SequenceStatus.DECODING}
        assert set(self._decode_ring) == decoding, "the decode ring differs from the decoding sequences"
        assert len(self._decode_ring) == len(decoding), "a slot is in the decode ring twice"


def concatenate(pieces: list[Int32Array]) -> Int32Array:
    """Like np.concatenate, which refuses an empty list."""
    return np.concatenate(pieces) if pieces else np.zeros(0, np.int32)
