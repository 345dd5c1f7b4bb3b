"""Which traces are kept, under which ids, and which exemplars lead to them."""

import os
from typing import Any

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span as PbSpan

from roseinfer.config.options import Config, TracingConfig
from roseinfer.observe.gaps.attribution import Attribution
from roseinfer.observe.gaps.causes import Cause
from roseinfer.observe.gaps.request_gaps import Gap
from roseinfer.observe.hub import Hub
from roseinfer.observe.metrics.exemplars import INTER_TOKEN_LATENCY, REQUEST_DURATION, TIME_TO_FIRST_TOKEN
from roseinfer.observe.metrics.metrics import Metrics
from roseinfer.observe.otel import exporter_names
from roseinfer.observe.tracing.head_sampling import HeadSampler, make_propagator, make_sampler
from roseinfer.observe.tracing.tracing import Tracing, make_tracing
from roseinfer.records import Advanced, FinishReason, LifecycleState, RequestTimeline
from tests.collector import attributes, receiving
from tests.unit.observe.facts import ENGINE, MS, Page, Traffic, make_metrics, make_step, make_timeline
from tests.unit.observe.tracing.made import SHARED, Made, own, parent_id, told


class Scene:
    """Tracing that keeps nothing by chance, unless it is told to, and what it has done."""

    def __init__(self, **config: Any) -> None:
        self.made, self.metrics, self.has_room = Made(), make_metrics(), True
        options = TracingConfig(**({"ratio": 0.0, "step_interval": 0} | config))
        sampler, propagator = make_sampler({}, options.ratio), make_propagator({})
        head_sampler = HeadSampler(sampler, propagator, self.made.ids, SHARED)
        self.tracing = Tracing(options, head_sampler, self.made.spans, self, self.metrics)

    def admit(self) -> bool:
        return self.has_room

    def close(self, timeout_s: float) -> None: ...

    def run(self, timeline: RequestTimeline) -> None:
        """A request from its begin to its end; its tokens come in steps 1, 2, …"""
        stamps, timeline.token_ns = timeline.token_ns, []
        self.tracing.on_start(timeline)
        for step_id, tokens_ns in enumerate(stamps, 1):
            timeline.token_ns.append(tokens_ns)
            self.tracing.on_step(make_step(step_id=step_id, tokens_ns=tokens_ns), Advanced.newest([timeline]))
        self.tracing.on_finish(timeline)

    def exemplars(self) -> set[tuple[str, float, str, int | None]]:
        return {
            (name, one.value_s, one.trace_id, one.step_id)
            for name, shelves in self.metrics._shelves.items()
            for shelf in shelves.values()
            for one in shelf.newest
            if one is not None
        }


def make_gap(**changes: Any) -> Gap:
    facts: dict[str, Any] = {"serial": 0, "index": 1, "start_ns": 1031 * MS, "end_ns": 1095 * MS, "step_id": 2}
    return Gap(**(facts | {"parts": {}, "cause": Cause.GC, "is_slow": True} | changes))


def test_an_ordinary_request_leaves_nothing_but_its_id() -> None:
    scene = Scene()
    scene.run(timeline := make_timeline())
    assert len(timeline.trace_id) == 32
    assert (scene.made.all(), scene.exemplars()) == ([], set())


def test_a_kept_request_has_spans_and_exemplars_of_its_values() -> None:
    scene = Scene(ratio=1.0)
    scene.run(timeline := make_timeline())
    assert own(scene.made.all()[0]).trace_id == int(timeline.trace_id, 16)
    assert scene.exemplars() == {
        (TIME_TO_FIRST_TOKEN, 0.063, timeline.trace_id, 1),
        (INTER_TOKEN_LATENCY, 0.064, timeline.trace_id, 3),
        (REQUEST_DURATION, 0.191, timeline.trace_id, 3),
    }


SLOW: list[tuple[dict[str, object], bool]] = [
    ({"finish_reason": FinishReason.ERROR}, True),
    ({"finish_reason": FinishReason.TIMEOUT}, True),
    ({"finish_reason": FinishReason.ABORT}, False),
    ({"finish_reason": FinishReason.REJECTED, "token_ns": [], "write_ns": []}, False),
    ({"finish_reason": FinishReason.REJECTED, "error_code": "queue_timeout", "token_ns": [], "write_ns": []}, True),
    ({"write_ns": [1999 * MS], "end_ns": 2000 * MS}, False),  # 999 ms to the first token
    ({"write_ns": [2001 * MS], "end_ns": 2002 * MS}, True),
    ({"is_streamed": False, "write_ns": [2001 * MS], "end_ns": 2002 * MS}, False),  # written when it is complete
    ({"is_streamed": False, "token_ns": [2001 * MS], "write_ns": [2002 * MS], "end_ns": 2003 * MS}, True),
]


@pytest.mark.parametrize(("changes", "is_kept"), SLOW)
@pytest.mark.parametrize("traceparent", ["", f"00-{'a' * 32}-{'b' * 16}-00"])
def test_slow_and_failed_requests_are_always_kept(changes: dict[str, object], is_kept: bool, traceparent: str) -> None:
    scene = Scene(slow_ttft_s=1.0)
    scene.run(make_timeline(traceparent=traceparent, **changes))
    assert bool(scene.made.all()) is is_kept
    assert bool(scene.exemplars()) is is_kept


