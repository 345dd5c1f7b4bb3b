"""The conservation laws of docs/metrics.md, over random traffic, checked on every page."""

from hypothesis import given, settings
from hypothesis import strategies as st

from roseinfer.records import FinishReason
from tests.unit.observe.facts import MS, Page, Traffic, make_metrics

ENDINGS = st.sampled_from([reason for reason in FinishReason if reason is not FinishReason.REJECTED])
EVENTS = st.one_of(
    st.tuples(st.just("arrive"), st.integers(min_value=1, max_value=2000)),
    st.tuples(st.sampled_from(["reject", "refuse"]), st.sampled_from(["overloaded", "not_ready", "internal_error"])),
    st.tuples(st.just("step"), st.integers(min_value=0, max_value=3000 * MS), st.integers(min_value=0, max_value=4)),
    st.tuples(st.just("write")),
    st.tuples(st.just("end"), st.integers(min_value=0, max_value=9), ENDINGS),
)


def check_page(page: Page, traffic: Traffic) -> None:
    with_token = [timeline for timeline in traffic.received if timeline.token_ns]
    num_tokens = sum(len(timeline.token_ns) for timeline in traffic.received)
    assert page.value("roseinfer_generation_tokens_total") == num_tokens
    assert page.value("roseinfer_inter_token_latency_seconds_count") == num_tokens - len(with_token)
    assert page.value("roseinfer_prompt_tokens_total") == sum(timeline.num_prompt_tokens for timeline in with_token)
    num_ended = page.total("roseinfer_requests_total")
    assert num_ended == page.total("roseinfer_request_duration_seconds_count") == len(traffic.ended)
    assert num_ended + page.value("roseinfer_http_inflight_streams") == len(traffic.received)
    assert page.value("roseinfer_requests_received_total") == len(traffic.received)
    num_rejected = page.value("roseinfer_requests_total", finish_reason="rejected", api="completions")
    assert page.total("roseinfer_requests_rejected_total") == traffic.num_refusals >= num_rejected
    num_written = sum(bool(timeline.write_ns) for timeline in traffic.ended)
    assert page.total("roseinfer_time_to_first_token_seconds_count") == num_written <= len(with_token)
    assert page.total("roseinfer_telemetry_dropped_total") == 0
    for family in page.families:
        if family.type == "histogram":
            check_histogram([(sample.name, sample.labels, sample.value) for sample in family.samples])
    assert min(page.samples.values()) >= 0


def check_histogram(samples: list[tuple[str, dict[str, str], float]]) -> None:
    children: dict[tuple[tuple[str, str], ...], dict[str, list[float]]] = {}
    for name, labels, value in samples:
        child = tuple(sorted((label, text) for label, text in labels.items() if label != "le"))
        children.setdefault(child, {}).setdefault(name.rsplit("_", 1)[1], []).append(value)
    for series in children.values():
        assert series["bucket"] == sorted(series["bucket"])
        assert series["count"] == [series["bucket"][-1]]


def check_sums(page: Page, traffic: Traffic) -> None:
    """At idle, what was counted live and what was counted at the end agree."""
    assert page.value("roseinfer_num_requests_running") == page.value("roseinfer_num_requests_waiting") == 0
    assert page.value("roseinfer_http_inflight_streams") == 0
    assert page.total("roseinfer_requests_total") == page.value("roseinfer_requests_received_total")
    assert page.value("roseinfer_request_output_tokens_sum") == page.value("roseinfer_generation_tokens_total")
    assert page.value("roseinfer_request_prompt_tokens_sum") >= page.value("roseinfer_prompt_tokens_total")
    ends = [timeline.token_ns for timeline in traffic.received if timeline.token_ns]
    gaps_s = sum(stamps[-1] - stamps[0] for stamps in ends) / 1e9
    assert abs(page.value("roseinfer_inter_token_latency_seconds_sum") - gaps_s) <= 1e-9 * (1 + gaps_s)


@settings(max_examples=25, deadline=None)
@given(st.lists(EVENTS, max_size=40))
def test_the_laws_hold_on_every_page(events: list[tuple[object, ...]]) -> None:
    metrics = make_metrics()
    traffic = Traffic(metrics)
    before = Page(metrics)
    for number, (name, *arguments) in enumerate(events):
        getattr(traffic, str(name))(*arguments)
        if number % 8 == 7:
            page = Page(metrics)
            check_page(page, traffic)
            assert [key for key in page.monotonic() if page.samples[key] < before.samples[key]] == []
            before = page
    traffic.drain()
    page = Page(metrics)
    check_page(page, traffic)
    check_sums(page, traffic)
