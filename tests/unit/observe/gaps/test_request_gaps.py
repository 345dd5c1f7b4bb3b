"""Each cause is found where it was planted, and the parts of a gap always add up to it."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest

from roseinfer.messages import EngineInfo
from roseinfer.observe.gaps.attribution import Attribution
from roseinfer.observe.gaps.causes import Cause
from roseinfer.observe.gaps.request_gaps import Clock, Gap, gaps_of
from roseinfer.observe.hub import Hub
from roseinfer.observe.recorder.recording import (
    INTERRUPTION_DTYPE,
    STEP_DTYPE,
    WRITE_DTYPE,
    ClockPair,
    Recording,
    RecordingMeta,
    RequestRecord,
    step_row,
)
from roseinfer.records import Advanced, Arrival, Delivery, EngineTimes, PhaseTimes, RequestTimeline, StepRecord
from roseinfer.runtime.step_costs import StepSize
from tests.unit.observe.facts import ENGINE, MS, make_step

US = 1000
DECODE_NS = 10 * MS


@dataclass
class Bench:
    """An engine and a front end on a clock of its own: steps as the test plans them, told to an `Attribution`."""

    num_streams: int = 4
    is_streamed: bool = True
    now_ns: int = 1_000 * MS
    attribution: Attribution = field(default_factory=Attribution)
    slow: list[tuple[Gap, RequestTimeline]] = field(default_factory=list)
    timelines: list[RequestTimeline] = field(default_factory=list)
    steps: list[StepRecord] = field(default_factory=list)
    writes: list[tuple[int, Delivery]] = field(default_factory=list)
    interruptions: list[tuple[int, int, Cause]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.hub = Hub([self.attribution])
        self.attribution.on_slow_gap.append(lambda gap, timeline: self.slow.append((gap, timeline)))
        for i in range(self.num_streams):
            self.arrive(f"r{i}")

    def arrive(self, name: str) -> RequestTimeline:
        serial = len(self.timelines)
        timeline = RequestTimeline(request_id=name, serial=serial, recv_ns=self.now_ns, is_streamed=self.is_streamed)
        timeline.parsed_ns = timeline.tokenized_ns = timeline.inbox_ns = timeline.scheduled_ns = self.now_ns + 1
        self.timelines.append(timeline)
        return timeline

    def step(
        self,
        *,
        host_ns: int = 200 * US,
        compute_ns: int = DECODE_NS,
        rows: list[RequestTimeline] | None = None,
        newcomers: int = 0,
        on_its_way_ns: tuple[int, int, int, int] = (100 * US, 200 * US, 50 * US, 50 * US),
        was_paused: bool = False,
        parts: dict[str, int] | None = None,
        **changes: int,
    ) -> None:
        """One step for the rows, whose first `newcomers` came with a prompt; their tokens reach the socket."""
        rows = self.timelines if rows is None else rows
        parts = parts or {}
        extra_ns = sum(parts.values())
        start_ns = self.now_ns
        self.now_ns += host_ns + compute_ns + extra_ns
        tokens_ns = self.now_ns
        wait_ns = compute_ns // 2
        record = make_step(
            **{
                "step_id": len(self.steps) + 1,
                "start_ns": start_ns,
                "tokens_ns": tokens_ns,
                "end_ns": tokens_ns + 20 * US,
                "num_decode_seqs": len(rows) - newcomers,
                "num_prefill_seqs": newcomers,
                "num_prefill_tokens": 100 * newcomers,
                "num_generated_tokens": len(rows),
                "num_context_tokens": 50 * len(rows),
                "phases": PhaseTimes(schedule=host_ns, launch=compute_ns + extra_ns - wait_ns, wait=wait_ns, **parts),
                **changes,
            }
        )
        self.steps.append(record)
        for timeline in rows:
            timeline.token_ns.append(tokens_ns)
        self.hub.on_step(record, Advanced.newest(rows))
        outbox_ns, loop_ns, text_ns, write_ns = on_its_way_ns
        sent_ns = tokens_ns + outbox_ns
        read_ns = sent_ns + 3 * loop_ns // 4
        arrival = Arrival(tokens_ns, sent_ns, read_ns, record.late_gc_ns, was_held=record.outbox_depth > 0)
        resumed_ns = sent_ns + loop_ns
        stamps = (resumed_ns, resumed_ns + text_ns, resumed_ns + text_ns + write_ns)
        for timeline in rows:
            delivery = Delivery(arrival, *stamps, was_paused, len(timeline.write_ns))
            timeline.arrivals.append(arrival)
            timeline.write_ns.append(delivery.written_ns)
            self.hub.on_write(timeline, delivery)
            self.writes.append((timeline.serial, delivery))
        self.hub.catch_up()

    def interrupt(self, start_ns: int, end_ns: int, cause: Cause) -> None:
        self.interruptions.append((start_ns, end_ns, cause))
        self.attribution.interruptions.add(start_ns, end_ns, cause)

    def warm_up(self, num_steps: int = 40) -> None:
        for i in range(num_steps):
            self.step(newcomers=self.num_streams if i == 0 else 0)
        assert self.slow == []

    def recording(self, engine: EngineInfo = ENGINE) -> Recording:
        interruptions = [(start, end, cause.number) for start, end, cause in self.interruptions]
        return Recording(
            meta=RecordingMeta(version="0", model_name="m", clock=ClockPair(0, 0), engine=engine),
            requests=[RequestRecord.of(timeline) for timeline in self.timelines],
            steps=np.array([step_row(step) for step in self.steps], STEP_DTYPE),
            writes=np.array([_write_row(serial, delivery) for serial, delivery in self.writes], WRITE_DTYPE),
            interruptions=np.array(interruptions, INTERRUPTION_DTYPE),
        )


def _write_row(serial: int, delivery: Delivery) -> tuple[object, ...]:
    arrival = delivery.arrival
    stamps = (arrival.tokens_ns, arrival.sent_ns, arrival.read_ns, delivery.resumed_ns, delivery.encoded_ns)
    return (serial, *stamps, delivery.written_ns, delivery.was_paused)


def plant_prefill(bench: Bench) -> None:
    newcomer = bench.arrive("long")
    bench.step(rows=[*bench.timelines[:-1], newcomer], newcomers=1, compute_ns=60 * MS, num_prefill_tokens=500)


def plant_growth(bench: Bench) -> None:
    bench.step(num_decode_seqs=40, num_generated_tokens=4, compute_ns=50 * MS, num_context_tokens=2000)


def plant_preemption(bench: Bench) -> None:
    victim, others = bench.timelines[0], bench.timelines[1:]
    for step in range(6):
        bench.step(rows=others)
        if step == 0:
            victim.preempted_ns = bench.now_ns - 10 * MS
    victim.resumed_ns = bench.now_ns
    bench.step(rows=bench.timelines, newcomers=1)


def plant_recomputation(bench: Bench) -> None:
    victim, others = bench.timelines[0], bench.timelines[1:]
    victim.preempted_ns = bench.now_ns + US
    victim.resumed_ns = bench.now_ns + 2 * US
    for _ in range(5):  # its chunks come one by one
        bench.step(rows=others)
    bench.step(newcomers=1)


def plant_not_selected(bench: Bench) -> None:
    for _ in range(5):
        bench.step(rows=bench.timelines[1:])
    bench.step()


def plant_scrape(bench: Bench) -> None:
    at_ns = bench.now_ns + 200 * US + DECODE_NS + 150 * US
    bench.interrupt(at_ns, at_ns + 40 * MS, Cause.SCRAPE)
    bench.step(on_its_way_ns=(100 * US, 41 * MS, 50 * US, 50 * US))


def plant_gc_in_front_end(bench: Bench) -> None:
    at_ns = bench.now_ns + 200 * US + DECODE_NS + 150 * US
    bench.interrupt(at_ns, at_ns + 40 * MS, Cause.GC)
    bench.step(on_its_way_ns=(100 * US, 41 * MS, 50 * US, 50 * US))


PLANTS: dict[Cause, Callable[[Bench], None]] = {
    Cause.PREFILL_OF_OTHERS: plant_prefill,
    Cause.BATCH_GROWTH: plant_growth,
    Cause.GRAPH_CAPTURE: lambda bench: bench.step(parts={"capture": 80 * MS}),
    Cause.H2D_COPY: lambda bench: bench.step(parts={"h2d": 50 * MS}),
    Cause.SAMPLE_SYNC: lambda bench: bench.step(parts={"sample": 50 * MS}),
    Cause.SCHEDULE: lambda bench: bench.step(host_ns=60 * MS),
    Cause.KV_WAIT: plant_preemption,
    Cause.PREEMPTED: plant_recomputation,
    Cause.NOT_SELECTED: plant_not_selected,
    Cause.GC: lambda bench: bench.step(compute_ns=60 * MS, gc_ns=50 * MS),
    Cause.ENGINE_OUTBOX: lambda bench: bench.step(on_its_way_ns=(100 * US, 60 * MS, 50 * US, 50 * US), outbox_depth=3),
    Cause.EVENT_LOOP: lambda bench: bench.step(on_its_way_ns=(100 * US, 60 * MS, 50 * US, 50 * US)),
    Cause.DETOKENIZE: lambda bench: bench.step(on_its_way_ns=(100 * US, 200 * US, 60 * MS, 50 * US)),
    Cause.CLIENT_BACKPRESSURE: lambda bench: bench.step(
        on_its_way_ns=(100 * US, 200 * US, 50 * US, 60 * MS), was_paused=True
    ),
    Cause.SCRAPE: plant_scrape,
    Cause.PROFILER: lambda bench: bench.step(compute_ns=60 * MS, is_profiled=1),
    Cause.UNKNOWN: lambda bench: bench.step(compute_ns=60 * MS),
}


@pytest.mark.parametrize("cause", PLANTS)
def test_a_planted_cause_is_found_live_and_in_a_recording(cause: Cause) -> None:
    bench = Bench()
    bench.warm_up()
    PLANTS[cause](bench)
    assert {gap.cause for gap, _ in bench.slow} == {cause}
    assert bench.attribution.num_slow_gaps[cause] == len(bench.slow)
    for gap, timeline in bench.slow:
        assert sum(gap.parts.values()) == gap.duration_ns == timeline.write_ns[-1] - timeline.write_ns[-2]
        assert gap.step_id == bench.steps[-1].step_id
    recorded = [gap for gap in gaps_of(bench.recording()) if gap.is_slow]
    newest = {(gap.serial, gap.start_ns): (gap.cause, gap.parts) for gap in recorded[-len(bench.slow) :]}
    assert newest == {(gap.serial, gap.start_ns): (gap.cause, gap.parts) for gap, _ in bench.slow}


def test_each_preemption_of_a_request_has_its_name_also_in_a_recording() -> None:
    bench = Bench()
    bench.warm_up()
    victim = bench.timelines[0]
    for number in (1, 2, 3):
        preempted_ns = bench.now_ns + US
        for _ in range(6):
            bench.step(rows=bench.timelines[1:])
        victim.stamp(EngineTimes(victim.inbox_ns, victim.scheduled_ns, 0, number, preempted_ns, bench.now_ns))
        bench.step(rows=bench.timelines, newcomers=1)
        bench.step()
    assert [gap.cause for gap, _ in bench.slow] == [Cause.KV_WAIT] * 3
    recorded = [gap for gap in gaps_of(bench.recording(), "engine") if gap.duration_ns > 50 * MS]
    assert [(gap.serial, gap.cause) for gap in recorded] == [(victim.serial, Cause.KV_WAIT)] * 3


@pytest.mark.parametrize("is_streamed", [True, False])
def test_the_cause_is_not_the_largest_part_but_the_furthest_above_what_is_usual(is_streamed: bool) -> None:
    bench = Bench(is_streamed=is_streamed)
    bench.warm_up()
    bench.step(parts={"h2d": 9 * MS, "capture": 8 * MS, "sample": 7 * MS})
    assert len(bench.slow) == bench.num_streams
    for gap, _ in bench.slow:
        assert (max(gap.parts, key=gap.parts.__getitem__), gap.cause) == (Cause.DECODE, Cause.H2D_COPY)


@pytest.mark.parametrize("clock", ["engine", "wire"])
def test_a_gap_that_is_not_slow_has_the_cause_of_its_largest_part(clock: Clock) -> None:
    """What it is above the usual may be next to nothing; a server's first gaps are compared with each other."""
    gaps = [gap for gap in gaps_of(random_life(0).recording(), clock) if not gap.is_slow]
    assert gaps
    for gap in gaps:
        assert gap.parts[gap.cause] == max(gap.parts.values())