def test_the_callers_decision_holds_and_its_span_is_the_parent() -> None:
    scene = Scene()
    scene.run(timeline := make_timeline(traceparent=f"00-{'a' * 32}-{'b' * 16}-01"))
    whole, *children = scene.made.all()
    assert timeline.trace_id == "a" * 32
    assert (own(whole).trace_id, parent_id(whole)) == (int("a" * 32, 16), int("b" * 16, 16))
    assert whole.parent is not None
    assert whole.parent.is_remote
    assert not any(child.parent.is_remote for child in children if child.parent)


def test_the_ratio_is_respected() -> None:
    scene = Scene(ratio=0.1)
    for index in range(2000):
        scene.run(make_timeline(request_id=f"r-{index}"))
    assert 150 < len(scene.made.named("text_completion tiny")) < 250


def test_a_slow_gap_keeps_its_request_and_tells_the_step_that_ended_it() -> None:
    scene = Scene()
    timeline = make_timeline(token_ns=[1031 * MS, 1095 * MS])
    scene.tracing.on_start(timeline)
    scene.tracing.on_step(make_step(step_id=1, tokens_ns=1031 * MS), Advanced.newest([timeline]))
    scene.tracing.on_step(make_step(step_id=2, tokens_ns=1095 * MS), Advanced.newest([timeline]))
    scene.tracing.note_slow_gap(make_gap(), timeline)
    scene.tracing.note_slow_gap(make_gap(), timeline)  # of another request, for instance
    (step,) = scene.made.named("roseinfer.step")
    assert (told(step)["roseinfer.step_id"], told(step)["roseinfer.is_slow"]) == (2, True)
    assert scene.exemplars() == {(INTER_TOKEN_LATENCY, 0.064, timeline.trace_id, 2)}  # before the request has ended
    scene.tracing.on_finish(timeline)
    (whole,) = scene.made.named("text_completion tiny")
    assert [link.context.span_id for link in step.links] == [own(whole).span_id]
    assert [link.context.trace_id for link in step.links] == [own(whole).trace_id] != [own(step).trace_id]
    assert [event.name for event in whole.events] == ["roseinfer.slow_gap"] * 2


def test_a_step_that_is_not_known_yet_is_traced_when_it_is() -> None:
    """The attribution hears of a step before tracing does."""
    scene = Scene()
    timeline = make_timeline(token_ns=[1031 * MS, 1095 * MS])
    scene.tracing.on_start(timeline)
    scene.tracing.on_step(make_step(step_id=1, tokens_ns=1031 * MS), Advanced.newest([timeline]))
    scene.tracing.note_slow_gap(make_gap(), timeline)
    assert scene.made.all() == []
    assert scene.exemplars() == {(INTER_TOKEN_LATENCY, 0.064, timeline.trace_id, 2)}
    scene.tracing.on_step(make_step(step_id=2, tokens_ns=1095 * MS), Advanced.newest([timeline]))
    assert len(scene.made.named("roseinfer.step")) == 1


def test_a_gap_between_writes_is_put_down_to_the_step_of_its_token() -> None:
    """When the write returns, the engine is steps ahead."""
    scene = Scene()
    timeline = make_timeline(token_ns=[1031 * MS, 1095 * MS])
    scene.tracing.on_start(timeline)
    for step_id, tokens_ns in ((1, 1031 * MS), (2, 1095 * MS), (3, 1111 * MS), (4, 1112 * MS)):
        scene.tracing.on_step(make_step(step_id=step_id, tokens_ns=tokens_ns), Advanced.newest([timeline]))
    scene.tracing.note_slow_gap(make_gap(start_ns=1063 * MS, end_ns=1125 * MS, step_id=4), timeline)
    (step,) = scene.made.named("roseinfer.step")
    assert told(step)["roseinfer.step_id"] == 2
    assert scene.exemplars() == {(INTER_TOKEN_LATENCY, 0.064, timeline.trace_id, 2)}


def test_only_the_three_longest_gaps_are_events() -> None:
    scene = Scene()
    scene.tracing.on_start(timeline := make_timeline())
    for length in (5, 9, 7, 6, 8):
        scene.tracing.note_slow_gap(make_gap(start_ns=1000 * MS, end_ns=(1000 + length) * MS), timeline)
    scene.tracing.on_finish(timeline)
    durations = [(event.attributes or {})["roseinfer.duration_s"] for event in scene.made.all()[0].events]
    assert durations == [0.009, 0.008, 0.007]


def test_a_gap_of_a_request_that_has_ended_is_nobodys() -> None:
    scene = Scene()
    scene.run(timeline := make_timeline())
    scene.tracing.note_slow_gap(make_gap(), timeline)
    assert (scene.made.all(), scene.exemplars()) == ([], set())


