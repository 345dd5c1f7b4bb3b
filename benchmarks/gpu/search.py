"""Searches for the fastest cuts of decode attention, and for the batches that a fused linear and norm are faster for.

    python -m benchmarks.gpu.search [--device cuda] [--quick] [--write] [--out FILE]

Each candidate is captured as one CUDA graph over many layers, whose keys and weights together do not fit into the L2
cache, and replayed; a time is the median of the replays, for one layer. A cut serves all batches and contexts, so that
with the least product of times over them is chosen, if it is faster than the rule's by SIGNIFICANT. With `--write` the
choice becomes the GPU's entry in `triton_kernels/tunings.json`. With `--device cpu`, where kernels are interpreted, it
only shows that the script works.
"""

import argparse
import itertools
import math
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

from benchmarks.machine import Sitting, part_parser

if __name__ == "__main__" and "cpu" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # is read when Triton is imported

import msgspec
import torch
from torch.nn import functional

from benchmarks.gpu.kernels import LayerKernels
from benchmarks.gpu.performance_model import MODELS, Model
from roseinfer.model.triton_kernels import linear, paging, pointwise, tunings
from roseinfer.model.triton_kernels.tunings import DecodeTuning, Tunings

BATCHES, CONTEXTS = (1, 4, 16, 64), (128, 512, 2048)
TILES, SPLIT_KEYS, PROGRAMS, WARPS = (32, 64), (64, 256), (2,), (2, 4, 8)  # a few hundred kernels to compile
SIGNIFICANT = 0.03
_COLD_BYTES = 256 << 20  # several times an L2 cache
_MAX_LAYERS = 32
_NUM_REPLAYS = 10
TINY = Model(1, 32, 2, 1, 24, 64, 64)

Call = Callable[[], object]


def microseconds(calls: Sequence[Call], device: torch.device) -> float:
    """Microseconds of one call, of several that run one after the other."""
    for call in calls:
        call()
    if device.type == "cpu":
        began = perf_counter()
        calls[0]()
        return (perf_counter() - began) * 1e6
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times: list[float] = []
    for _ in range(_NUM_REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(times)


def candidates(*, is_quick: bool) -> list[DecodeTuning]:
    if is_quick:
        return [DecodeTuning(tile=16, min_split_keys=64, programs=1, num_warps=4)]
    return [
        DecodeTuning(tile=tile, min_split_keys=keys, programs=programs, num_warps=num_warps)
        for tile, keys, programs, num_warps in itertools.product(TILES, SPLIT_KEYS, PROGRAMS, WARPS)
        if tile <= keys
    ]


def search_decode(model: Model, device: torch.device, *, is_quick: bool) -> tuple[str, dict[str, Any]]:
    """The shape's key, and the best cut, its time in parts of the rule's, and the rule's times in microseconds."""
    batches, contexts = ((2,), (96,)) if is_quick else (BATCHES, CONTEXTS)
    times: dict[DecodeTuning, list[float]] = {}
    for batch, context in itertools.product(batches, contexts):
        layer = LayerKernels(model, batch, context, device)
        heads, rule = layer.spec, layer.rule
        num_bytes = 4 * batch * context * heads.num_kv_heads * heads.head_dim
        count = 1 if is_quick else max(4, min(_MAX_LAYERS, _COLD_BYTES // num_bytes))
        layers = [layer, *(LayerKernels(model, batch, context, device) for _ in range(count - 1))]
        for tuning in {rule: None, **dict.fromkeys(candidates(is_quick=is_quick))}:
            calls = [each.decoding(batch, tuning) for each in layers]
            times.setdefault(tuning, []).append(microseconds(calls, device))
    shares = {
        tuning: math.prod(mine / rules for mine, rules in zip(found, times[rule], strict=True)) ** (1 / len(found))
        for tuning, found in times.items()
    }
    best = min(shares, key=shares.__getitem__)
    if shares[best] > 1 - SIGNIFICANT:
        best = rule
    padded = paging.heads_of(heads)
    key = tunings.decode_key(padded.group.value, padded.padded_dim.value, torch.bfloat16)
    return key, {"best": msgspec.to_builtins(best), "share": shares[best], "is_rule": best == rule, "us": times[rule]}


def search_linear(model: Model, device: torch.device, *, is_quick: bool) -> tuple[str, dict[str, Any]]:
    """The shape's key, and the most rows for which one kernel is faster than the library's product and the norm."""
    num_inputs = model.num_heads * model.head_dim
    count = 1 if is_quick else max(4, min(64, _COLD_BYTES // (2 * model.width * num_inputs)))
    times, best = {}, 0
    for num_rows in (4,) if is_quick else (1, 8, 16, 32, 64):
        fused, apart = [], []
        for _ in range(count):
            layer = LayerKernels(model, num_rows, 16, device)
            weights, out_dtype = layer.weights, torch.bfloat16
            x = torch.zeros(num_rows, model.width, device=device)
            rows = torch.zeros(num_rows, num_inputs, dtype=out_dtype, device=device)

            fused.append(partial(linear.linear_add_norm, rows, weights, x, out_dtype))
            apart.append(partial(_in_two, rows, weights, x))
        times[num_rows] = microseconds(fused, device), microseconds(apart, device)
        if times[num_rows][0] < times[num_rows][1]:
            best = num_rows
    return tunings.linear_key(model.width, num_inputs), {"best": best, "us": times}


def _in_two(rows: torch.Tensor, weights: linear.Weights, x: torch.Tensor) -> None:
    delta = functional.linear(rows, weights.linear, weights.linear_bias)
    pointwise.add_norm(x, delta, weights.norm, weights.norm_bias, weights.epsilon, rows.dtype)


def measured(results: dict[str, Any]) -> Tunings:
    """The entry of the file: what differs from the rule."""
    decode = {key: row["best"] for key, row in results["decode"].items() if not row["is_rule"]}
    rows = {key: row["best"] for key, row in results["linear"].items()}
    return msgspec.convert({"decode": decode, "linear_rows": rows}, Tunings)


def write(device_name: str, entry: Tunings, file: Path) -> None:
    known = msgspec.json.decode(file.read_bytes(), type=dict[str, Tunings])
    text = msgspec.json.encode({**known, device_name: entry}, order="sorted")
    file.write_bytes(msgspec.json.format(text, indent=1) + b"\n")


def parser_of() -> argparse.ArgumentParser:
    parser = part_parser(__doc__, "bench-gpu/search.json", quick="one candidate", device="cuda")
    parser.add_argument("--write", action="store_true", help="the GPU's entry in triton_kernels/tunings.json")
    return parser


def main() -> int:
    arguments = parser_of().parse_args()
    sitting, device = Sitting("search"), torch.device(arguments.device)
    is_quick = arguments.quick or device.type == "cpu"
    results: dict[str, Any] = {"decode": {}, "linear": {}}
    for name, model in {"tiny": TINY}.items() if device.type == "cpu" else MODELS.items():
        for part, search in (("decode", search_decode), ("linear", search_linear)):
            key, row = search(model, device, is_quick=is_quick)
            results[part][key] = row
            print(f"  {name}, {part} ({key}): {row['best']}", flush=True)
        if arguments.write and not is_quick:  # what is found is kept, also if there is no time for the rest
            write(tunings.device_name(device), measured(results), Path(tunings.__file__).with_name(tunings.FILE_NAME))
        sitting.write(arguments.out, results)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
