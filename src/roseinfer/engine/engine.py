"""One step, three verbs: schedule, launch, commit. Turns requests into step outputs; never sees text or tensors."""

from roseinfer.engine.batch import Runner
from roseinfer.engine.scheduler import Scheduler
from roseinfer.messages import EngineInfo, Request, StepOutput
from roseinfer.records import Phases, StepRecord


class Engine:
    """A scheduler, a runner and a stopwatch. Owned by one loop; nothing here has a lock."""

    def __init__(self, scheduler: Scheduler, runner: Runner, phases: Phases, info: EngineInfo) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.phases = phases
        self.info = info
        self._step_id = 0

    @property
    def has_work(self) -> bool:
        """A step would do something: run a sequence, or tell of one that was aborted."""
        return self.scheduler.has_work

    def add(self, request: Request) -> None:
        self.scheduler.add(request, self.phases.clock())

    def abort(self, request_id: str) -> None:
        self.scheduler.abort(request_id)

    def step(self, outbox_depth: int = 0) -> StepOutput:
        """Advance every sequence that has its turn. `outbox_depth` is only written into the record."""
        scheduler, phases = self.scheduler, self.phases
        self._step_id += 1
        phases.begin(self._step_id)
        start_ns = phases.clock()
        with phases("schedule"):
            batch = scheduler.schedule(self._step_id, start_ns)
        outputs = []
        tokens_ns = start_ns
        if batch is not None:
            with phases("launch"):
                launched = self.runner.launch(batch)
            with phases("wait"):
                sampled = launched.wait()
            tokens_ns = phases.clock()
            with phases("commit"):
                outputs = scheduler.commit(batch, sampled)
        num_generated_tokens = len(outputs)
        outputs += scheduler.take_ended()
        return StepOutput(outputs, self._record(start_ns, tokens_ns, num_generated_tokens, outbox_depth))

    def _record(self, start_ns: int, tokens_ns: int, num_generated_tokens: int, outbox_depth: int) -> StepRecord:
        scheduler = self.scheduler
        counts, pool = scheduler.counts, scheduler.residency.pool
        return StepRecord(
            step_id=self._step_id,
            start_ns=start_ns,
            tokens_ns=tokens_ns,
            end_ns=self.phases.clock(),
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_decode_seqs=counts.num_decode_seqs,
            num_prefill_seqs=counts.num_prefill_seqs,
            num_prefill_tokens=counts.num_prefill_tokens,
            num_generated_tokens=num_generated_tokens,
            num_not_selected=counts.num_not_selected,
            num_preemptions=counts.num_preemptions,
            num_finished=counts.num_finished,
            num_prefix_queried_tokens=counts.num_prefix_queried_tokens,
            num_prefix_hit_tokens=counts.num_prefix_hit_tokens,
            num_used_blocks=pool.num_used,
            num_cached_blocks=pool.num_cached,
            num_total_blocks=pool.num_blocks,
            outbox_depth=outbox_depth,
            phases=self.phases.times(),
        )

    def check_integrity(self) -> None:
        self.scheduler.check_integrity()
