"""Measures the linears of Qwen3-0.6B's shape in every form that the processor has, against what memory can deliver.

    python -m benchmarks.costs.linears [--quick] [--layers 8] [--rounds 15] [--rows 1,8,64,512] [--threads 1]
        [--forms int8]

Random weights; more layers than a cache holds, without the head. The forms compute the same steps in turn, and
in each round the roofs are measured too: one array is read once, and registers are multiplied by the instructions that
the form has at this level (peak.cpp), on as many threads. Printed is the median of the rounds, and the least and the
most: milliseconds, GB/s of weights and scales, 10^9 operations a second, a multiply-add being two, and the median share
of the memory's and of the instructions' roof within a round. With one thread the clock is the processor's time of this
process, so that others on the machine count for less.
"""

import ctypes
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch

from benchmarks.figures import Spread
from benchmarks.machine import Sitting, part_parser
from benchmarks.random_qwen3 import QWEN3_06B
from benchmarks.roofs import read_patterns
from roseinfer.config.options import RunnerConfig
from roseinfer.model.device import Placement, Quantization
from roseinfer.model.kernels.library import LEVELS, SOURCE_DIR, Kernels, find_compiler, load_kernels
from roseinfer.model.layers.linear import Linear
from roseinfer.runtime import memory

WIDTH, INNER = QWEN3_06B["hidden_size"], QWEN3_06B["intermediate_size"]
HEADS, KV_HEADS, SIZE = (QWEN3_06B[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim"))
LAYER = (  # inputs, outputs
    (WIDTH, (HEADS + 2 * KV_HEADS) * SIZE),
    (HEADS * SIZE, WIDTH),
    (WIDTH, 2 * INNER),
    (INNER, WIDTH),
)
# Name -> the type of rows and results, quantisation, whether with compiled kernels, and the bytes of a weight.
FORMS: dict[str, tuple[torch.dtype, Quantization, bool, float]] = {
    "float32": (torch.float32, "none", True, 4.0),
    "bfloat16": (torch.bfloat16, "none", True, 2.0),
    "int8 by torch": (torch.float32, "int8", False, 1.0),
    "int8": (torch.float32, "int8", True, 1.0),
    "int8 of bfloat16": (torch.bfloat16, "int8", True, 1.0),
    "int4": (torch.float32, "int4", True, 0.5625),
    "int4 of bfloat16": (torch.bfloat16, "int4", True, 0.5625),
}
ROOF_MIB = 256
# Of a call, some hundredths of a second; and those of one lane in one instruction, where they are not four.
PEAK_PRODUCTS = {"float32": 3 << 28, "bfloat16": 3 << 31, "int8": 3 << 32, "int4": 3 << 30}
PEAK_DEPTHS = {"float32": 1, "bfloat16": 2}


def main() -> int:
    parser = part_parser(__doc__, "bench/linears.json", quick="three rounds of one layer")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--rows", default="1,8,64,512")
    parser.add_argument("--forms", default=",".join(FORMS))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    if args.quick:
        args.layers, args.rounds = 1, 3
    torch.set_num_threads(args.threads)
    memory.prefer_huge_pages()  # as an engine has it
    memory.keep_freed_memory()
    kernels = load_kernels(RunnerConfig())
    sitting, results = Sitting("linears"), {}
    linears = {name: _linears(name, kernels, args.layers) for name in args.forms.split(",")}
    num_weights = args.layers * sum(inputs * outputs for inputs, outputs in LAYER)
    print(f"kernels {kernels.level if kernels else 'off'}, {torch.get_num_threads()} threads, {num_weights:,} weights")
    reads = read_patterns(ROOF_MIB << 20)
    roofs = peaks(kernels.level, args.threads) if kernels else {}
    for num_rows in map(int, args.rows.split(",")):
        calls = {name: _step(each, num_rows, FORMS[name][0]) for name, each in linears.items()}
        times = in_turn(calls | reads | roofs, args.rounds)
        read_s = list(map(min, zip(*(times[name] for name in reads), strict=True)))
        print(f"\n{num_rows} rows; memory is read at {(ROOF_MIB << 20) / statistics.median(read_s) / 1e9:.1f} GB/s")
        for name in calls:
            of_memory = [num_weights * FORMS[name][3] / time for time in times[name]]
            of_peak = [2 * num_weights * num_rows / time for time in times[name]]
            rates = [(ROOF_MIB << 20) / time for time in read_s]
            kind = name.removesuffix(" of bfloat16")
            tops = [2 * PEAK_PRODUCTS[kind] * args.threads / time for time in times.get(f"peak {kind}", [])]
            figures = {
                "ms": Spread.of([time * 1e3 for time in times[name]]),
                "gb_s": Spread.of([rate / 1e9 for rate in of_memory]),
                "gop_s": Spread.of([rate / 1e9 for rate in of_peak]),
                "share of memory": Spread.of([rate / roof for rate, roof in zip(of_memory, rates, strict=True)]),
            }
            if tops:
                shares = [rate / top for rate, top in zip(of_peak, tops, strict=True)]
                figures["share of peak"] = Spread.of(shares)
            results[f"{name}, {num_rows} rows"] = {what: asdict(spread) for what, spread in figures.items()}
            texts = (f"{what} {each.text('.3g')}" for what, each in figures.items())
            print(f"  {name:<17}" + ", ".join(texts), flush=True)
    sitting.write(args.out, results)
    return 0


def peaks(level: str, num_threads: int) -> dict[str, Callable[[], object]]:
    """The loops of peak.cpp on all threads, by the forms they are the roof of; those that the level has."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "peak.so"
        flags = (*LEVELS[level].compiler_flags, "-I", str(SOURCE_DIR))
        command = [find_compiler(), *flags, "-shared", str(Path(__file__).with_name("peak.cpp")), "-o", str(file)]
        subprocess.run(command, check=True)  # noqa: S603
        library = ctypes.CDLL(str(file))
    pool = ThreadPoolExecutor(num_threads)

    def call(name: str) -> None:
        count = PEAK_PRODUCTS[name] // (12 * lanes * PEAK_DEPTHS.get(name, 4))
        outs = [(ctypes.c_float * 16)() for _ in range(num_threads)]
        list(pool.map(lambda out: library[f"peak_{name}"](ctypes.c_int64(count), out), outs))

    lanes = 16 if "avx512f" in LEVELS[level].instructions else 8
    return {f"peak {name}": partial(call, name) for name in PEAK_PRODUCTS if hasattr(library, f"peak_{name}")}


def _linears(name: str, kernels: Kernels | None, num_layers: int) -> list[Linear]:
    dtype, quantization, has_kernels, _ = FORMS[name]
    placement = Placement(torch.device("cpu"), dtype, quantization, kernels if has_kernels else None)
    weights = [(torch.randn(outputs, inputs) * inputs**-0.5).to(dtype) for inputs, outputs in LAYER]
    return [Linear(weight, None, placement) for _ in range(num_layers) for weight in weights]


def _step(linears: list[Linear], num_rows: int, dtype: torch.dtype) -> Callable[[], object]:
    rows = {inputs: torch.randn(num_rows, inputs).to(dtype) for inputs, _ in LAYER}

    def step() -> None:
        for linear in linears:
            linear(rows[linear.num_inputs])

    return step


def in_turn(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each call in each round; the first round is not counted."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    times: dict[str, list[float]] = {name: [] for name in calls}
    for index in range(rounds + 1):
        for name, call in calls.items():
            began = clock()
            call()
            if index:
                times[name].append(clock() - began)
    return times


if __name__ == "__main__":
    raise SystemExit(main())
