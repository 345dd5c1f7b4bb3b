"""Writes the pages in `docs/benchmarks/` from the JSON that the parts of a suite have left.

python -m benchmarks.report [cpu|gpu] [--dir build/bench] [--out FILE]
"""

import argparse
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import requirements, roofs
from benchmarks.figures import Spread, medians
from benchmarks.requirements import PRECISIONS, REFERENCE, Requirement, Results, stream_figure
from benchmarks.workloads import WORKLOADS

PARTS = {"cpu": ("roofs", "decode", "served", "peers"), "gpu": ("roofs", "block_info", "streams", "decode", "bursts")}
STREAM_FIGURES = (
    *("tokens/s", "TTFT p50", "TTFT p99", "TPOT p50", "TPOT p99", "ITL p50", "ITL p95", "ITL p99", "Submit lag p99"),
)
CPU_HEAD = """\
# CPU

Written by `make bench`; a change by hand is lost. How each figure is measured is said at the top of each script in
`benchmarks/`. The model is a GPT-2 small of random weights (124M parameters; `benchmarks/random_gpt2.py`), greedy, with
end-of-sequence ignored. A figure is a median, and the range in brackets is over its repeats; a difference within the
ranges is noise.
"""
GPU_HEAD = """
Written by `make bench-gpu`; a change by hand is lost. The model is a GPT-2 small of random weights in bfloat16, greedy,
with end-of-sequence ignored. A figure is a median, and the range in brackets is over its repeats.
"""
SERVED_HEAD = """\
`benchmarks/workloads.py` says what each consists of. Latencies are p50 / p99 in milliseconds, medians over the repeats.
Libraries without a server (OpenVINO, CTranslate2, transformers) and `engine only` run without HTTP and text, which is a
small advantage. Peak memory counts pages that processes share once for each of them.
"""
STREAMS_HEAD = """
Milliseconds. The first run of a process is the first traffic that the engine sees; lazily captured graphs are paid for
there.
"""
DECODE_HEAD = """\
Speed-ups are against the column of transformers; the roof is of the same run. A pipelined engine reads the step before
while the next one runs, so its figure is the time from one result to the next.
"""

Parts = Mapping[str, Mapping[str, Any]]
"""The JSON of each part that was run."""


def load_parts(suite: str, directory: Path) -> Parts:
    files = {part: directory / f"{part}.json" for part in PARTS[suite]}
    return {part: json.loads(file.read_text()) for part, file in files.items() if file.is_file()}


def cpu_page(parts: Parts) -> str:
    results = {part: content["results"] for part, content in parts.items()}
    sections = [
        CPU_HEAD,
        *circumstances(parts),
        *required_table(requirements.of_cpu(results)),
        *roof_tables(results),
        *decode_tables(results),
        *served_tables(results),
    ]
    return "\n".join(sections)


def gpu_page(parts: Parts) -> str:
    results = {part: content["results"] for part, content in parts.items()}
    sections = [
        f"# {gpu_of(parts).get('name', 'unknown GPU')}",
        GPU_HEAD,
        *circumstances(parts),
        *required_table(list(requirements.of_gpu(results))),
        *stream_tables(results),
        *decode_tables(results),
        *burst_table(results),
        *block_info_table(results),
    ]
    return "\n".join(sections)


def gpu_of(parts: Parts) -> Mapping[str, Any]:
    """What the roofs' part says of the GPU that it ran on."""
    gpu: Mapping[str, Any] = parts.get("roofs", {}).get("results", {}).get("gpu", {})
    return gpu


def slug(gpu: str) -> str:
    """`h200` for `NVIDIA H200`."""
    return gpu.lower().removeprefix("nvidia ").replace(" ", "-")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    return [*lines, *(f"| {' | '.join(row)} |" for row in rows), ""]


def number(value: float) -> str:
    """Three digits that say something."""
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:.{digits}f}"


def ranged(spread: Spread | None) -> str:
    if spread is None:
        return "–"
    if spread.num_repeats == 1:
        return number(spread.median)
    return f"{number(spread.median)} ({number(spread.least)} to {number(spread.most)})"


def without_folders(command: str) -> str:
    """The command with only the last name of each absolute path."""
    return re.sub(r"(?<=\s)/\S*/(?=[^\s/]+)", "…/", command)


