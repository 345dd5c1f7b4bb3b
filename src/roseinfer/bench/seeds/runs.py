"""Runs a workload against an `LLM` and keeps every stamp: requests on a schedule, or all at once."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from roseinfer.bench.definitions import RequestTimes
from roseinfer.cli.progress import Progress
from roseinfer.errors import Overloaded
from roseinfer.llm.arguments import Prompt
from roseinfer.llm.llm import LLM
from roseinfer.messages import SamplingParams
from roseinfer.records import Advanced, Observer, StepRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One measured pass over the workload."""

    requests: list[RequestTimes]
    submit_wall: int  # ns
    rejected: list[int] = field(default_factory=list)  # ns that each refused submission took
    steps: list[StepRecord] = field(default_factory=list)

    @property
    def num_prompt_tokens(self) -> int:
        return sum(times.timeline.num_prompt_tokens for times in self.requests)

    @property
    def num_completion_tokens(self) -> int:
        return sum(len(times.timeline.token_ns) for times in self.requests)


class StepLog(Observer):
    """An observer that keeps the records of all steps, and moves a progress display on."""

    def __init__(self) -> None:
        self.steps: list[StepRecord] = []
        self.progress: Progress | None = None
        self._num_tokens = 0

    def clear(self, progress: Progress) -> None:
        """A new run begins; the engine is idle."""
        self.steps, self.progress, self._num_tokens = [], progress, 0

    def on_step(self, record: StepRecord, advanced: Advanced) -> None:
        self.steps.append(record)
        self._num_tokens += len(advanced)
        if self.progress is not None:
            self.progress.update(done=self._num_tokens)


@dataclass(frozen=True, slots=True)
class Schedule:
    """When requests are submitted. Interval 0 is a burst."""

    interval: int  # ns
    is_absolute: bool = True
    clock: Callable[[], int] = time.monotonic_ns
    sleep: Callable[[float], None] = time.sleep

    def target(self, start: int, index: int) -> int | None:
        return start + index * self.interval if self.is_absolute and self.interval else None

    def wait(self, target: int | None) -> None:
        """Before a submission: sleep until it is due, if it has a due time; a late one goes at once."""
        if target is not None and (remaining := target - self.clock()) > 0:
            self.sleep(remaining / 1e9)

    def pause(self) -> None:
        """After a submission."""
        if not self.is_absolute and self.interval:
            self.sleep(self.interval / 1e9)


def run_online(
    llm: LLM, prompts: Sequence[Prompt], params: SamplingParams, schedule: Schedule, cache_salt: str = ""
) -> Run:
    """Submit on this thread at the scheduled times, then wait for all. Refused requests are in no latency pool."""
    submitted: list[tuple[str, int, int, int | None]] = []
    rejected: list[int] = []
    first = schedule.clock()
    for i, prompt in enumerate(prompts):
        target = schedule.target(first, i)
        schedule.wait(target)
        start = schedule.clock()
        try:
            request_id = llm.submit(prompt, params, cache_salt=cache_salt)
        except Overloaded:
            rejected.append(schedule.clock() - start)
        else:
            submitted.append((request_id, start, schedule.clock(), target))
        schedule.pause()
    wall = schedule.clock() - first
    requests = [
        RequestTimes(llm.result(request_id).timeline, start, end, target)
        for request_id, start, end, target in submitted
    ]
    return Run(requests=requests, submit_wall=wall, rejected=rejected)


def run_offline(llm: LLM, prompts: Sequence[Prompt], params: SamplingParams, cache_salt: str) -> Run:
    """All prompts as one batch. The parts of a request's latency mean nothing here, and no report shows them."""
    start = time.monotonic_ns()
    completions = llm.generate(prompts, params, cache_salt=cache_salt)
    requests = [RequestTimes(done.timeline, start, start, None) for done in completions]
    return Run(requests=requests, submit_wall=0)
