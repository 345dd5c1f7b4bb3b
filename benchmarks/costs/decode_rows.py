"""Measures decode steps of few rows on the shape of Qwen3-0.6B, replayed and as they are written, and their parts.

    python -m benchmarks.costs.decode_rows [--quick] [--rows 1] [--precisions int8,int4] [--rounds 12] [--steps 20]

The runner alone, without scheduler and server. A round is some steps with `model/steps/replay.py` and some without it,
in turn, and a reading of the memory's speed; printed are medians of the rounds' medians, the least and the most:
milliseconds of a step and of its parts, and the share of a step that reading the weights once would take. A precision
is measured after the other.
"""

import statistics
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict
from time import perf_counter
from typing import Any

import msgspec
import numpy as np

from benchmarks.engine_options import config_of, load_as_engines_do, precision_options
from benchmarks.figures import Spread
from benchmarks.machine import Sitting, part_parser
from benchmarks.random_qwen3 import default_directory, make
from benchmarks.requirements import QWEN3_WEIGHTS
from benchmarks.roofs import read_rate
from roseinfer.engine.core.batch import SlotBinding
from roseinfer.messages import SamplingParams

BYTES = {"float32": 4.0, "bfloat16": 2.0, "int8": 1.0, "int4": 0.5625}  # of a weight, its share of scales included
CONTEXT = 128
PARTS = ("stage", "forward", "sample")
READ_MIB = 512


class Steps:
    """A runner whose slots decode, one token after the other, without an engine."""

    def __init__(self, precision: str, num_rows: int) -> None:
        options = {"model.max_model_len": "2048", "cache.num_blocks": "2048", **precision_options(precision)}
        self._runner = load_as_engines_do(config_of(make(default_directory()), options), max(num_rows, 8))
        self.replay = self._runner._replay  # noqa: SLF001
        self._num_rows, self._position = num_rows, 0
        self._table = np.arange(num_rows * 32, dtype=np.int32).reshape(num_rows, 32)
        bindings = tuple(SlotBinding(slot, SamplingParams(temperature=0.0), 1, ()) for slot in range(num_rows))
        self._times: dict[str, float] = {}
        from roseinfer.model.steps.warm_up_batches import prompt_batch

        # An engine's warm-up begins with a prompt too, so what a first step makes, as the tables of a rotation, is in
        # no recording.
        self._runner.launch(prompt_batch(8, 8, 1)).wait()
        self._run(bindings)

    def _run(self, bindings: tuple[SlotBinding, ...] = ()) -> None:
        from roseinfer.model.steps.warm_up_batches import decode_batch

        batch = decode_batch(self._num_rows, self._position, bindings)
        self._runner.launch(msgspec.structs.replace(batch, block_table=self._table), self._watch).wait()

    @contextmanager
    def _watch(self, name: str) -> Generator[None]:
        began = perf_counter()
        yield
        self._times[name] = (perf_counter() - began) * 1e3

    def measure(self, num_steps: int, *, is_replayed: bool) -> dict[str, float]:
        """Medians of some steps at contexts around `CONTEXT`: milliseconds of a step, and of its parts."""
        self._runner._replay = self.replay if is_replayed else None  # noqa: SLF001
        found: dict[str, list[float]] = {name: [] for name in ("step", *PARTS)}
        for step in range(num_steps + 2):
            self._position = CONTEXT - num_steps // 2 + step
            began = perf_counter()
            self._run()
            if step < 2:  # the first one may be recorded, and has other parts
                continue
            self._times["step"] = (perf_counter() - began) * 1e3
            for name, values in found.items():
                values.append(self._times[name])
        return {name: statistics.median(values) for name, values in found.items()}


def measure(precision: str, num_rows: int, num_rounds: int, num_steps: int) -> dict[str, dict[str, Any]]:
    """Spreads over the rounds of what a step takes, by how it runs and by part."""
    steps, rate = Steps(precision, num_rows), read_rate(READ_MIB << 20)
    rounds: dict[str, list[dict[str, float]]] = {"as written": [], "replayed": []}
    for _ in range(num_rounds):
        memory = rate()
        for name, found in rounds.items():
            times = steps.measure(num_steps, is_replayed=name == "replayed")
            roof_ms = QWEN3_WEIGHTS * BYTES[precision] / memory * 1e3
            found.append(times | {"share": roof_ms / times["step"], "GB/s": memory / 1e9})
    results = {}
    for name, found in rounds.items():
        spreads = {part: Spread.of([each[part] for each in found]) for part in found[0]}
        results[name] = {part: asdict(spread) for part, spread in spreads.items()}
        cells = (f"{part} {each.text('.2f')}" for part, each in spreads.items())
        print(f"{precision}, {num_rows} rows, {name}: {', '.join(cells)}", flush=True)
    ratios = [a["step"] / b["step"] for a, b in zip(*rounds.values(), strict=True)]
    print(f"  times as fast: {Spread.of(ratios).text('.3f')}", flush=True)
    return results


def main() -> int:
    parser = part_parser(__doc__, "bench/decode_rows.json", quick="two rounds")
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--precisions", default="int8,int4")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    sitting, results = Sitting("decode rows"), {}
    for precision in args.precisions.split(","):
        results[precision] = measure(precision, args.rows, 2 if args.quick else args.rounds, args.steps)
    sitting.write(args.out, results)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
