"""What `Metrics` makes of facts: every series of design README §1, the gauges, and what happens at the edges."""

import math
import platform
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import pytest

from roseinfer.observe.metrics.catalogue import CATALOGUE, LOAD
from roseinfer.observe.metrics.metrics import Metrics
from roseinfer.records import Advanced, Api, Arrival, Delivery, FinishReason, LifecycleState
from roseinfer.runtime.host import HostFacts
from tests.unit.observe.facts import ENGINE, MS, Page, Traffic, make_metrics, make_step, make_timeline, writes_of

ACCEPTED = Path(__file__).with_name("accepted_by_pickers.prom")
# Made by hand from the stamps of make_timeline, in milliseconds.
ONCE_PER_REQUEST_MS = {
    "roseinfer_receive_seconds": 1,
    "roseinfer_tokenize_seconds": 2,
    "roseinfer_submit_lag_seconds": 4,
    "roseinfer_queue_wait_seconds": 8,
    "roseinfer_prefill_seconds": 16,
    "roseinfer_time_to_first_token_seconds": 63,
    "roseinfer_engine_time_to_first_token_seconds": 28,
    "roseinfer_time_per_output_token_seconds": 64,
    "roseinfer_request_duration_seconds": 191,
}


def test_everything_exists_at_zero_before_the_first_request() -> None:
    metrics = make_metrics()
    page = Page(metrics)
    state_of_the_server = {"roseinfer_lifecycle_state", "roseinfer_build_info", "roseinfer_start_time_seconds"}
    assert {key for key, value in page.samples.items() if value and key[0] not in state_of_the_server} == set()
    for row in CATALOGUE:
        if row.kind == "info":
            continue
        suffix = "_count" if row.kind == "histogram" else ""
        names = [label.name for label in row.labels]
        for values in product(*(label.values for label in row.labels)):
            assert (row.name + suffix, frozenset(zip(names, values, strict=True))) in page.samples


@pytest.mark.parametrize(("name", "expected_ms"), ONCE_PER_REQUEST_MS.items())
def test_a_finished_request_is_observed_once(name: str, expected_ms: int) -> None:
    metrics = make_metrics()
    metrics.on_start(make_timeline())
    metrics.on_finish(make_timeline())
    page = Page(metrics)
    assert page.total(f"{name}_count") == 1
    assert page.total(f"{name}_sum") == pytest.approx(expected_ms / 1e3)


def test_wire_gaps_are_observed_once_per_write_but_the_first() -> None:
    metrics, timeline = make_metrics(), make_timeline()
    arrival = Arrival(1, 2, 3)
    for index, written_ns in enumerate(timeline.write_ns):
        metrics.on_writes(writes_of((timeline, Delivery(arrival, 4, 5, written_ns, was_paused=False, index=index))))
    metrics.on_finish(timeline)
    page = Page(metrics)
    assert page.value("roseinfer_stream_gap_seconds_count") == 2
    assert page.value("roseinfer_stream_gap_seconds_sum") == pytest.approx(0.127)


def test_inter_token_latency_is_observed_token_by_token_while_the_request_runs() -> None:
    metrics = make_metrics()
    timeline = make_timeline(token_ns=[])
    for tokens, expected_sum in enumerate([0.0, 0.005, 0.007], start=1):
        timeline.token_ns.append([10 * MS, 15 * MS, 17 * MS][tokens - 1])
        step = make_step(num_decode_seqs=1, tokens_ns=timeline.token_ns[-1])
        metrics.on_step(step, Advanced.newest([timeline]))
        page = Page(metrics)
        assert page.value("roseinfer_inter_token_latency_seconds_count") == tokens - 1
        assert page.value("roseinfer_inter_token_latency_seconds_sum") == pytest.approx(expected_sum)
        assert page.value("roseinfer_generation_tokens_total") == tokens
        assert page.value("roseinfer_prompt_tokens_total") == 7
    metrics.on_finish(timeline)
    assert Page(metrics).value("roseinfer_inter_token_latency_seconds_count") == 2


