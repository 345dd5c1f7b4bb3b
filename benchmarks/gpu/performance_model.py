"""Predicts what a step takes on a GPU, from the bytes and operations of its nodes and the rates that NVIDIA publishes.

    python -m benchmarks.gpu.performance_model [--shape "GPT-2 small"] [--batch 64] [--context 512] [--prompt N]

It prints the nodes of one step: `batch` rows that decode, or with `--prompt` one prompt of that many tokens. This is a
model and no measurement. A node takes the longer of bytes / bandwidth and operations / peak, and NODE_S to begin; one
follows the other. Weights, activations and keys are in bfloat16, the residual stream in float32, each read or written
once for each node, as if no cache held any of it. Operations are those of products, a multiply-add being two; vectors
of weights are left out. A kernel reaches less than these rates and a host adds to them, so a figure is a roof.
"""

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch

from benchmarks.random_gpt2 import HEAD_DIM, NUM_LAYERS, NUM_POSITIONS, VOCAB_SIZE, WIDTH
from benchmarks.random_qwen3 import QWEN3_06B
from roseinfer.model.triton_kernels.tunings import linear_rows

if TYPE_CHECKING:
    from benchmarks.workloads import Shape
    from roseinfer.bench.definitions import Observed

NODE_S = 1.5e-6  # between the end of a node of a graph and the work of the next; assumed
NUM_BYTES = 2  # of a number in bfloat16


class Gpu(NamedTuple):
    """Rates of a data sheet."""

    device: str  # as torch names it
    bandwidth: float  # bytes/s
    peak: float  # operations/s in bfloat16 without sparsity; the sheets of H100 and H200 give twice that, with it
    num_processors: int
    source: str


GPUS = {
    "H100": Gpu("NVIDIA H100 80GB HBM3", 3.35e12, 989.5e12, 132, "NVIDIA H100 Tensor Core GPU data sheet, H100 SXM"),
    "H200": Gpu("NVIDIA H200", 4.8e12, 989.5e12, 132, "NVIDIA H200 Tensor Core GPU data sheet, H200 SXM"),
    "A100": Gpu("NVIDIA A100-SXM4-80GB", 2.039e12, 312e12, 108, "NVIDIA A100 Tensor Core GPU data sheet, 80 GB SXM"),
    "L40S": Gpu("NVIDIA L40S", 0.864e12, 362.05e12, 142, "NVIDIA L40S GPU data sheet"),
}


class Model(NamedTuple):
    """The shape of a model: GPT-2's layers, or with `is_gated` those of Llama and Qwen3."""

    num_layers: int
    width: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    inner: int
    vocab_size: int
    is_gated: bool = True


MODELS = {
    "GPT-2 small": Model(NUM_LAYERS, WIDTH, 12, 12, HEAD_DIM, 4 * WIDTH, VOCAB_SIZE, is_gated=False),
    "Qwen3-0.6B": Model(
        *(QWEN3_06B[name] for name in ("num_hidden_layers", "hidden_size", "num_attention_heads")),
        *(QWEN3_06B[name] for name in ("num_key_value_heads", "head_dim", "intermediate_size", "vocab_size")),
    ),
    "Llama-3.2-3B": Model(28, 3072, 24, 8, 128, 8192, 128_256),
    "Llama-3.1-8B": Model(32, 4096, 32, 8, 128, 14_336, 128_256),
}


class Step(NamedTuple):
    """What a step computes."""

    num_tokens: int
    num_samples: int  # rows whose logits are computed
    num_keys: int  # positions that are read, each sequence's once
    num_pairs: int  # of a token and a position that it sees

    @property
    def is_decode(self) -> bool:
        return self.num_tokens == self.num_samples


def decode(batch: int, context: int) -> Step:
    """A token for each of `batch` sequences that have `context` with it."""
    return Step(batch, batch, batch * context, batch * context)


