"""The GPU parts' JSON into `docs/benchmarks/<gpu>.md`. Knows every part's shape, starts nothing and measures nothing.

python -m benchmarks.gpu_report [--parts build/bench-gpu] [--out FILE]
"""

import argparse
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import roofs
from benchmarks.figures import Spread
from benchmarks.gpu_steps import REFERENCE
from benchmarks.report import latency, number, ranged, required_table, table
from benchmarks.requirements import Requirement

PARTS = ("roofs", "block_info", "streams", "steps", "bursts")
SEEDS_WORKLOAD = "64 requests, 20 ms apart"
BASE_SETTING = "captured first, pinned"
STREAM_FIGURES = {  # of the posts' report: what must be reached in the posts' workload
    "tokens/s": (5900.0, True, "tokens/s"),
    "TPOT p50": (0.8, False, "ms"),
    "TPOT p99": (1.5, False, "ms"),
    "ITL p99": (3.0, False, "ms"),
    "TTFT p50": (3.0, False, "ms"),
    "TTFT p99": (8.0, False, "ms"),
    "Submit lag p99": (2.0, False, "ms"),
}
SHOWN = ("tokens/s", "TTFT p50", "TTFT p99", "TPOT p50", "TPOT p99", "ITL p50", "ITL p95", "ITL p99", "Submit lag p99")
BURST_RATES = {"burst offline": 150_000.0, "burst over HTTP": 50_000.0, "one stream": 2_000.0}

HEAD = """
Written by `make bench-gpu`; a change by hand is lost. The model is a GPT-2 small of random weights in bfloat16, greedy,
with end-of-sequence ignored. A figure is a median, and the range in brackets is over its repeats.
"""
STREAMS_HEAD = """
Milliseconds. The first run of a process is the first traffic that the engine sees; lazily captured graphs are paid for
there.
"""
STEPS_HEAD = f"""
`Engine.step` in its own process, and {REFERENCE} in eager torch with a DynamicCache. A pipelined engine reads the step
before while the next one runs, so its figure is the time from one result to the next.
"""

Results = Mapping[str, Mapping[str, Any]]


def slug(gpu: str) -> str:
    """`NVIDIA H200` into `h200`."""
    return gpu.lower().removeprefix("nvidia ").replace(" ", "-")


def load_parts(folder: Path) -> dict[str, dict[str, Any]]:
    files = {part: folder / f"{part}.json" for part in PARTS}
    return {part: json.loads(file.read_text()) for part, file in files.items() if file.is_file()}


def page(parts: Mapping[str, Mapping[str, Any]]) -> str:
    results = {part: content["results"] for part, content in parts.items()}
    gpu = results.get("roofs", {}).get("gpu", {"name": "unknown GPU"})
    lines = [
        f"# {gpu['name']}",
        HEAD,
        *circumstances(parts, gpu),
        *required_table(list(requirements(results))),
        *stream_tables(results),
        *step_table(results),
        *burst_table(results),
        *block_info_table(results),
    ]
    return "\n".join(lines)


def circumstances(parts: Mapping[str, Mapping[str, Any]], gpu: Mapping[str, Any]) -> list[str]:
    if not parts:
        return ["Nothing has been run.", ""]
    machine = next(iter(parts.values()))["machine"]
    packages = ", ".join(f"{name} {version}" for name, version in machine["packages"].items())
    rows = [
        (name, f"`{part['command']}`", part["date"], f"{part['elapsed_s']:.0f} s", f"{part['load_before']:.1f}")
        for name, part in parts.items()
    ]
    return [
        f"- GPU: {', '.join(f'{name} {value}' for name, value in gpu.items())}",
        f"- Host: {machine['cpu']}; {machine['num_cores']} cores; Python {machine['python']}, {packages}",
        f"- Commit {machine['commit']}",
        "",
        *table(("part", "command", "began", "took", "load before"), rows),
    ]


def requirements(results: Results) -> Iterator[Requirement]:
    for figure, (bound, is_least, unit) in STREAM_FIGURES.items():
        measured = stream_figure(results, SEEDS_WORKLOAD, BASE_SETTING, figure, is_first=False)
        yield Requirement(f"the posts' workload: {figure}", bound, is_least, unit, measured)
    for name, bound in BURST_RATES.items():
        rows = results.get("bursts", {}).get("rows", {}).get(name, ())
        measured = Spread.of([row["tokens_per_s"] for row in rows]) if rows else None
        yield Requirement(name, bound, True, "tokens/s", measured)


