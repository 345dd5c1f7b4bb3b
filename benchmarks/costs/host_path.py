"""Measures the engine's own Python in a decode step, by part and by number of sequences, in microseconds.

    python -m benchmarks.costs.host_path [--rows 1 8 64 256] [--steps 400] [--pipeline-depth 0] [--evict-mib 0]
    python -m benchmarks.costs.host_path --graphs [--rows 64]

The runner is the simulator's and answers at once, so what is left is the host's part of a step: schedule, commit,
record (the rest of `Engine.step`: stamps, counts, the step's record) and encode (the message as it goes to the front
end). Prompts have different lengths, so in every step some sequences need a new block and some publish a full one, as
they do after requests have come one by one. At depth 0 rows look for drafts, as on a CPU. Medians, with the 10th and
the 90th percentile in brackets. At depth 1 a call of `Engine.step` holds parts of two steps, so the percentiles of
record mean nothing there; its median does. With `--evict-mib` a step reads so much memory as a model would, and the
caches are as cold afterwards.

With `--graphs` the runner is that of a GPU, at its pipeline depth: a step is staged, sent in one copy, replayed as a
graph, and its tokens are fetched, all on a device whose copies, graphs and events do nothing. So beside those parts
there are stage (writing the step's integers), launch (the rest of the runner's launch) and wait (making the tokens
that have come into numbers), and `step` is `Engine.step` as a whole. What CUDA's own calls cost is not in it.
"""

import argparse
import gc
import platform
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from benchmarks.tables import print_head, print_row
from roseinfer.bench.simulate.cost_model import CostModel
from roseinfer.bench.simulate.virtual_runner import VirtualClock, VirtualRunner
from roseinfer.config.options import CacheConfig, RunnerConfig, SchedulerConfig
from roseinfer.engine.core.batch import Runner
from roseinfer.engine.core.engine import Engine
from roseinfer.engine.core.scheduler import Scheduler
from roseinfer.engine.core.stopwatch import Phases
from roseinfer.engine.pace import Pace
from roseinfer.engine.speculation import Speculation
from roseinfer.messages import EngineInfo, Request, SamplingParams
from roseinfer.model.attention.base import Attend, AttentionSpec, PackedTokens
from roseinfer.model.device import Placement
from roseinfer.model.device_stream import Graph, Stream
from roseinfer.model.layers.linear import Linear
from roseinfer.model.loading import LoadedModel
from roseinfer.model.runner import ModelRunner, RunnerLimits
from roseinfer.runtime.frames import encode_frame

VOCAB_SIZE = 50257
MAX_MODEL_LEN = 1024
NUM_WARM_STEPS = 50
MAX_STEPS = 700  # then the longest sequences meet the end of the context
PARTS = ("schedule", "commit", "record", "encode", "total")
GRAPH_PARTS = ("schedule", "stage", "launch", "wait", "commit", "record", "step")


class IdleStream(Stream):
    """A device with memory of its own that does nothing."""

    is_host = False

    def new_device_tensor(self, host: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(host)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None: ...

    def free_bytes(self) -> int:
        return 1 << 30

    def capture(self, work: Callable[[], None]) -> Graph:  # noqa: ARG002 - none of it is run
        return _IdleGraph()


class _IdleGraph:
    def replay(self) -> None: ...


class IdleModel:
    """A model of zeros, and its attention. Both are asked only for prompts: the graphs of decode steps are empty."""

    name = model_type = "idle"
    is_capturable = True
    vocab_size, max_positions, num_parameters = VOCAB_SIZE, MAX_MODEL_LEN, 0
    attention_spec = AttentionSpec(1, 1, 1, 1.0, (None,))

    def __init__(self) -> None:
        self.layer_linears: list[Linear] = []

    @property
    def head(self) -> Linear:
        raise NotImplementedError

    def forward(self, token_ids: torch.Tensor, *_: object) -> torch.Tensor:
        return torch.zeros(len(token_ids), 1)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(hidden), VOCAB_SIZE)

    def prepare(self, _: PackedTokens) -> Attend:
        return lambda _layer, _q, _k, v: v


def simulated(num_rows: int, _: EngineInfo, evicted_mib: int) -> Runner:
    """The simulator's runner, which reads so much memory a step."""
    weights = np.ones(evicted_mib << 17)  # eight bytes each
    return VirtualRunner(
        VirtualClock(),
        CostModel(step_ns=0, decode_row_ns=0, prefill_token_ns=0, context_token_ns=0, host_ns=0),
        vocab_size=VOCAB_SIZE - 1,  # so none ends a sequence
        num_slots=num_rows,
        on_launch=lambda _: weights.sum(),
    )


