"""Measures attention of whole prompts, and of decoding rows, beside the linears of a layer, in Qwen3-0.6B's shape.

    python -m benchmarks.costs.attention [--prompts 1500,4000,16000] [--decode 1,8] [--rounds 5] [--before FILE]
        [--forms float32,float32/int8,bfloat16,bfloat16/int8]

Random numbers. A form is the type of queries and cache, or of queries and of the cache behind a slash. A prompt is one
layer's, computed in chunks of 512 tokens as the scheduler cuts it. A decoding step has rows, tokens before them and
layers enough that no cache of the processor holds their keys and values. Forms take turns with the roof of their
products on as many threads (peak.cpp), and with the layer's linears on one chunk. Printed is the median of the rounds,
and the least and the most: of prompts the milliseconds of a layer's attention, 10^9 operations a second (a multiply-add
is two, and only keys that a token sees count), the share of the roof within a round, and attention's share of attention
and linears together, for each form of the linears; of decoding the microseconds of a layer, and the GB/s of keys,
values and scales. `--before` is the file of another build of the same level (`roseinfer kernels list` names it): it
takes its turn with each prompt, and the ratio of the times is printed too. With one thread the clock is the processor's
time of this process, so that others on it count for less.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch

from benchmarks.costs.linears import HEADS, KV_HEADS, LAYER, PEAK_PRODUCTS, SIZE, in_turn, peaks
from benchmarks.figures import Spread
from benchmarks.machine import Sitting, part_parser
from benchmarks.random_qwen3 import QWEN3_06B
from roseinfer.config.options import RunnerConfig
from roseinfer.model.attention.base import AttentionSpec, PackedTokens
from roseinfer.model.attention.kv_cache import CacheType, KVCache, dtype_of
from roseinfer.model.attention.registry import choose_attention
from roseinfer.model.device import Placement, Quantization
from roseinfer.model.kernels.library import Kernels, load_kernels
from roseinfer.model.layers.linear import Linear

CHUNK = 512  # tokens: the default of scheduler.max_num_batched_tokens
BLOCK_SIZE = 16
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
FORMS = "float32,float32/int8,bfloat16,bfloat16/int8"
DECODED_BYTES = 256 << 20  # of keys and values, at least, unless all layers have less
NUM_LAYERS = QWEN3_06B["num_hidden_layers"]
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
    parser.add_argument("--decode", default="1,8", help="rows of decoding steps, or nothing; default: %(default)s")
    parser.add_argument("--forms", default=FORMS, help="default: %(default)s")
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
                "ms": spread([time * 1e3 for time in times[name]]),
                "gop_s": spread([rate / 1e9 for rate in rates]),
                "share of peak": spread([rate / top for rate, top in zip(rates, tops, strict=True)]),
            }
            if before:
                former_times = times[f"former {name}"]
                row["before, ms"] = spread([time * 1e3 for time in former_times])
                row["times as fast"] = spread([then / now for then, now in zip(former_times, times[name], strict=True)])
            for other in linears:
                both = zip(times[name], times[other], strict=True)
                row[f"beside {other}"] = spread([mine / (mine + all_of * length / CHUNK) for mine, all_of in both])
            results[f"{name}, {length} tokens"] = row
            print(f"  {name:<15}" + ", ".join(f"{what} {value}" for what, value in row.items()), flush=True)
        for num_rows in map(int, filter(None, args.decode.split(","))):
            steps = {name: Decoding(name, kernels, length, num_rows) for name in forms}
            former_steps = {f"former {name}": Decoding(name, before, length, num_rows) for name in forms if before}
            results |= _decode(steps, former_steps, args.rounds)
    sitting.write(args.out, results)
    return 0


def spread(values: list[float]) -> str:
    return Spread.of(values).text(".3g")


def _linears(name: str, kernels: Kernels) -> Callable[[], object]:
    """One layer's linears for a chunk."""
    dtype, quantization = LINEARS[name]
    placement = Placement(torch.device("cpu"), dtype, quantization, kernels)
    linears = [Linear(torch.randn(outputs, inputs) * inputs**-0.5, None, placement) for inputs, outputs in LAYER]
    rows = {inputs: torch.randn(CHUNK, inputs, dtype=dtype) for inputs, _ in LAYER}
    return lambda: [linear(rows[linear.num_inputs]) for linear in linears]