def stream_figure(results: Results, workload: str, setting: str, figure: str, *, is_first: bool) -> Spread | None:
    """Of the first run of each process, or of all later ones."""
    processes = results.get("streams", {}).get("workloads", {}).get(workload, {}).get(setting, ())
    runs = [run for process in processes for run in (process[:1] if is_first else process[1:])]
    values = [run[figure] for run in runs if figure in run]
    return Spread.of(values) if values else None


def stream_tables(results: Results) -> list[str]:
    if "streams" not in results:
        return []
    streams = results["streams"]
    lines = ["## The posts' workloads, one option changed at a time", STREAMS_HEAD]
    for workload, by_setting in streams["workloads"].items():
        rows = []
        for setting in by_setting:
            for is_first in (True, False):
                spreads = [stream_figure(results, workload, setting, figure, is_first=is_first) for figure in SHOWN]
                cells = [number(spread.median) if spread else "–" for spread in spreads[1:]]
                rows.append((setting, "first" if is_first else "later", ranged(spreads[0]), *cells))
        lines += [f"### {workload}", "", *table(("setting", "runs", *SHOWN), rows)]
    failures = [f"- {name}: {reason}" for name, reason in streams["failures"].items()]
    return [*lines, *failures, *([""] if failures else [])]


def step_table(results: Results) -> list[str]:
    if "steps" not in results:
        return []
    steps = results["steps"]
    names = list(steps["subjects"])
    rows = []
    for case in steps["cases"]:
        found = {name: case["subjects"].get(name, {}).get("step") for name in names}
        cells = [ranged(Spread(**step)) if step else "failed" for step in found.values()]
        rows.append(
            (str(case["batch"]), str(case["context"]), *cells, roof_cell(results, case["batch"], case["context"]))
        )
    failures = [f"- {name}: {reason}" for name, reason in steps["failures"].items()]
    head = ("batch", "context", *names, "roof")
    return ["## Decode step, milliseconds", STEPS_HEAD, *table(head, rows), *failures, *([""] if failures else [])]


def roof_cell(results: Results, batch: int, context: int) -> str:
    """The formula of `benchmarks/roofs.py`, of GPT-2 small."""
    if "roofs" not in results:
        return "–"
    measured = {"bandwidth": results["roofs"]["bandwidth"], "peak": results["roofs"]["peak"]}
    return number(roofs.roof_of(measured, "bfloat16", batch, context))


def burst_table(results: Results) -> list[str]:
    if "bursts" not in results:
        return []
    rows = []
    for name, repeats in results["bursts"]["rows"].items():
        figures = {key: statistics.median(row[key] for row in repeats) for key in repeats[0]}
        rates = ranged(Spread.of([row["tokens_per_s"] for row in repeats]))
        rows.append((name, rates, *(latency(figures, kind) for kind in ("ttft", "tpot", "itl"))))
    head = ("what", "tokens/s", "TTFT p50 / p99", "TPOT p50 / p99", "ITL p50 / p99")
    told = "`benchmarks/gpu/bursts.py` says what each is. Milliseconds; over HTTP as the clients saw it."
    return ["## Bursts, and one stream", "", told, "", *table(head, rows)]


def block_info_table(results: Results) -> list[str]:
    if "block_info" not in results:
        return []
    rows: Sequence[Sequence[str]] = [(name, ranged(Spread(**row))) for name, row in results["block_info"].items()]
    told = "64 sequences, 12 layers where each has records of its own (`benchmarks/costs/block_info.py`), no GPU."
    return ["## Block metadata", "", told, "", *table(("way", "µs a step"), rows)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", type=Path, default=Path("build/bench-gpu"), metavar="DIR")
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: docs/benchmarks/<gpu>.md")
    arguments = parser.parse_args()
    parts = load_parts(arguments.parts)
    gpu = parts.get("roofs", {}).get("results", {}).get("gpu", {}).get("name", "unknown")
    out = arguments.out or Path("docs/benchmarks") / f"{slug(gpu)}.md"
    text = page(parts)
    out.write_text(text)
    print(text)
    print(f"written to {out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
