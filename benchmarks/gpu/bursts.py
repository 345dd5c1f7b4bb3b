"""Measures a burst without and with HTTP, and one stream alone, on a GPU: tokens/s and latencies.

    python -m benchmarks.gpu.bursts [--device cuda] [--quick] [--model DIR] [--out FILE]

- burst offline: 256 prompts of 4 tokens as one batch of `LLM.generate`, 128 new tokens each
- burst online: the same through `LLM.submit`, each request on its own
- burst over HTTP: the same through `roseinfer serve`, read by several client processes, since one cannot parse the rate
- one stream: a prompt of 128 tokens and 32 new ones, alone, again and again; against transformers on the same GPU
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from benchmarks import protocol
from benchmarks.engine_options import engine_command, precision_options
from benchmarks.figures import summarise
from benchmarks.machine import Sitting, part_parser
from benchmarks.peers import libraries
from benchmarks.protocol import Worker
from benchmarks.random_gpt2 import make
from benchmarks.servers import MODEL_NAME, start_roseinfer
from benchmarks.workloads import PlannedRequest, Shape, Words, requests_of
from roseinfer.bench.definitions import Observed

BURST = Shape(256, 0.0, (4,), 128)
ONE_STREAM = Shape(1, 0.0, (128,), 32)
QUICK_BURST = Shape(8, 0.0, (4,), 4)
NUM_CLIENTS = 4
NUM_BURSTS, NUM_STREAMS = 5, 20

Drive = Callable[[Sequence[PlannedRequest]], list[Observed]]


def options_of(device: str) -> dict[str, str]:
    """The engine's, served or not: room for the whole burst in one step."""
    return {
        "runner.device": device,
        **precision_options("bfloat16" if device == "cuda" else "float32"),
        "scheduler.max_num_seqs": str(BURST.num_requests),
        "scheduler.max_num_batched_tokens": str(8 * BURST.num_requests),
    }


def repeat(name: str, drive: Drive, shape: Shape, words: Words, num_repeats: int) -> list[dict[str, float]]:
    """New prompts each time; the first one is not counted."""
    rows = [summarise(drive(requests_of(name, words, i, shape))) for i in range(num_repeats + 1)][1:]
    rates = ", ".join(f"{row['tokens_per_s']:.0f}" for row in rows)
    print(f"  {name}: {rates} tokens/s", flush=True)
    return rows


def over_http(clients: Sequence[Worker]) -> Drive:
    """Every client has its share of the requests, and all work at once."""

    def drive(requests: Sequence[PlannedRequest]) -> list[Observed]:
        for i, client in enumerate(clients):
            client.send("drive", requests=requests[i :: len(clients)])
        return [Observed(**each) for client in clients for each in client.receive("drive")]

    return drive


def measure(
    arguments: argparse.Namespace, model: Path, log: Path, keep: Callable[[dict[str, list[dict[str, float]]]], object]
) -> None:
    """`keep` is called with all that has been measured so far, again and again; the rival's comes last."""
    words = Words(model / "tokenizer.json")
    options = options_of(arguments.device)
    burst, bursts, streams = (QUICK_BURST, 1, 2) if arguments.quick else (BURST, NUM_BURSTS, NUM_STREAMS)
    rows: dict[str, list[dict[str, float]]] = {}

    def note(name: str, drive: Drive, shape: Shape, num_repeats: int) -> None:
        rows[name] = repeat(name, drive, shape, words, num_repeats)
        keep(rows)

    with Worker("engine only", engine_command(model, options), log) as worker:
        note("burst offline", partial(worker.drive, call="drive_offline"), burst, bursts)
        note("burst online", worker.drive, burst, bursts)
        note("one stream", worker.drive, ONE_STREAM, streams)
    served = {**options, "server.max_inflight": str(2 * BURST.num_requests)}
    with ExitStack() as stack:
        server = stack.enter_context(start_roseinfer("roseinfer", model, served, log))
        client = [sys.executable, "-m", "benchmarks.http_client", server.url, MODEL_NAME]
        num_clients = 1 if arguments.quick else NUM_CLIENTS
        clients = [stack.enter_context(Worker(f"client {i}", client, log)) for i in range(num_clients)]
        note("burst over HTTP", over_http(clients), burst, bursts)
    precision = "bfloat16" if arguments.device == "cuda" else "float32"
    rival = libraries.command_of("transformers", model, precision)
    with Worker("transformers", [*rival, "--device", arguments.device], log) as worker:
        note("one stream, transformers", worker.drive, ONE_STREAM, streams)
        note("burst, transformers", worker.drive, burst, 1)


def main() -> int:
    quick = "eight requests of four tokens, once"
    parser = part_parser(__doc__, "bench-gpu/bursts.json", quick=quick, device="cuda", model=True)
    arguments = parser.parse_args()
    sitting = Sitting("bursts")
    with protocol.own_session_raised():
        measure(
            arguments,
            make(arguments.model),
            arguments.out.with_suffix(".log"),
            lambda rows: sitting.write(arguments.out, {"rows": rows}),
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
