"""What must be reached, beside what was measured: ratios, ranges, rivals of the same precision, and what is missing."""

from typing import Any

import pytest

from benchmarks import requirements as r
from benchmarks.figures import Spread
from benchmarks.roofs import roof_ms


def step(median: float, least: float | None = None, most: float | None = None) -> dict[str, dict[str, float]]:
    """A decode row with phases of a fiftieth and a hundredth of a millisecond."""

    def spread(median: float, least: float, most: float) -> dict[str, float]:
        return {"median": median, "least": least, "most": most, "num_repeats": 3}

    phases = {name: spread(ms, ms, ms) for name, ms in (("schedule", 0.02), ("commit", 0.01))}
    return {"step": spread(median, least or median, most or median), **phases}


def decode(**milliseconds: Any) -> dict[str, Any]:
    names = {"reference": r.REFERENCE} | {precision: f"roseinfer {precision}" for precision in r.PRECISIONS}
    case = {"batch": 64, "context": 64, "subjects": {names[name]: row for name, row in milliseconds.items()}}
    return {"decode": {"cases": [case]}}


def row(name: str, workload: str, *rates: float, **figures: float) -> dict[str, Any]:
    repeats = [{"tokens_per_s": rate, **figures} for rate in rates]
    return {"name": name, "workload": workload, "repeats": repeats, "peak_rss_mb": 1900.0}


def streams(*processes: list[dict[str, float]]) -> dict[str, Any]:
    by_setting = {r.BASE_SETTING: list(processes)}
    return {"workloads": {r.SEEDS_WORKLOAD: by_setting}, "failures": {"lazy graphs": "it fell over"}}


def only(rows: list[r.Requirement]) -> r.Requirement:
    [found] = rows
    return found


def test_a_ratio_of_spreads_goes_from_the_worst_pair_to_the_best() -> None:
    assert r.ratio(Spread(12.0, 10.0, 20.0, 3), Spread(4.0, 2.0, 5.0, 2)) == Spread(3.0, 2.0, 10.0, 2)


def test_a_speedup_is_the_reference_over_ours() -> None:
    rows = list(r.decode_speedups(decode(reference=step(200.0), float32=step(110.0, 90.0, 125.0), bfloat16=step(50.0))))
    by_measure = {row.measure: row for row in rows if "context 64," in row.measure}
    assert len(rows) == 5
    float32, bfloat16, int8 = by_measure.values()
    assert float32.measured == Spread(200 / 110, 200 / 125, 200 / 90, 3)
    assert float32.is_reached is False
    assert (bfloat16.bound, bfloat16.is_reached) == (3.7, True)
    assert (int8.measured, int8.is_reached) == (None, None), "not measured is neither reached nor missed"


def test_the_share_of_a_roof_is_the_roof_over_the_step() -> None:
    turns = [[30e9, 60.0], [60e9, 50.0], [30e9, 80.0]]
    results = {**decode(bfloat16=step(60.0, 50.0, 80.0) | {"turns": turns}), "roofs": {"peak": {"bfloat16": 440e9}}}
    [share] = [row for row in r.roof_shares(results) if "batch 64" in row.measure]
    slow, fast = (roof_ms("bfloat16", 64, 64, bandwidth, 440e9) for bandwidth in (30e9, 60e9))
    assert share.measured is not None
    least, median, most = sorted([100 * slow / 60, 100 * fast / 50, 100 * slow / 80])
    assert share.measured == Spread(median, least, most, 3), "each turn has a roof of its own"


def test_host_work_is_schedule_and_commit_in_microseconds() -> None:
    float32 = next(r.host_work(decode(float32=step(10.0))))
    assert float32.measured is not None
    assert float32.measured.median == pytest.approx(30.0)
    assert float32.is_reached is True


