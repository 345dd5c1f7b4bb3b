"""The scheduler: decides which sequences compute how many tokens in a step, and commits the sampled tokens.

Each step has one token budget: first one token for each decoding sequence, then the next chunk of prompts being
prefilled, then newcomers.

Counts grow when a step is scheduled; token ids are filled in when it is committed. The next step can be scheduled
between the two. The host does not know by then whether a token was an end-of-sequence or stop token: if it was, the
sequence's row in the next step is surplus, and the commit drops it.
"""

from bisect import insort
from collections import deque
from collections.abc import Callable

import numpy as np

from roseinfer.config.options import CacheConfig, SchedulerConfig
from roseinfer.engine.core.admission import make_policy
from roseinfer.engine.core.batch import Int32Array, SampledTokens, ScheduledBatch, SlotBinding
from roseinfer.engine.core.constraint import Grammars
from roseinfer.engine.core.deadlines import Deadlines
from roseinfer.engine.core.decode_ring import DecodeRing, DecodeRows, Plan, rows_of
from roseinfer.engine.core.kv_cache_manager import KVCacheManager
from roseinfer.engine.core.sequence import Sequence, SequenceStatus, SlotTable
from roseinfer.engine.core.steps import (
    Chunk,
    Drafter,
    Outcome,
    Pacer,
    RowFailures,
    ScheduledStep,
    StepCounts,
    advance_grammars,
    build_outcome,
    find_last_rows,
    make_batch,
)
from roseinfer.engine.core.waiting_queue import CompilingQueue, WaitingQueue
from roseinfer.messages import PRIORITY_WAIT_S, Request, TokenOutput
from roseinfer.records import MAX_PREFIX_WAIT_STEPS, BlockedBy, FinishReason


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
        pacer: Pacer | None = None,
        make_drafter: Callable[[SlotTable, int | None], Drafter] | None = None,
    ) -> None:
        """With `make_drafter` a row has the same bits whatever its step holds, and no step is launched ahead."""
        assert num_blocks * cache.block_size >= max_model_len, "the pool does not hold one sequence: it could never run"
        self.limits = config.limits
        self.max_model_len = max_model_len
        self.eos_token_ids = eos_token_ids
        self.kv_cache = KVCacheManager(
            cache, num_slots=self.limits.max_active_seqs, num_blocks=num_blocks, max_model_len=max_model_len
        )
        self.waiting = WaitingQueue(int(PRIORITY_WAIT_S * 1e9) if config.admission == "priority" else 0)
        self.compiling = CompilingQueue(grammars, eos_token_ids)
        self.counts = StepCounts()  # of the step scheduled or committed last
        self._table = self.kv_cache.table
        self._policy = make_policy(config)
        self._window = max(config.lookahead, self.limits.max_prefill_seqs)
        self._admission_turn = 0
        self._now_ns = 0  # when the last scheduled step began
        self._tokens_ns = 0  # of the last committed step; 0 when nothing was left to do after it
        self.sequences: dict[str, Sequence] = {}  # every unfinished one by request id
        self.deadlines = Deadlines()
        self.num_added = 0
        drafts = 0 if config.speculation == "off" else config.speculation
        fixed = None if drafts == "auto" else drafts
        self.speculation = make_drafter(self._table, fixed) if make_drafter and drafts != 0 else None
        self._pacer = pacer if pacer and (pacer.cuts or self.speculation) else None  # else what it learns is of no use
        self.ring = DecodeRing(self.limits.max_num_seqs)
        self._plan = Plan(self._table)
        self._failures = RowFailures()
        self.prefilling: list[Sequence] = []  # oldest first
        self.in_flight: deque[ScheduledStep] = deque()  # scheduled and not committed, oldest first
        self.leaving: list[Sequence] = []  # ended, but in a step in flight: they still hold slot and blocks
        self._bindings: list[SlotBinding] = []
        self._ended: list[TokenOutput] = []  # last outputs of sequences that ended outside a step
        self._started: list[str] = []  # requests that were scheduled for the first time

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

    def add_request(self, request: Request, inbox_ns: int) -> None:
        """Queue a validated request: its prompt is not empty, and prompt and completion fit the context."""
        assert 0 < len(request.prompt_token_ids) <= self.max_model_len - request.params.max_tokens
        assert request.request_id not in self.sequences, f"request id {request.request_id} is in use"
        sequence = Sequence(
            request=request,
            inbox_ns=inbox_ns,
            token_ids=np.asarray(request.prompt_token_ids, np.int32),
            chain=self.kv_cache.prefix_cache.new_chain(request.cache_salt, request.client_salt),
            scores=None if request.params.num_prompt_logprobs is None else [],
        )
        self.sequences[request.request_id] = sequence
        self.num_added += 1
        self.deadlines.add_sequence(sequence, len(self.sequences))
        if not self.compiling.add_sequence(sequence):
            self.waiting.add_newcomer(sequence)

    def abort(self, request_id: str) -> None:
        """End a sequence in whatever stage it is. Unknown and finished ids are ignored."""
        if (sequence := self.sequences.get(request_id)) is not None:
            self._end_early(sequence, FinishReason.ABORT)

    def _end_early(self, sequence: Sequence, reason: FinishReason, grammar_error: str = "") -> None:
        """End a sequence outside a step, without a token."""
        self._end(sequence)
        request_id, times = sequence.request.request_id, sequence.times
        self._ended.append(TokenOutput(request_id, [], None, reason, times=times, grammar_error=grammar_error))

    def _queue_compiled(self) -> None:
        """Move sequences whose grammars are compiled to the waiting queue; end those whose grammar failed."""
        for sequence, error in self.compiling.pop_compiled():
            self.waiting.add_newcomer(sequence)
            if error is not None:
                self._end_early(sequence, FinishReason.ERROR, f"{type(error).__name__}: {error}")

    def pop_ended(self) -> list[TokenOutput]:
        """Return the last outputs of sequences that ended outside a step since the last call."""
        ended, self._ended = self._ended, []
        self.counts.num_finished += len(ended)
        return ended

    def pop_started(self) -> list[str]:
        """Return the ids of requests that were scheduled for the first time since the last call."""
        started, self._started = self._started, []
        return started

    def _end(self, sequence: Sequence) -> None:
        """End a sequence. Its slot and blocks are freed once no step in flight writes there."""
        if sequence.status is SequenceStatus.WAITING:
            if not self.compiling.remove_sequence(sequence):
                self.waiting.remove_sequence(sequence)
        else:
            self._stop_running(sequence)
            self.leaving.append(sequence)
        sequence.status = SequenceStatus.FINISHED
        del self.sequences[sequence.request.request_id]
        self._free_ended()

    def _stop_running(self, sequence: Sequence) -> None:
        """Keep the sequence out of further steps."""
        if sequence.status is SequenceStatus.DECODING:
            self.ring.remove(sequence.slot)
        elif sequence.status is SequenceStatus.PREFILLING:
            self.prefilling.remove(sequence)

    def _free_ended(self) -> None:
        """Free slots and blocks of ended sequences that are in no step in flight."""
        for sequence in self.leaving.copy():
            if not any(step.holds(sequence.slot) for step in self.in_flight):
                self.leaving.remove(sequence)
                self.kv_cache.free(sequence)

    # --- schedule ---------------------------------------------------------------------------------------------------

    def schedule(self, step_id: int, now_ns: int) -> ScheduledBatch | None:
        """The next step's batch; None when nothing can run, or not before the steps in flight are committed.

        `now_ns` becomes the `scheduled_ns` of newcomers.
        """
        self.counts = StepCounts()
        self._now_ns = now_ns
        if now_ns >= self.deadlines.next_ns:
            for sequence in self.deadlines.pop_expired(now_ns):
                self._end_early(sequence, FinishReason.TIMEOUT)
        if len(self.compiling):
            self._queue_compiled()
        decodes = self._select_decodes()
        if decodes is None:
            return None
        chunks: list[Chunk] = []
        if self.prefilling or self.waiting:
            budget = self._prompt_budget(len(decodes.slots))
            chunks = self._continue_prefills(budget)
            chunks += self._admit(budget - sum(length for _, length in chunks))
        if not chunks and not len(decodes.slots):
            return None
        return self._advance(step_id, decodes, chunks)

    def _prompt_budget(self, num_rows: int) -> int:
        """How many prompt tokens the step may have; all that it holds where no stream waits for it."""
        budget = min(self.limits.max_num_batched_tokens - num_rows, self.limits.max_prefill_tokens)
        if self._pacer is None or not num_rows:
            return budget
        num_waiting = len(self.prefilling) + min(len(self.waiting), self._table.num_free)
        return min(budget, self._pacer.most_prompt_tokens(num_rows, num_waiting))

    def _select_decodes(self) -> DecodeRows | None:
        """The slots that decode in this step, each with a block for its token; None as of `_make_room`."""
        selected = self.ring.select()
        self.counts.num_not_selected = len(self.ring) - len(selected.slots)
        ready = self._without_unread(selected)
        rows = self._make_room(ready)
        if rows is not None:
            self.ring.pass_turn(len(rows.slots) + len(selected.slots) - len(ready.slots))
        return rows

    def _without_unread(self, rows: DecodeRows) -> DecodeRows:
        """Leave out slots whose grammar needs a token that a step in flight samples."""
        if not self._table.constraints or not self.in_flight:
            return rows
        unread = {slot for slot in self._table.constraints if any(step.holds(slot) for step in self.in_flight)}
        return rows_of([slot for slot in rows.slots.tolist() if slot not in unread])

    def _make_room(self, rows: DecodeRows) -> DecodeRows | None:
        """Give a block to each slot whose last one is full, preempting the youngest sequences when none is left.

        Blocks go to the oldest first, which is never preempted while others hold any, so it always progresses.
        Returns the rows that still decode; None when a sequence must be preempted while steps are in flight, since all
        its token ids must be known for it to come back.
        """
        kv_cache, owners = self.kv_cache, self._table.owners
        full = self._plan.full_slots(rows)
        if len(full) <= kv_cache.pool.num_available:
            kv_cache.grow(full)
            return rows
        if self.in_flight:
            return None
        for sequence in sorted((self._table.owner(slot) for slot in full), key=lambda owner: owner.age):
            while sequence.slot >= 0 and not kv_cache.pool.num_available:
                self._preempt(kv_cache.residents[-1])
            if sequence.slot >= 0:
                kv_cache.grow([sequence.slot])
        return rows_of([slot for slot in rows.slots.tolist() if owners[slot] is not None])

    def _draft(self, decodes: DecodeRows, budget: int) -> dict[int, Int32Array]:
        """The slots whose tokens the batch brings along, each with its draft and the blocks for it."""
        drafts = {} if self.speculation is None else self.speculation.draft(decodes.index, budget)
        return drafts and {slot: draft[: self.kv_cache.reserve(slot, len(draft))] for slot, draft in drafts.items()}

    def _preempt(self, sequence: Sequence) -> None:
        """Free the sequence's blocks; it computes its tokens again later, except those in the prefix cache."""
        self._stop_running(sequence)
        self.kv_cache.free(sequence)
        sequence.status = SequenceStatus.WAITING
        sequence.num_preemptions += 1
        sequence.preempted_ns, sequence.resumed_ns = self._now_ns, 0
        self.counts.num_preemptions += 1
        self.waiting.add_preempted(sequence)

    def _continue_prefills(self, budget: int) -> list[Chunk]:
        """Schedule prompts begun in an earlier step, oldest first."""
        chunks: list[Chunk] = []
        for sequence in self.prefilling:
            if budget <= 0:
                break
            length = min(budget, self.kv_cache.num_missing(sequence))
            chunks.append((sequence, length))
            budget -= length
        return chunks

    def _admit(self, budget: int) -> list[Chunk]:
        """Admit waiting sequences, in the policy's order, while there is room for them."""
        if not self.waiting:
            return []
        if blocked_by := self._full_limit(budget, 0):
            self.counts.blocked_by = blocked_by
            return []
        window = self.waiting.window(self._window)
        order, may_overtake = self._policy(window, self._admission_turn)
        chunks: list[Chunk] = []
        for sequence in order:
            if blocked_by := self._full_limit(budget, len(chunks)):
                self.counts.blocked_by = self.counts.blocked_by or blocked_by
                break
            matched = self.kv_cache.match_prefix(sequence)
            if self._waits_for_prefix(sequence, len(matched)):
                self.counts.blocked_by = self.counts.blocked_by or BlockedBy.PREFIX
                continue
            if self.kv_cache.fits(sequence, matched):
                self._begin_prefill(sequence, matched)
                length = min(budget, self.kv_cache.num_missing(sequence))
                chunks.append((sequence, length))
                budget -= length
                continue
            self.counts.blocked_by = self.counts.blocked_by or BlockedBy.KV_BLOCKS
            if not may_overtake:
                break
        if chunks:
            self._admission_turn += 1
            self.waiting.drop_admitted(window)
        return chunks

    def _full_limit(self, budget: int, num_admitted: int) -> BlockedBy:
        """The limit that keeps any further sequence out of this step, if there is one."""
        if budget <= 0:
            return BlockedBy.TOKEN_BUDGET
        if num_admitted == self.limits.max_prefill_seqs:
            return BlockedBy.PREFILL_SEQS
        return BlockedBy.NOTHING if self._table.num_free else BlockedBy.SLOTS

    def _waits_for_prefix(self, sequence: Sequence, num_matched: int) -> bool:
        """Whether to wait for a block that another sequence is computing; at most `MAX_PREFIX_WAIT_STEPS` times."""
        is_patient = sequence.num_prefix_wait_steps < MAX_PREFIX_WAIT_STEPS
        if not is_patient or not self.kv_cache.is_prefix_pending(sequence, num_matched):
            return False
        sequence.num_prefix_wait_steps += 1
        return True

    def _begin_prefill(self, sequence: Sequence, matched: list[int]) -> None:
        """Give the sequence a slot and blocks, and bind the slot in the next batch."""
        self.kv_cache.allocate(sequence, matched)
        sequence.status = SequenceStatus.PREFILLING
        insort(self.prefilling, sequence, key=lambda prefilling: prefilling.age)
        if sequence.num_preemptions:
            sequence.resumed_ns = self._now_ns
        if not sequence.scheduled_ns:
            sequence.scheduled_ns = self._now_ns
            self._started.append(sequence.request.request_id)
            sequence.num_cached_tokens = len(matched) * self.kv_cache.block_size
            if self.kv_cache.prefix_cache.is_enabled and sequence.may_match:
                self.counts.num_prefix_queried_tokens += sequence.num_prompt_tokens
                self.counts.num_prefix_hit_tokens += sequence.num_cached_tokens
        self._bindings.append(sequence.binding(self.eos_token_ids))
        if self.speculation is not None:
            self.speculation.bind(sequence.slot)

    def _advance(self, step_id: int, decodes: DecodeRows, chunks: list[Chunk]) -> ScheduledBatch:
        """Make the batch. From here on its tokens count as computed, and those it samples as known."""
        table, counts = self._table, self.counts
        bindings, self._bindings = tuple(self._bindings) if self._bindings else (), []
        counts.num_decode_seqs, counts.num_prefill_seqs = len(decodes.slots), len(chunks)
        counts.num_prefill_tokens = sum(length for _, length in chunks) if chunks else 0
        budget = self.limits.max_num_batched_tokens - counts.num_decode_seqs - counts.num_prefill_tokens
        drafts = self._draft(decodes, budget)
        if drafts:
            decodes = rows_of([slot for slot in decodes.slots.tolist() if slot not in drafts])
        planned = self._plan.pass_step(None if chunks else decodes)
        batch, index, ends = make_batch(step_id, table, decodes, planned, drafts, chunks, bindings)
        first_chunk = batch.num_rows - len(chunks)
        counts.num_draft_tokens = sum(map(len, drafts.values())) if drafts else 0
        counts.num_context_tokens = planned.num_context_tokens if planned else sum(ends.tolist())
        slots, num_computed = index, ends
        if batch.drafted is not None:  # one row of each slot: what is drafted counts when it is accepted
            known = np.flatnonzero(batch.drafted < 0)
            slots, num_computed = index[known], ends[known]
        table.num_computed[slots] = num_computed
        for row, (sequence, _) in enumerate(chunks, first_chunk):
            if batch.samples[row]:  # it has the last chunk of its prompt, and decodes from the next step on
                self.prefilling.remove(sequence)
                sequence.status = SequenceStatus.DECODING
                self.ring.append(sequence.slot)
        ending = [] if planned and not planned.has_last else slots[num_computed == table.last_positions[slots]].tolist()
        for slot in ending:
            sequence = table.owner(slot)
            self._stop_running(sequence)
            sequence.status = SequenceStatus.ENDING
        self.in_flight.append(ScheduledStep(batch, index, ends, bool(ending or drafts), first_chunk, counts))
        return batch

    # --- commit -----------------------------------------------------------------------------------------------------

    def commit(self, batch: ScheduledBatch, sampled: SampledTokens, tokens_ns: int) -> Outcome:
        """Commit the tokens of the oldest step in flight: keep ids, publish full blocks, end sequences.

        They were known at `tokens_ns`. Raises UnattributableFailure when rows failed and no request can be the cause.
        """
        step = self.in_flight.popleft()
        assert step.batch is batch, "steps are committed in the order of their launches"
        self.counts = step.counts
        rows = step.sampled_rows(sampled, self.leaving)
        last = find_last_rows(rows, self._table, self.eos_token_ids)
        accepted: list[int] = []
        if self.speculation is not None and batch.drafted is not None:
            rows, last, accepted = self.speculation.judge(step, rows, last)
            # The keys and values of what was drafted and held count as computed.
            np.add.at(self._table.num_computed, rows.index[accepted], 1)
            step.counts.num_accepted_tokens = len(accepted)
        if failed := self._failures.judge(rows, self._table):
            last |= {row: FinishReason.ERROR for row in failed if row not in rows.surplus}
            for row in failed:
                self.kv_cache.unpublish(self._table.owner(rows.index[row]))
        for row in range(step.first_chunk, batch.num_rows):
            self.kv_cache.publish(self._table.owner(step.index[row]), int(step.ends[row]))
        if batch.scored or batch.pooled:
            step.keep_of_prompts(sampled, self._table)
        self._table.add_tokens(rows.index, rows.ends, rows.sampled.token_ids)
        if self._table.constraints:
            advance_grammars(rows, self._table, last)
        outcome = build_outcome(rows, self._table, last, accepted)
        if last:
            for row in sorted(last):
                self._end(self._table.owner(rows.index[row]))
            self.counts.num_finished += len(last)
        if self.leaving:
            self._free_ended()
        if self._pacer is not None and self._tokens_ns:
            self._pacer.learn_step(step.counts, tokens_ns - self._tokens_ns)
        self._tokens_ns = tokens_ns if self.sequences else 0
        return outcome
