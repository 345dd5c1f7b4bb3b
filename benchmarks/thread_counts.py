"""One thread of the engine and all cores, in turn, for models of growing size, into tokens/s and time per token.

    python -m benchmarks.thread_counts [--precisions bfloat16,float32] [--threads 1,2] [--repeats 5] [--out FILE]

The engine's threads wait for each other several times in each layer, and front end and clients want processors too. So
a second thread slows a small model down, and speeds a large one up. Served is a stream alone, and W2. The models are
GPT-2s of random weights with the embedded model's tokenizer; the first is the embedded model itself. What this measured
is what `model/device.py:default_num_threads` goes by.
"""

import argparse
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import protocol, rotation
from benchmarks.engine_options import PRECISIONS
from benchmarks.machine import Sitting
from benchmarks.random_gpt2 import Gpt2Shape, write_config, write_weights
from benchmarks.roofs import WEIGHT_BYTES
from benchmarks.rotation import Limits
from benchmarks.served import ServedEntrant
from benchmarks.servers import Server, roseinfer_plan
from benchmarks.workloads import WORKLOADS, Shape
from roseinfer.config.tree import DEMO_MODEL
from roseinfer.model.checkpoint import Checkpoint, resolve_checkpoint
from roseinfer.model.device import num_usable_cores

SIZES = ((4, 256), (6, 384), (8, 512), (12, 640))  # layers and width
VOCAB_SIZE = 2048
SHAPES = {"alone": Shape(1, 0.0, (4,), 128), "W2": WORKLOADS["W2"]}
NUM_REPEATS = 5
BUDGET_S = 120.0  # of one workload of one model, with all numbers of threads


def models(directory: Path) -> Iterator[Path]:
    """The embedded model, and larger ones, each made when it is its turn."""
    demo = resolve_checkpoint(DEMO_MODEL)
    yield demo
    for num_layers, width in SIZES:
        model = directory / f"{num_layers} layers of {width}"
        model.mkdir()
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(demo / name, model)
        shape = Gpt2Shape(num_layers, width, VOCAB_SIZE)
        write_weights(model, shape)
        write_config(model, shape)
        yield model


def measure(model: Path, precision: str, threads: list[int], num_repeats: int, log: Path) -> list[dict[str, Any]]:
    """Rows of the rotation, one for each number of threads and workload."""
    with ExitStack() as stack:
        entrants = []
        for num_threads in threads:
            plan = roseinfer_plan(model, precision)
            command = (*plan.command, "--runner.num-threads", str(num_threads))
            plan = replace(plan, name=f"{num_threads} threads", command=command)
            server = stack.enter_context(Server(plan, log))
            server.pause()
            entrants.append(ServedEntrant(server, tuple(SHAPES)))
        limits = Limits(num_repeats, BUDGET_S)
        return rotation.run(entrants, rotation.words_of(model), tuple(SHAPES), limits, SHAPES)


def table_row(name: str, mib: float, precision: str, rows: list[dict[str, Any]]) -> str:
    """One model at one precision: median tokens/s and TPOT in ms of each workload, for each number of threads."""
    cells = [name, precision, f"{mib:.0f}"]
    for row in rows:
        if row["repeats"]:
            rates = sorted(repeat["tokens_per_s"] for repeat in row["repeats"])
            median = row["median"]
            cells.append(
                f"{median['tokens_per_s']:.0f} ({rates[0]:.0f} to {rates[-1]:.0f}), {median['tpot_p50_ms']:.2f} ms"
            )
        else:
            cells.append(f"failed: {row['error']}")
    return f"| {' | '.join(cells)} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precisions", type=lambda text: text.split(","), default=["bfloat16", "float32"])
    parser.add_argument(
        "--threads",
        type=lambda text: [int(part) for part in text.split(",")],
        default=sorted({1, num_usable_cores()}),
        metavar="N,N",
    )
    parser.add_argument("--repeats", type=int, default=NUM_REPEATS)
    parser.add_argument("--out", type=Path, default=Path("build/bench/thread_counts.json"), metavar="FILE")
    arguments = parser.parse_args()
    if strangers := set(arguments.precisions) - set(PRECISIONS):
        parser.error(f"--precisions: {', '.join(sorted(strangers))} is none of {', '.join(PRECISIONS)}")
    sitting = Sitting("thread_counts", ["python", "-m", "benchmarks.thread_counts", *sys.argv[1:]])
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    results, lines = [], []
    with tempfile.TemporaryDirectory() as scratch, protocol.own_session_raised():
        for model in models(Path(scratch)):
            with Checkpoint(model) as checkpoint:
                num_elements = checkpoint.num_matrix_elements
            for precision in arguments.precisions:
                mib = num_elements * WEIGHT_BYTES[precision] / 2**20
                print(f"{model.name}, {precision}, {mib:.0f} MiB", flush=True)
                log = arguments.out.with_suffix(".log")
                rows = measure(model, precision, arguments.threads, arguments.repeats, log)
                results.append({"model": model.name, "precision": precision, "weights_mib": mib, "rows": rows})
                lines.append(table_row(model.name, mib, precision, rows))
    headings = ["model", "dtype", "weights, MiB"]
    headings += [f"{name}, {n} thread{'s' * (n > 1)}" for name in SHAPES for n in arguments.threads]
    print("\n".join([f"| {' | '.join(headings)} |", "|---" * len(headings) + "|", *lines]))
    sitting.write(arguments.out, {"models": results})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
