"""Measures one stream, eight, and long prompts on a model of Qwen3-0.6B's shape, in turn with what else people run.

    python -m benchmarks.qwen3 [--quick] [--peers DIR] [--groups int8,int4,float32,bfloat16] [--out FILE]

Entrants whose figures are compared are ready at once and take turns, as in `benchmarks.served`; a group is int8 or int4
weights with llama.cpp's q8_0 or q4_0 and OpenVINO GenAI, a library, or float32 or bfloat16 with vLLM, of which prompts
alone are compared. The int4 group has our int8 too. Rivals are taken from DIR, where `benchmarks/peers/setup.sh` puts
them, and run as they come. The memory's bandwidth, which bounds one stream, is measured before and after each
turn, while all entrants rest.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import protocol, rotation
from benchmarks.engine_options import require_kernels
from benchmarks.machine import Sitting, part_parser
from benchmarks.peers import libraries
from benchmarks.protocol import Entrant, PeerFailed, Worker
from benchmarks.random_qwen3 import default_directory, make
from benchmarks.requirements import QWEN3_WEIGHTS
from benchmarks.roofs import read_rate
from benchmarks.rotation import Limits
from benchmarks.served import DEFAULT_PEERS
from benchmarks.servers import (
    llama_cpp_version,
    serving_options,
    start_llama_cpp,
    start_roseinfer,
    start_vllm,
    vllm_version,
)
from benchmarks.workloads import QWEN3_WORKLOADS, Words
from roseinfer.bench.load.launcher import LaunchFailed
from roseinfer.runtime import memory

MAX_MODEL_LEN = 2048
NUM_REPEATS = 3
BUDGET_S = 180.0  # of one workload in one group
LLAMA_CPP_FORMS = {"int8": "q8_0", "int4": "q4_0"}


class Group(NamedTuple):
    """Entrants that are compared, by what starts each, and the workloads that they run."""

    starts: Mapping[str, Callable[[], Entrant]]
    workloads: Sequence[str]


def group_of(precision: str, model: Path, peers: Path, log: Path) -> Group:
    ours = [precision, "int8"] if precision == "int4" else [precision]
    starts: dict[str, Callable[[], Entrant]] = {
        f"roseinfer {each}": partial(
            start_roseinfer, f"roseinfer {each}", model, serving_options(each, MAX_MODEL_LEN), log
        )
        for each in ours
    }
    form = LLAMA_CPP_FORMS.get(precision)
    if form is None:
        starts[f"vllm {precision}"] = partial(start_vllm, peers / "vllm", model, precision, MAX_MODEL_LEN, log)
        return Group(starts, ("L4",))
    starts[f"llama.cpp {form}"] = partial(start_llama_cpp, peers / "llama.cpp", model, form, MAX_MODEL_LEN, log)
    starts[f"openvino {precision}"] = partial(_openvino, model, precision, peers, log)
    return Group(starts, QWEN3_WORKLOADS)


def _openvino(model: Path, precision: str, peers: Path, log: Path) -> Entrant:
    converted = peers / "models" / f"{model.name}-openvino-{precision}"
    python = peers / "api" / "bin" / "python"
    command = libraries.command_of("openvino", model, precision, converted=converted, python=python)
    worker = Worker(f"openvino {precision}", command, log, QWEN3_WORKLOADS)
    try:
        print(f"  {worker.call('describe')}", flush=True)
    except PeerFailed:
        worker.close()
        raise
    return worker


def versions_of(peers: Path) -> dict[str, str]:
    """Of the rivals that are set up, by the names of the rows without their precision."""
    found = {"vllm": vllm_version(peers / "vllm"), "llama.cpp": llama_cpp_version(peers / "llama.cpp")}
    has_openvino = (peers / "api" / "bin" / "python").exists()
    return {name: version or "not set up" for name, version in found.items()} | (
        {} if has_openvino else {"openvino": "not set up"}
    )


def measure(
    group: Group, versions: Mapping[str, str], words: Words, limits: Limits, bandwidth: Callable[[], float]
) -> list[dict[str, Any]]:
    """Start all, run the workloads in turn, and end all. Returns the rows; rivals that are not there have some too."""
    rows: list[dict[str, Any]] = []
    entrants: list[Entrant] = []
    with ExitStack() as stack:
        for name, start in group.starts.items():
            if versions.get(name.split()[0]) == "not set up":
                rows.append(rotation.absent(name, "not set up", group.workloads))
                continue
            try:
                entrants.append(stack.enter_context(start()))
            except (LaunchFailed, PeerFailed) as error:
                rows.append(rotation.absent(name, str(error), group.workloads))
            else:
                entrants[-1].pause()
        return rows + rotation.run(entrants, words, group.workloads, limits, roof=bandwidth)


def main() -> int:
    parser = part_parser(__doc__, "bench/qwen3.json", quick="once, and of int4 alone")
    parser.add_argument("--peers", type=Path, default=DEFAULT_PEERS, metavar="DIR", help="default: %(default)s")
    parser.add_argument("--groups", default="int8,int4,float32,bfloat16", metavar="P,P", help="default: %(default)s")
    arguments = parser.parse_args()
    require_kernels()
    memory.prefer_huge_pages()  # for what is read in this process, as an engine has it
    sitting, began = Sitting("qwen3"), time.monotonic()
    model, log = make(default_directory()), arguments.out.with_suffix(".log")
    words, versions = Words(model / "tokenizer.json"), versions_of(arguments.peers)
    limits = Limits(1 if arguments.quick else NUM_REPEATS, BUDGET_S)
    rows: list[dict[str, Any]] = []
    bandwidth = read_rate(QWEN3_WEIGHTS)
    with protocol.own_session_raised() as is_raised:
        for precision in ["int4"] if arguments.quick else arguments.groups.split(","):
            group = group_of(precision, model, arguments.peers, log)
            rows += [row | {"group": precision} for row in measure(group, versions, words, limits, bandwidth)]
            print(f"  {precision} is done after {time.monotonic() - began:.0f} s", flush=True)
    sitting.write(arguments.out, {"versions": versions, "is_raised": is_raised, "rows": rows})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
