"""Pages are those that prometheus_client writes, whatever was kept of those before them."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from prometheus_client.exposition import generate_latest as plain
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.exposition import generate_latest as openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse

from roseinfer.observe.metrics import text
from roseinfer.observe.metrics.exemplars import REQUEST_DURATION, TIME_TO_FIRST_TOKEN, Exemplar
from roseinfer.observe.metrics.metrics import Metrics
from roseinfer.observe.metrics.protobuf import Values
from roseinfer.observe.metrics.row import Row
from roseinfer.observe.metrics.text import TextEncoder
from roseinfer.records import LifecycleState
from tests.unit.observe.facts import ENGINE, MODEL, MS, Traffic, make_metrics

FORMATS: dict[str, Callable[[Any], bytes]] = {"": plain, "application/openmetrics-text; version=1.0.0": openmetrics}


class Families:
    def __init__(self, metrics: Metrics) -> None:
        self._snapshot = metrics.snapshot()

    def collect(self) -> Iterator[Metric]:
        return (text._family(row, values, MODEL, exemplars) for row, values, exemplars in self._snapshot)


@pytest.mark.parametrize("accept", FORMATS)
def test_every_page_of_a_server_is_prometheus_clients_own(accept: str) -> None:
    metrics, encoder = make_metrics(), TextEncoder(MODEL)
    traffic, chance = Traffic(metrics), random.Random(1)
    acts: list[Callable[[], object]] = [
        lambda: traffic.arrive(3),
        lambda: traffic.step(2 * MS, 1),
        lambda: traffic.step(2 * MS, 0),
        traffic.reject,
        lambda: metrics.set_engine_info(ENGINE),  # an info that was empty before
        lambda: metrics.on_lifecycle(chance.choice(list(LifecycleState))),
        lambda: metrics.put_exemplars(
            [(TIME_TO_FIRST_TOKEN, Exemplar(chance.random(), traffic.now_ns, "ab" * 16, 4, 5, ("true",)))]
        ),
        lambda: metrics.put_exemplars([(REQUEST_DURATION, Exemplar(0.3, traffic.now_ns, "cd" * 16, 4, 5, ("chat",)))]),
        lambda: metrics.forget_exemplars(chance.choice(["ab" * 16, "cd" * 16])),
        lambda: None,
    ]
    for _ in range(60):
        chance.choice(acts)()
        families = Families(metrics)
        expected = FORMATS[accept](families).replace(b"\nvllm_", b"\nvllm:")
        assert encoder.encode(accept, families._snapshot)[0] == expected


@pytest.mark.parametrize("scheme", ["underscores", "values", "dots", "allow-utf-8"])
def test_names_that_need_no_escapes_get_none(scheme: str) -> None:
    metrics = make_metrics()
    metrics.put_exemplars([(REQUEST_DURATION, Exemplar(0.3, 5, "cd" * 16, 4, 5, ("chat",)))])
    accept = f"application/openmetrics-text; version=1.0.0; escaping={scheme}"
    page, content_type = TextEncoder(MODEL).encode(accept, metrics.snapshot())
    families = parse(page.decode())  # type: ignore[no-untyped-call]
    assert {family.name for family in families} >= {REQUEST_DURATION, "vllm:num_requests_running"}
    assert content_type.endswith("allow-utf-8" if scheme == "allow-utf-8" else "underscores")


def test_formats_that_scrapers_make_up_take_no_memory() -> None:
    metrics, encoder = make_metrics(), TextEncoder(MODEL)
    for number in range(9):
        encoder.encode(f"text/plain; version=1.0.{number}; escaping=underscores", metrics.snapshot())
        encoder.encode(f"application/openmetrics-text; version=1.0.{number}", metrics.snapshot())
    assert len(encoder._known) <= text._MAX_FORMATS


def test_what_has_not_changed_since_the_last_page_is_written_no_second_time(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics, encoder = make_metrics(), TextEncoder(MODEL)
    traffic = Traffic(metrics)
    traffic.arrive(3)
    page = encoder.encode("", before := metrics.snapshot())[0]
    numbers, written = text._numbers, list[str]()

    def noted(row: Row, values: Values) -> list[float]:
        written.append(row.name)
        return numbers(row, values)

    monkeypatch.setattr(text, "_numbers", noted)
    traffic.step(2 * MS, 1)
    encoder.encode("", metrics.snapshot())
    assert "roseinfer_step_seconds" in written
    assert "roseinfer_request_duration_seconds" not in written
    assert TextEncoder(MODEL).encode("", before)[0] == page  # the earlier snapshot is as it was
