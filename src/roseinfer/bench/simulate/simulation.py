"""Runs a planned load through the real scheduler and engine on a virtual clock.

The loop is that of `engine/loop.py` with time made explicit: commands that are due are taken between two steps, a step
takes what the runner says, and when there is nothing to do the clock jumps to the next arrival. The front end takes the
same time for each request and none for a token. So the outcome follows from plan, setup and seed alone.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import NamedTuple

import msgspec
import numpy as np

from roseinfer import __version__
from roseinfer.bench.definitions import Observed
from roseinfer.bench.load.plan import PlannedRequest, Tokens
from roseinfer.bench.options import Delay
from roseinfer.bench.simulate.cost_model import CostModel
from roseinfer.bench.simulate.virtual_runner import VirtualClock, VirtualRunner, foretell
from roseinfer.config.options import CacheConfig, SchedulerConfig
from roseinfer.engine.core.batch import ScheduledBatch
from roseinfer.engine.core.engine import Engine
from roseinfer.engine.core.scheduler import Scheduler
from roseinfer.engine.core.stopwatch import Phases
from roseinfer.engine.pace import Pace
from roseinfer.engine.prefix_digests import PrefixDigests
from roseinfer.engine.speculation import Speculation
from roseinfer.errors import ConfigError
from roseinfer.messages import EngineInfo, Request, SamplingParams, StepOutput, TokenOutput
from roseinfer.observe.recorder.recording import (
    STEP_DTYPE,
    ClockPair,
    Recording,
    RecordingMeta,
    RequestRecord,
    step_row,
)
from roseinfer.records import FinishReason, RequestTimeline, StepRecord


class Setup(NamedTuple):
    """Everything that a simulation's outcome depends on, beside its plan."""

    scheduler: SchedulerConfig
    cache: CacheConfig
    num_blocks: int
    max_model_len: int
    costs: CostModel
    vocab_size: int = 32_000
    pipeline_depth: int = 0
    is_asynchronous: bool = False  # the device computes while the host goes on, as a GPU does
    delays: tuple[Delay, ...] = ()
    seed: int = 0
    draft_share: float = 0.0  # of the tokens of answers, which drafts foretell where there may be any

    def check_pool(self) -> None:
        """Raise ConfigError unless the longest sequence could run alone."""
        if self.num_blocks * self.cache.block_size < self.max_model_len:
            raise ConfigError(
                f"{self.num_blocks} blocks of {self.cache.block_size} do not hold one sequence of "
                f"{self.max_model_len} tokens",
                param="cache.num_blocks",
            )

    def check_plan(self, planned: Sequence[PlannedRequest]) -> None:
        """Raise ConfigError unless every request fits into the context."""
        for request in planned:
            if request.num_prompt_tokens + request.max_tokens > self.max_model_len:
                raise ConfigError(
                    f"{request.num_prompt_tokens} prompt tokens and {request.max_tokens} to be generated do not fit "
                    f"into {self.max_model_len}",
                    param="model.max_model_len",
                )


