"""The pages: every required figure has a row, and entrants that were not measured have one too."""

from typing import Any

from benchmarks import report
from benchmarks.figures import summarise
from benchmarks.gpu.bursts import ONE_STREAM
from benchmarks.gpu.performance_model import GPUS, MODELS, step_s, streams_of
from benchmarks.gpu.performance_model import decode as decode_step
from benchmarks.requirements import BASE_SETTING, SEEDS_WORKLOAD
from benchmarks.rotation import absent
from benchmarks.workloads import GPT2_WORKLOADS
from tests.benchmarks.test_requirements import decode, row, step, streams

MACHINE = {
    "cpu": "A processor",
    "cpu_flags": ["avx2"],
    "num_cores": 2,
    "l3": "32M",
    "memory_gb": 24,
    "kernel": "6",
    "python": "3.11",
    "packages": {"torch": "2"},
    "commit": "abc",
}


def part(name: str, results: dict[str, Any]) -> dict[str, Any]:
    circumstances = {"date": "2026-01-02", "elapsed_s": 61.0, "load_before": 0.1, "stolen_share": 0.01}
    return {"part": name, "command": f"python {name}", **circumstances, "machine": MACHINE, "results": results}


def page(**results: dict[str, Any]) -> str:
    return report.page("cpu", {name: part(name, content) for name, content in results.items()})


def served(*rows: dict[str, Any]) -> dict[str, Any]:
    return {"versions": {"vllm": "vllm 1"}, "is_raised": True, "rows": list(rows)}


def figures(name: str, workload: str, rate: float) -> dict[str, Any]:
    latencies = {f"{kind}_{percent}_ms": 12.345 for kind in ("ttft", "tpot", "itl") for percent in ("p50", "p99")}
    return {**row(name, workload, rate, **latencies), "median": {"tokens_per_s": rate, **latencies}}


def test_nothing_run_is_a_page_that_says_so() -> None:
    text = page()
    assert "Nothing has been run." in text
    assert "\n0 reached, 0 not, " in text


def test_the_report_names_its_circumstances() -> None:
    text = page(served=served())
    assert "A processor" in text
    assert "| served | `python served` | abc | 2026-01-02 | 61 s | 0.1 | 1.0% | yes |" in text
    assert "vllm: vllm 1" in text


def test_workloads_are_ordered_by_rate_and_absent_rivals_stay() -> None:
    gone = absent("gone", "not set up", GPT2_WORKLOADS)
    text = page(served=served(figures("slow", "W2", 90.0), figures("fast", "W2", 100.0), gone))
    section = text[text.index("### W2") : text.index("### W3")]
    assert section.index("| fast | 100 (100) | 12.3 / 12.3 |") < section.index("| slow |") < section.index("| gone |")
    assert "| gone | not set up |" in section
    assert text.count("| gone | not set up |") == 5, "in every workload"


def test_groups_of_qwen3_keep_their_order_and_prompts_have_a_rate_of_their_own() -> None:
    ours = figures("roseinfer int4", "L4", 2.0)
    rate = {"prompt_tokens_per_s": 3000.0}
    ours |= {"median": ours["median"] | rate, "repeats": [repeat | rate for repeat in ours["repeats"]]}
    rows = [row | {"group": "int4"} for row in (ours, absent("llama.cpp q4_0", "not set up", ("L4",)))]
    text = page(qwen3={"versions": {}, "is_raised": True, "rows": rows})
    section = text[text.index("### L4") :]
    assert "| int4 | roseinfer int4 | 3000 (3000) | 12.3 / 12.3 |" in section
    assert "| int4 | llama.cpp q4_0 | not set up |" in section


def test_decode_rows_have_speedup_and_share_of_the_roof() -> None:
    roofs = {
        "bandwidth": {"236": 30e9},
        "bandwidth_by": {"236": "sum"},
        "peak": {"bfloat16": 440e9},
        "peak_by": {"bfloat16": "1 × 2 × 3"},
        "step_gemms_ms": {},
    }
    row = step(50.0, 49.0, 51.0) | {"turns": [[30e9, 50.0], [30e9, 49.0], [30e9, 51.0]]}
    measured = decode(reference=step(200.0), bfloat16=row)["decode"]
    subjects: dict[str, Any] = {"roseinfer bfloat16": {}, "transformers float32": {}}
    text = page(roofs=roofs, decode={**measured, "subjects": subjects, "failures": {"roseinfer int8": "no kernels"}})
    assert "| 64 | 64 | 200 (200 to 200) | 50.0 (49.0 to 51.0); 4.0×; 82% of 41.0 |" in text
    assert "- roseinfer int8: no kernels" in text
    assert "30.0 GB/s" in text