def test_one_step_in_a_number_is_traced_slow_or_not() -> None:
    scene = Scene(step_interval=10)
    for step_id in range(1, 41):
        scene.tracing.on_step(make_step(step_id=step_id), Advanced())
    exported = [told(span)["roseinfer.step_id"] for span in scene.made.named("roseinfer.step")]
    assert exported == [10, 20, 30, 40]


def test_what_found_no_room_is_named_by_no_exemplar() -> None:
    scene = Scene()
    scene.tracing.on_start(timeline := make_timeline())
    scene.tracing.note_slow_gap(make_gap(), timeline)
    assert scene.exemplars()
    scene.has_room = False
    scene.tracing.on_finish(timeline)
    assert scene.exemplars() == set()


def test_a_step_is_found_by_its_stamp_however_long_ago_within_the_ring() -> None:
    scene = Scene()
    for step_id in range(1, 70_001):
        scene.tracing.on_step(make_step(step_id=step_id, tokens_ns=step_id * MS), Advanced())
    found = [scene.tracing._step_id_of(step_id * MS) for step_id in (70_000, 69_999, 4_465, 4_464, 1)]
    assert found == [70_000, 69_999, 4_465, None, None]
    assert scene.tracing._step_id_of(5_000 * MS + 1) is None


def test_the_start_is_traced_once_from_the_states_and_the_stages() -> None:
    scene = Scene()
    entered_ns = {LifecycleState.STARTING: 5, LifecycleState.LOADING: 9 * MS, LifecycleState.READY: 1000 * MS}
    scene.tracing.note_startup(ENGINE, entered_ns)
    whole, *stages = scene.made.all()
    assert [(span.start_time, span.end_time) for span in (whole, *stages[:1])] == [(5, 1000 * MS), (9 * MS, 509 * MS)]
    names = [span.name for span in (whole, *stages)]
    assert names == ["roseinfer.startup", *(f"roseinfer.startup.{stage}" for stage in ENGINE.startup_s)]
    assert [span.end_time - span.start_time for span in stages if span.start_time and span.end_time] == [
        500 * MS,
        250 * MS,
        125 * MS,
    ]


def test_nothing_is_remembered_of_requests_that_have_ended() -> None:
    scene = Scene(ratio=0.5)
    traffic = Traffic(scene.tracing)
    for _ in range(50):
        traffic.reject()
        traffic.arrive(3)
        traffic.step(MS, num_admitted=1)
    traffic.drain()
    assert scene.tracing._contexts == {}


def build(config: TracingConfig, metrics: Metrics | None = None, attribution: Attribution | None = None) -> Tracing:
    """As the server does, by the environment."""
    names = exporter_names("traces", config.endpoint, os.environ)
    metrics, attribution = metrics or make_metrics(), attribution or Attribution()
    return make_tracing(Config(tracing=config), "1.2.3", metrics, attribution, names, os.environ)


def test_the_page_tells_of_lost_spans_and_names_their_trace_no_more() -> None:
    with receiving((400, {})) as collector:
        metrics = make_metrics()
        tracing = build(TracingConfig(endpoint=collector.url, ratio=1.0), metrics)
        assert Page(metrics).value("roseinfer_telemetry_dropped_total", signal="span") == 0
        tracing.on_start(timeline := make_timeline())
        tracing.on_finish(timeline)
        tracing.close()
        assert Page(metrics).value("roseinfer_telemetry_dropped_total", signal="span") == 8
        shelves = [shelf for of_one in metrics._shelves.values() for shelf in of_one.values()]
        assert all(one is None for shelf in shelves for one in shelf.newest)  # nobody would find it


def test_what_the_attribution_finds_slow_is_kept_with_its_step() -> None:
    attribution, metrics = Attribution(), make_metrics()
    with receiving() as collector:
        tracing = build(TracingConfig(endpoint=collector.url, ratio=0.0, step_interval=0), metrics, attribution)
        traffic = Traffic(Hub([attribution, metrics, tracing]))
        traffic.arrive(3)
        traffic.arrive(3)
        for _ in range(40):
            traffic.step(5 * MS, num_admitted=2)
        traffic.step(60 * MS, num_admitted=0)
        slow_step_id = traffic.step_id
        traffic.step(5 * MS, num_admitted=0)
        traffic.end(0, FinishReason.STOP)
        traffic.drain()
        tracing.close()
        spans = collector.spans()
    whole = [span for span in spans if span.kind == PbSpan.SPAN_KIND_SERVER]
    assert {span.trace_id.hex() for span in whole} == {timeline.trace_id for timeline in traffic.received}
    for span in whole:
        (event,) = span.events
        gap = attributes(event.attributes)
        assert gap["roseinfer.step_id"] == slow_step_id
        assert isinstance(gap["roseinfer.duration_s"], float)
        assert gap["roseinfer.duration_s"] > 0.06
    (step,) = [span for span in spans if span.name == "roseinfer.step"]
    assert {link.span_id for link in step.links} == {span.span_id for span in whole}
    shelf = metrics._shelves[INTER_TOKEN_LATENCY][()]
    assert {one.step_id for one in shelf.newest if one is not None and one.value_s > 0.05} == {slow_step_id}
