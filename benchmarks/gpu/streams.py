"""Runs the posts' commands on a GPU with one option changed at a time, and keeps the figures of their reports.

    python -m benchmarks.gpu.streams [--device cuda] [--quick] [--model DIR] [--out FILE]

Each process is one `roseinfer bench streaming` without warm-up runs: its first run is the first traffic that the engine
sees, where lazily captured graphs are paid for, and the later ones are warm. The settings take turns.
"""

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import protocol
from benchmarks.machine import Sitting, part_parser
from benchmarks.random_gpt2 import make

NUM_TURNS = 2
NUM_RUNS = 3  # in one process
TIMEOUT_S = 240.0
SETTINGS = {
    "captured first, pinned": {},
    "pageable staging": {"--runner.staging": "pageable"},
    "lazy graphs": {"--runner.cuda-graphs": "lazy"},
    "no graphs": {"--runner.cuda-graphs": "off"},
    "pipeline depth 0": {"--runner.pipeline-depth": "0"},
}
COMMON = (
    *("--prompt", "Hello", "--pretok", "--no-stop-on-eos", "--no-prefix-cache", "--paged-attn", "--cuda-graph"),
    *("--warmup-runs", "0"),
)
WORKLOADS = {  # flags of the posts; the second is the one on block metadata
    "64 requests, 20 ms apart": (
        *("--num-requests", "64", "--max-new-tokens", "128", "--submit-interval-ms", "20"),
        *("--submit-schedule", "absolute", "--stream-interval", "8", "--tokenize-workers", "0"),
        *("--max-batch-size", "64", "--prefill-max-batch-size", "64"),
    ),
    "128 requests at once, prompts × 1 and × 4, decode batch 8": (
        *("--num-requests", "128", "--max-new-tokens", "128", "--prompt-repeats", "1,4"),
    ),
}
QUICK = ("--num-requests", "6", "--max-new-tokens", "6")
NUM_QUICK_SETTINGS = 2


def command_of(workload: str, setting: str, arguments: argparse.Namespace, json_file: Path) -> list[str]:
    options = [word for pair in SETTINGS[setting].items() for word in pair]
    where = ["--hf-model-id", str(arguments.model), "--device", arguments.device]
    numbers = ["--bf16"] if arguments.device == "cuda" else []
    size = [*WORKLOADS[workload], *(QUICK if arguments.quick else ()), "--repeat-runs", str(NUM_RUNS)]
    program = [sys.executable, "-m", "roseinfer", "bench", "streaming"]
    return [*program, *where, *numbers, *COMMON, *size, *options, "--json", str(json_file)]


def figures_of(run: Mapping[str, Any]) -> dict[str, float]:
    """One run of the report's JSON: rate, and percentiles in milliseconds by the report's names."""
    figures = {"tokens/s": run["throughput_tokens_per_s"]}
    for name, pool in run["distributions"].items():
        figures |= {f"{name} {percent}": pool[percent] for percent in ("p50", "p95", "p99")}
    return figures


def measure(workload: str, setting: str, arguments: argparse.Namespace) -> list[dict[str, float]]:
    """The runs of one process, the first one first. Raises RuntimeError."""
    json_file = arguments.out.parent / "streaming.json"
    json_file.unlink(missing_ok=True)
    log = arguments.out.with_suffix(".log")
    if not protocol.run(command_of(workload, setting, arguments, json_file.resolve()), log, TIMEOUT_S):
        raise RuntimeError(f"{setting} failed; see {log}")
    return [figures_of(run) for run in json.loads(json_file.read_text())["runs"]]


def main() -> int:
    parser = part_parser(
        __doc__, "bench-gpu/streams.json", quick="a few tokens, two settings, in one turn", device="cuda", model=True
    )
    arguments = parser.parse_args()
    sitting = Sitting("streams")
    make(arguments.model)
    settings = [*SETTINGS][: NUM_QUICK_SETTINGS if arguments.quick else None]
    rows: dict[str, dict[str, list[list[dict[str, float]]]]] = {name: {s: [] for s in settings} for name in WORKLOADS}
    failures: dict[str, str] = {}
    with protocol.own_session_raised():
        for workload, by_setting in rows.items():
            for _ in range(1 if arguments.quick else NUM_TURNS):
                for setting, processes in by_setting.items():
                    try:
                        processes.append(measure(workload, setting, arguments))
                    except RuntimeError as error:
                        failures[f"{workload}: {setting}"] = str(error)
                        print(f"  {error}", flush=True)
                        continue
                    rates = ", ".join(f"{run['tokens/s']:.0f}" for run in processes[-1])
                    print(f"  {workload}, {setting}: {rates} tokens/s", flush=True)
                    sitting.write(arguments.out, {"workloads": rows, "failures": failures})
    sitting.write(arguments.out, {"workloads": rows, "failures": failures})
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
