"""The table itself, and the formats it is told in."""

import subprocess
from itertools import pairwise

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from roseinfer import errors
from roseinfer.observe.metrics.catalogue import CATALOGUE
from roseinfer.observe.metrics.histogram import REQUEST_S, TOKEN_S, WAIT_S
from roseinfer.observe.metrics.metrics import Metrics
from roseinfer.observe.metrics.row import Row
from roseinfer.records import FinishReason, LifecycleState
from tests.conftest import require_tool
from tests.unit.observe.facts import ENGINE, MS, Traffic, make_metrics

OPENMETRICS = "application/openmetrics-text; version=1.0.0"
MAX_SAMPLES = 850


@pytest.fixture(scope="module")
def busy() -> Metrics:
    """Metrics of a server that has seen some of everything."""
    metrics = make_metrics()
    metrics.set_engine_info(ENGINE)
    metrics.on_lifecycle(LifecycleState.READY)
    traffic = Traffic(metrics)
    traffic.reject()
    for num_prompt_tokens in (3, 300, 30):
        traffic.arrive(num_prompt_tokens)
        traffic.step(5 * MS, num_admitted=1)
        traffic.write()
    traffic.end(0, FinishReason.STOP)
    traffic.end(0, FinishReason.ERROR)
    traffic.drain()
    metrics.render("")
    return metrics


def by_kind(kind: str) -> list[Row]:
    return [row for row in CATALOGUE if row.kind == kind]


def test_names_are_unique_in_openmetrics_too() -> None:
    families = [row.name.removesuffix("_total").removesuffix("_info") for row in CATALOGUE]
    assert len(set(families)) == len(families)
    assert all(family.startswith(("roseinfer_", "vllm:")) for family in families)


def test_names_follow_the_rules_of_the_field() -> None:
    assert all(row.name.endswith("_total") == (row.kind == "counter") for row in CATALOGUE)
    assert all(row.name.endswith("_info") == (row.kind == "info") for row in CATALOGUE)
    assert all(row.name.removesuffix("_total").endswith("_seconds") == (row.unit == "seconds") for row in CATALOGUE)


def test_every_interval_states_its_two_events_and_what_counts_once() -> None:
    rows = [row for row in by_kind("histogram") if row.unit == "seconds"]
    assert [row.name for row in rows if "→" not in row.help or "Once per" not in row.help] == []


def test_bounds_rise_and_the_thresholds_of_service_levels_are_among_them() -> None:
    assert all(list(row.buckets) == sorted(set(row.buckets)) for row in CATALOGUE)
    assert all(bool(row.buckets) == (row.kind == "histogram") for row in CATALOGUE)
    assert {0.25, 0.5, 1.0} <= set(WAIT_S)


def test_bounds_separate_requests_from_one_token_to_a_quarter_of_an_hour_by_a_factor_of_two() -> None:
    assert REQUEST_S[0] <= 0.01
    assert REQUEST_S[-1] >= 15 * 60
    assert max(upper / lower for lower, upper in pairwise(REQUEST_S)) <= 2


def test_bounds_separate_tokens_between_4_and_50_ms_by_a_third() -> None:
    bounds = [bound for bound in TOKEN_S if 0.004 <= bound <= 0.05]
    widths = [(upper - lower) / lower for lower, upper in pairwise(bounds)]
    assert max(widths) <= 1 / 3 + 1e-9


def codes(root: type[errors.RoseinferError]) -> set[str]:
    """The codes under which errors of this kind are told."""
    leaves = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, root)]
    return {kind.code for kind in leaves if kind.code is not None}


def label_values(name: str) -> set[str]:
    [label] = [label for row in CATALOGUE if row.name == name for label in row.labels]
    return set(label.values)


def test_every_code_of_the_error_tree_is_that_of_a_refusal_or_of_a_fault() -> None:
    refused, failed = label_values("roseinfer_requests_rejected_total"), label_values("roseinfer_request_errors_total")
    assert failed == codes(errors.EngineError) - {errors.EngineError.code} | {"other"}
    in_neither = {errors.EngineError.code, errors.SlowReader.code}  # of `LLM` alone, and the end of a stream alone
    assert refused | failed == codes(errors.RoseinferError) - in_neither | {"other"}
    assert refused & failed == {"engine_dead", "queue_timeout", "other"}, (
        "before the engine has heard of a request, and after"
    )


def test_one_model_costs_few_samples(busy: Metrics) -> None:
    page, _ = busy.render("")
    assert len([line for line in page.decode().splitlines() if not line.startswith("#")]) <= MAX_SAMPLES


def test_the_accept_header_chooses_the_format(busy: Metrics) -> None:
    plain, plain_type = busy.render("")
    openmetrics, openmetrics_type = busy.render(OPENMETRICS)
    assert plain_type.startswith("text/plain")
    assert openmetrics_type.startswith("application/openmetrics-text")
    assert openmetrics.endswith(b"# EOF\n")
    assert b"# EOF" not in plain


def test_the_page_is_legal_openmetrics(busy: Metrics) -> None:
    page, _ = busy.render(OPENMETRICS)
    families = {family.name: family for family in text_string_to_metric_families(page.decode())}  # type: ignore[no-untyped-call]
    assert len(families) == len(CATALOGUE)
    for row in CATALOGUE:
        family = families[row.name.removesuffix("_total").removesuffix("_info")]
        assert (family.type, family.documentation) == (row.kind, row.help)
        assert all(("model_name" in sample.labels) == row.is_per_model for sample in family.samples)
    assert families["roseinfer_inter_token_latency_seconds"].unit == "seconds"


def test_promtool_dislikes_the_colons_of_vllms_names_alone(busy: Metrics) -> None:
    """Prometheus keeps colons for recorded series, and would like to see `ratio` for `perc`."""
    page, _ = busy.render("")
    command = [require_tool("promtool"), "check", "metrics"]
    done = subprocess.run(command, input=page, capture_output=True, check=False)
    assert all(line.startswith(b"vllm:") for line in (done.stdout + done.stderr).splitlines())
    assert b"vllm:num_requests_waiting metric names should not contain ':'" in done.stderr
    ours = b"\n".join(line for line in page.splitlines() if b"vllm:" not in line) + b"\n"
    done = subprocess.run(command, input=ours, capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