def test_a_request_that_was_aborted_in_the_queue_has_only_the_parts_it_lived_through() -> None:
    metrics = make_metrics()
    metrics.on_finish(make_timeline(scheduled_ns=0, token_ns=[], write_ns=[], finish_reason=FinishReason.ABORT))
    page = Page(metrics)
    for name in ("receive", "tokenize", "submit_lag", "request_duration"):
        assert page.total(f"roseinfer_{name}_seconds_count") == 1
    for name in ("queue_wait", "prefill", "time_to_first_token", "engine_time_to_first_token", "stream_gap"):
        assert page.total(f"roseinfer_{name}_seconds_count") == 0
    assert page.value("roseinfer_request_prompt_tokens_sum") == 7
    assert page.value("roseinfer_request_output_tokens_count") == 1
    assert page.value("roseinfer_request_output_tokens_sum") == 0


def test_a_response_that_is_not_streamed_has_its_first_token_at_its_only_write() -> None:
    metrics = make_metrics()
    timeline = make_timeline(is_streamed=False, write_ns=[1190 * MS])
    metrics.on_writes(writes_of((timeline, Delivery(Arrival(1, 2, 3), 4, 5, 1190 * MS, was_paused=False, index=0))))
    metrics.on_finish(timeline)
    page = Page(metrics)
    assert page.value("roseinfer_time_to_first_token_seconds_sum", streamed="false") == pytest.approx(0.19)
    assert page.value("roseinfer_time_to_first_token_seconds_count", streamed="true") == 0
    assert page.value("roseinfer_stream_gap_seconds_count") == 0


def test_the_clients_own_submit_lag_is_shown_when_it_makes_sense() -> None:
    metrics = make_metrics()
    for lag_s in (None, 0.25, -3.0):
        metrics.on_finish(make_timeline(client_submit_lag_s=lag_s))
    page = Page(metrics)
    assert page.value("roseinfer_client_submit_lag_seconds_count") == 1
    assert page.value("roseinfer_client_submit_lag_seconds_sum") == 0.25
    assert page.value("roseinfer_telemetry_dropped_total", signal="interval") == 0


def test_a_mistaken_stamp_is_counted_as_dropped_and_not_as_speed() -> None:
    metrics = make_metrics()
    metrics.on_finish(make_timeline(parsed_ns=999 * MS))  # before the head arrived
    page = Page(metrics)
    assert page.value("roseinfer_receive_seconds_count") == 0
    assert page.value("roseinfer_tokenize_seconds_count") == 1
    assert page.value("roseinfer_telemetry_dropped_total", signal="interval") == 1


@pytest.mark.parametrize(("reason", "api"), list(product(FinishReason, Api)))
def test_a_request_ends_under_its_own_reason_and_api_alone(reason: FinishReason, api: Api) -> None:
    metrics = make_metrics()
    metrics.on_finish(make_timeline(finish_reason=reason, api=api))
    page = Page(metrics)
    assert page.value("roseinfer_requests_total", finish_reason=reason.value, api=api.value) == 1
    assert page.value("roseinfer_request_duration_seconds_count", api=api.value) == 1
    assert page.total("roseinfer_requests_total") == page.total("roseinfer_request_duration_seconds_count") == 1


@pytest.mark.parametrize(
    ("reason", "code", "error_type"),
    [
        (FinishReason.ERROR, "engine_failed", "engine_failed"),
        (FinishReason.ERROR, "engine_dead", "engine_dead"),
        (FinishReason.TIMEOUT, "timeout", "timeout"),
        (FinishReason.ERROR, "", "other"),
        (FinishReason.ERROR, "made-up\nroseinfer_engine_up 1", "other"),
        (FinishReason.REJECTED, "overloaded", None),
        (FinishReason.ABORT, "", None),
    ],
)
def test_faults_of_the_server_are_counted_under_a_closed_set_of_types(
    reason: FinishReason, code: str, error_type: str | None
) -> None:
    metrics = make_metrics()
    metrics.on_finish(make_timeline(finish_reason=reason, error_code=code))
    page = Page(metrics)
    assert page.total("roseinfer_request_errors_total") == (1 if error_type else 0)
    if error_type:
        assert page.value("roseinfer_request_errors_total", error_type=error_type) == 1