def circumstances(parts: Parts) -> list[str]:
    """Date, machine, versions and commands."""
    if not parts:
        return ["Nothing has been run.", ""]
    machine = next(iter(parts.values()))["machine"]
    packages = ", ".join(f"{name} {version}" for name, version in machine["packages"].items())
    rivals = {
        name: version
        for part in ("served", "peers")
        for name, version in parts.get(part, {}).get("results", {}).get("versions", {}).items()
    }
    flags = ", ".join(machine["cpu_flags"])
    gpu = gpu_of(parts)
    lines = [
        *([f"- GPU: {', '.join(f'{name} {value}' for name, value in gpu.items())}"] if gpu else []),
        f"- Processor: {machine['cpu']}; {machine['num_cores']} cores, L3 {machine['l3']}, {flags}",
        f"- Memory: {machine['memory_gb']} GB; Linux {machine['kernel']}",
        f"- Versions: Python {machine['python']}, {packages}; commit {machine['commit']}",
        f"- Rivals: {'; '.join(f'{name}: {version}' for name, version in rivals.items()) or 'none'}",
        "",
    ]
    head = ("part", "command", "began", "took", "load before", "processor time stolen", "groups raised")
    rows = [
        (
            part,
            f"`{without_folders(content['command'])}`",
            content["date"],
            f"{content['elapsed_s']:.0f} s",
            f"{content['load_before']:.1f}",
            f"{content['stolen_share']:.1%}",
            {True: "yes", False: "no", None: "–"}[content["results"].get("is_raised")],
        )
        for part, content in parts.items()
    ]
    return [*lines, *table(head, rows)]


def required_table(rows: Sequence[Requirement]) -> list[str]:
    reached = {True: "yes", False: "**no**", None: "not measured"}
    body = [
        (
            row.measure,
            f"{'≥' if row.is_least else '≤'} {number(row.bound)} {row.unit}",
            f"{ranged(row.measured)}{f'; {row.note}' if row.note else ''}",
            reached[row.is_reached],
        )
        for row in rows
    ]
    counts = {state: sum(row.is_reached is state for row in rows) for state in (True, False, None)}
    summary = f"{counts[True]} reached, {counts[False]} not, {counts[None]} not measured."
    return ["## What must be reached", "", *table(("measure", "required", "measured", "reached"), body), summary, ""]


def roof_tables(results: Results) -> list[str]:
    if "roofs" not in results:
        return []
    measured = results["roofs"]
    reads = [
        (f"read {mib} MiB", f"{rate / 1e9:.1f} GB/s", measured["bandwidth_by"][mib])
        for mib, rate in measured["bandwidth"].items()
    ]
    peaks = [
        (f"multiply in {precision}", f"{rate / 1e9:.0f} GFLOP/s", measured["peak_by"][precision])
        for precision, rate in measured["peak"].items()
    ]
    formula = (
        "`roof = max(weight bytes / bandwidth, GEMM FLOPs / peak) + KV bytes / bandwidth` (`benchmarks/roofs.py`)."
    )
    return ["## Roofs", "", formula, "", *table(("what", "best median", "by"), [*reads, *peaks])]


def decode_tables(results: Results) -> list[str]:
    if "decode" not in results:
        return []
    decode = results["decode"]
    rival = next((name for name in decode["subjects"] if name.startswith("transformers")), REFERENCE)
    names = [name for name in decode["subjects"] if name != rival]
    rows = []
    for case in decode["cases"]:
        reference = requirements.decode_ms(results, rival, case["batch"], case["context"])
        row = [str(case["batch"]), str(case["context"]), ranged(reference)]
        row += [decode_cell(results, name, case["batch"], case["context"], reference) for name in names]
        rows.append(row)
    lines = ["## Decode step, milliseconds", "", DECODE_HEAD, *table(("batch", "context", rival, *names), rows)]
    return [*lines, *failure_lines(decode), *phase_table(results, names)]


def failure_lines(part: Mapping[str, Any]) -> list[str]:
    lines = [f"- {name}: {reason}" for name, reason in part["failures"].items()]
    return [*lines, ""] if lines else []


def precision_of(name: str) -> str:
    """Of a subject of the decode part; those of a GPU are named by an option and are all in bfloat16."""
    last = name.rsplit(maxsplit=1)[-1]
    return last if last in PRECISIONS else "bfloat16"


def decode_cell(results: Results, name: str, batch: int, context: int, reference: Spread | None) -> str:
    own = requirements.decode_ms(results, name, batch, context)
    if own is None:
        return "failed"
    figures = [ranged(own)]
    if reference is not None:
        figures.append(f"{reference.median / own.median:.1f}×")
    if "roofs" in results:
        roof = roofs.roof_of(results["roofs"], precision_of(name), batch, context)
        figures.append(f"{roof / own.median:.0%} of {number(roof)}")
    return "; ".join(figures)