def test_drafts_and_mixed_loads_are_held_against_their_bounds() -> None:
    found = {"median": 1.01, "least": 0.97, "most": 1.02, "num_repeats": 5}
    copy, one, *others = r.drafts({"speculation": {"chat, 1": found, "chat, 64": found | {"median": 0.9}}})
    assert (copy.measured, one.is_reached, [each.is_reached for each in others]) == (None, True, [None, False])
    default = {"p99/p50": 2.4, "tokens_per_s": 95.0, "ttft_p50_ms": 130.0}
    whole = {"p99/p50": 6.0, "tokens_per_s": 100.0, "ttft_p50_ms": 90.0}
    rows = list(r.mixed_load({"mixed": {"default": [default], "whole steps": [whole]}}))
    assert [row.is_reached for row in rows] == [True, True, False]
    assert rows[1].measured == Spread(0.95, 0.95, 0.95, 1)


def test_the_served_share_is_of_the_same_precision() -> None:
    rows = [
        row("roseinfer bfloat16", "W2", 800.0, 900.0, 700.0),
        row("engine only bfloat16", "W2", 1000.0),
        row("engine only float32", "W2", 100.0),
    ]
    shares = list(r.served_shares({"served": {"rows": rows}}))
    assert [share.is_reached for share in shares] == [None, False, None]
    assert shares[1].measured == Spread(80.0, 70.0, 90.0, 1)


def test_latencies_against_vllm_must_be_lower_and_rates_higher() -> None:
    latencies = {"tpot_p99_ms": 10.0, "itl_p99_ms": 30.0}
    rows = [
        row("roseinfer float32", "W2", 500.0, **latencies),
        row("vllm float32", "W2", 400.0, tpot_p99_ms=12.0, itl_p99_ms=20.0),
        {"name": "vllm bfloat16", "workload": "W1x32, W2", "repeats": [], "error": "not set up"},
    ]
    found = list(r.against_vllm({"served": {"rows": rows}}))
    assert [entry.is_reached for entry in found] == [True, True, False, None, None, None]
    assert found[3].note == "not set up"


def test_the_fastest_peer_of_the_same_precision_counts() -> None:
    rows = [row("roseinfer float32", "W3", 600.0), row("vllm float32", "W3", 400.0), row("vllm bfloat16", "W3", 900.0)]
    peers = [row("openvino float32", "W3", 650.0), row("openvino float32", "W4", 999.0), row("llama.cpp q8", "W3", 5.0)]
    results = {"served": {"rows": rows}, "peers": {"rows": peers}}
    found = {entry.measure: entry for entry in r.against_all_peers(results)}
    float32 = found["W3, float32: tokens/s against the fastest peer"]
    assert float32.measured is not None
    assert float32.measured.median == pytest.approx(600 / 650)
    assert float32.note == "openvino float32, 650 tokens/s, is the fastest of 2"
    assert "llama.cpp q8" in found["W3, int8: tokens/s against the fastest peer"].note
    assert found["W1x32, int8: tokens/s against the fastest peer"].is_reached is None


@pytest.mark.parametrize("name", ["roseinfer int8", "engine only int8"])
def test_our_own_rows_are_no_rivals(name: str) -> None:
    assert r.is_rival("vllm int8", "int8")
    assert not r.is_rival(name, "int8")


def test_steady_streams_and_memory() -> None:
    rows = [row("roseinfer bfloat16", "W2", 1.0, steady_itl_p50_ms=20.0, steady_itl_p99_ms=30.0)]
    results = {"served": {"rows": rows}}
    assert [entry.is_reached for entry in r.steady_streams(results)] == [None, True, None]
    memory = only(list(r.memory(results)))
    assert memory.measured == Spread.of([1.9])
    assert memory.is_reached is True