@pytest.mark.parametrize(
    ("error_code", "code"),
    [
        *[(code, code) for code in ("overloaded", "not_ready", "invalid_value", "invalid_api_key", "engine_dead")],
        ("internal_error", "other"),
        ("made-up\nroseinfer_engine_up 1", "other"),
    ],
)
def test_a_refusal_is_counted_under_the_code_that_the_client_got(error_code: str, code: str) -> None:
    metrics = make_metrics()
    metrics.on_refusal(error_code)
    metrics.on_finish(make_timeline(finish_reason=FinishReason.REJECTED, error_code=error_code))
    page = Page(metrics)
    assert page.value("roseinfer_requests_rejected_total", code=code) == 1
    assert page.total("roseinfer_requests_rejected_total") == 1


def test_disconnects_and_requests_in_flight() -> None:
    metrics = make_metrics()
    for _ in range(3):
        metrics.on_start(make_timeline())
    metrics.on_finish(make_timeline(client_disconnected=True, finish_reason=FinishReason.ABORT))
    page = Page(metrics)
    assert page.value("roseinfer_requests_received_total") == 3
    assert page.value("roseinfer_http_inflight_streams") == 2
    assert page.value("roseinfer_client_disconnects_total") == 1


@pytest.mark.parametrize(("decode", "prefill", "phase"), [(3, 0, "decode"), (0, 2, "prefill"), (3, 2, "mixed")])
def test_a_step_is_counted_under_what_its_rows_were(decode: int, prefill: int, phase: str) -> None:
    metrics = make_metrics()
    metrics.on_step(make_step(num_decode_seqs=decode, num_prefill_seqs=prefill), Advanced())
    metrics.on_step(make_step(), Advanced())  # without rows: state only
    page = Page(metrics)
    assert page.value("roseinfer_step_seconds_sum", phase=phase) == pytest.approx(0.002)
    assert page.value("roseinfer_batch_size_sum", phase=phase) == decode + prefill
    assert page.total("roseinfer_step_seconds_count") == page.total("roseinfer_batch_size_count") == 1


def test_counts_of_steps_add_up_and_gauges_are_those_of_the_last_one() -> None:
    metrics = make_metrics()
    metrics.on_step(make_step(num_preemptions=1, num_prefix_queried_tokens=10, num_prefix_hit_tokens=4), Advanced())
    last = {"num_running": 5, "num_waiting": 6, "num_used_blocks": 25, "num_cached_blocks": 40}
    metrics.on_step(make_step(num_preemptions=2, num_prefix_queried_tokens=20, **last), Advanced())
    page = Page(metrics)
    assert page.value("roseinfer_preemptions_total") == 3
    assert page.value("roseinfer_prefix_cache_queries_total") == 30
    assert page.value("roseinfer_prefix_cache_hits_total") == 4
    assert page.value("roseinfer_num_requests_running") == 5
    assert page.value("roseinfer_num_requests_waiting") == 6
    assert page.value("roseinfer_kv_cache_usage_ratio") == 0.25
    blocks = {state: page.value("roseinfer_kv_cache_blocks", state=state) for state in ("used", "cached", "free")}
    assert blocks == {"used": 25, "cached": 40, "free": 35}


def test_the_last_step_is_a_time_of_the_calendar() -> None:
    metrics = make_metrics()
    metrics.on_step(make_step(end_ns=time.monotonic_ns() - 2_000_000_000), Advanced())
    age_s = time.time() - Page(metrics).value("roseinfer_engine_last_step_timestamp_seconds")
    assert 2.0 <= age_s < 60.0


@pytest.mark.parametrize("state", LifecycleState)
def test_exactly_one_lifecycle_state_holds(state: LifecycleState) -> None:
    metrics = make_metrics()
    metrics.on_lifecycle(LifecycleState.LOADING)
    metrics.on_lifecycle(state)
    page = Page(metrics)
    assert page.value("roseinfer_lifecycle_state", state=state.value) == 1
    assert page.total("roseinfer_lifecycle_state") == 1
    assert page.value("roseinfer_engine_up") == (state in {LifecycleState.READY, LifecycleState.DRAINING})


