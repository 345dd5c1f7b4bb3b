"""One step, three verbs: schedule, launch, commit. Turns requests into step outputs; never sees text or tensors."""

from collections import deque

import msgspec

from roseinfer.engine.core.batch import Launched, Runner, ScheduledBatch
from roseinfer.engine.core.invariants import violations
from roseinfer.engine.core.scheduler import Scheduler
from roseinfer.engine.core.steps import NOTHING, Outcome
from roseinfer.engine.link.heartbeat import Pulse
from roseinfer.engine.profiling import Profiler, StepProfile
from roseinfer.messages import AtRest, EngineInfo, Request, StepOutput
from roseinfer.records import NO_TIMES, StepRecord
from roseinfer.runtime.gc_pauses import GcPauses
from roseinfer.runtime.stopwatch import Phases, Stopwatch

_COMPILING_WAIT_S = 0.005  # for a grammar, before commands are looked at again


class OutboxState(msgspec.Struct, frozen=True, gc=False):
    """How far the front end is behind with reading."""

    depth: int  # messages that it has not taken yet
    wait_ns: int  # that the engine has just stood still for it


IDLE_OUTBOX = OutboxState(0, 0)


class _LaunchedStep(msgspec.Struct, frozen=True, gc=False):
    batch: ScheduledBatch
    launched: Launched
    watch: Stopwatch


class Engine:
    """A scheduler, a runner and a stopwatch. Owned by one loop; nothing here has a lock.

    With a `pipeline_depth` of 1 the next step is launched before the result of the one before is read, so the device
    goes on while the host tells of the tokens and schedules.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        phases: Phases,
        info: EngineInfo,
        pipeline_depth: int = 0,
        profiler: Profiler | None = None,
    ) -> None:
        self.profile = StepProfile(profiler)
        self.scheduler = scheduler
        self.runner = runner
        self.phases = phases
        self.info = info
        self.pipeline_depth = pipeline_depth
        self._pipeline: deque[_LaunchedStep] = deque()  # launched and not read, oldest first
        self._num_steps = 0
        self._num_seen_steps = 0  # when somebody looked around last
        self._told_id = 0  # of the step that is told next, or was told last
        self.pulse = Pulse()
        phases.on_capture = self._note_capture
        self.gc_pauses = GcPauses(on_start=self._begin_collection, on_end=self._end_collection)
        self._gc_ns = 0  # of collections up to the tokens of the step read last

    def _begin_collection(self) -> None:
        if self.phases.marker is not None:
            self.phases.marker.push("gc", self._told_id)
        self.pulse.begin_collection()

    def _end_collection(self) -> None:
        self.pulse.end_collection()
        if self.phases.marker is not None:
            self.phases.marker.pop()

    def _note_capture(self, begins: bool) -> None:
        self.pulse.begin_capture() if begins else self.pulse.begin_step()

    @property
    def has_work(self) -> bool:
        """A step would do something: run a sequence, read a launched step, or tell of a request that was aborted."""
        return self.scheduler.has_work

    def add(self, request: Request) -> None:
        self.scheduler.add(request, self.phases.clock())

    def abort(self, request_id: str) -> None:
        self.scheduler.abort(request_id)

    def step(self, outbox: OutboxState = IDLE_OUTBOX) -> StepOutput:
        """Launch as far as the pipeline goes, then read the oldest step: one output tells of one step.

        `outbox` is only written into the record.
        """
        self._told_id = self._pipeline[0].watch.step_id if self._pipeline else self._num_steps + 1
        with self.phases.whole(self._told_id):
            return self._step(outbox)

    def _step(self, outbox: OutboxState) -> StepOutput:
        watch = self._fill_pipeline()  # at depth 0 that of the step itself
        if not self._pipeline:  # nothing could run: a step all the same, which may tell of aborted requests
            self._num_steps += 1
            self.scheduler.compiling.wait(_COMPILING_WAIT_S)
            return self._tell(NOTHING, watch, watch, watch.start_ns, None, outbox)
        step = self._pipeline.popleft()
        with step.watch("wait"):
            sampled = step.launched.wait()
        tokens_ns = self.phases.clock()
        gc_ns, self._gc_ns = self.gc_pauses.total_ns - self._gc_ns, self.gc_pauses.total_ns
        with step.watch("commit"):
            outcome = self.scheduler.commit(step.batch, sampled)
        return self._tell(outcome, step.watch, watch, tokens_ns, step.launched, outbox, gc_ns)

    def _fill_pipeline(self) -> Stopwatch:
        """Schedule and launch until the pipeline is full or nothing can run; the stopwatch of the last attempt."""
        while True:
            watch = self.phases.begin(self._num_steps + 1)
            with watch("schedule"):
                batch = self.scheduler.schedule(watch.step_id, watch.start_ns)
            if batch is None:
                return watch
            with watch("launch"):
                launched = self.runner.launch(batch, watch)
            self._num_steps += 1
            self._pipeline.append(_LaunchedStep(batch, launched, watch))
            if len(self._pipeline) > self.pipeline_depth:
                return watch

    def _tell(
        self,
        outcome: Outcome,
        watch: Stopwatch,
        ahead: Stopwatch,
        tokens_ns: int,
        launched: Launched | None,
        outbox: OutboxState,
        gc_ns: int = 0,
    ) -> StepOutput:
        scheduler = self.scheduler
        outputs = outcome.outputs + scheduler.take_ended()
        counts, pool = scheduler.counts, scheduler.residency.pool
        # In the order of the fields: to find each of thirty by its name takes a microsecond, a fifth of the budget.
        record = StepRecord(
            watch.step_id,
            watch.start_ns,
            tokens_ns,
            self.phases.clock(),  # end_ns
            scheduler.num_running,
            scheduler.num_waiting,
            counts.num_decode_seqs,
            counts.num_prefill_seqs,
            counts.num_prefill_tokens,
            outcome.num_tokens,  # num_generated_tokens
            counts.num_not_selected,
            counts.num_preemptions,
            counts.num_finished,
            counts.num_prefix_queried_tokens,
            counts.num_prefix_hit_tokens,
            pool.num_used,  # num_used_blocks
            pool.num_cached,  # num_cached_blocks
            pool.num_blocks,  # num_total_blocks
            counts.num_context_tokens,
            counts.blocked_by,
            outbox.depth,  # outbox_depth
            outbox.wait_ns,  # outbox_wait_ns
            gc_ns,
            self.gc_pauses.total_ns - self._gc_ns if launched else 0,  # late_gc_ns
            0 if launched is None else launched.h2d_bytes,
            self.profile.marks_step(),  # is_profiled
            0 if launched is None else launched.graph_rows,
            self.pipeline_depth,
            watch.times(),  # phases
            NO_TIMES if ahead is watch else ahead.times(),  # ahead
        )
        return StepOutput(outcome.slots, outcome.token_ids, outputs, record)

    @property
    def has_worked(self) -> bool:
        """There was a step since somebody looked around."""
        return self._num_steps != self._num_seen_steps

    def look_around(self) -> AtRest:
        """Whether all is as it must be, now that nothing moves."""
        self._num_seen_steps = self._num_steps
        return AtRest(self.scheduler.num_added, violations(self.scheduler))

    def check_integrity(self) -> None:
        """Assert every invariant over sequences, slots and blocks. For tests, and for debugging when idle."""
        found = violations(self.scheduler)
        assert not found, "; ".join(f"{violation.invariant}: {violation.detail}" for violation in found)
