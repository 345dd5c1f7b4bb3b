"""Measures models that run transformers' modelling code: Llama against our own file, and experts against its own loop.

    python -m benchmarks.costs.transformers_models [--dtype bfloat16] [--rounds 15] [--shared] [--out FILE]

Both models of a pair are loaded from one checkpoint of random weights, with the widths of Qwen3-0.6B and eight layers,
and compute the same steps in turn. Printed is the median of the rounds, and the least and the most, of each, and of
the ratio within a round.
"""

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import msgspec
import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.engine_options import load_as_engines_do, require_kernels
from benchmarks.figures import Spread
from benchmarks.machine import Sitting, part_parser
from benchmarks.tables import print_head, print_row
from roseinfer.config.options import CacheConfig, Config, ModelConfig, RunnerConfig
from roseinfer.engine.core.batch import ScheduledBatch, SlotBinding
from roseinfer.messages import SamplingParams
from roseinfer.model.families import registry, transformers_layers
from roseinfer.model.runner import ModelRunner

NUM_SLOTS, CONTEXT, BLOCKS = 64, 128, 64  # blocks of a slot
SHAPE = {
    "vocab_size": 32_000,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 1024,
}
EXPERTS = {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 512}
STEPS = {"1 row": (1, 1), "8 rows": (8, 1), "64 rows": (64, 1), "prompt of 512": (1, 512)}  # rows, tokens of each
Launch = Callable[[], object]
Clock = Callable[[], float]


def main() -> int:
    parser = part_parser(__doc__, "bench/transformers_models.json")
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=15)
    shared = "processor time of one thread, in place of the time of all: for a machine that does other work meanwhile"
    parser.add_argument("--shared", action="store_true", help=shared)
    args = parser.parse_args()
    require_kernels()
    sitting, results = Sitting("transformers_models"), {}
    clock = time.process_time if args.shared else time.perf_counter
    with tempfile.TemporaryDirectory() as directory:
        for title, model_type, changes, other in (
            ("Llama: our file, and transformers' code with our layers", "llama", {}, _generic),
            ("Qwen3-MoE: our experts, and transformers' loop over them", "qwen3_moe", EXPERTS, _loop_over_experts),
        ):
            path = Path(directory) / model_type
            config = AutoConfig.for_model(model_type, **SHAPE | changes)
            AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(path)
            ours = _load(path, args.dtype)
            with other():
                theirs = _load(path, args.dtype)
            print(f"\n{title}, {args.dtype}: ms a step, and their time in ours\n")
            print_head("step", "ours", "theirs", "ratio")
            if args.shared:
                torch.set_num_threads(1)
            for name, shape in STEPS.items():
                taken = results[f"{model_type}, {name}"] = _measure(
                    _step(ours, *shape), _step(theirs, *shape), args.rounds, clock
                )
                print_row(name, *(Spread.of(values).text(".2f") for values in taken))
    sitting.write(args.out, {"dtype": args.dtype, "is_shared": args.shared, "steps": results})
    return 0


def _load(path: Path, dtype: str) -> ModelRunner:
    config = Config(
        model=ModelConfig(path=str(path), dtype=dtype),  # type: ignore[arg-type]  # of the parser's choices
        cache=CacheConfig(num_blocks=NUM_SLOTS * BLOCKS),
        runner=RunnerConfig(device="cpu"),
    )
    return load_as_engines_do(config, NUM_SLOTS)


@contextmanager
def _generic() -> Iterator[None]:
    """No family has a file of its own."""
    with mock.patch.object(registry, "FAMILIES", {}):
        yield


@contextmanager
def _loop_over_experts() -> Iterator[None]:
    """Experts, and nothing else, are as transformers computes them."""
    with mock.patch.object(transformers_layers, "is_mixture", return_value=False):
        yield


def _step(runner: ModelRunner, num_rows: int, num_tokens: int) -> Launch:
    """A step of rows behind `CONTEXT` tokens of whatever the cache holds.

    Rows of one token decode those that a first step has sampled, as an engine's do, so that such steps are replayed.
    """
    tokens = np.random.default_rng(0).integers(0, SHAPE["vocab_size"], num_rows * num_tokens).astype(np.int32)
    slots = np.arange(num_rows, dtype=np.int32)
    batch = ScheduledBatch(
        step_id=0,
        slots=slots,
        starts=np.full(num_rows, CONTEXT if num_tokens == 1 else 0, np.int32),
        num_new_tokens=np.full(num_rows, num_tokens, np.int32),
        samples=np.ones(num_rows, bool),
        num_device_rows=0,
        token_ids=tokens,
        block_table=np.arange(NUM_SLOTS * BLOCKS, dtype=np.int32).reshape(NUM_SLOTS, BLOCKS),
        bindings=tuple(SlotBinding(slot, SamplingParams(temperature=0.0), 1, ()) for slot in slots.tolist()),
    )
    if num_tokens == 1:
        runner.launch(batch).wait()
        batch = msgspec.structs.replace(batch, num_device_rows=num_rows, token_ids=tokens[:0], bindings=())
    return lambda: runner.logits(batch)


def _measure(ours: Launch, theirs: Launch, rounds: int, clock: Clock) -> tuple[list[float], list[float], list[float]]:
    """Milliseconds of both in each round, and their ratio."""
    taken: tuple[list[float], list[float], list[float]] = ([], [], [])
    for number in range(-2, rounds):  # the first two warm up
        first, second = (ours, theirs) if number % 2 else (theirs, ours)
        one, other = _seconds(first, clock), _seconds(second, clock)
        mine, yours = (one, other) if number % 2 else (other, one)
        if number >= 0:
            for values, value in zip(taken, (mine * 1e3, yours * 1e3, yours / mine), strict=True):
                values.append(value)
    return taken


def _seconds(launch: Launch, clock: Clock) -> float:
    began = clock()
    launch()
    return clock() - began


if __name__ == "__main__":
    raise SystemExit(main())