def test_a_failed_engine_runs_nothing() -> None:
    metrics = make_metrics()
    metrics.set_engine_info(ENGINE)
    last_ns = time.monotonic_ns()
    metrics.on_step(make_step(end_ns=last_ns, num_running=5, num_waiting=6, num_used_blocks=25), Advanced())
    metrics.on_lifecycle(LifecycleState.FAILED)
    page = Page(metrics)
    assert page.value("roseinfer_engine_last_step_timestamp_seconds") > 0
    assert page.value("roseinfer_num_requests_running") == page.value("roseinfer_num_requests_waiting") == 0
    assert page.value("roseinfer_kv_cache_usage_ratio") == 0


def test_what_the_host_does_is_read_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics, now_ns, read = make_metrics(), 5, list[int]()

    def read_host(pid: int) -> HostFacts:
        read.append(pid)
        return HostFacts(steal_s=len(read))

    metrics.read_host = read_host
    monkeypatch.setattr(time, "monotonic_ns", lambda: now_ns)
    assert [Page(metrics).total("roseinfer_host_steal_seconds_total") for _ in range(3)] == [1, 1, 1]
    metrics.set_engine_info(ENGINE)
    now_ns += 1000 * MS
    assert Page(metrics).total("roseinfer_host_steal_seconds_total") == 2
    assert read == [0, ENGINE.pid]


def test_what_the_engine_turned_out_to_be() -> None:
    metrics = make_metrics()
    metrics.set_engine_info(ENGINE)
    page = Page(metrics)
    assert page.value("roseinfer_cache_config_info", block_size="16", num_gpu_blocks="100") == 1
    assert page.value("roseinfer_startup_seconds", stage="load") == 0.25
    assert page.total("roseinfer_startup_seconds") == 0.875
    assert page.value("roseinfer_kv_cache_blocks", state="free") == 100
    assert page.value("roseinfer_build_info", version="1.2.3", python=platform.python_version()) == 1
    [model] = [dict(labels) for name, labels in page.samples if name == "roseinfer_model_info"]
    assert model["device"] == "cpu"
    assert model["max_model_len"] == "128"


def test_a_scrape_counts_the_scrapes_before_it() -> None:
    metrics = make_metrics()
    assert [Page(metrics).value("roseinfer_scrape_duration_seconds_count") for _ in range(3)] == [0, 1, 2]


def test_who_listens_hears_when_a_page_began_and_was_done() -> None:
    metrics, heard = make_metrics(), list[tuple[int, int]]()
    metrics.render_listeners.append(lambda start_ns, end_ns: heard.append((start_ns, end_ns)))
    before_ns = time.monotonic_ns()
    metrics.render("")
    [(start_ns, end_ns)] = heard
    assert before_ns <= start_ns < end_ns <= time.monotonic_ns()


@pytest.mark.parametrize("accept", ["text/plain; version=x", "application/openmetrics-text; version=one.0"])
def test_a_version_that_is_no_number_gets_the_plain_page(accept: str) -> None:
    metrics = make_metrics()
    _, content_type = metrics.render(accept)
    assert content_type == metrics.render("")[1]


