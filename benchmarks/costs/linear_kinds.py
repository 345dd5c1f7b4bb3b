"""All linears of a GPT-2 small step, multiplied in every way that this processor has, in turn, into milliseconds.

    python -m benchmarks.costs.linear_kinds [--threads 1] [--rows 1,8,32,64,256] [--rounds 15] [--out FILE]

Every layer has weights of its own, as a model has, so a step of few rows reads them all from memory. An input is the
output before it, as far as their widths go. oneDNN is given two rows in place of one, as the runner does: a single row
would have other bits. Printed is the median of the rounds, and the least and the most.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from benchmarks.engine_options import require_kernels
from benchmarks.machine import Sitting
from benchmarks.random_gpt2 import GPT2_SMALL
from roseinfer.config.tree import RunnerConfig
from roseinfer.model.kernels.library import load_kernels
from roseinfer.model.layers.amx import TileLinear
from roseinfer.model.layers.int8 import IntegerLinear, quantized_weight
from roseinfer.model.layers.linear import OneDnnLinear
from roseinfer.model.layers.packed_linear import RegisterLinear
from roseinfer.model.placement import Placement

CPU = torch.device("cpu")
Multiply = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Kind:
    """A way to multiply rows of `dtype`."""

    dtype: torch.dtype
    make: Callable[[torch.Tensor], Multiply]  # of a weight
    fewest_rows: int = 1


def shapes() -> list[tuple[int, int]]:
    """Inputs and outputs of each linear, in the model's order; the head is the last."""
    width = GPT2_SMALL.width
    layer = [(width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)]
    return layer * GPT2_SMALL.num_layers + [(width, GPT2_SMALL.vocab_size)]


def kinds() -> dict[str, Kind]:
    """By name, those that this processor has."""
    kernels = load_kernels(RunnerConfig())
    made: dict[str, Kind] = {}
    of_float32, of_bfloat16 = (Placement(CPU, dtype, kernels=kernels) for dtype in (torch.float32, torch.bfloat16))
    made["oneDNN float32"] = Kind(torch.float32, partial(one_dnn, of_float32), fewest_rows=2)
    if kernels is not None:
        made["registers float32"] = Kind(torch.float32, partial(register, of_float32))
    made["oneDNN bfloat16"] = Kind(torch.bfloat16, partial(one_dnn, of_bfloat16), fewest_rows=2)
    if of_bfloat16.has_pairs:
        made["registers bfloat16"] = Kind(torch.bfloat16, partial(register, of_bfloat16))
    if of_bfloat16.has_tiles:
        made["tiles bfloat16"] = Kind(torch.bfloat16, partial(tile, of_bfloat16))
    made["torch int8"] = Kind(torch.bfloat16, partial(integer, IntegerLinear, of_bfloat16))
    if of_bfloat16.has_fours:
        made["registers int8"] = Kind(torch.bfloat16, partial(integer, RegisterLinear, of_bfloat16))
    if of_bfloat16.has_tiles:
        made["tiles int8"] = Kind(torch.bfloat16, partial(integer, TileLinear, of_bfloat16))
    return made


def one_dnn(at: Placement, weight: torch.Tensor) -> Multiply:
    return OneDnnLinear(weight, None, "none", at.dtype)


def register(at: Placement, weight: torch.Tensor) -> Multiply:
    return RegisterLinear(weight.to(at.dtype), None, None, "none", at.dtype, at)


def tile(at: Placement, weight: torch.Tensor) -> Multiply:
    return TileLinear(weight.to(at.dtype), None, None, "none", at.dtype, at)


def integer(
    kind: type[TileLinear] | type[RegisterLinear] | type[IntegerLinear], at: Placement, weight: torch.Tensor
) -> Multiply:
    return kind(*quantized_weight(weight), None, "none", at.dtype, at)


def step(linears: list[Multiply], x: torch.Tensor) -> None:
    for linear, (num_inputs, _) in zip(linears, shapes(), strict=True):
        x = linear(x[:, :num_inputs].contiguous())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--rows", type=lambda text: [int(part) for part in text.split(",")], default=[1, 8, 32, 64, 256]
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, default=Path("build/bench/linear_kinds.json"), metavar="FILE")
    arguments = parser.parse_args()
    require_kernels()
    sitting = Sitting("linear_kinds", ["python", "-m", "benchmarks.costs.linear_kinds", *sys.argv[1:]])
    torch.set_num_threads(arguments.threads)
    generator = torch.Generator().manual_seed(0)
    subjects = kinds()
    linears: dict[str, list[Multiply]] = {}
    for name, kind in subjects.items():
        weights = (torch.randn(outputs, inputs, generator=generator) * 0.02 for inputs, outputs in shapes())
        linears[name] = [kind.make(weight) for weight in weights]
    results = []
    print(f"| rows | {' | '.join(subjects)} |")
    print("|---" * (1 + len(subjects)) + "|")
    for num_rows in arguments.rows:
        x = torch.randn(num_rows, GPT2_SMALL.width, generator=generator)
        took_ms: dict[str, list[float]] = {name: [] for name in subjects}
        for repeat in range(-1, arguments.rounds):  # the first is not counted: kernels are made
            for name, kind in subjects.items():
                given = x if num_rows >= kind.fewest_rows else x.expand(kind.fewest_rows, -1)
                given = given.to(kind.dtype)
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
