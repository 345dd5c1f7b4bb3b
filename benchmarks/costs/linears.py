"""Measures the linears of Qwen3-0.6B's shape in every form that the processor has, against what memory can deliver.

    python -m benchmarks.costs.linears [--layers 8] [--rounds 15] [--rows 1,8,64,512] [--threads 1] [--forms int8]

Random weights; so many layers that no cache holds them, without the head. The forms compute the same steps in turn,
and one array is read once in each round: the roof of a single row. Printed is the median of the rounds, and the least
and the most: milliseconds, GB/s of weights and scales, and 10^9 operations a second, a multiply-add being two. With one
thread the clock is the processor's time of this process, so that others on the machine count for less.
"""

import statistics
import time
from collections.abc import Callable

import torch

from benchmarks.machine import Sitting, part_parser
from benchmarks.random_qwen3 import QWEN3_06B
from benchmarks.roofs import read_patterns
from roseinfer.config.options import RunnerConfig
from roseinfer.model.device import Placement, Quantization
from roseinfer.model.kernels.library import Kernels, load_kernels
from roseinfer.model.layers.linear import Linear

WIDTH, INNER = QWEN3_06B["hidden_size"], QWEN3_06B["intermediate_size"]
HEADS, KV_HEADS, SIZE = (QWEN3_06B[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim"))
LAYER = (  # inputs, outputs
    (WIDTH, (HEADS + 2 * KV_HEADS) * SIZE),
    (HEADS * SIZE, WIDTH),
    (WIDTH, 2 * INNER),
    (INNER, WIDTH),
)
# Name -> quantisation, whether with compiled kernels, and the bytes of a weight.
FORMS: dict[str, tuple[Quantization, bool, float]] = {
    "float32": ("none", True, 4.0),
    "int8 by torch": ("int8", False, 1.0),
    "int8": ("int8", True, 1.0),
}
ROOF_MIB = 256


def main() -> int:
    parser = part_parser(__doc__, "bench/linears.json")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--rows", default="1,8,64,512")
    parser.add_argument("--forms", default=",".join(FORMS))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    kernels = load_kernels(RunnerConfig())
    sitting, results = Sitting("linears"), {}
    linears = {name: _linears(name, kernels, args.layers) for name in args.forms.split(",")}
    num_weights = args.layers * sum(inputs * outputs for inputs, outputs in LAYER)
    print(f"kernels {kernels.level if kernels else 'off'}, {torch.get_num_threads()} threads, {num_weights:,} weights")
    reads = read_patterns(ROOF_MIB << 20)
    for num_rows in map(int, args.rows.split(",")):
        calls = {name: _step(each, num_rows) for name, each in linears.items()}
        times = _in_turn(calls | reads, args.rounds if num_rows < 64 else max(3, args.rounds // 3))
        roof = max((ROOF_MIB << 20) / min(times[name]) / 1e9 for name in reads)
        print(f"\n{num_rows} rows; memory is read at {roof:.1f} GB/s")
        for name in calls:
            median = statistics.median(times[name])
            told = {
                "ms": median * 1e3,
                "range": [min(times[name]) * 1e3, max(times[name]) * 1e3],
                "gb_s": num_weights * FORMS[name][2] / median / 1e9,
                "gop_s": 2 * num_weights * num_rows / median / 1e9,
            }
            results[f"{name}, {num_rows} rows"] = told | {"roof_gb_s": roof}
            span = f"{told['range'][0]:.1f} to {told['range'][1]:.1f}"
            print(f"  {name:<15}{told['ms']:8.1f} ms ({span}) {told['gb_s']:7.1f} GB/s {told['gop_s']:8.0f} Gop/s")
    sitting.write(args.out, results)
    return 0


def _linears(name: str, kernels: Kernels | None, num_layers: int) -> list[Linear]:
    quantization, has_kernels, _ = FORMS[name]
    placement = Placement(torch.device("cpu"), torch.float32, quantization, kernels if has_kernels else None)
    weights = [torch.randn(outputs, inputs) * inputs**-0.5 for inputs, outputs in LAYER]
    return [Linear(weight, None, placement) for _ in range(num_layers) for weight in weights]


def _step(linears: list[Linear], num_rows: int) -> Callable[[], object]:
    rows = {inputs: torch.randn(num_rows, inputs) for inputs, _ in LAYER}

    def step() -> None:
        for linear in linears:
            linear(rows[linear.num_inputs])

    return step


def _in_turn(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
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