def prompt(num_tokens: int) -> Step:
    """One prompt, alone and from its beginning."""
    return Step(num_tokens, 1, num_tokens, num_tokens * (num_tokens + 1) // 2)


class Node(NamedTuple):
    """Kernels of one kind in a step, and bytes and operations of each."""

    name: str
    num_nodes: int
    num_bytes: int
    num_operations: int = 0

    def seconds(self, gpu: Gpu) -> float:
        """The time that all of them take."""
        return self.num_nodes * (max(self.num_bytes / gpu.bandwidth, self.num_operations / gpu.peak) + NODE_S)


def nodes_of(model: Model, step: Step, gpu: Gpu) -> list[Node]:
    """The nodes of a step, as `runner.py` and the model's file launch them."""
    return [*_begin(model, step), *_layers(model, step, gpu), *_end(model, step)]


def _begin(model: Model, step: Step) -> Iterator[Node]:
    """From the integers of the step to the residual stream."""
    num_tokens, row = step.num_tokens, step.num_tokens * model.width
    if step.is_decode:
        yield Node("block table", 1, 16 * num_tokens)
    yield Node("last tokens", 1 if step.is_decode else 2, 24 * num_tokens)
    yield Node("embedding", 1, (4 + (1 if model.is_gated else 2) * NUM_BYTES) * row)


def _layers(model: Model, step: Step, gpu: Gpu) -> Iterator[Node]:
    num_layers, width, inner, rows = model.num_layers, model.width, model.inner, step.num_tokens
    queries, keys = model.num_heads * model.head_dim, 2 * model.num_kv_heads * model.head_dim
    norm_bytes = (8 + 2 * NUM_BYTES) * rows * width
    yield Node("norms", num_layers, norm_bytes)
    yield _product("queries, keys and values", num_layers, rows, width, queries + keys)
    if model.is_gated:
        yield Node("rotations", num_layers, 2 * NUM_BYTES * rows * (queries + keys // 2))
    if not step.is_decode:
        yield Node("keys and values to the cache", num_layers, 2 * NUM_BYTES * rows * keys)
    num_read = step.num_keys * keys + 2 * rows * queries
    yield Node("attention", num_layers, NUM_BYTES * num_read, 4 * step.num_pairs * queries)
    out = _product("output of attention", num_layers, rows, queries, width)
    if rows <= linear_rows(gpu.device, width, queries, torch.bfloat16):
        yield out._replace(name="output of attention and norm", num_bytes=out.num_bytes + norm_bytes)
    else:
        yield out
        yield Node("norms behind attention", num_layers, norm_bytes)
    yield _product("up", num_layers, rows, width, 2 * inner if model.is_gated else inner)
    if model.is_gated:
        yield Node("activation", num_layers, 3 * NUM_BYTES * rows * inner)
    yield _product("down", num_layers, rows, inner, width)


def _end(model: Model, step: Step) -> Iterator[Node]:
    """From the residual stream to sampled tokens."""
    num_samples, width = step.num_samples, model.width
    yield Node("last norm", 1, (8 + 2 * NUM_BYTES) * step.num_tokens * width)
    if not step.is_decode:
        yield Node("rows that sample", 1, 2 * NUM_BYTES * num_samples * width)
    head = _product("head", 1, num_samples, width, model.vocab_size)
    yield head._replace(num_bytes=head.num_bytes + (4 - NUM_BYTES) * num_samples * model.vocab_size)
    yield Node("sampling by pieces", 1, 4 * num_samples * model.vocab_size)
    yield Node("choice of a piece", 1, 4 * num_samples * 1024)
    yield Node("tokens to their slots", 3, 16 * num_samples)


def _product(name: str, num_nodes: int, rows: int, inputs: int, outputs: int) -> Node:
    num_numbers = inputs * outputs + rows * (inputs + outputs)
    return Node(name, num_nodes, NUM_BYTES * num_numbers, 2 * rows * inputs * outputs)


def step_s(model: Model, step: Step, gpu: Gpu) -> float:
    return sum(node.seconds(gpu) for node in nodes_of(model, step, gpu))


# --- the table of docs/performance.md ---------------------------------------------------------------------------------

TABLE_STEPS = {
    **{f"decode, batch {batch}, context 512": decode(batch, 512) for batch in (1, 8, 64)},
    **{f"a prompt of {num_tokens}": prompt(num_tokens) for num_tokens in (128, 1000)},
}


def markdown() -> str:
    """Milliseconds of steps of each model on each GPU, and the rates behind them."""
    lines = [f"| model | step | nodes | GB | TFLOP | {' | '.join(f'{name}, ms' for name in GPUS)} |"]
    lines.append("|---|---|" + "---|" * (3 + len(GPUS)))
    for name, model in MODELS.items():
        for words, step in TABLE_STEPS.items():
            nodes = nodes_of(model, step, GPUS["H100"])
            num_bytes = sum(node.num_nodes * node.num_bytes for node in nodes) / 1e9
            num_operations = sum(node.num_nodes * node.num_operations for node in nodes) / 1e12
            times = " | ".join(f"{step_s(model, step, gpu) * 1e3:.2f}" for gpu in GPUS.values())
            sizes = f"{sum(node.num_nodes for node in nodes)} | {num_bytes:.2f} | {num_operations:.3f}"
            lines.append(f"| {name} | {words} | {sizes} | {times} |")
    lines += ["", "| GPU | TB/s | TFLOP/s in bfloat16 | source |", "|---|---|---|---|"]
    lines += [
        f"| {name} | {gpu.bandwidth / 1e12:.3g} | {gpu.peak / 1e12:.4g} | {gpu.source} |" for name, gpu in GPUS.items()
    ]
    return "\n".join(lines) + "\n"


# --- loads ------------------------------------------------------------------------------------------------------------


def of_device(name: str) -> Gpu | None:
    """The GPU that torch names so; None for one without published rates here."""
    return next((gpu for gpu in GPUS.values() if gpu.device == name), None)


def streams_of(shape: "Shape", gpu: Gpu, max_num_seqs: int) -> "list[Observed]":
    """A load of GPT-2 small on a device that takes as long as the model says, and a host that takes no time.

    The scheduler is the real one, on the clock of `roseinfer bench simulate`, one step ahead as on a GPU. A step's
    prompts are begun and ended in it.
    """
    from itertools import cycle

    from roseinfer.bench.load.plan import SHARED_KEY, PlannedRequest, Segment
    from roseinfer.bench.simulate.cost_model import CostModel
    from roseinfer.bench.simulate.simulation import Setup, Simulation
    from roseinfer.config.options import CacheConfig, SchedulerConfig

    class Costs(CostModel):
        """The time of the step's nodes in place of a line that was fitted to steps."""

        def compute_ns(self, num_decode_rows: int, num_prefill_tokens: int, num_context_tokens: int) -> int:
            num_prompts = -(-num_prefill_tokens // max(shape.prompt_lengths))
            num_tokens, num_samples = num_decode_rows + num_prefill_tokens, num_decode_rows + num_prompts
            step = Step(num_tokens, num_samples, num_context_tokens, num_context_tokens)
            return round(step_s(MODELS["GPT-2 small"], step, gpu) * 1e9)

    setup = Setup(
        scheduler=SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=max(512, 8 * max_num_seqs)),
        cache=CacheConfig(),
        num_blocks=max_num_seqs * NUM_POSITIONS // 16,
        max_model_len=NUM_POSITIONS,
        costs=Costs(step_ns=0.0, decode_row_ns=0.0, prefill_token_ns=0.0, context_token_ns=0.0, host_ns=0.0),
        pipeline_depth=1,
        is_asynchronous=True,
    )
    planned = [
        PlannedRequest(
            offset_ns=round(index * shape.interval_s * 1e9),
            segments=(
                *((Segment(SHARED_KEY, shape.num_shared),) if shape.num_shared else ()),
                Segment(index + 1, num_tokens - shape.num_shared),
            ),
            max_tokens=shape.new_tokens,
        )
        for index, num_tokens in zip(range(shape.num_requests), cycle(shape.prompt_lengths), strict=False)
    ]
    return Simulation(setup).run(planned).observed()


def predictions(gpu: Gpu) -> dict[str, dict[str, float]]:
    """The figures of `summarise` for the loads of `make bench-gpu`, by their names there."""
    from benchmarks.figures import summarise
    from benchmarks.gpu.bursts import BURST, ONE_STREAM
    from benchmarks.gpu.streams import WORKLOADS
    from benchmarks.workloads import BATCH, GPT2_WORKLOADS, Shape
    from benchmarks.workloads import WORKLOADS as SERVED

    spread, batched = WORKLOADS  # of "Hello", once or four times
    loads = {
        spread: (Shape(64, 0.020, (1,), 128), 64),
        batched: (Shape(128, 0.0, (1, 4), 128), 8),
        "burst": (BURST, BURST.num_requests),
        "one stream": (ONE_STREAM, BURST.num_requests),
        **{name: (SERVED[name], BATCH) for name in GPT2_WORKLOADS},
    }
    found = {name: summarise(streams_of(shape, gpu, num_seqs)) for name, (shape, num_seqs) in loads.items()}
    burst = found.pop("burst")
    return found | {f"burst {how}": burst for how in ("offline", "online", "over HTTP")}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=tuple(MODELS), default="GPT-2 small", help="default: %(default)s")
    parser.add_argument("--batch", type=int, default=64, metavar="N", help="default: %(default)s")
    parser.add_argument("--context", type=int, default=512, metavar="N", help="default: %(default)s")
    parser.add_argument("--prompt", type=int, metavar="N", help="tokens of a prompt, in place of rows that decode")
    arguments = parser.parse_args()
    model = MODELS[arguments.shape]
    step = prompt(arguments.prompt) if arguments.prompt else decode(arguments.batch, arguments.context)
    print(
        f"{'microseconds of all':30} {'nodes':>5} {'MB each':>9} {'GFLOP each':>10}", *(f"{name:>8}" for name in GPUS)
    )
    for node in nodes_of(model, step, GPUS["H100"]):
        sizes = f"{node.num_nodes:5} {node.num_bytes / 1e6:9.3f} {node.num_operations / 1e9:10.3f}"
        print(f"{node.name:30} {sizes}", *(f"{node.seconds(gpu) * 1e6:8.1f}" for gpu in GPUS.values()))
    print(f"{'the step':30} {'':26}", *(f"{step_s(model, step, gpu) * 1e6:8.1f}" for gpu in GPUS.values()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