def test_a_graph_miss_is_found() -> None:
    bench = Bench()
    bench.attribution.set_graphs(has_graphs=True)
    for i in range(40):
        bench.step(newcomers=4 if i == 0 else 0, graph_rows=4)
    bench.step(compute_ns=60 * MS, graph_rows=0)
    assert {gap.cause for gap, _ in bench.slow} == {Cause.GRAPH_MISS}


@pytest.mark.parametrize(("graph_rows", "cause"), [(0, Cause.GRAPH_MISS), (8, Cause.PREFILL_OF_OTHERS)])
def test_a_step_with_prompts_misses_what_it_takes_longer_than_in_a_graph(graph_rows: int, cause: Cause) -> None:
    bench = Bench()
    bench.attribution.set_graphs(has_graphs=True)
    for i in range(60):
        num_prompt_tokens = 100 * (i % 3)
        compute_ns, num_prompts = DECODE_NS + num_prompt_tokens * 50 * US, min(1, i % 3)
        bench.step(
            graph_rows=8, compute_ns=compute_ns, num_prefill_seqs=num_prompts, num_prefill_tokens=num_prompt_tokens
        )
    bench.slow.clear()
    bench.step(compute_ns=60 * MS, graph_rows=graph_rows, num_prefill_seqs=1, num_prefill_tokens=200)
    assert {gap.cause for gap, _ in bench.slow} == {cause}
    if not graph_rows:
        assert {round(gap.parts[Cause.GRAPH_MISS] / MS) for gap, _ in bench.slow} == {40}
        assert {round(gap.parts[Cause.PREFILL_OF_OTHERS] / MS) for gap, _ in bench.slow} == {10}


