"""Exemplars: on a value that was observed, in its bucket, of a trace that is kept, and only in OpenMetrics."""

from collections.abc import Iterator

from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.samples import Sample

from roseinfer.observe.metrics import exemplars
from roseinfer.observe.metrics.exemplars import INTER_TOKEN_LATENCY, REQUEST_DURATION, TIME_TO_FIRST_TOKEN, Exemplar
from roseinfer.observe.metrics.histogram import TOKEN_S
from roseinfer.observe.metrics.metrics import Metrics
from tests.unit.observe.facts import MS, make_metrics, make_timeline

OPENMETRICS = "application/openmetrics-text; version=1.0.0"
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


def buckets_with_exemplars_of(metrics: Metrics) -> list[tuple[str, object]]:
    return [(sample.labels["le"], sample.exemplar) for sample in buckets_with_exemplars(metrics)]


def buckets_with_exemplars(metrics: Metrics) -> Iterator[Sample]:
    page, content_type = metrics.render(OPENMETRICS)
    assert "openmetrics" in content_type
    for family in parse_openmetrics(page.decode()):  # type: ignore[no-untyped-call]
        for sample in family.samples:
            if sample.exemplar is not None:
                yield sample


def test_a_request_has_one_for_each_bucket_it_was_counted_in() -> None:
    stamps = [0, 10, 20, 30, 130, 140, 240, 245]  # ms; gaps of 10 (newest ends at 140), 100 and 5
    timeline = make_timeline(trace_id=TRACE, token_ns=[(1000 + at) * MS for at in stamps])
    found = list(exemplars.of_request(timeline, {(1000 + at) * MS: at for at in stamps}.get, 9))
    assert {(name, one.value_s, one.step_id) for name, one in found} == {
        (TIME_TO_FIRST_TOKEN, 0.063, 0),
        (REQUEST_DURATION, 0.191, 245),
        (INTER_TOKEN_LATENCY, 0.01, 140),
        (INTER_TOKEN_LATENCY, 0.1, 240),
        (INTER_TOKEN_LATENCY, 0.005, 245),
    }
    assert {one.trace_id for _, one in found} == {TRACE}


def test_values_on_a_bound_are_in_the_bucket_that_the_histogram_counts_them_in() -> None:
    token_ns = [1]
    for bound in TOKEN_S:  # on each bound, and then a little above, which is the next bucket and older than its bound
        token_ns += [token_ns[-1] + round(bound * 1e9)]
        token_ns += [token_ns[-1] + round(bound * 1e9) + 1000]
    timeline = make_timeline(trace_id=TRACE, token_ns=token_ns)
    found = [one for name, one in exemplars.of_request(timeline, lambda _: 1, 9) if name == INTER_TOKEN_LATENCY]
    assert sorted(one.value_s for one in found) == [*TOKEN_S, TOKEN_S[-1] + 1e-6]


def test_the_page_shows_the_newest_of_each_bucket_and_it_lies_in_it() -> None:
    metrics = make_metrics()
    metrics.put_exemplars(
        [
            (INTER_TOKEN_LATENCY, Exemplar(0.0045, 2_000, "b" * 32, 2, 9)),
            (INTER_TOKEN_LATENCY, Exemplar(0.0046, 1_000, "a" * 32, 1, 9)),  # older, though told later
            (INTER_TOKEN_LATENCY, Exemplar(99.0, 3_000, "c" * 32, None, 9)),
        ]
    )
    found = {sample.labels["le"]: sample for sample in buckets_with_exemplars(metrics)}
    assert set(found) == {"0.005", "+Inf"}
    first, last = found["0.005"].exemplar, found["+Inf"].exemplar
    assert first is not None
    assert last is not None
    assert (first.labels, first.value) == (
        {"trace_id": "b" * 32, "span_id": "0000000000000009", "step_id": "2"},
        0.0045,
    )
    assert (last.labels, last.value) == ({"trace_id": "c" * 32, "span_id": "0000000000000009"}, 99.0)
    assert buckets_with_exemplars_of(metrics) == buckets_with_exemplars_of(metrics)  # the same times too


def test_a_histogram_with_a_label_shows_each_beside_its_own_series() -> None:
    metrics = make_metrics()
    for is_streamed, trace_id in ((True, "a" * 32), (False, "b" * 32)):
        timeline = make_timeline(trace_id=trace_id, is_streamed=is_streamed)
        metrics.put_exemplars(
            [one for one in exemplars.of_request(timeline, lambda _: 1, 9) if one[0] == TIME_TO_FIRST_TOKEN]
        )
    found = {sample.labels["streamed"]: sample.exemplar for sample in buckets_with_exemplars(metrics)}
    assert {label: one and one.labels["trace_id"] for label, one in found.items()} == {
        "true": "a" * 32,
        "false": "b" * 32,
    }
    metrics.forget_exemplars("b" * 32)
    assert [sample.labels["streamed"] for sample in buckets_with_exemplars(metrics)] == ["true"]


def test_the_labels_are_never_longer_than_openmetrics_allows() -> None:
    labels = Exemplar(1.0, 1, "f" * 32, 2**63 - 1, 2**64 - 1).labels
    assert sum(len(name) + len(value) for name, value in labels.items()) <= 128


def test_the_other_format_shows_none() -> None:
    metrics = make_metrics()
    metrics.put_exemplars([(TIME_TO_FIRST_TOKEN, Exemplar(0.2, 1, TRACE, 3, 9, ("true",)))])
    assert TRACE.encode() in metrics.render(OPENMETRICS)[0]
    assert TRACE.encode() not in metrics.render("")[0]


def test_what_is_forgotten_is_shown_no_more() -> None:
    metrics = make_metrics()
    metrics.put_exemplars(
        [
            (TIME_TO_FIRST_TOKEN, Exemplar(0.2, 1, TRACE, 3, 9, ("true",))),
            (REQUEST_DURATION, Exemplar(0.2, 1, "e" * 32, 3, 9, ("chat",))),
        ]
    )
    metrics.forget_exemplars(TRACE)
    (left,) = buckets_with_exemplars(metrics)
    assert left.exemplar is not None
    assert left.exemplar.labels["trace_id"] == "e" * 32
