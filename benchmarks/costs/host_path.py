"""Measures the engine's own Python in a decode step, by part and by number of sequences, in microseconds.

    python -m benchmarks.costs.host_path [--rows 1 8 64 256] [--steps 400] [--pipeline-depth 0] [--evict-mib 0]

The runner is the simulator's and answers at once, so what is left is the host's part of a step: schedule, commit,
record (the rest of `Engine.step`: stamps, counts, the step's record) and encode (the message as it goes to the front
end). Prompts have different lengths, so in every step some sequences need a new block and some publish a full one, as
they do after requests have come one by one. At depth 0 rows look for drafts, as on a CPU. Medians, with the 10th and
the 90th percentile in brackets. At depth 1 a call of `Engine.step` holds parts of two steps, so the percentiles of
record mean nothing there; its median does. With `--evict-mib` a step reads so much memory as a model would, and the
caches are as cold afterwards.
"""

import argparse
import gc
import platform
import time
from functools import partial

import numpy as np

from benchmarks.tables import print_head, print_row
from roseinfer.bench.simulate.cost_model import CostModel
from roseinfer.bench.simulate.virtual_runner import VirtualClock, VirtualRunner
from roseinfer.config.options import CacheConfig, SchedulerConfig
from roseinfer.engine.core.engine import Engine
from roseinfer.engine.core.scheduler import Scheduler
from roseinfer.engine.core.stopwatch import Phases
from roseinfer.engine.pace import Pace
from roseinfer.engine.speculation import Speculation
from roseinfer.messages import EngineInfo, Request, SamplingParams
from roseinfer.runtime.frames import encode_frame

VOCAB_SIZE = 50257
MAX_MODEL_LEN = 1024
NUM_WARM_STEPS = 50
MAX_STEPS = 700  # then the longest sequences meet the end of the context
PARTS = ("schedule", "commit", "record", "encode", "total")


def make_engine(num_rows: int, pipeline_depth: int, evicted_mib: int) -> Engine:
    config, cache = SchedulerConfig(max_num_seqs=num_rows, max_num_batched_tokens=4 * MAX_MODEL_LEN), CacheConfig()
    pace = Pace.of(config, cache.block_size, is_cpu=True)
    scheduler = Scheduler(
        config,
        cache,
        num_blocks=num_rows * MAX_MODEL_LEN // CacheConfig().block_size,
        max_model_len=MAX_MODEL_LEN,
        eos_token_ids=(VOCAB_SIZE - 1,),
        pacer=pace,
        make_drafter=None if pipeline_depth else partial(Speculation, pace),
    )
    block_size = CacheConfig().block_size
    info = EngineInfo(
        vocab_size=VOCAB_SIZE, max_model_len=MAX_MODEL_LEN, device="cpu", block_size=block_size, num_blocks=0
    )
    weights = np.ones(evicted_mib << 17)  # eight bytes each
    runner = VirtualRunner(
        VirtualClock(),
        CostModel(step_ns=0, decode_row_ns=0, prefill_token_ns=0, context_token_ns=0, host_ns=0),
        vocab_size=VOCAB_SIZE - 1,  # so none ends a sequence
        num_slots=num_rows,
        on_launch=lambda _: weights.sum(),
    )
    return Engine(scheduler, runner, Phases(), info, pipeline_depth)


def measure(num_rows: int, num_steps: int, pipeline_depth: int, evicted_mib: int) -> dict[str, list[float]]:
    """Microseconds of each part, one entry a step."""
    engine = make_engine(num_rows, pipeline_depth, evicted_mib)
    random = np.random.default_rng(0)
    for i in range(num_rows):
        length = int(random.integers(32, 97))
        engine.add_request(
            Request(
                request_id=f"cmpl-{i:024x}",
                prompt_token_ids=random.integers(0, VOCAB_SIZE - 1, length).tolist(),
                params=SamplingParams(max_tokens=MAX_MODEL_LEN - length),
            )
        )
    times: dict[str, list[float]] = {part: [] for part in PARTS}
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
        host = stepped - start - phases.launch - phases.wait
        parts = (phases.schedule, phases.commit, host - phases.schedule - phases.commit, encoded - stepped)
        for part, elapsed_ns in zip(PARTS, (*parts, sum(parts)), strict=True):
            times[part].append(elapsed_ns / 1e3)
    return {part: values[NUM_WARM_STEPS:] for part, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--pipeline-depth", type=int, default=0, choices=[0, 1])
    parser.add_argument("--evict-mib", type=int, default=0, help="that a step reads, as a model reads its weights")
    arguments = parser.parse_args()
    if not 0 < arguments.steps <= MAX_STEPS:
        parser.error(f"--steps must be 1 to {MAX_STEPS}: the sequences are over then")
    print(f"Python {platform.python_version()}, numpy {np.__version__}, {arguments.steps} steps, microseconds a step")
    print_head("rows", *PARTS)
    for num_rows in arguments.rows:
        times = measure(num_rows, arguments.steps, arguments.pipeline_depth, arguments.evict_mib)
        cells = [np.percentile(times[part], [50, 10, 90]) for part in PARTS]
        print_row(num_rows, *(f"{median:.1f} ({low:.1f} to {high:.1f})" for median, low, high in cells))


if __name__ == "__main__":
    main()