def test_entrants_are_compared_within_their_group() -> None:
    names = ("roseinfer int4", "roseinfer int8", "llama.cpp q4_0")
    rows = [row(name, "S1", rate) | {"group": "int4"} for name, rate in zip(names, (60.0, 45.0, 40.0), strict=True)]
    rows.append(row("roseinfer int8", "S1", 50.0, roof=3.8e10) | {"group": "int8"})
    results: dict[str, dict[str, Any]] = {"qwen3": {"rows": rows}, "roofs": {"peak": {"int8": 8e11}}}
    found = {entry.measure.partition(", ")[2]: entry for entry in r.one_stream_and_eight(results)}
    assert found["S1, int4: tokens/s against llama.cpp q4_0"].measured == Spread(1.5, 1.5, 1.5, 1)
    assert found["S1, int4: tokens/s against roseinfer int8"].is_reached is False, "45 in its group, not 50"
    assert found["S8, int4: tokens/s against openvino int4"].is_reached is None
    share = found["S1, int8: share of its steps' roofs"].measured
    assert share is not None
    # 35.6 ms for 28.5 G operations of the prompt, 95 times 15.69 ms for the weights, 0.9 GB of keys and values.
    assert share.median == pytest.approx(100 * 50 / 96 * (0.0356 + 95 * 0.015686 + 0.0229), rel=1e-3)


def test_products_and_starts_are_read_from_their_parts() -> None:
    share = {"median": 0.7, "least": 0.6, "most": 0.8, "num_repeats": 3}
    first, second = (
        [{"ready_s": seconds, "all_mb": mb, "beside_mb": mb - 650}] for seconds, mb in ((8.0, 1300.0), (4.0, 1100.0))
    )
    results: dict[str, dict[str, Any]] = {
        "linears": {"int8 of bfloat16, 512 rows": {"share of peak": share}},
        "start": {"int8, native, first": first, "int8, native, second": second},
    }
    assert [entry.is_reached for entry in r.products(results)] == [True, None]
    reached = [entry.is_reached for entry in r.starts(results)]
    assert reached == [False, None, False, True, True], "1.3 GB, 650 MB of them beside weights, in the first start"


def test_prompts_are_compared_by_their_tokens() -> None:
    rows = [
        row(name, "L4", 9.0, prompt_tokens_per_s=rate)
        for name, rate in (("roseinfer int8", 900.0), ("llama.cpp q8_0", 200.0))
    ]
    results = {"qwen3": {"rows": [each | {"group": "int8"} for each in rows]}}
    assert [entry.is_reached for entry in r.prompts(results)] == [True, None, None, None]


def test_nothing_measured_is_all_rows_without_a_figure() -> None:
    rows = r.of_cpu({})
    assert len(rows) >= 30
    assert {row.is_reached for row in rows} == {None}


def test_the_first_run_of_each_process_counts_apart() -> None:
    results = {"streams": streams([{"tokens/s": 1.0}, {"tokens/s": 5.0}, {"tokens/s": 7.0}], [{"tokens/s": 3.0}])}
    rate = (results, r.SEEDS_WORKLOAD, r.BASE_SETTING, "tokens/s")
    first, later = (r.stream_figure(*rate, is_first=is_first) for is_first in (True, False))
    assert first == Spread(2.0, 1.0, 3.0, 2)
    assert later == Spread(6.0, 5.0, 7.0, 2)


def test_required_figures_are_of_warm_runs() -> None:
    run = {"tokens/s": 6000.0, "TPOT p50": 0.9}
    results = {
        "streams": streams([{"tokens/s": 1.0, "TPOT p50": 0.1}, run]),
        "bursts": {"rows": {"burst offline": [{"tokens_per_s": 151_000.0}, {"tokens_per_s": 149_500.0}]}},
    }
    found = {row.measure: row.is_reached for row in r.of_gpu(results, {})}
    assert found["the posts' workload: tokens/s"] is True
    assert found["the posts' workload: TPOT p50"] is False
    assert found["the posts' workload: ITL p99"] is None
    assert found["burst offline"] is True
    assert found["one stream"] is None