def test_a_page_that_cannot_be_made_is_over_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics, heard = make_metrics(), list[str]()
    metrics.render_start_listeners.append(lambda _: heard.append("begins"))
    metrics.render_listeners.append(lambda *_: heard.append("is over"))
    monkeypatch.setattr(metrics, "snapshot", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        metrics.render("")
    assert heard == ["begins", "is over"]


def test_collections_are_counted_when_a_step_or_a_scrape_asks_for_them() -> None:
    pauses = [[2 * MS], [], [MS // 2, 3 * MS], []]
    metrics = make_metrics(take_gc_pauses_ns=lambda: pauses.pop(0))
    metrics.on_step(make_step(), Advanced())
    metrics.on_step(make_step(), Advanced())
    page = Page(metrics)
    assert page.value("roseinfer_gc_pause_seconds_count") == 3
    assert page.value("roseinfer_gc_pause_seconds_sum") == pytest.approx(0.0055)
    assert page.value("roseinfer_gc_pause_seconds_bucket", le="0.0005") == 1
    assert Page(metrics).value("roseinfer_gc_pause_seconds_count") == 3


def test_a_page_rendered_in_another_thread_shows_one_moment() -> None:
    """Eight requests get all the tokens, one each 1.002 ms, so on every consistent page the numbers below agree."""
    metrics = make_metrics()
    traffic = Traffic(metrics)
    for _ in range(8):
        traffic.arrive(num_prompt_tokens=1)
    traffic.step(MS, num_admitted=8)
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(max_workers=1) as scraper:
            scrapes = scraper.submit(lambda: [Page(metrics) for _ in range(25)])
            while not scrapes.done():
                traffic.step(MS, num_admitted=0)
    finally:
        sys.setswitchinterval(interval_s)
    for page in scrapes.result():
        count = page.value("roseinfer_inter_token_latency_seconds_count")
        assert page.value("roseinfer_generation_tokens_total") == count + 8
        assert page.value("roseinfer_step_seconds_count", phase="decode") == count / 8
        assert page.value("roseinfer_inter_token_latency_seconds_sum") == pytest.approx(count * 1.002e-3)
    assert count > 0


def test_nothing_on_a_page_is_not_a_number() -> None:
    metrics = make_metrics()
    metrics.on_finish(make_timeline(client_submit_lag_s=math.nan))
    assert not [key for key, value in Page(metrics).samples.items() if not math.isfinite(value)]


def test_the_load_page_shows_its_gauges_as_the_whole_page_does() -> None:
    metrics = make_metrics()
    metrics.set_engine_info(ENGINE)
    metrics.on_lifecycle(LifecycleState.READY)
    metrics.on_start(make_timeline())
    metrics.on_step(make_step(num_running=3, num_waiting=5), Advanced.newest([]))
    for accept in ("", "application/openmetrics-text; version=1.0.0"):
        load, load_type = metrics.render_load(accept)
        whole, whole_type = metrics.render(accept)
        assert load_type == whole_type
        names = {row.name for row in LOAD}
        lines = [line for line in whole.decode().splitlines() if line.split("{")[0] in names]
        assert lines == [line for line in load.decode().splitlines() if not line.startswith("#")]
        assert 'roseinfer_num_requests_waiting{model_name="' in load.decode()
        assert " 5.0" in load.decode()
        assert " 3.0" in load.decode()


def busy_page(*, has_vllm_names: bool = True) -> tuple[str, str]:
    """`/metrics` and `/metrics/load` of a server with three running and five waiting requests."""
    metrics = Metrics("tiny", "1.2.3", has_vllm_names=has_vllm_names)
    metrics.set_engine_info(ENGINE)
    metrics.on_step(make_step(num_running=3, num_waiting=5, num_used_blocks=40), Advanced.newest([]))
    return metrics.render("")[0].decode(), metrics.render_load("")[0].decode()


def test_pickers_find_vllms_names_on_both_pages() -> None:
    expected = [line for line in ACCEPTED.read_text().splitlines() if "vllm:" in line]
    assert len(expected) == 12
    for page in busy_page():
        assert [line for line in page.splitlines() if "vllm:" in line] == expected
    for page in busy_page(has_vllm_names=False):
        assert "vllm:" not in page
        assert "roseinfer_num_requests_waiting{" in page


def test_vllms_names_keep_their_colons_in_openmetrics() -> None:
    metrics = make_metrics()
    metrics.set_engine_info(ENGINE)
    for render in (metrics.render, metrics.render_load):
        page = render("application/openmetrics-text; version=1.0.0")[0].decode()
        assert '\nvllm:num_requests_waiting{model_name="tiny"} 0.0\n' in page
        assert "vllm_" not in page
