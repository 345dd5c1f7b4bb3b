"""Facts for the observers' tests: single records, and a small server whose traffic obeys the rules of the real one."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

from roseinfer.messages import EngineInfo
from roseinfer.observe.hub import Writes
from roseinfer.observe.metrics.metrics import Metrics
from roseinfer.records import (
    Advanced,
    BlockedBy,
    Delivery,
    FinishReason,
    Observer,
    PhaseTimes,
    RequestTimeline,
    StepRecord,
)

MODEL = "tiny"
MS = 1_000_000

ENGINE = EngineInfo(
    checkpoint_dir="tiny",
    model_type="gpt2",
    num_parameters=1000,
    vocab_size=64,
    max_model_len=128,
    eos_token_ids=[0],
    device="cpu",
    dtype="float32",
    attention="reference",
    linear="torch",
    num_threads=1,
    block_size=16,
    num_blocks=100,
    startup_s={"import": 0.5, "load": 0.25, "warmup": 0.125},
)


def make_metrics(take_gc_pauses_ns: Callable[[], Sequence[int]] = tuple) -> Metrics:
    return Metrics(MODEL, "1.2.3", take_gc_pauses_ns=take_gc_pauses_ns)


def make_step(**changes: object) -> StepRecord:
    counts = dict.fromkeys(StepRecord.__struct_fields__, 0)
    counts |= {"num_total_blocks": 100, "start_ns": 1 * MS, "tokens_ns": 2 * MS, "end_ns": 3 * MS}
    others: dict[str, object] = {"phases": PhaseTimes(), "ahead": PhaseTimes()}
    others |= {"blocked_by": BlockedBy.NOTHING, "is_profiled": False}
    return StepRecord(**(counts | others | changes))  # type: ignore[arg-type]


def make_timeline(**changes: object) -> RequestTimeline:
    """A streamed request that lived through every part: 1, 2, 4, 8, 16 and 32 ms, three tokens, 64 ms apart."""
    stamps: dict[str, object] = {
        "request_id": "r-1",
        "recv_ns": 1000 * MS,
        "parsed_ns": 1001 * MS,
        "tokenized_ns": 1003 * MS,
        "inbox_ns": 1007 * MS,
        "scheduled_ns": 1015 * MS,
        "token_ns": [1031 * MS, 1095 * MS, 1159 * MS],
        "write_ns": [1063 * MS, 1125 * MS, 1190 * MS],
        "end_ns": 1191 * MS,
        "num_prompt_tokens": 7,
        "is_streamed": True,
        "finish_reason": FinishReason.LENGTH,
    }
    return RequestTimeline(**(stamps | changes))  # type: ignore[arg-type]


class Page:
    """A scrape, by sample name and labels (the model's name left out)."""

    def __init__(self, metrics: Metrics) -> None:
        page, _ = metrics.render("")
        self.families = list(text_string_to_metric_families(page.decode()))
        self.samples = {
            (sample.name, frozenset(item for item in sample.labels.items() if item[0] != "model_name")): sample.value
            for family in self.families
            for sample in family.samples
        }

    def value(self, name: str, **labels: str) -> float:
        return self.samples[name, frozenset(labels.items())]

    def total(self, name: str) -> float:
        """The sum over all children of one sample name."""
        return sum(value for (sample, _), value in self.samples.items() if sample == name)

    def monotonic(self) -> Iterator[tuple[str, frozenset[tuple[str, str]]]]:
        """The keys of everything that may only grow."""
        for key in self.samples:
            if key[0].endswith(("_total", "_bucket", "_count", "_sum")):
                yield key


@dataclass
class Traffic:
    """Requests that arrive, wait, run, write and end, with a clock that only moves forward."""

    observer: Observer
    now_ns: int = MS
    step_id: int = 0
    waiting: list[RequestTimeline] = field(default_factory=list)
    running: list[RequestTimeline] = field(default_factory=list)
    received: list[RequestTimeline] = field(default_factory=list)
    ended: list[RequestTimeline] = field(default_factory=list)
    num_refusals: int = 0

    def _tick(self, ns: int = 1000) -> int:
        self.now_ns += ns
        return self.now_ns

    def refuse(self, code: str) -> None:
        """What asked for no tokens."""
        self.num_refusals += 1
        self.observer.on_refusal(code)

    def reject(self, code: str = "overloaded") -> None:
        timeline = RequestTimeline(request_id=f"r-{len(self.received)}", recv_ns=self._tick(), error_code=code)
        timeline.serial = len(self.received)
        self.received.append(timeline)
        self.observer.on_start(timeline)
        self.refuse(code)
        self._end(timeline, FinishReason.REJECTED)

    def arrive(self, num_prompt_tokens: int) -> None:
        timeline = RequestTimeline(request_id=f"r-{len(self.received)}", recv_ns=self._tick())
        timeline.serial = len(self.received)
        self.received.append(timeline)
        self.observer.on_start(timeline)
        timeline.parsed_ns, timeline.tokenized_ns, timeline.inbox_ns = self._tick(), self._tick(), self._tick()
        timeline.num_prompt_tokens = num_prompt_tokens
        self.waiting.append(timeline)

    def step(self, duration_ns: int, num_admitted: int) -> None:
        """Every running request and the newly admitted ones get one token, known just before the step ends."""
        start_ns, num_decoded = self._tick(), len(self.running)
        admitted, self.waiting = self.waiting[:num_admitted], self.waiting[num_admitted:]
        for timeline in admitted:
            timeline.scheduled_ns = self._tick()
        self.running += admitted
        tokens_ns = self._tick(duration_ns)
        for timeline in self.running:
            timeline.token_ns.append(tokens_ns)
        self.step_id += 1
        record = make_step(
            step_id=self.step_id,
            start_ns=start_ns,
            tokens_ns=tokens_ns,
            end_ns=self._tick(),
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            num_decode_seqs=num_decoded,
            num_prefill_seqs=len(admitted),
            num_generated_tokens=len(self.running),
            num_used_blocks=len(self.running),
            num_cached_blocks=min(self.step_id, 10),
        )
        self.observer.on_step(record, Advanced.newest(self.running))

    def write(self) -> None:
        """Whoever has tokens that are not written yet gets one write for all of them."""
        for timeline in self.running:
            if timeline.token_ns and (not timeline.write_ns or timeline.write_ns[-1] < timeline.token_ns[-1]):
                timeline.write_ns.append(self._tick())

    def end(self, index: int, reason: FinishReason) -> None:
        """End some request, queued or running, if there is one."""
        alive = self.running + self.waiting
        if alive:
            timeline = alive[index % len(alive)]
            (self.running if timeline in self.running else self.waiting).remove(timeline)
            self._end(timeline, reason)

    def drain(self) -> None:
        while self.running or self.waiting:
            self.end(0, FinishReason.ABORT)
        self.step(0, 0)

    def _end(self, timeline: RequestTimeline, reason: FinishReason) -> None:
        timeline.end_ns, timeline.finish_reason = self._tick(), reason
        self.ended.append(timeline)
        self.observer.on_finish(timeline)


def writes_of(*told: tuple[RequestTimeline, Delivery]) -> Writes:
    return Writes.of([timeline for timeline, _ in told], [delivery for _, delivery in told])