def test_drafted_tokens_are_decoding_and_neither_growth_nor_prompts_of_others() -> None:
    """A row takes a millisecond here, and a prompt token a twentieth of it."""
    bench = Bench()
    bench.warm_up()
    for i in range(60):
        num_drafted = 8 * (i % 3 if i % 2 else 0)
        bench.step(compute_ns=DECODE_NS + num_drafted * MS, num_draft_tokens=num_drafted)
    assert not any(gap.parts.get(Cause.BATCH_GROWTH) for gap in gaps_of(bench.recording()))
    bench.slow.clear()
    bench.step(compute_ns=DECODE_NS + 36 * MS, num_draft_tokens=16, num_prefill_seqs=1, num_prefill_tokens=400)
    assert {round(gap.parts[Cause.PREFILL_OF_OTHERS] / MS) for gap, _ in bench.slow} == {20}
    bench.step(compute_ns=DECODE_NS)
    bench.slow.clear()
    bench.step(compute_ns=DECODE_NS + 10 * MS + 16 * MS, num_decode_seqs=14, num_draft_tokens=16)
    assert {round(gap.parts[Cause.BATCH_GROWTH] / MS) for gap, _ in bench.slow} == {10}


def test_a_collection_in_the_front_end_is_no_other_delay() -> None:
    bench = Bench()
    bench.warm_up()
    plant_gc_in_front_end(bench)
    assert {gap.cause for gap, _ in bench.slow} == {Cause.GC}
    assert {gap.parts[Cause.GC] for gap, _ in bench.slow} == {40 * MS}


