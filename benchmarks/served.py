"""Measures workloads over HTTP against `roseinfer serve` and vLLM, in turn, at each precision: tokens/s and latencies.

    python -m benchmarks.served [--quick] [--peers DIR] [--precisions float32,bfloat16] [--device cpu] [--out FILE]

For one precision the servers are started, and from then on all but the one that is measured are paused: A B A B, with
one start each. `engine only` is roseinfer without HTTP, for the share that serving keeps; it runs W2 alone. vLLM is
taken from DIR/vllm, where `benchmarks/peers/setup.sh` puts it. On a GPU the rivals are vLLM and SGLang, in bfloat16,
each where this Python imports it or PATH has it.
"""

import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import protocol, rotation
from benchmarks.engine_options import PRECISIONS, engine_command, require_kernels
from benchmarks.machine import Sitting, part_parser
from benchmarks.protocol import Entrant, Worker
from benchmarks.random_gpt2 import make
from benchmarks.rotation import Limits
from benchmarks.servers import (
    GPU_RIVALS,
    Server,
    python_of,
    serving_options,
    start_on_gpu,
    start_roseinfer,
    start_vllm,
    version_in,
    vllm_version,
)
from benchmarks.workloads import BATCH, GPT2_WORKLOADS, Words
from roseinfer.bench.load.launcher import LaunchFailed

VLLM_PRECISIONS = ("float32", "bfloat16")
MAX_MODEL_LEN = 1024  # GPT-2 has no more
NUM_REPEATS = 3
BUDGET_S = 125.0  # of one workload at one precision, all entrants together
QUICK_WORKLOADS = ("W1x32", "W2")
DEFAULT_PEERS = Path.home() / ".cache" / "roseinfer" / "benchmarks" / "peers"


def starts_of(
    model: Path, precision: str, device: str, peers: Path, log: Path
) -> tuple[dict[str, str], dict[str, Callable[[], Server]]]:
    """Options of roseinfer, and what starts each server, by its name."""
    options = {**serving_options(precision, MAX_MODEL_LEN), "runner.device": device}
    starts: dict[str, Callable[[], Server]] = {}
    if device == "cuda":
        options["cache.num_blocks"] = str(BATCH * MAX_MODEL_LEN // 16)
        for rival in GPU_RIVALS:
            starts[f"{rival} {precision}"] = partial(start_on_gpu, rival, model, MAX_MODEL_LEN, log)
    elif precision in VLLM_PRECISIONS:
        starts[f"vllm {precision}"] = partial(start_vllm, peers / "vllm", model, precision, MAX_MODEL_LEN, log)
    name = f"roseinfer {precision}"
    return options, {name: partial(start_roseinfer, name, model, options, log), **starts}


def entrants_of(
    stack: ExitStack, model: Path, precision: str, device: str, peers: Path, log: Path
) -> tuple[list[Entrant], list[dict[str, Any]]]:
    """Entrants that are ready at this precision, and rows for those that are not."""
    if device == "cpu":
        require_kernels()
    options, starts = starts_of(model, precision, device, peers, log)
    entrants: list[Entrant] = []
    absent = []
    for name, start in starts.items():
        try:
            entrants.append(stack.enter_context(start()))
        except LaunchFailed as error:
            absent.append(rotation.absent(name, str(error), GPT2_WORKLOADS))
        else:
            entrants[-1].pause()
    entrants.append(
        stack.enter_context(Worker(f"engine only {precision}", engine_command(model, options), log, ("W2",)))
    )
    return entrants, absent


def versions_of(device: str, peers: Path) -> dict[str, str]:
    if device == "cpu":
        return {"vllm": vllm_version(peers / "vllm") or "not set up"}
    found = {rival: python_of(rival) for rival in GPU_RIVALS}
    return {rival: (python and version_in(python, rival)) or "not installed" for rival, python in found.items()}


def main() -> int:
    quick = f"once, and {' and '.join(QUICK_WORKLOADS)} only"
    parser = part_parser(__doc__, "bench/served.json", quick=quick, device="cpu", model=True)
    parser.add_argument("--peers", type=Path, default=DEFAULT_PEERS, metavar="DIR", help="default: %(default)s")
    parser.add_argument("--precisions", default=",".join(PRECISIONS), metavar="P,P", help="default: %(default)s")
    arguments = parser.parse_args()
    sitting = Sitting("served")
    began = time.monotonic()
    model, log = make(arguments.model), arguments.out.with_suffix(".log")
    words = Words(model / "tokenizer.json")
    versions = versions_of(arguments.device, arguments.peers)
    workloads = QUICK_WORKLOADS if arguments.quick else GPT2_WORKLOADS
    limits = Limits(1 if arguments.quick else NUM_REPEATS, BUDGET_S)
    rows: list[dict[str, Any]] = []
    with protocol.own_session_raised() as is_raised:
        for precision in arguments.precisions.split(","):
            with ExitStack() as stack:
                entrants, absent = entrants_of(stack, model, precision, arguments.device, arguments.peers, log)
                before = [*rows, *absent]

                def keep(more: list[dict[str, Any]], before: list[dict[str, Any]] = before) -> None:
                    results = {"versions": versions, "is_raised": is_raised, "rows": [*before, *more]}
                    sitting.write(arguments.out, results)

                rows = [*before, *rotation.run(entrants, words, workloads, limits, keep)]
            print(f"  {precision} is done after {time.monotonic() - began:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
