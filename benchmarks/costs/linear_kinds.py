"""Measures all linears of a GPT-2 small step, multiplied in every way that this processor has, in turn.

    python -m benchmarks.costs.linear_kinds [--threads 1] [--rows 1,8,32,64,256] [--rounds 15] [--out FILE]

Every layer has weights of its own, as a model has, so a step of few rows reads them all from memory. An input is the
output before it, as far as their widths go. oneDNN is given two rows in place of one, as the runner does: a single row
would have other bits. Printed is the median of the rounds, and the least and the most.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from benchmarks.engine_options import require_kernels
from benchmarks.machine import Sitting, part_parser
from benchmarks.random_gpt2 import WIDTH
from benchmarks.roofs import STEP_LINEARS
from roseinfer.config.options import RunnerConfig
from roseinfer.model.device import FOURS, PAIRS, TILES, Placement
from roseinfer.model.kernels.library import load_kernels
from roseinfer.model.layers.linear import IntegerLinear, OneDnnLinear, RegisterLinear, TileLinear, quantized_weight

CPU = torch.device("cpu")
Multiply = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Kind:
    """A way to multiply rows of `at.dtype`."""

    at: Placement
    build: Callable[[Placement, torch.Tensor], Multiply]  # from a weight
    fewest_rows: int = 1


def kinds() -> dict[str, Kind]:
    """By name, those that this processor has."""
    kernels = load_kernels(RunnerConfig())
    float32, bfloat16 = (Placement(CPU, dtype, kernels=kernels) for dtype in (torch.float32, torch.bfloat16))
    known = {
        "oneDNN float32": (True, Kind(float32, one_dnn, fewest_rows=2)),
        "registers float32": (kernels is not None, Kind(float32, partial(own, RegisterLinear))),
        "oneDNN bfloat16": (True, Kind(bfloat16, one_dnn, fewest_rows=2)),
        "registers bfloat16": (bfloat16.has_kernel(PAIRS), Kind(bfloat16, partial(own, RegisterLinear))),
        "tiles bfloat16": (bfloat16.has_kernel(TILES), Kind(bfloat16, partial(own, TileLinear))),
        "torch int8": (True, Kind(bfloat16, partial(integer, IntegerLinear))),
        "registers int8": (bfloat16.has_kernel(FOURS), Kind(bfloat16, partial(integer, RegisterLinear))),
        "tiles int8": (bfloat16.has_kernel(TILES), Kind(bfloat16, partial(integer, TileLinear))),
    }
    return {name: kind for name, (is_here, kind) in known.items() if is_here}


def one_dnn(at: Placement, weight: torch.Tensor) -> Multiply:
    return OneDnnLinear(weight, None, "none", at.dtype)


def own(kind: type[TileLinear] | type[RegisterLinear], at: Placement, weight: torch.Tensor) -> Multiply:
    return kind(weight.to(at.dtype), None, None, "none", at.dtype, at)


def integer(
    kind: type[TileLinear] | type[RegisterLinear] | type[IntegerLinear], at: Placement, weight: torch.Tensor
) -> Multiply:
    return kind(*quantized_weight(weight), None, "none", at.dtype, at)


def step(linears: list[Multiply], x: torch.Tensor) -> None:
    for linear, (num_inputs, _) in zip(linears, STEP_LINEARS, strict=True):
        x = linear(x[:, :num_inputs].contiguous())


def main() -> int:
    parser = part_parser(__doc__, "bench/linear_kinds.json")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--rows", type=lambda text: [int(part) for part in text.split(",")], default=[1, 8, 32, 64, 256]
    )
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    require_kernels()
    sitting = Sitting("linear_kinds")
    torch.set_num_threads(arguments.threads)
    generator = torch.Generator().manual_seed(0)
    subjects = kinds()
    linears: dict[str, list[Multiply]] = {}
    for name, kind in subjects.items():
        weights = (torch.randn(outputs, inputs, generator=generator) * 0.02 for inputs, outputs in STEP_LINEARS)
        linears[name] = [kind.build(kind.at, weight) for weight in weights]
    results = []
    print(f"| rows | {' | '.join(subjects)} |")
    print("|---" * (1 + len(subjects)) + "|")
    for num_rows in arguments.rows:
        x = torch.randn(num_rows, WIDTH, generator=generator)
        took_ms: dict[str, list[float]] = {name: [] for name in subjects}
        for repeat in range(-1, arguments.rounds):  # the first is not counted: kernels are made
            for name, kind in subjects.items():
                given = x if num_rows >= kind.fewest_rows else x.expand(kind.fewest_rows, -1)
                given = given.to(kind.at.dtype)
                began = time.perf_counter()
                step(linears[name], given)
                if repeat >= 0:
                    took_ms[name].append((time.perf_counter() - began) * 1e3)
        cells = [f"{statistics.median(each):.1f} ({min(each):.1f} to {max(each):.1f})" for each in took_ms.values()]
        print(f"| {num_rows} | {' | '.join(cells)} |", flush=True)
        results.append({"rows": num_rows, "ms": took_ms})
    sitting.write(arguments.out, {"threads": arguments.threads, "cases": results})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