def phase_table(results: Results, names: Sequence[str]) -> list[str]:
    """Where a step's time goes, beside what torch's own GEMMs of that step take alone."""
    rows = []
    for name in names:
        for batch in (1, 64):
            phases = [
                requirements.decode_ms(results, name, batch, 64, part)
                for part in ("schedule", "launch", "wait", "commit")
            ]
            gemms = results.get("roofs", {}).get("step_gemms_ms", {}).get(precision_of(name), {}).get(str(batch))
            if all(phases):
                cells = [f"{phase.median * 1e3:.0f}" for phase in phases if phase is not None]
                rows.append((name, str(batch), *cells, f"{gemms * 1e3:.0f}" if gemms else "–"))
    head = ("engine, context 64", "batch", "schedule µs", "launch µs", "wait µs", "commit µs", "torch's GEMMs alone µs")
    return table(head, rows) if rows else []


def served_tables(results: Results) -> list[str]:
    rows = requirements.served_rows(results)
    if not rows:
        return []
    lines = ["## Workloads", "", SERVED_HEAD]
    for workload in WORKLOADS:
        body = [served_row(row) for row in rows if workload in row["workload"].split(", ")]
        body.sort(key=lambda cells: -float(cells[1].split()[0]) if cells[1][0].isdigit() else 0.0)
        head = ("who", "tokens/s (repeats)", "TTFT", "TPOT", "ITL", "peak MB")
        lines += [f"### {workload}", "", *table(head, body)]
    return lines


def served_row(row: Mapping[str, Any]) -> tuple[str, ...]:
    if not row["repeats"]:
        return (row["name"], row.get("error", "not measured"), "–", "–", "–", "–")
    rates = ", ".join(f"{repeat['tokens_per_s']:.0f}" for repeat in row["repeats"])
    rate = f"{row['median']['tokens_per_s']:.0f} ({rates})"
    return (row["name"], rate, *latencies(row["median"]), f"{row['peak_rss_mb']:.0f}")


def latencies(figures: Mapping[str, float]) -> list[str]:
    """TTFT, TPOT and ITL, each p50 / p99."""
    return [
        " / ".join(number(figures[f"{name}_p{percent}_ms"]) for percent in (50, 99))
        if f"{name}_p50_ms" in figures
        else "–"
        for name in ("ttft", "tpot", "itl")
    ]


def stream_tables(results: Results) -> list[str]:
    if "streams" not in results:
        return []
    lines = ["## The posts' workloads, one option changed at a time", STREAMS_HEAD]
    for workload, by_setting in results["streams"]["workloads"].items():
        rows = []
        for setting in by_setting:
            for runs in ("first", "later"):
                rate, *others = (
                    stream_figure(results, workload, setting, figure, is_first=runs == "first")
                    for figure in STREAM_FIGURES
                )
                cells = [number(spread.median) if spread else "–" for spread in others]
                rows.append((setting, runs, ranged(rate), *cells))
        lines += [f"### {workload}", "", *table(("setting", "runs", *STREAM_FIGURES), rows)]
    return [*lines, *failure_lines(results["streams"])]


def burst_table(results: Results) -> list[str]:
    if "bursts" not in results:
        return []
    rows = [
        (name, ranged(Spread.of([row["tokens_per_s"] for row in repeats])), *latencies(medians(repeats)))
        for name, repeats in results["bursts"]["rows"].items()
    ]
    head = ("what", "tokens/s", "TTFT p50 / p99", "TPOT p50 / p99", "ITL p50 / p99")
    intro = "`benchmarks/gpu/bursts.py` says what each is. Milliseconds; over HTTP as the clients saw it."
    return ["## Bursts, and one stream", "", intro, "", *table(head, rows)]


def block_info_table(results: Results) -> list[str]:
    if "block_info" not in results:
        return []
    rows: Sequence[Sequence[str]] = [(name, ranged(Spread(**row))) for name, row in results["block_info"].items()]
    intro = "64 sequences, 12 layers where each has records of its own (`benchmarks/costs/block_info.py`), no GPU."
    return ["## Block metadata", "", intro, "", *table(("way", "µs a step"), rows)]


def write(suite: str, directory: Path, out: Path | None) -> None:
    """Write the page of the parts in `directory`, and print it; by default it goes to `docs/benchmarks`."""
    parts = load_parts(suite, directory)
    name = "cpu" if suite == "cpu" else slug(gpu_of(parts).get("name", "unknown"))
    file = out or Path("docs/benchmarks") / f"{name}.md"
    text = cpu_page(parts) if suite == "cpu" else gpu_page(parts)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    print(text)
    print(f"written to {file}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", nargs="?", choices=tuple(PARTS), default="cpu", help="default: %(default)s")
    parser.add_argument("--dir", type=Path, metavar="DIR", help="of the parts' results; default: build/bench[-gpu]")
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: docs/benchmarks/cpu.md or <gpu>.md")
    arguments = parser.parse_args()
    default = Path("build/bench" if arguments.suite == "cpu" else "build/bench-gpu")
    write(arguments.suite, arguments.dir or default, arguments.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