def test_a_profiler_that_starts_or_writes_between_two_steps_is_named() -> None:
    bench = Bench()
    bench.warm_up()
    bench.step(host_ns=50 * MS, is_profiled=1)
    assert {gap.cause for gap, _ in bench.slow} == {Cause.PROFILER}


def test_more_rows_than_ever_cost_no_more_than_in_proportion() -> None:
    bench = Bench()
    bench.warm_up()
    bench.step(num_decode_seqs=5, num_generated_tokens=4, compute_ns=80 * MS)
    [parts] = {tuple(gap.parts.items()) for gap, _ in bench.slow}
    assert dict(parts)[Cause.BATCH_GROWTH] <= 0.4 * DECODE_NS
    assert dict(parts)[Cause.UNKNOWN] >= 60 * MS


def test_rows_that_were_seen_before_are_no_riddle() -> None:
    bench = Bench()
    bench.warm_up()
    for _ in range(60):
        bench.step(num_decode_seqs=40, num_generated_tokens=4, compute_ns=50 * MS, num_context_tokens=2000)
    assert {gap.cause for gap, _ in bench.slow} == {Cause.BATCH_GROWTH, Cause.DECODE}
    assert bench.attribution.total_ns[Cause.UNKNOWN] == 0


def test_requests_that_are_not_streamed_have_their_engine_gaps_judged() -> None:
    bench = Bench(is_streamed=False)
    bench.warm_up()
    bench.step(rows=bench.timelines[1:])
    bench.step()
    assert not bench.slow, "the others have no slow gap where one was left out"
    bench.step(parts={"capture": 80 * MS})
    assert [gap.cause for gap, _ in bench.slow] == [Cause.GRAPH_CAPTURE] * 4
    assert all(gap.duration_ns == timeline.token_ns[-1] - timeline.token_ns[-2] for gap, timeline in bench.slow)


def test_a_captured_step_says_nothing_of_what_others_take() -> None:
    """On a CPU its computing is a part of the capture."""
    bench = Bench()
    bench.step(newcomers=bench.num_streams)
    for _ in range(30):
        bench.step(compute_ns=0, parts={"capture": 80 * MS})
    assert bench.attribution._splitter.costs.expected_ns(StepSize(4, 0, 200)) is None
    for _ in range(40):
        bench.step()
    assert bench.attribution._splitter.costs.expected_ns(StepSize(4, 0, 200)) == pytest.approx(DECODE_NS, rel=0.01)