class Decision(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the scheduler decided for one step; a line of the decision log."""

    step: int
    now_ns: int
    rows: list[tuple[str, int, int]]  # request, first position, new tokens
    admitted: list[str] = []
    resumed: list[str] = []  # admitted again after a preemption
    preempted: list[str] = []
    num_waiting: int = 0


class Simulated(NamedTuple):
    """What happened; `timelines[i]` is that of request i of the plan."""

    timelines: list[RequestTimeline]
    steps: list[StepRecord]
    recording_meta: RecordingMeta

    def observed(self) -> list[Observed]:
        """As a client on the same host would see it if the front end took no time."""
        return [_observed(timeline) for timeline in self.timelines]

    def recording(self) -> Recording:
        """The same as a server's recording; nothing was written to a socket, so gaps are the engine's."""
        return Recording(
            meta=self.recording_meta,
            requests=[RequestRecord.of(timeline) for timeline in self.timelines],
            steps=np.array([step_row(step) for step in self.steps], STEP_DTYPE),
        )


class Simulation:
    """One run. `after_step` gets each step's output once its tokens are in the timelines. Raises ConfigError."""

    def __init__(
        self,
        setup: Setup,
        *,
        on_decision: Callable[[Decision], None] | None = None,
        on_ended: Callable[[int], None] = lambda _: None,
        after_step: Callable[[StepOutput], None] = lambda _: None,
    ) -> None:
        setup.check_pool()
        self._setup = setup
        self._on_decision = on_decision
        self._on_ended = on_ended
        self._after_step = after_step
        self._clock = VirtualClock()
        self.engine = self._make_engine()
        self._tokens = Tokens(setup.seed, setup.vocab_size)
        self._digests = PrefixDigests(setup.cache.block_size, b"simulated")  # the same in each run
        self._timelines: list[RequestTimeline] = []
        self._planned: Sequence[PlannedRequest] = ()
        self._by_slot: dict[int, int] = {}  # index into both lists
        self._goodbyes: list[tuple[int, int]] = []  # when a client that is still waiting goes away, and its index
        self._leaving: list[int] = []  # those who go away before the next step
        self._steps: list[StepRecord] = []
        self._num_ended = 0

    def _make_engine(self) -> Engine:
        setup = self._setup
        pace = Pace.of(setup.scheduler, setup.cache.block_size, is_cpu=not setup.is_asynchronous)
        find = partial(foretell, share=setup.draft_share, vocab_size=setup.vocab_size)
        can_draft = setup.draft_share > 0 and not setup.is_asynchronous and not setup.pipeline_depth
        scheduler = Scheduler(
            setup.scheduler,
            setup.cache,
            num_blocks=setup.num_blocks,
            max_model_len=setup.max_model_len,
            eos_token_ids=(),
            pacer=pace,
            make_drafter=partial(Speculation, pace, find=find) if can_draft else None,
        )
        runner = VirtualRunner(
            self._clock,
            setup.costs,
            vocab_size=setup.vocab_size,
            num_slots=scheduler.limits.max_active_seqs,
            is_asynchronous=setup.is_asynchronous,
            delays=setup.delays,
            collect=self._collect,
            on_launch=self._decide,
        )
        return Engine(scheduler, runner, Phases(clock=self._clock), _info_of(setup), setup.pipeline_depth)

    def _collect(self, duration_ns: int) -> None:
        """A collection of the engine's interpreter, injected."""
        self.engine.gc_ns += duration_ns

    def run(self, planned: Sequence[PlannedRequest]) -> Simulated:
        """From the first arrival until nothing is left to do. Requests are in the order in which they are due."""
        self._setup.check_plan(planned)
        self._planned = planned
        start_ns = self._clock.now_ns
        meta = self._meta(start_ns)
        while len(self._timelines) < len(planned) or self.engine.has_work:
            self._run_commands(start_ns)
            if self.engine.has_work:
                self._route(self.engine.step())
                self._clock.advance(round(self._setup.costs.host_ns))
            elif len(self._timelines) < len(planned):
                self._clock.advance_to(self._inbox_ns(start_ns, len(self._timelines)))
        return Simulated(self._timelines, self._steps, meta)

    # --- commands -----------------------------------------------------------------------------------------------------

    def _run_commands(self, start_ns: int) -> None:
        """What arrived up to now, in its order; then the aborts."""
        now_ns = self._clock.now_ns
        while len(self._timelines) < len(self._planned):
            index = len(self._timelines)
            if self._inbox_ns(start_ns, index) > now_ns:
                break
            self._add_request(index, start_ns + self._planned[index].offset_ns, self._inbox_ns(start_ns, index))
        while self._goodbyes and self._goodbyes[0][0] <= now_ns:
            _, index = heapq.heappop(self._goodbyes)
            if not self._timelines[index].token_ns:
                self._leaving.append(index)
        for index in self._leaving:
            timeline = self._timelines[index]
            if timeline.finish_reason is None:
                timeline.client_disconnected = True
                self.engine.abort(timeline.request_id)
        self._leaving.clear()

    def _inbox_ns(self, start_ns: int, index: int) -> int:
        """When the engine can find a request in its inbox."""
        return start_ns + self._planned[index].offset_ns + round(self._setup.costs.arrival_ns)

    def _add_request(self, index: int, arrival_ns: int, tokenized_ns: int) -> None:
        planned = self._planned[index]
        token_ids = self._tokens.of(planned.segments)
        timeline = RequestTimeline(
            request_id=f"r{index}",
            serial=index,
            recv_ns=arrival_ns,
            parsed_ns=arrival_ns,
            tokenized_ns=tokenized_ns,
            num_prompt_tokens=len(token_ids),
            max_tokens=planned.max_tokens,
            prefix_digests=self._digests.digests_of(token_ids),
        )
        self._timelines.append(timeline)
        # Greedy, so that nothing asks for random numbers; the seed is the runner's name for the sequence.
        seed = (self._setup.seed * 1_000_003 + index) % 2**63
        params = SamplingParams(temperature=0.0, max_tokens=planned.max_tokens, ignore_eos=True, seed=seed)
        self.engine.add_request(Request(request_id=timeline.request_id, prompt_token_ids=token_ids, params=params))
        if planned.abort_after_ns is not None:
            heapq.heappush(self._goodbyes, (arrival_ns + planned.abort_after_ns, index))

    # --- steps --------------------------------------------------------------------------------------------------------

    def _decide(self, batch: ScheduledBatch) -> None:
        """Report the batch that is about to be launched."""
        if self._on_decision is None:
            return
        scheduler = self.engine.scheduler
        owner, now_ns = scheduler.kv_cache.table.owner, self._clock.now_ns
        bound = [owner(binding.slot) for binding in batch.bindings]
        lost: list[str] = []
        if scheduler.counts.num_preemptions:
            lost = [s.request.request_id for s in (*scheduler.waiting, *bound) if s.preempted_ns == now_ns]
        rows = zip(batch.slots.tolist(), batch.starts.tolist(), batch.num_new_tokens.tolist(), strict=True)
        self._on_decision(
            Decision(
                step=batch.step_id,
                now_ns=now_ns,
                rows=[(owner(slot).request.request_id, start, count) for slot, start, count in rows],
                admitted=[s.request.request_id for s in bound if not s.num_preemptions],
                resumed=[s.request.request_id for s in bound if s.num_preemptions],
                preempted=lost,
                num_waiting=scheduler.num_waiting,
            )
        )

    def _route(self, output: StepOutput) -> None:
        tokens_ns = output.record.tokens_ns
        for slot, _ in output.tokens():
            self._add_tokens(self._by_slot[slot], 1, tokens_ns)
        for update in output.outputs:
            index = int(update.request_id[1:])
            if update.slot is not None:
                self._by_slot[update.slot] = index
            if update.token_ids:
                self._add_tokens(index, len(update.token_ids), tokens_ns)
            self._update_timeline(self._timelines[index], update)
        self._steps.append(output.record)
        self._after_step(output)

    def _add_tokens(self, index: int, count: int, tokens_ns: int) -> None:
        timeline = self._timelines[index]
        timeline.token_ns.extend([tokens_ns] * count)
        limit = self._planned[index].abort_after_tokens
        if limit is not None and len(timeline.token_ns) >= limit:
            self._leaving.append(index)

    def _update_timeline(self, timeline: RequestTimeline, update: TokenOutput) -> None:
        if update.times is not None:
            timeline.stamp(update.times)
        if update.finish_reason is not None:
            timeline.finish_reason = update.finish_reason
            timeline.end_ns = self._clock.now_ns
            self._num_ended += 1
            self._on_ended(self._num_ended)

    def _meta(self, start_ns: int) -> RecordingMeta:
        setup = self._setup
        sections = {
            "scheduler": asdict(setup.scheduler),
            "cache": asdict(setup.cache),
            "runner": {"pipeline_depth": setup.pipeline_depth},
        }
        return RecordingMeta(
            version=__version__,
            model_name="simulated",
            clock=ClockPair(start_ns, start_ns),
            engine=self.engine.info,
            config=sections,
        )


def _info_of(setup: Setup) -> EngineInfo:
    return EngineInfo(
        model_type="simulated",
        vocab_size=setup.vocab_size,
        max_model_len=setup.max_model_len,
        device="cuda" if setup.is_asynchronous else "cpu",
        block_size=setup.cache.block_size,
        num_blocks=setup.num_blocks,
    )


def _observed(timeline: RequestTimeline) -> Observed:
    return Observed(
        request_id=timeline.request_id,
        intended_ns=timeline.recv_ns,
        sent_ns=timeline.recv_ns,
        token_ns=list(timeline.token_ns),
        token_counts=[1] * len(timeline.token_ns),
        end_ns=timeline.end_ns,
        num_prompt_tokens=timeline.num_prompt_tokens,
        num_cached_tokens=timeline.num_cached_tokens,
        finish_reason=timeline.finish_reason or "",
        was_aborted=timeline.finish_reason is FinishReason.ABORT,
    )