def _decode(
    steps: dict[str, "Decoding"], former_steps: dict[str, "Decoding"], rounds: int
) -> dict[str, dict[str, str]]:
    """Steps of each form in turn, and of the former build."""
    results = {}
    times = in_turn({name: step.compute for name, step in (steps | former_steps).items()}, rounds)
    for name, step in steps.items():
        layers = [time / step.num_layers for time in times[name]]
        row = {
            "us": spread([time * 1e6 for time in layers]),
            "gb_s": spread([step.layer_bytes / time / 1e9 for time in layers]),
        }
        if former_times := times.get(f"former {name}"):
            row["times as fast"] = spread([then / now for then, now in zip(former_times, times[name], strict=True)])
        results[f"{name}, {step.title}"] = row
        print(f"  {name:<15} {step.title}: " + ", ".join(f"{what} {value}" for what, value in row.items()), flush=True)
    return results


def _placement(name: str) -> tuple[Placement, CacheType]:
    dtype, _, cache_type = name.partition("/")
    return Placement(torch.device("cpu"), DTYPES[dtype]), "int8" if cache_type == "int8" else "auto"


class Decoding:
    """A step of rows with one token each, in several layers whose caches are full of random numbers."""

    def __init__(self, name: str, kernels: Kernels, length: int, num_rows: int) -> None:
        placement, cache_type = _placement(name)
        one = AttentionSpec(HEADS, KV_HEADS, SIZE, SIZE**-0.5, (None,))
        self.title = f"{num_rows} rows behind {length} tokens"
        self.layer_bytes = num_rows * length * one.bytes_per_token(dtype_of(cache_type, placement))
        self.num_layers = min(NUM_LAYERS, -(-DECODED_BYTES // self.layer_bytes))
        spec = dataclasses.replace(one, windows=(None,) * self.num_layers)
        blocks_each = length // BLOCK_SIZE + 1
        cache = KVCache(spec, num_rows * blocks_each, BLOCK_SIZE, placement, cache_type)
        for numbers in (*cache.keys, *cache.values):
            numbers.random_(-127, 128) if cache.is_quantized else numbers.normal_()
        for scales in (*cache.key_scales, *cache.value_scales):
            scales.fill_(0.02)
        table = np.random.default_rng(0).permutation(num_rows * blocks_each).astype(np.int32)
        packed = torch.randn(num_rows, HEADS + 2 * KV_HEADS, SIZE).to(placement.dtype)
        self._inputs = torch.split(packed, [HEADS, KV_HEADS, KV_HEADS], 1)
        self._tokens = PackedTokens(
            slots=np.arange(num_rows, dtype=np.int32),
            positions=np.full(num_rows, length, np.int32),
            query_starts=np.arange(num_rows + 1, dtype=np.int32),
            block_table=table.reshape(num_rows, -1),
            max_query_len=1,
            max_context_len=length + 1,
        )
        self._backend = choose_attention("native", cache, spec, kernels)

    def compute(self) -> None:
        attend = self._backend.prepare(self._tokens)
        for layer in range(self.num_layers):
            attend(layer, *self._inputs)


def _prompt(name: str, kernels: Kernels, length: int) -> Callable[[], object]:
    """One layer's attention for a prompt, chunk by chunk."""
    placement, cache_type = _placement(name)
    spec = AttentionSpec(HEADS, KV_HEADS, SIZE, SIZE**-0.5, (None,))
    num_blocks = -(-length // BLOCK_SIZE)
    cache = KVCache(spec, num_blocks, BLOCK_SIZE, placement, cache_type)
    backend = choose_attention("native", cache, spec, kernels)
    table = np.random.default_rng(0).permutation(num_blocks).astype(np.int32)[None]
    packed = torch.randn(length, HEADS + 2 * KV_HEADS, SIZE).to(placement.dtype)

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
