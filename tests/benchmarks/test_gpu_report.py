"""The GPU's page: the first run of a process apart from the later ones, figures beside what they must reach."""

from typing import Any

import pytest

from benchmarks import gpu_report
from benchmarks.figures import Spread
from tests.benchmarks.test_report import part

WORKLOAD, SETTING = gpu_report.SEEDS_WORKLOAD, gpu_report.BASE_SETTING


def streams(*processes: list[dict[str, float]]) -> dict[str, Any]:
    return {"workloads": {WORKLOAD: {SETTING: list(processes)}}, "failures": {"lazy graphs": "it fell over"}}


@pytest.mark.parametrize(("name", "expected"), [("NVIDIA H200", "h200"), ("NVIDIA A100-SXM4-80GB", "a100-sxm4-80gb")])
def test_the_page_is_called_as_the_gpu_is(name: str, expected: str) -> None:
    assert gpu_report.slug(name) == expected


def test_the_first_run_of_each_process_is_told_apart() -> None:
    results = {"streams": streams([{"tokens/s": 1.0}, {"tokens/s": 5.0}, {"tokens/s": 7.0}], [{"tokens/s": 3.0}])}
    rate = (results, WORKLOAD, SETTING, "tokens/s")
    first, later = (gpu_report.stream_figure(*rate, is_first=is_first) for is_first in (True, False))
    assert first == Spread(2.0, 1.0, 3.0, 2)
    assert later == Spread(6.0, 5.0, 7.0, 2)


def test_required_figures_are_of_warm_runs() -> None:
    run = {"tokens/s": 6000.0, "TPOT p50": 0.9}
    results = {
        "streams": streams([{"tokens/s": 1.0, "TPOT p50": 0.1}, run]),
        "bursts": {"rows": {"burst offline": [{"tokens_per_s": 151_000.0}, {"tokens_per_s": 149_500.0}]}},
    }
    found = {row.measure: row.is_reached for row in gpu_report.requirements(results)}
    assert found["the posts' workload: tokens/s"] is True
    assert found["the posts' workload: TPOT p50"] is False
    assert found["the posts' workload: ITL p99"] is None
    assert found["burst offline"] is True
    assert found["one stream"] is None


def test_the_page_tells_settings_failures_and_roofs() -> None:
    figures = {"tokens_per_s": 2100.0, "ttft_p50_ms": 2.0, "ttft_p99_ms": 3.0}
    step = {"median": 0.5, "least": 0.4, "most": 0.6, "num_repeats": 7}
    parts = {
        "roofs": {"gpu": {"name": "NVIDIA H200"}, "bandwidth": {"256": 4e12}, "peak": {"bfloat16": 7e14}},
        "streams": streams([{"tokens/s": 10.0}, {"tokens/s": 20.0}]),
        "steps": {
            "subjects": {"captured graphs": {}, "no graphs": {}},
            "failures": {},
            "cases": [{"batch": 64, "context": 64, "subjects": {"captured graphs": {"step": step}}}],
        },
        "bursts": {"rows": {"one stream": [figures]}},
        "block_info": {"arrays": step},
    }
    text = gpu_report.page({name: part(name, results) for name, results in parts.items()})
    assert text.startswith("# NVIDIA H200\n")
    assert f"| {SETTING} | first | 10.0 |" in text
    assert f"| {SETTING} | later | 20.0 |" in text
    assert "- lazy graphs: it fell over" in text
    assert "| 64 | 64 | 0.50 (0.40 to 0.60) | failed | 0.10 |" in text
    assert "| one stream | 2100 | 2.00 / 3.00 | – | – |" in text
    assert "| arrays | 0.50 (0.40 to 0.60) |" in text