def test_what_is_not_reached_stands_out() -> None:
    measured = decode(reference=step(200.0), bfloat16=step(100.0), float32=step(50.0))["decode"]
    text = page(decode={**measured, "subjects": {}, "failures": {}})
    ending = ", against transformers eager float32"
    rows = {line.split("|")[1].strip().removesuffix(ending): line for line in text.splitlines() if ending in line}
    assert rows["decode step, batch 64, context 64, bfloat16"].endswith("**no** |")
    assert rows["decode step, batch 64, context 64, float32"].endswith(" yes |")
    assert rows["decode step, batch 64, context 64, int8"].endswith(" not measured |")


def test_a_page_does_not_tell_where_it_was_made() -> None:
    command = "python -m benchmarks.served --out build/bench/served.json --model /models/small/gpt2 --quick"
    assert report.without_folders(command) == (
        "python -m benchmarks.served --out build/bench/served.json --model …/gpt2 --quick"
    )


def gpu_page(gpu: str) -> str:
    figures = {"tokens_per_s": 2100.0, "ttft_p50_ms": 2.0, "ttft_p99_ms": 3.0}
    step = {"median": 0.5, "least": 0.4, "most": 0.6, "num_repeats": 7}
    parts = {
        "tests": {"num_passed": 7, "num_skipped": 1, "failed": ["tests/gpu/test_x.py::test_y"], "note": "ended"},
        "sanitizer": {"num_passed": 0, "num_skipped": 0, "failed": [], "note": "compute-sanitizer is absent"},
        "roofs": {"gpu": {"name": gpu}, "bandwidth": {"256": 4e12}, "peak": {"bfloat16": 7e14}},
        "streams": streams([{"tokens/s": 10.0}, {"tokens/s": 20.0}]),
        "decode": {
            "subjects": {"captured graphs": {}, "no graphs": {}, "transformers bfloat16": {}},
            "failures": {},
            "cases": [{"batch": 64, "context": 64, "subjects": {"captured graphs": {"step": step}}}],
        },
        "bursts": {"rows": {"one stream": [figures]}},
        "served": served(absent("vllm bfloat16", "not installed", GPT2_WORKLOADS)),
        "block_info": {"arrays": step},
    }
    results = {name: part(name, content) for name, content in parts.items()}
    return report.page("gpu", results, {"served": "ended after 600 s"})


def test_the_page_names_settings_failures_and_roofs() -> None:
    text = gpu_page("NVIDIA H300")
    assert text.startswith("# NVIDIA H300\n")
    assert "has no published rates of this GPU" in text
    assert f"| {BASE_SETTING} | first | 10.0 |" in text
    assert f"| {BASE_SETTING} | later | 20.0 |" in text
    assert "- lazy graphs: it fell over" in text
    assert "| 64 | 64 | – | 0.50 (0.40 to 0.60); 20% of 0.10 | failed |" in text
    assert "\n| one stream | 2100 | 2.00 / 3.00 | – | – |" in text
    assert "| arrays | 0.50 (0.40 to 0.60) |" in text
    assert "- **served ended after 600 s**" in text
    assert "7 passed, 1 failed, 1 skipped; ended.\n\n- failed: `tests/gpu/test_x.py::test_y`" in text
    assert "0 passed, 0 failed, 0 skipped; compute-sanitizer is absent." in text


def test_a_gpu_of_published_rates_has_a_prediction_beside_each_figure() -> None:
    text = gpu_page("NVIDIA H200")
    gpu = GPUS["H200"]
    step_ms = step_s(MODELS["GPT-2 small"], decode_step(64, 64), gpu) * 1e3
    assert f"| 64 | 64 | – | 0.50 (0.40 to 0.60); {step_ms / 0.5:.0%} of {step_ms:.2f} | failed |" in text
    section = text[text.index(f"### {SEEDS_WORKLOAD}") :]
    assert section.index("| predicted | |") < section.index(f"| {BASE_SETTING} | first |")
    rate = summarise(streams_of(ONE_STREAM, gpu, 256))["tokens_per_s"]
    assert f"| one stream, predicted | {rate:.0f} |" in text
    assert "| copy 256 MiB, read and written | 4.80 TB/s | 4.00 TB/s |" in text
    section = text[text.index("### W2") : text.index("### W3")]
    assert section.index("| predicted | ") < section.index("| vllm bfloat16 | not installed |")
    assert f"| one stream | ≥ 2000 tokens/s | {rate:.0f} | 2100 | yes |" in text
