"""Measures the front end's memory at its peak and after bodies of two megabytes that are accepted.

    python -m benchmarks.stress.long_bodies [--clients 4]

The embedded model is served by processes of their own. Each kind of body is sent once alone and then by so many clients
at once; a row has the answers, the resident memory half a second after the last of them, and its peak meanwhile.
"""

import argparse
import asyncio
import time
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.servers import resident_mb
from benchmarks.tables import print_head, print_row
from roseinfer.bench.load.client import LoadClient
from roseinfer.bench.load.endpoint import Endpoint
from roseinfer.bench.load.launcher import serving

REST_S = 0.5
TEXT = "hello world " * 150_000
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "words": ("/tokenize", {"prompt": TEXT}),
    "words, spelled": ("/tokenize", {"prompt": TEXT, "return_token_strs": True}),
    "a token for each byte": ("/tokenize", {"prompt": "q7" * 1_000_000}),
    "scattered": ("/tokenize", {"prompt": "".join(chr(0x4E00 + i % 20_000) for i in range(600_000))}),
    "metadata": ("/v1/completions", {"prompt": "a", "max_tokens": 1, "metadata": {"a": "x" * 2_000_000}}),
}


def forget_peak(pid: int) -> None:
    """See clear_refs in proc(5)."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


async def measure(arguments: argparse.Namespace, url: str, pid: int) -> None:
    print(f"resident at first: {resident_mb(pid):.0f} MB")
    print_head("body", "clients", "answers", "s", "resident afterwards MB", "peak MB")
    async with LoadClient(Endpoint(url)) as client:
        for name, (path, fields) in KINDS.items():
            for num_clients in (1, arguments.clients):
                forget_peak(pid)
                began_s = time.monotonic()
                asked = await asyncio.gather(*(client.exchange(path, fields) for _ in range(num_clients)))
                statuses = Counter(answer.status for answer in asked)
                took_s = time.monotonic() - began_s
                await asyncio.sleep(REST_S)
                answers = ", ".join(f"{count} × {status}" for status, count in sorted(statuses.items()))
                sizes = (round(resident_mb(pid, field)) for field in ("VmRSS", "VmHWM"))
                print_row(name, num_clients, answers, took_s, *sizes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=4, help="of the second run of each kind")
    arguments = parser.parse_args()
    with serving("--log-level", "error") as server:
        asyncio.run(measure(arguments, server.url, server.pid))


if __name__ == "__main__":
    main()
