"""Measures attention of whole prompts beside the linears of the same layer, in the shape of Qwen3-0.6B.

    python -m benchmarks.costs.attention [--prompts 1500,4000,16000] [--forms float32,bfloat16] [--rounds 5]
        [--before FILE]

Random numbers; one layer, whose prompt is computed in chunks of 512 tokens as the scheduler cuts it. A form is the type
of queries and cache. Forms take turns with the roof of their products on as many threads (peak.cpp), and with the
layer's linears on one chunk. Printed is the median of the rounds, and the least and the most: milliseconds of a layer's
attention for the whole prompt, 10^9 operations a second (a multiply-add is two, and only keys that a token sees count),
the share of the roof within a round, and attention's share of attention and linears together, for each form of the
linears. `--before` is the file of another build of the same level (`roseinfer kernels list` names it): it takes its
turn in each round, and the ratio of the times is printed too. With one thread the clock is the processor's time of this
process, so that others on it count for less.
"""

import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch

from benchmarks.costs.linears import HEADS, KV_HEADS, LAYER, PEAK_PRODUCTS, SIZE, in_turn, peaks
from benchmarks.machine import Sitting, part_parser
from roseinfer.config.options import RunnerConfig
from roseinfer.model.attention.base import AttentionSpec, PackedTokens
from roseinfer.model.attention.registry import choose_attention
from roseinfer.model.device import Placement, Quantization
from roseinfer.model.kernels.library import Kernels, load_kernels
from roseinfer.model.kv_cache import KVCache
from roseinfer.model.layers.linear import Linear

CHUNK = 512  # tokens: the default of scheduler.max_num_batched_tokens
BLOCK_SIZE = 16
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# Name of the linears -> type of activations, and quantisation.
LINEARS: dict[str, tuple[torch.dtype, Quantization]] = {
    "float32": (torch.float32, "none"),
    "bfloat16": (torch.bfloat16, "none"),
    "int8": (torch.bfloat16, "int8"),
    "int4": (torch.bfloat16, "int4"),
}


def main() -> int:
    parser = part_parser(__doc__, "bench/attention.json")
    parser.add_argument("--prompts", default="1500,4000,16000")
    parser.add_argument("--forms", default="float32,bfloat16")
    parser.add_argument("--linears", default=",".join(LINEARS), help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--before", type=Path, metavar="FILE", help="compiled kernels to compare with")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    kernels = load_kernels(RunnerConfig())
    if kernels is None:
        parser.error("there are no compiled kernels: run `roseinfer kernels build`")
    before = Kernels(kernels.level, args.before) if args.before else None
    sitting, results = Sitting("attention"), {}
    print(f"kernels {kernels.level}, {args.threads} threads")
    roofs = peaks(kernels.level, args.threads)
    linears = {f"linears {name}": _linears(name, kernels) for name in args.linears.split(",") if name}
    for length in map(int, args.prompts.split(",")):
        forms = {name: _prompt(name, kernels, length) for name in args.forms.split(",")}
        former = {f"former {name}": _prompt(name, before, length) for name in forms} if before else {}
        times = in_turn(forms | former | linears | roofs, args.rounds)
        print(f"\na prompt of {length} tokens")
        for name in forms:
            products = 2 * HEADS * SIZE * (length * (length + 1) // 2)
            roof = name.partition("/")[0]
            tops = [2 * PEAK_PRODUCTS[roof] * args.threads / time for time in times[f"peak {roof}"]]
            rates = [2 * products / time for time in times[name]]
            row = {
                "ms": told([time * 1e3 for time in times[name]]),
                "gop_s": told([rate / 1e9 for rate in rates]),
                "share of peak": told([rate / top for rate, top in zip(rates, tops, strict=True)]),
            }
            if before:
                former_times = times[f"former {name}"]
                row["before, ms"] = told([time * 1e3 for time in former_times])
                row["times as fast"] = told([then / now for then, now in zip(former_times, times[name], strict=True)])
            for other in linears:
                both = zip(times[name], times[other], strict=True)
                row[f"beside {other}"] = told([mine / (mine + all_of * length / CHUNK) for mine, all_of in both])
            results[f"{name}, {length} tokens"] = row
            print(f"  {name:<15}" + ", ".join(f"{what} {value}" for what, value in row.items()), flush=True)
    sitting.write(args.out, results)
    return 0


def told(values: list[float]) -> str:
    return f"{statistics.median(values):.3g} ({min(values):.3g} to {max(values):.3g})"


def _linears(name: str, kernels: Kernels) -> Callable[[], object]:
    """One layer's linears for a chunk."""
    dtype, quantization = LINEARS[name]
    placement = Placement(torch.device("cpu"), dtype, quantization, kernels)
    linears = [Linear(torch.randn(outputs, inputs) * inputs**-0.5, None, placement) for inputs, outputs in LAYER]
    rows = {inputs: torch.randn(CHUNK, inputs, dtype=dtype) for inputs, _ in LAYER}
    return lambda: [linear(rows[linear.num_inputs]) for linear in linears]


def _prompt(name: str, kernels: Kernels, length: int) -> Callable[[], object]:
    """One layer's attention for a prompt, chunk by chunk."""
    dtype = DTYPES[name]
    spec = AttentionSpec(HEADS, KV_HEADS, SIZE, SIZE**-0.5, (None,))
    num_blocks = -(-length // BLOCK_SIZE)
    cache = KVCache(spec, num_blocks, BLOCK_SIZE, Placement(torch.device("cpu"), dtype))
    backend = choose_attention("native", cache, spec, kernels)
    table = np.random.default_rng(0).permutation(num_blocks).astype(np.int32)[None]
    packed = torch.randn(length, HEADS + 2 * KV_HEADS, SIZE).to(dtype)

    def chunk(start: int, end: int) -> None:
        tokens = PackedTokens(
            slots=np.zeros(end - start, np.int32),
            positions=np.arange(start, end, dtype=np.int32),
            query_starts=np.array([0, end - start], np.int32),
            block_table=table,
            max_query_len=end - start,
            max_context_len=end,
        )
        backend.prepare(tokens)(0, *torch.split(packed[start:end], [HEADS, KV_HEADS, KV_HEADS], 1))

    chunks = [partial(chunk, start, min(start + CHUNK, length)) for start in range(0, length, CHUNK)]
    return lambda: [compute() for compute in chunks]


if __name__ == "__main__":
    raise SystemExit(main())
