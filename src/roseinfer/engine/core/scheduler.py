"""Decides, step by step, which sequences get how many tokens, and takes the sampled tokens back.

One token budget a step: first one token for each decoding sequence, then the next chunk of prompts being prefilled,
then newcomers. Knows sequences and counts; never sees text, tensors or a clock of its own.

Counts grow when a step is scheduled, token ids are filled in when it is committed. So the next step can be scheduled
between the two. What the host cannot know by then is that a token was an end-of-sequence or stop token: the row that
such a sequence has in the next step is surplus, and its commit drops it.
"""

from bisect import insort
from collections import deque
from collections.abc import Iterable

import numpy as np

from roseinfer.config.tree import CacheConfig, SchedulerConfig
from roseinfer.engine.core.admission import make_policy, make_turn
from roseinfer.engine.core.batch import SampledTokens, ScheduledBatch, SlotBinding
from roseinfer.engine.core.compiling import Compiling
from roseinfer.engine.core.constraint import Grammars
from roseinfer.engine.core.deadlines import Deadlines
from roseinfer.engine.core.decode_ring import DecodeRing, DecodeRows, rows_of
from roseinfer.engine.core.kv_cache_manager import Residency
from roseinfer.engine.core.sequence import Sequence, SequenceStatus
from roseinfer.engine.core.steps import (
    Chunk,
    Outcome,
    RowFailures,
    ScheduledStep,
    StepCounts,
    find_last,
    follow,
    make_batch,
    tell,
)
from roseinfer.engine.core.waiting_queue import WaitingQueue
from roseinfer.messages import Request, TokenOutput
from roseinfer.records import BlockedBy, FinishReason


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
        grammars: Grammars | None = None,
    ) -> None:
        assert num_blocks * cache.block_size >= max_model_len, "the pool does not hold one sequence: it could never run"
        self.limits = config.limits
        self.max_model_len = max_model_len
        self.eos_token_ids = eos_token_ids
        self.residency = Residency(
            cache, num_slots=self.limits.max_active_seqs, num_blocks=num_blocks, max_model_len=max_model_len
        )
        self.waiting = WaitingQueue(make_turn(config))
        self.compiling = Compiling(grammars, eos_token_ids)
        self.counts = StepCounts()  # of the step scheduled or committed last
        self._table = self.residency.table
        self._policy = make_policy(config)
        self._window = max(config.lookahead, self.limits.max_prefill_seqs)
        self._max_prefix_wait_steps = config.max_prefix_wait_steps
        self._admission_turn = 0
        self._now_ns = 0  # when the step was begun that was scheduled last
        self.sequences: dict[str, Sequence] = {}  # every unfinished one by request id
        self.deadlines = Deadlines()
        self.num_added = 0
        self.ring = DecodeRing(self.limits.max_num_seqs)
        self._failures = RowFailures()
        self.prefilling: list[Sequence] = []  # oldest first
        self.in_flight: deque[ScheduledStep] = deque()  # scheduled and not committed, oldest first
        self.leaving: list[Sequence] = []  # ended, but in a step in flight: slot and blocks are still theirs
        self._bindings: list[SlotBinding] = []
        self._ended: list[TokenOutput] = []  # last outputs of sequences that ended outside a step

    @property
    def num_running(self) -> int:
        return len(self.sequences) - self.num_waiting

    @property
    def num_waiting(self) -> int:
        return len(self.waiting) + len(self.compiling)

    @property
    def has_work(self) -> bool:
        return bool(self.sequences or self._ended or self.in_flight)

    # --- requests in, requests out ----------------------------------------------------------------------------------

    def add(self, request: Request, inbox_ns: int) -> None:
        """Queue a validated request: its prompt is not empty, and prompt and completion fit the context."""
        assert 0 < len(request.prompt_token_ids) <= self.max_model_len - request.params.max_tokens
        assert request.request_id not in self.sequences, f"request id {request.request_id} is in use"
        sequence = Sequence(
            request=request,
            inbox_ns=inbox_ns,
            token_ids=np.asarray(request.prompt_token_ids, np.int32),
            chain=self.residency.new_chain(request.cache_salt),
            scores=None if request.params.num_prompt_logprobs is None else [],
        )
        self.sequences[request.request_id] = sequence
        self.num_added += 1
        self.deadlines.add(sequence, len(self.sequences))
        if not self.compiling.add(sequence):
            self.waiting.add(sequence)

    def abort(self, request_id: str) -> None:
        """End a sequence wherever it is. An unknown or finished id is no mistake."""
        sequence = self.sequences.get(request_id)
        if sequence is not None:
            self._end_early(sequence, FinishReason.ABORT)

    def _end_early(self, sequence: Sequence, reason: FinishReason, grammar_error: str = "") -> None:
        """End it outside a step, without a token."""
        self._end(sequence)
        request_id, times = sequence.request.request_id, sequence.times
        self._ended.append(TokenOutput(request_id, [], None, reason, times=times, grammar_error=grammar_error))

    def _take_compiled(self) -> None:
        """Those whose grammars are compiled wait for their turn; those whose are not fit to be used have failed."""
        for sequence, error in self.compiling.take():
            self.waiting.add(sequence)
            if error is not None:
                self._end_early(sequence, FinishReason.ERROR, f"{type(error).__name__}: {error}")

    def take_ended(self) -> list[TokenOutput]:
        """Last outputs of what ended outside a step since the last call. Each is handed out once."""
        ended, self._ended = self._ended, []
        self.counts.num_finished += len(ended)
        return ended

    def _end(self, sequence: Sequence) -> None:
        """It is over. Slot and blocks are free again as soon as no step in flight writes there."""
        if sequence.status is SequenceStatus.WAITING:
            if not self.compiling.remove(sequence):
                self.waiting.remove(sequence)
        else:
            self._stop_running(sequence)
            self.leaving.append(sequence)
        sequence.status = SequenceStatus.FINISHED
        del self.sequences[sequence.request.request_id]
        self._release()

    def _stop_running(self, sequence: Sequence) -> None:
        """No further step contains it."""
        if sequence.status is SequenceStatus.DECODING:
            self.ring.remove(sequence.slot)
        elif sequence.status is SequenceStatus.PREFILLING:
            self.prefilling.remove(sequence)

    def _release(self) -> None:
        """Take slots and blocks back from those that are over and in no step any more."""
        for sequence in self.leaving.copy():
            if not any(step.holds(sequence.slot) for step in self.in_flight):
                self.leaving.remove(sequence)
                self.residency.leave(sequence)

    # --- schedule ---------------------------------------------------------------------------------------------------

    def schedule(self, step_id: int, now_ns: int) -> ScheduledBatch | None:
        """The next step's batch, or None when nothing can run, or not before the steps in flight are committed.

        `now_ns` becomes newcomers' first scheduling.
        """
        self.counts = StepCounts()
        self._now_ns = now_ns
        if now_ns >= self.deadlines.next_ns:
            for sequence in self.deadlines.take_expired(now_ns):
                self._end_early(sequence, FinishReason.TIMEOUT)
        if len(self.compiling):
            self._take_compiled()
        decodes = self._select_decodes()
        if decodes is None:
            return None
        budget = min(self.limits.max_num_batched_tokens - len(decodes), self.limits.max_prefill_tokens)
        chunks = self._continue_prefills(budget)
        budget -= sum(length for _, length in chunks)
        chunks += self._admit(budget)
        if not chunks and not len(decodes):
            return None
        return self._advance(step_id, decodes, chunks)

    def _select_decodes(self) -> DecodeRows | None:
        """Slots that decode in this step, each with room for its token; when more decode, they take turns."""
        self.counts.num_not_selected = max(0, len(self.ring) - self.limits.max_num_seqs)
        selected = self.ring.select()
        ready = self._without_unread(selected)
        rows = self._make_room(ready)
        if rows is not None:
            self.ring.pass_turn(len(rows) + len(selected) - len(ready))
        return rows

    def _without_unread(self, rows: DecodeRows) -> DecodeRows:
        """Without those whose grammar must see a token first that a step in flight samples."""
        if not self._table.constraints or not self.in_flight:
            return rows
        unread = {slot for slot in self._table.constraints if any(step.holds(slot) for step in self.in_flight)}
        return rows_of([slot for slot in rows.slots.tolist() if slot not in unread])

    def _make_room(self, rows: DecodeRows) -> DecodeRows | None:
        """A new block for every slot whose last one is full; the youngest sequences are preempted when none is left.

        Blocks go to the oldest first, and it is never preempted while others hold any, so it always progresses.
        Returns the rows that still decode. None when somebody must be preempted while steps are in flight: what is
        preempted comes back with its token ids, so all of them must be known.
        """
        residency, owners = self.residency, self._table.owners
        full = residency.find_full(rows.index)
        if len(full) <= residency.pool.num_available:
            residency.grow(full)
            return rows
        if self.in_flight:
            return None
        for sequence in sorted((self._table.owner(slot) for slot in full), key=lambda owner: owner.age):
            while sequence.slot >= 0 and not residency.pool.num_available:
                self._preempt(residency.sequences[-1])
            if sequence.slot >= 0:
                residency.grow([sequence.slot])
        return rows_of([slot for slot in rows.slots.tolist() if owners[slot] is not None])

    def _preempt(self, sequence: Sequence) -> None:
        """Take the sequence's blocks; it computes its tokens again later, the prefix cache permitting."""
        self._stop_running(sequence)
        self.residency.leave(sequence)
        sequence.status = SequenceStatus.WAITING
        sequence.num_preemptions += 1
        sequence.preempted_ns, sequence.resumed_ns = self._now_ns, 0
        self.counts.num_preemptions += 1
        self.waiting.put_back(sequence)

    def _continue_prefills(self, budget: int) -> list[Chunk]:
        """Prompts begun in an earlier step, oldest first."""
        chunks: list[Chunk] = []
        for sequence in self.prefilling:
            if budget <= 0:
                break
            length = min(budget, self.residency.num_missing(sequence))
            chunks.append((sequence, length))
            budget -= length
        return chunks

    def _admit(self, budget: int) -> list[Chunk]:
        """Sequences from the waiting queue, in the policy's order, as long as there is room for them."""
        if not self.waiting:
            return []
        if blocked_by := self._full_limit(budget, 0):
            self.counts.blocked_by = blocked_by
            return []
        window = self.waiting.window(self._window)
        order = self._policy(window, self._admission_turn)
        chunks: list[Chunk] = []
        for sequence in order.sequences:
            if blocked_by := self._full_limit(budget, len(chunks)):
                self._note_blocked(blocked_by)
                break
            matched = self.residency.match_prefix(sequence)
            if self._waits_for_prefix(sequence, len(matched)):
                self._note_blocked(BlockedBy.PREFIX)
                continue
            if self.residency.fits(sequence, matched):
                self._enter(sequence, matched)
                length = min(budget, self.residency.num_missing(sequence))
                chunks.append((sequence, length))
                budget -= length
                continue
            self._note_blocked(BlockedBy.KV_BLOCKS)
            if not order.may_overtake:
                break
        if chunks:
            self._admission_turn += 1
            self.waiting.drop_admitted(window)
        return chunks

    def _full_limit(self, budget: int, num_admitted: int) -> BlockedBy:
        """The limit that lets no further sequence into this step, if there is one."""
        if budget <= 0:
            return BlockedBy.TOKEN_BUDGET
        if num_admitted == self.limits.max_prefill_seqs:
            return BlockedBy.PREFILL_SEQS
        return BlockedBy.NOTHING if self._table.num_free else BlockedBy.SLOTS

    def _note_blocked(self, blocked_by: BlockedBy) -> None:
        """The first that is left behind says what the others wait for."""
        self.counts.blocked_by = self.counts.blocked_by or blocked_by

    def _waits_for_prefix(self, sequence: Sequence, num_matched: int) -> bool:
        """Another sequence is computing the very block this one needs next: wait for it, but not for ever."""
        if sequence.num_prefix_wait_steps >= self._max_prefix_wait_steps:
            return False
        if not self.residency.is_prefix_pending(sequence, num_matched):
            return False
        sequence.num_prefix_wait_steps += 1
        return True

    def _enter(self, sequence: Sequence, matched: list[int]) -> None:
        """Slot and blocks for the sequence, and the news for the runner."""
        self.residency.enter(sequence, matched)
        sequence.status = SequenceStatus.PREFILLING
        insort(self.prefilling, sequence, key=lambda prefilling: prefilling.age)
        if sequence.num_preemptions:
            sequence.resumed_ns = self._now_ns
        if not sequence.scheduled_ns:
            sequence.scheduled_ns = self._now_ns
            sequence.num_cached_tokens = len(matched) * self.residency.block_size
            if self.residency.prefix_cache.is_enabled and sequence.scores is None:
                self.counts.num_prefix_queried_tokens += sequence.num_prompt_tokens
                self.counts.num_prefix_hit_tokens += sequence.num_cached_tokens
        self._bindings.append(sequence.binding(self.eos_token_ids))

    def _advance(self, step_id: int, decodes: DecodeRows, chunks: list[Chunk]) -> ScheduledBatch:
        """The batch. From here on its tokens count as computed, and those it samples as known."""
        table, num_device_rows, counts = self._table, len(decodes), self.counts
        bindings, self._bindings = tuple(self._bindings), []
        batch, index, ends = make_batch(step_id, table, decodes, chunks, bindings)
        counts.num_decode_seqs, counts.num_prefill_seqs = num_device_rows, len(chunks)
        counts.num_prefill_tokens, counts.num_context_tokens = len(batch.token_ids), int(ends.sum())
        table.num_computed[index] = ends
        num_tokens = table.num_tokens[index] + batch.samples
        table.num_tokens[index] = num_tokens
        for row, (sequence, _) in enumerate(chunks, num_device_rows):
            if batch.samples[row]:
                self._begin_decoding(sequence)
        last_rows = (num_tokens == table.max_tokens[index]).nonzero()[0].tolist()
        for row in last_rows:
            sequence = table.owner(batch.slots[row])
            self._stop_running(sequence)
            sequence.status = SequenceStatus.ENDING
        self.in_flight.append(ScheduledStep(batch, index, ends, bool(last_rows), self.counts))
        return batch

    def _begin_decoding(self, sequence: Sequence) -> None:
        """The last chunk of its prompt is in a step: it decodes from the next one on."""
        self.prefilling.remove(sequence)
        sequence.status = SequenceStatus.DECODING
        self.ring.append(sequence.slot)

    # --- commit -----------------------------------------------------------------------------------------------------

    def commit(self, batch: ScheduledBatch, sampled: SampledTokens) -> Outcome:
        """Take the tokens of the oldest step in flight in: ids are kept, full blocks published, sequences finished.

        Raises UnattributableFailure when rows failed and it cannot be their own fault.
        """
        step = self.in_flight.popleft()
        assert step.batch is batch, "steps are committed in the order of their launches"
        self.counts = step.counts
        rows = step.sampled_rows(sampled, {sequence.slot for sequence in self.leaving})
        last = find_last(rows, self._table, self.eos_token_ids)
        if failed := self._failures.judge(rows, self._table):
            last |= {row: FinishReason.ERROR for row in failed if row not in rows.surplus}
            self._disown(self._table.owner(rows.index[row]) for row in failed)
        for row in range(batch.num_device_rows, batch.num_rows):
            self.residency.publish(self._table.owner(step.index[row]), int(step.ends[row]))
        step.keep_scores(sampled, self._table)
        self._table.token_ids[rows.index, rows.ends] = sampled.token_ids
        if self._table.constraints:
            follow(rows, self._table, last)
        outcome = tell(rows, self._table, last)
        for row in sorted(last):
            self._end(self._table.owner(rows.index[row]))
        self.counts.num_finished += len(last)
        if self.leaving:
            self._release()
        return outcome

    def _disown(self, failed: Iterable[Sequence]) -> None:
        """What these have computed may be wrong: nobody else gets it."""
        for sequence in failed:
            sequence.has_failed = True
            self.residency.disown(sequence)
