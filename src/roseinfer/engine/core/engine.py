"""The engine: one step schedules, launches and commits, and turns requests into step outputs."""

from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec

from roseinfer.engine.core.batch import Launched, Runner, ScheduledBatch
from roseinfer.engine.core.scheduler import Scheduler
from roseinfer.engine.core.steps import NOTHING, Outcome
from roseinfer.engine.core.stopwatch import Phases, Stopwatch
from roseinfer.messages import EngineInfo, Request, StepOutput
from roseinfer.records import NO_TIMES, StepRecord

_LATE_NS = 1_000_000  # after a step's tokens, from which on it is asked whether the engine had a core
_COMPILING_WAIT_S = 0.005  # for a grammar, before the loop looks for commands again


class Profiler(Protocol):
    """Records what host and device do: `model/device_stream.py:TorchProfiler`. Raises OSError or RuntimeError."""

    def start(self) -> None: ...

    def stop(self, directory: Path) -> None:
        """Stop recording, and write the trace into `directory`."""


class LoopState(msgspec.Struct, frozen=True, gc=False):
    """What the loop around the engine adds to a step's record."""

    outbox_depth: int = 0  # messages that the front end has not taken yet
    outbox_wait_ns: int = 0  # that the engine has just stood still for it
    is_profiled: bool = False


QUIET = LoopState()


class _LaunchedStep(msgspec.Struct, frozen=True, gc=False):
    batch: ScheduledBatch
    launched: Launched
    watch: Stopwatch


class Engine:
    """A scheduler and a runner. Owned by one loop; nothing here has a lock.

    With a `pipeline_depth` of 1 the next step is launched before the result of the one before is read, so the device
    computes while the host outputs tokens and schedules.
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
        assert not pipeline_depth or scheduler.speculation is None, "a step ahead cannot know what drafts hold"
        self.scheduler = scheduler
        self.runner = runner
        self.phases = phases
        self.info = info
        self.pipeline_depth = pipeline_depth
        self.profiler = profiler  # for the loop
        self.gc_ns = 0  # of all garbage collections; the loop adds to it
        self.look_for_waits: Callable[[int], tuple[int, int]] = lambda _: (0, 0)  # see StepRecord; the loop sets it
        self._late_waits = (0, 0)  # that were seen after the tokens of the step read last
        self._read_gc_ns = 0  # of those before the tokens of the step read last
        self._pipeline: deque[_LaunchedStep] = deque()  # launched and not read, oldest first
        self._num_steps = 0

    @property
    def has_work(self) -> bool:
        """A step would do something: run a sequence, read a launched step, or output the end of an aborted request."""
        return self.scheduler.has_work

    def add_request(self, request: Request) -> None:
        self.scheduler.add_request(request, self.phases.clock())

    def abort(self, request_id: str) -> None:
        self.scheduler.abort(request_id)

    def step(self, state: LoopState = QUIET) -> StepOutput:
        """Launch as far as the pipeline goes, then read the oldest step and output it."""
        with self.phases.whole(self._pipeline[0].watch.step_id if self._pipeline else self._num_steps + 1):
            return self._step(state)

    def _step(self, state: LoopState) -> StepOutput:
        watch = self._fill_pipeline()  # at depth 0 that of the step itself
        if not self._pipeline:  # nothing could run: a step all the same, which may output aborted requests
            self._num_steps += 1
            self.scheduler.compiling.wait(_COMPILING_WAIT_S)
            return self._build_output(NOTHING, watch, watch, watch.start_ns, None, state)
        step = self._pipeline.popleft()
        with step.watch("wait"):
            sampled = step.launched.wait()
        tokens_ns = self.phases.clock()
        gc_ns, self._read_gc_ns = self.gc_ns - self._read_gc_ns, self.gc_ns
        (throttled_ns, wait_ns), (late_throttled_ns, late_wait_ns) = self.look_for_waits(tokens_ns), self._late_waits
        cpu_waits = (throttled_ns + late_throttled_ns, wait_ns + late_wait_ns)
        with step.watch("commit"):
            outcome = self.scheduler.commit(step.batch, sampled, tokens_ns)
        return self._build_output(outcome, step.watch, watch, tokens_ns, step.launched, state, gc_ns, cpu_waits)

    def _fill_pipeline(self) -> Stopwatch:
        """Schedule and launch until the pipeline is full or nothing can run; returns the watch of the last attempt."""
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

    def _build_output(
        self,
        outcome: Outcome,
        watch: Stopwatch,
        ahead: Stopwatch,
        tokens_ns: int,
        launched: Launched | None,
        state: LoopState,
        gc_ns: int = 0,
        cpu_waits: tuple[int, int] = (0, 0),
    ) -> StepOutput:
        scheduler, counts, pool = self.scheduler, self.scheduler.counts, self.scheduler.kv_cache.pool
        outputs = outcome.outputs + scheduler.pop_ended()
        end_ns = self.phases.clock()
        self._late_waits = self.look_for_waits(end_ns) if end_ns - tokens_ns > _LATE_NS else (0, 0)
        # In the order of the fields: finding each of thirty by name takes a microsecond, a fifth of the budget.
        record = StepRecord(
            watch.step_id,
            watch.start_ns,
            tokens_ns,
            end_ns,
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
            state.outbox_depth,
            state.outbox_wait_ns,
            gc_ns,
            self.gc_ns - self._read_gc_ns if launched else 0,  # late_gc_ns
            0 if launched is None else launched.h2d_bytes,
            state.is_profiled,
            0 if launched is None else launched.graph_rows,
            self.pipeline_depth,
            watch.times(),  # phases
            NO_TIMES if ahead is watch else ahead.times(),  # ahead
            counts.num_draft_tokens,
            counts.num_accepted_tokens,
            *cpu_waits,  # cpu_throttled_ns, cpu_wait_ns
            *self._late_waits,  # late_throttled_ns, late_wait_ns
        )
        return StepOutput(outcome.slots, outcome.token_ids, outputs, record, scheduler.pop_started())