def idle(num_rows: int, info: EngineInfo) -> Runner:
    """A GPU's runner on a device that does nothing. All tokens are 0."""
    model, limits = IdleModel(), RunnerLimits(num_rows, num_rows, 4 * MAX_MODEL_LEN)
    loaded = LoadedModel(model, model, Placement(IdleStream.device, torch.float32), info)
    runner = ModelRunner(loaded, IdleStream(), limits, RunnerConfig(cuda_graphs="lazy"), lambda *_: None)
    runner._sampler._use_triton(MAX_MODEL_LEN)  # noqa: SLF001 - as where there are its kernels
    return runner


def make_engine(num_rows: int, pipeline_depth: int, make_runner: Callable[[int, EngineInfo], Runner]) -> Engine:
    # No more tokens than a graph holds: --graphs has kernels for no other step.
    config, cache = SchedulerConfig(max_num_seqs=num_rows, max_num_batched_tokens=MAX_MODEL_LEN), CacheConfig()
    pace = Pace.of(config, cache.block_size, is_cpu=not pipeline_depth)
    num_blocks = num_rows * MAX_MODEL_LEN // cache.block_size
    scheduler = Scheduler(
        config,
        cache,
        num_blocks=num_blocks,
        max_model_len=MAX_MODEL_LEN,
        eos_token_ids=(VOCAB_SIZE - 1,),
        pacer=pace,
        make_drafter=None if pipeline_depth else partial(Speculation, pace),
    )
    info = EngineInfo(
        vocab_size=VOCAB_SIZE,
        max_model_len=MAX_MODEL_LEN,
        device="cpu",
        block_size=cache.block_size,
        num_blocks=num_blocks,
    )
    return Engine(scheduler, make_runner(num_rows, info), Phases(), info, pipeline_depth)


def measure(engine: Engine, num_rows: int, num_steps: int) -> dict[str, list[float]]:
    """Microseconds of each part, one entry a step."""
    random = np.random.default_rng(0)
    for i in range(num_rows):
        length = int(random.integers(32, 97))
        engine.add_request(
            Request(
                request_id=f"cmpl-{i:024x}",
                prompt_token_ids=random.integers(0, VOCAB_SIZE - 1, length).tolist(),
                params=SamplingParams(temperature=0.0, max_tokens=MAX_MODEL_LEN - length),
            )
        )
    times: dict[str, list[float]] = {part: [] for part in (*PARTS, *GRAPH_PARTS)}
    gc.collect()
    gc.freeze()
    while len(times["total"]) < NUM_WARM_STEPS + num_steps:
        start = time.perf_counter_ns()
        output = engine.step()
        stepped = time.perf_counter_ns()
        encode_frame(output)
        encoded = time.perf_counter_ns()
        if output.record.num_decode_seqs < num_rows:
            continue
        phases = output.record.phases
        of_engine = stepped - start - phases.launch - phases.wait
        elapsed_ns = {
            "schedule": phases.schedule,
            "stage": phases.stage,
            "launch": phases.launch - phases.stage,
            "wait": phases.wait,
            "commit": phases.commit,
            "record": of_engine - phases.schedule - phases.commit,
            "encode": encoded - stepped,
            "step": stepped - start,
            "total": of_engine + encoded - stepped,
        }
        for part, elapsed in elapsed_ns.items():
            times[part].append(elapsed / 1e3)
    return {part: values[NUM_WARM_STEPS:] for part, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--pipeline-depth", type=int, default=0, choices=[0, 1])
    parser.add_argument("--evict-mib", type=int, default=0, help="that a step reads, as a model reads its weights")
    parser.add_argument("--graphs", action="store_true", help="a GPU's runner and depth, on a device that does nothing")
    arguments = parser.parse_args()
    if not 0 < arguments.steps <= MAX_STEPS:
        parser.error(f"--steps must be 1 to {MAX_STEPS}: the sequences are over then")
    if arguments.graphs and arguments.evict_mib:
        parser.error("--evict-mib: the device of --graphs does nothing")
    print(f"Python {platform.python_version()}, numpy {np.__version__}, {arguments.steps} steps, microseconds a step")
    parts = GRAPH_PARTS if arguments.graphs else PARTS
    make_runner = idle if arguments.graphs else partial(simulated, evicted_mib=arguments.evict_mib)
    print_head("rows", *parts)
    for num_rows in arguments.rows:
        engine = make_engine(num_rows, 1 if arguments.graphs else arguments.pipeline_depth, make_runner)
        times = measure(engine, num_rows, arguments.steps)
        cells = [np.percentile(times[part], [50, 10, 90]) for part in parts]
        print_row(num_rows, *(f"{median:.1f} ({low:.1f} to {high:.1f})" for median, low, high in cells))


if __name__ == "__main__":
    main()
