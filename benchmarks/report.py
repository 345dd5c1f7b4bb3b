"""Writes the pages in `docs/benchmarks/` from the JSON that the parts of a suite have left.

python -m benchmarks.report [cpu|gpu] [--dir build/bench] [--out FILE]

What a page says stands in `page.md.jinja`; the figures that it asks for are made here.
"""

import argparse
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jinja2

from benchmarks import requirements, roofs
from benchmarks.figures import Spread, medians
from benchmarks.gpu import performance_model
from benchmarks.requirements import PRECISIONS, REFERENCE, Results, decode_ms, roofs_of_turns, stream_figure
from benchmarks.workloads import GPT2_WORKLOADS, QWEN3_WORKLOADS

PARTS = {
    "cpu": ("roofs", "decode", "served", "peers", "linears", "start", "speculation", "mixed", "qwen3"),
    "gpu": ("tests", "sanitizer", "roofs", "search", "block_info", "streams", "decode", "bursts", "served"),
}
STREAM_FIGURES = [
    *("tokens/s", "TTFT p50", "TTFT p99", "TPOT p50", "TPOT p99", "ITL p50", "ITL p95", "ITL p99", "Submit lag p99"),
]
TEMPLATE = Path(__file__).with_name("page.md.jinja")

Parts = Mapping[str, Mapping[str, Any]]
"""The JSON of each part that was run."""


def load_parts(suite: str, directory: Path) -> Parts:
    files = {part: directory / f"{part}.json" for part in PARTS[suite]}
    return {part: json.loads(file.read_text()) for part, file in files.items() if file.is_file()}


def page(suite: str, parts: Parts, failures: Mapping[str, str] | None = None) -> str:
    """The text of a page; `failures` are parts that did not end well, each with what became of it."""
    results = {part: content["results"] for part, content in parts.items()}
    gpu = gpu_of(parts)
    known = performance_model.of_device(gpu.get("name", ""))
    predicted = performance_model.predictions(known) if known else {}
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)  # noqa: S701 - it makes Markdown
    environment.filters |= {
        "number": number,
        "ranged": ranged,
        "latencies": latencies,
        "medians": medians,
        "spread": lambda of: Spread(**of) if isinstance(of, Mapping) else Spread.of(of),
        "without_folders": without_folders,
    }
    text = environment.from_string(TEMPLATE.read_text()).render(
        suite=suite,
        parts=parts,
        failed_parts=failures or {},
        results=results,
        gpu=gpu,
        published=known,
        predicted=predicted,
        rivals={name: version for part in results.values() for name, version in part.get("versions", {}).items()},
        required=requirements.of_cpu(results) if suite == "cpu" else list(requirements.of_gpu(results, predicted)),
        rival=next((name for name in results.get("decode", {}).get("subjects", ()) if is_reference(name)), REFERENCE),
        decode_ms=partial(decode_ms, results),
        decode_cell=partial(decode_cell, results, known),
        phases=partial(phases, results),
        stream_figures=STREAM_FIGURES,
        summarised=requirements.summarised,
        stream_figure=lambda *of: stream_figure(results, *of[:3], is_first=of[3]),
        served_rows=sorted(
            requirements.served_rows(results), key=lambda row: -row["median"]["tokens_per_s"] if row["repeats"] else 0.0
        ),
        workloads=GPT2_WORKLOADS,
        qwen3_workloads=QWEN3_WORKLOADS,
    )
    return text.rstrip() + "\n"


def gpu_of(parts: Parts) -> Mapping[str, Any]:
    """What the roofs' part says of the GPU that it ran on."""
    gpu: Mapping[str, Any] = parts.get("roofs", {}).get("results", {}).get("gpu", {})
    return gpu


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


def is_reference(name: str) -> bool:
    return name.startswith("transformers")


def precision_of(name: str) -> str:
    """Of a subject of the decode part; those of a GPU are named by an option and are all in bfloat16."""
    last = name.rsplit(maxsplit=1)[-1]
    return last if last in PRECISIONS else "bfloat16"


def decode_cell(
    results: Results, gpu: performance_model.Gpu | None, name: str, rival: str, batch: int, context: int
) -> str:
    """A step, how much faster than the rival it is, and its share of the roof: the model's, where the GPU is known."""
    own, reference = (decode_ms(results, each, batch, context) for each in (name, rival))
    if own is None:
        return "failed"
    figures = [ranged(own)]
    if reference is not None:
        figures.append(f"{reference.median / own.median:.1f}×")
    if gpu is not None:
        step = performance_model.decode(batch, context)
        roof = performance_model.step_s(performance_model.MODELS["GPT-2 small"], step, gpu) * 1e3
        figures.append(f"{roof / own.median:.0%} of {number(roof)}")
    elif found := roofs_of_turns(results, name, batch, context):
        of_turn, share = found
        figures.append(f"{share.median:.0%} of {number(of_turn.median)}")
    elif "gpu" in results.get("roofs", {}):
        roof = roofs.roof_of(results["roofs"], precision_of(name), batch, context)
        figures.append(f"{roof / own.median:.0%} of {number(roof)}")
    return "; ".join(figures)


def phases(results: Results, names: Sequence[str]) -> Iterator[list[str]]:
    """Where a step's time goes, beside what torch's own GEMMs of that step take alone."""
    for name in names:
        for batch in (1, 64):
            found = [decode_ms(results, name, batch, 64, part) for part in ("schedule", "launch", "wait", "commit")]
            gemms = results.get("roofs", {}).get("step_gemms_ms", {}).get(precision_of(name), {}).get(str(batch))
            if all(found):
                cells = [f"{phase.median * 1e3:.0f}" for phase in found if phase is not None]
                yield [name, str(batch), *cells, f"{gemms * 1e3:.0f}" if gemms else "–"]


def latencies(figures: Mapping[str, float]) -> str:
    """TTFT, TPOT and ITL, each p50 / p99, as cells of a row."""
    cells = [[figures.get(f"{name}_p{percent}_ms") for percent in (50, 99)] for name in ("ttft", "tpot", "itl")]
    return " | ".join("–" if None in pair else " / ".join(map(number, filter(None, pair))) for pair in cells)


def write(suite: str, directory: Path, out: Path | None, failures: Mapping[str, str] | None = None) -> None:
    """Write the page of the parts in `directory`, and print it; by default it goes to `docs/benchmarks`."""
    parts = load_parts(suite, directory)
    file = out or Path("docs/benchmarks") / f"{suite}.md"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(page(suite, parts, failures))
    print(f"{file.read_text()}\nwritten to {file}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", nargs="?", choices=tuple(PARTS), default="cpu", help="default: %(default)s")
    parser.add_argument("--dir", type=Path, metavar="DIR", help="of the parts' results; default: build/bench[-gpu]")
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: docs/benchmarks/cpu.md or gpu.md")
    arguments = parser.parse_args()
    default = Path("build/bench" if arguments.suite == "cpu" else "build/bench-gpu")
    write(arguments.suite, arguments.dir or default, arguments.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
