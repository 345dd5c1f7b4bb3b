"""The parts' JSON into `docs/benchmarks/cpu.md`. Knows every part's shape, starts nothing and measures nothing.

python -m benchmarks.report [--parts build/bench] [--out docs/benchmarks/cpu.md]
"""

import argparse
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import requirements, roofs
from benchmarks.figures import Spread
from benchmarks.requirements import REFERENCE, Requirement, Results
from benchmarks.workloads import WORKLOADS

PARTS = ("roofs", "decode", "served", "peers")
HEAD = """\
# CPU

Written by `make bench`; a change by hand is lost. How each figure is measured is said at the top of each script in
`benchmarks/`. The model is a GPT-2 small of random weights (124M parameters; `benchmarks/random_gpt2.py`), greedy, with
end-of-sequence ignored. A figure is a median, and the range in brackets is over its repeats; a difference within the
ranges is noise.
"""


SERVED_HEAD = """\
`benchmarks/workloads.py` says what each consists of. Latencies are p50 / p99 in milliseconds, medians over the repeats.
Libraries without a server (OpenVINO, CTranslate2, transformers) and `engine only` run without HTTP and text, which is a
small advantage. Peak memory counts pages that processes share once for each of them.
"""


def load_parts(folder: Path) -> dict[str, dict[str, Any]]:
    """The parts that have been run, whole."""
    files = {part: folder / f"{part}.json" for part in PARTS}
    return {part: json.loads(file.read_text()) for part, file in files.items() if file.is_file()}


def page(parts: Mapping[str, Mapping[str, Any]]) -> str:
    results = {part: content["results"] for part, content in parts.items()}
    sections = [
        HEAD,
        *circumstances(parts),
        *required_table(requirements.requirements(results)),
        *roof_tables(results),
        *decode_tables(results),
        *served_tables(results),
    ]
    return "\n".join(sections)


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
    """The command with only the last name of each absolute path: where a page was made is nobody's business."""
    return re.sub(r"(?<=\s)/\S*/(?=[^\s/]+)", "…/", command)


def circumstances(parts: Mapping[str, Mapping[str, Any]]) -> list[str]:
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
    lines = [
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
    told = f"{counts[True]} reached, {counts[False]} not, {counts[None]} not measured."
    return ["## What must be reached", "", *table(("measure", "required", "measured", "reached"), body), told, ""]


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
    lines = [
        "## Decode step, milliseconds",
        "",
        "Speed-ups are against the column of transformers; the roof is of the same run.",
        "",
    ]
    names = [name for name in decode["subjects"] if name != REFERENCE]
    rows = []
    for case in decode["cases"]:
        reference = requirements.decode_ms(results, REFERENCE, case["batch"], case["context"])
        row = [str(case["batch"]), str(case["context"]), ranged(reference)]
        row += [decode_cell(results, name, case["batch"], case["context"], reference) for name in names]
        rows.append(row)
    failures = [f"- {name}: {reason}" for name, reason in decode["failures"].items()]
    lines += [*table(("batch", "context", REFERENCE, *names), rows), *failures, *([""] if failures else [])]
    return [*lines, *phase_table(results, names)]


def decode_cell(results: Results, name: str, batch: int, context: int, reference: Spread | None) -> str:
    own = requirements.decode_ms(results, name, batch, context)
    if own is None:
        return "failed"
    told = [ranged(own)]
    if reference is not None:
        told.append(f"{reference.median / own.median:.1f}×")
    if "roofs" in results:
        roof = roofs.roof_of(results["roofs"], name.rsplit(maxsplit=1)[-1], batch, context)
        told.append(f"{roof / own.median:.0%} of {number(roof)}")
    return "; ".join(told)


def phase_table(results: Results, names: Sequence[str]) -> list[str]:
    """Where a step's time goes, beside what torch's own GEMMs of that step take alone."""
    rows = []
    for name in names:
        for batch in (1, 64):
            phases = [
                requirements.decode_ms(results, name, batch, 64, part)
                for part in ("schedule", "launch", "wait", "commit")
            ]
            gemms = results.get("roofs", {}).get("step_gemms_ms", {}).get(name.split()[-1], {}).get(str(batch))
            if all(phases):
                told = [f"{phase.median * 1e3:.0f}" for phase in phases if phase is not None]
                rows.append((name, str(batch), *told, f"{gemms * 1e3:.0f}" if gemms else "–"))
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
    figures = row["median"]
    latencies = [latency(figures, name) for name in ("ttft", "tpot", "itl")]
    rates = ", ".join(f"{repeat['tokens_per_s']:.0f}" for repeat in row["repeats"])
    told = f"{figures['tokens_per_s']:.0f} ({rates})"
    return (row["name"], told, *latencies, f"{row['peak_rss_mb']:.0f}")


def latency(figures: Mapping[str, float], name: str) -> str:
    if f"{name}_p50_ms" not in figures:
        return "–"
    return " / ".join(number(figures[f"{name}_p{percent}_ms"]) for percent in (50, 99))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", type=Path, default=Path("build/bench"), metavar="DIR")
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks/cpu.md"), metavar="FILE")
    arguments = parser.parse_args()
    text = page(load_parts(arguments.parts))
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(text)
    print(text)
    print(f"written to {arguments.out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