def test_a_device_that_sets_the_pace_hides_the_host() -> None:
    """At depth 1 the next step's schedule and launch lie in a gap and delay nothing while the device computes."""
    bench = Bench(is_streamed=False)
    for i in range(30):
        phases = PhaseTimes(schedule=3 * MS, launch=2 * MS, wait=5 * MS)
        ahead = PhaseTimes(schedule=3 * MS, launch=2 * MS, h2d=MS, capture=MS // 2, sample=MS // 2)
        bench.step(
            newcomers=4 if i == 0 else 0,
            pipeline_depth=1,
            gc_ns=MS,
            outbox_wait_ns=MS,
            cpu_wait_ns=MS,
            phases=phases,  # type: ignore[arg-type]
            ahead=ahead,  # type: ignore[arg-type]
        )
    totals = bench.attribution.total_ns
    assert totals[Cause.DECODE] == 4 * 29 * (DECODE_NS + 200 * US)


def test_a_device_that_waits_for_its_host_blames_what_the_host_did_meanwhile() -> None:
    """At depth 1 that is the launch of the step after the one whose tokens came late."""
    bench = Bench(is_streamed=False)
    for i in range(30):
        phases = PhaseTimes(schedule=3 * MS, launch=2 * MS, wait=5 * MS)
        bench.step(newcomers=4 if i == 0 else 0, pipeline_depth=1, phases=phases)  # type: ignore[arg-type]
    ahead = PhaseTimes(schedule=MS, launch=80 * MS, capture=70 * MS)
    bench.step(compute_ns=90 * MS, pipeline_depth=1, phases=PhaseTimes(wait=1000), ahead=ahead)  # type: ignore[arg-type]
    assert {gap.cause for gap, _ in bench.slow} == {Cause.GRAPH_CAPTURE}


def random_life(seed: int) -> Bench:
    """Steps of every kind, one after the other."""
    chance = random.Random(seed)
    bench, depth = Bench(is_streamed=chance.random() < 0.7), seed % 2
    bench.warm_up(chance.randrange(2, 30))
    kinds = list(PLANTS.values())
    for _ in range(60):
        if chance.random() < 0.05:  # facts were lost
            bench.hub.on_resume(bench.timelines)
        elif chance.random() < 0.3:
            chance.choice(kinds)(bench)
        else:
            ahead = PhaseTimes(**{name: chance.randrange(10 * MS) for name in PhaseTimes.__struct_fields__})
            bench.step(
                host_ns=chance.randrange(1, 3 * MS),
                compute_ns=chance.choice((US, chance.randrange(1, 30 * MS))),
                pipeline_depth=depth,
                ahead=ahead,  # type: ignore[arg-type]
                gc_ns=chance.choice((0, 0, 50 * MS)),
                outbox_wait_ns=chance.choice((0, 0, 50 * MS)),
                on_its_way_ns=(*(chance.randrange(2, 30 * MS) for _ in range(4)),),  # type: ignore[arg-type]
                was_paused=chance.random() < 0.2,
            )
    return bench


@pytest.mark.parametrize("seed", range(8))
def test_totals_add_up_to_the_latencies(seed: int) -> None:
    bench = random_life(seed)
    engine = sum(timeline.token_ns[-1] - timeline.token_ns[0] for timeline in bench.timelines)
    on_their_way = sum(
        delivery.written_ns - max(delivery.arrival.tokens_ns, before)
        for before, delivery in previous_writes(bench)
        if delivery.written_ns > before
    )
    assert sum(bench.attribution.total_ns.values()) == engine + on_their_way


def previous_writes(bench: Bench) -> Iterator[tuple[int, Delivery]]:
    last: dict[int, int] = {}
    for serial, delivery in bench.writes:
        if serial in last:
            yield last[serial], delivery
        last[serial] = delivery.written_ns


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("clock", ["engine", "wire"])
def test_the_parts_of_every_recorded_gap_add_up(seed: int, clock: str) -> None:
    gaps = gaps_of(random_life(seed).recording(), clock)  # type: ignore[arg-type]
    assert len(gaps) > 100
    for gap in gaps:
        assert sum(gap.parts.values()) == max(0, gap.duration_ns)
        assert all(duration > 0 for duration in gap.parts.values())


@pytest.mark.parametrize("seed", range(8))
def test_the_decode_time_of_a_request_adds_up(seed: int) -> None:
    bench = random_life(seed)
    for timeline in bench.timelines:
        parts = bench.attribution.decode_ns(timeline)
        assert sum(parts.values()) == timeline.token_ns[-1] - timeline.token_ns[0]
        assert all(duration > 0 for duration in parts.values())
