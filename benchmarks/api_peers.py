"""Measures the workloads through libraries without a server, one library after the other.

    python -m benchmarks.api_peers [--quick] [--peers DIR] [--out FILE]

transformers comes with our own environment; the others are taken from DIR/api, where `benchmarks/peers/setup.sh` puts
them. Each peer has a budget of seconds; short workloads come first, and a workload that the budget does not reach has a
row that says so.
"""

import time
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import protocol, rotation
from benchmarks.machine import Sitting, part_parser
from benchmarks.peers import libraries
from benchmarks.protocol import PeerFailed, Worker
from benchmarks.random_gpt2 import make
from benchmarks.rotation import Limits
from benchmarks.served import DEFAULT_PEERS
from benchmarks.workloads import Words

WORKLOADS = ("W1x32", "W4", "W4b", "W2", "W3")  # the shortest first
NUM_REPEATS = 3
WORKLOAD_BUDGET_S = 20.0
NOT_AUTOMATED = ("llama.cpp float32", "llama.cpp q8", "rosellm float32")  # peers that have no packages to install


class Peer(NamedTuple):
    """A library at one precision."""

    name: str
    library: str  # of benchmarks.peers.libraries
    precision: str
    budget_s: float
    is_own: bool = False  # it comes with our environment


PEERS = (
    Peer("openvino float32", "openvino", "float32", 100.0),
    Peer("openvino bfloat16", "openvino", "bfloat16", 60.0),
    Peer("openvino int8", "openvino", "int8", 50.0),
    Peer("ctranslate2 float32", "ctranslate2", "float32", 35.0),
    Peer("ctranslate2 int8", "ctranslate2", "int8", 40.0),
    Peer("transformers float32", "transformers", "float32", 25.0, is_own=True),
    Peer("transformers bfloat16", "transformers", "bfloat16", 25.0, is_own=True),
)


def command_of(peer: Peer, model: Path, peers: Path) -> list[str] | None:
    """How its driver is started; None when it is not set up."""
    if peer.is_own:
        return libraries.command_of(peer.library, model, peer.precision)
    python = peers / "api" / "bin" / "python"
    if not python.exists():
        return None
    # OpenVINO writes other files for int8 weights; for the rest one conversion serves every precision.
    weights = "-int8" if peer.name == "openvino int8" else ""
    converted = peers / "models" / f"{model.name}-{peer.library}{weights}"
    return libraries.command_of(peer.library, model, peer.precision, converted=converted, python=python)


def measure(peer: Peer, worker: Worker, words: Words, num_repeats: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    limits = Limits(num_repeats, WORKLOAD_BUDGET_S)
    began = time.monotonic()
    for workload in worker.workloads:
        if time.monotonic() - began > peer.budget_s:
            rows.append({"name": peer.name, "workload": workload, "repeats": [], "error": "not reached in its time"})
        else:
            rows += rotation.run([worker], words, [workload], limits)
    return rows


def main() -> int:
    parser = part_parser(__doc__, "bench/peers.json", quick="once, and the first workload only", model=True)
    parser.add_argument("--peers", type=Path, default=DEFAULT_PEERS, metavar="DIR", help="default: %(default)s")
    arguments = parser.parse_args()
    sitting = Sitting("peers")
    model, log = make(arguments.model), arguments.out.with_suffix(".log")
    words = Words(model / "tokenizer.json")
    workloads, num_repeats = (WORKLOADS[:1], 1) if arguments.quick else (WORKLOADS, NUM_REPEATS)
    rows = [rotation.absent(name, "not set up", WORKLOADS) for name in NOT_AUTOMATED]
    versions: dict[str, str] = {}
    with protocol.own_session_raised():
        for peer in PEERS:
            command = command_of(peer, model, arguments.peers)
            if command is None:
                rows.append(rotation.absent(peer.name, "not set up", WORKLOADS))
                continue
            print(f"  starting {peer.name}", flush=True)
            with Worker(peer.name, command, log, workloads) as worker:
                try:
                    versions[peer.name] = worker.call("describe")
                    rows += measure(peer, worker, words, num_repeats)
                except PeerFailed as error:
                    rows.append(rotation.absent(peer.name, str(error), WORKLOADS))
    sitting.write(arguments.out, {"versions": versions, "rows": rows})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
