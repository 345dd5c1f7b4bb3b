"""An engine in a process that a tool may be attached to: a fake device, graphs captured when first met. For tests.

`nvtx_engine.py DEPTH IS_MARKED` runs two requests, collects garbage between two steps, and prints the ids of the steps
as they were told, in JSON.
"""

import gc
import json
import sys

from roseinfer.config.options import CacheConfig, RunnerConfig, SchedulerConfig
from roseinfer.engine.core.engine import Engine
from roseinfer.engine.core.scheduler import Scheduler
from roseinfer.engine.link.heartbeat import Heartbeat
from roseinfer.engine.loop import note_pauses
from roseinfer.engine.ranges import make_phases
from roseinfer.messages import Request, SamplingParams
from roseinfer.observe.tracing.nvtx import make_marker
from tests.unit.model.fake_device import LateStream
from tests.unit.model.fake_model import BLOCK_SIZE, NUM_BLOCKS, make_runner

NUM_SLOTS = 4


def make_engine(pipeline_depth: int, *, is_marked: bool) -> Engine:
    runner = make_runner(LateStream(), RunnerConfig(cuda_graphs="lazy"), NUM_SLOTS)
    runner._max_graph_context = 0  # steps with prompts go without a graph
    runner.warm_up(32)
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=NUM_SLOTS, max_num_batched_tokens=32),
        CacheConfig(block_size=BLOCK_SIZE),  # type: ignore[arg-type]  # 8 is one of its sizes
        num_blocks=NUM_BLOCKS,
        max_model_len=runner.info.max_model_len,
        eos_token_ids=(),
    )
    return Engine(scheduler, runner, make_phases(make_marker(enabled=is_marked)), runner.info, pipeline_depth)


def main(pipeline_depth: int, *, is_marked: bool) -> None:
    gc.disable()  # one collection, where this says
    engine = make_engine(pipeline_depth, is_marked=is_marked)
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    for name in ("a", "b"):
        engine.add_request(Request(request_id=name, prompt_token_ids=[1, 2, 3], params=params))
    told = []
    with note_pauses(engine, Heartbeat()):
        while engine.has_work:
            told.append(engine.step().record)
            if len(told) == 3:
                gc.collect()
    steps = [{"id": record.step_id, "graph_rows": record.graph_rows, "kind": record.kind} for record in told]
    print(json.dumps(steps))


if __name__ == "__main__":
    main(int(sys.argv[1]), is_marked=sys.argv[2] == "marked")
