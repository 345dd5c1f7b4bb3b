"""Measures what a picker that knows where prefixes lie is worth: two replicas behind nginx, against taking turns.

    python -m benchmarks.fleet [--requests 1000] [--rate 24] [--prefixes 48] [--blocks 2304] [--rounds 1] [--out FILE]

Each request continues one of `--prefixes` prompts, drawn anew, and arrivals are a Poisson process. In a round the same
load is sent twice, with token ids of its own each time: nginx hands requests out in turn, or asks the stand-in of
`benchmarks/picker.py` first. Rounds begin with one and the other by turns. The prefixes are 1536 blocks: with 2304
a replica's cache holds all of them beside what runs, with 1024 two thirds.
"""

import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import msgspec

from benchmarks.figures import Spread
from benchmarks.http_client import ANSWER_TIMEOUT_S, ServerRefused, prepared
from benchmarks.machine import Sitting, part_parser
from roseinfer.bench.definitions import Observed, percentile
from roseinfer.bench.load.client import LoadClient, PreparedRequest
from roseinfer.bench.load.endpoint import find_endpoint, get
from roseinfer.bench.load.launcher import Server, free_port, serve_command
from roseinfer.bench.load.plan import Segment, Tokens

ARMS = ("in turn", "by the picker")
NUM_REPLICAS = 2
NGINX = """
daemon off;
worker_processes 1;
pid nginx.pid;
error_log stderr warn;
events {{ worker_connections 4096; }}
http {{
    access_log off;
    client_max_body_size 2m;
    client_body_buffer_size 2m;
    client_body_temp_path body;
    proxy_temp_path proxy;
    fastcgi_temp_path fastcgi;
    scgi_temp_path scgi;
    uwsgi_temp_path uwsgi;
    proxy_http_version 1.1;
    proxy_set_header Connection "";
    proxy_buffering off;
    proxy_read_timeout 300s;
    upstream turn {{ {servers} keepalive 64; }}
    upstream picker {{ server 127.0.0.1:{picker}; keepalive 64; }}
    {upstreams}
    server {{
        listen 127.0.0.1:{turn};
        location / {{ proxy_pass http://turn; }}
    }}
    server {{
        listen 127.0.0.1:{picked};
        location / {{ proxy_pass http://picker; }}
        {locations}
    }}
}}
"""


class Load(NamedTuple):
    """Requests that share prefixes."""

    num_requests: int
    rate: float  # a second
    num_prefixes: int
    prefix_tokens: int = 512
    own_tokens: int = 40
    answer_tokens: int = 16

    def plan(self, seed: int, kind: int, vocab_size: int, model: str) -> list[PreparedRequest]:
        """Seeds decide what shares a prefix and when it is due, and kinds which tokens these are."""
        chance = random.Random(f"fleet {seed}")
        tokens = Tokens(seed * len(ARMS) + kind, vocab_size)
        times = accumulate(chance.expovariate(self.rate) for _ in range(self.num_requests))
        return [
            prepared(
                tokens.of(
                    (
                        Segment(chance.randrange(self.num_prefixes), self.prefix_tokens),
                        Segment(self.num_prefixes + index, self.own_tokens),
                    )
                ),
                self.answer_tokens,
                at=at,
                model=model,
            )
            for index, at in enumerate(times)
        ]


class Fleet(NamedTuple):
    """The addresses of each way to two replicas, and how many requests the picker gave each."""

    turn: str
    picked: str
    picker: str

    def url(self, arm: str) -> str:
        return self.turn if arm == ARMS[0] else self.picked

    def num_picked(self) -> list[int]:
        counts: list[int] = msgspec.json.decode(get(f"{self.picker}/readyz", "", "the picker"))["picked"]
        return counts

    def send(self, arm: str, load: Load, seed: int) -> list[Observed]:
        """Raises ServerRefused."""
        endpoint = find_endpoint(self.url(arm), api_key="")
        requests = load.plan(seed, ARMS.index(arm), endpoint.vocab_size, endpoint.model)
        streams = LoadClient(endpoint, timeout_s=ANSWER_TIMEOUT_S).run(requests)
        for stream in streams:
            if stream.error or stream.num_tokens != load.answer_tokens:
                raise ServerRefused(stream.error or f"{stream.num_tokens} tokens in place of {load.answer_tokens}")
        return streams


@contextmanager
def fleet(directory: Path, nginx: str, num_blocks: int) -> Iterator[Fleet]:
    """Two replicas, the picker and nginx, all ready. Raises LaunchFailed."""
    with ExitStack() as stack:
        ports = [(free_port(), free_port(), free_port()) for _ in range(NUM_REPLICAS)]
        replicas = []
        for number, (port, events, replay) in enumerate(ports):
            flags = ["--runner.num-threads", "1", "--cache.num-blocks", str(num_blocks)]
            flags += ["--kv-events.endpoint", f"tcp://*:{events}", "--kv-events.replay-endpoint", f"tcp://*:{replay}"]
            replicas.append(Server(serve_command(port, 0, flags), port, directory / f"replica-{number}.log"))
            stack.callback(replicas[-1].stop)
        picker = free_port()
        command = [sys.executable, "-m", "benchmarks.picker", "--port", str(picker)]
        for port, events, replay in ports:
            urls = (f"http://127.0.0.1:{port}", f"tcp://127.0.0.1:{events}", f"tcp://127.0.0.1:{replay}")
            command += ["--replica", ",".join(urls)]
        choosing = Server(command, picker, directory / "picker.log")
        stack.callback(choosing.stop)
        for server in (*replicas, choosing):
            server.wait_ready()
        yield stack.enter_context(behind_nginx(directory, nginx, [port for port, *_ in ports], picker))


@contextmanager
def behind_nginx(directory: Path, nginx: str, ports: Sequence[int], picker: int) -> Iterator[Fleet]:
    turn, picked = free_port(), free_port()
    names = [(f"replica-{number}", port) for number, port in enumerate(ports)]
    text = NGINX.format(
        turn=turn,
        picked=picked,
        picker=picker,
        servers=" ".join(f"server 127.0.0.1:{port};" for port in ports),
        upstreams="\n".join(f"upstream {name} {{ server 127.0.0.1:{port}; keepalive 64; }}" for name, port in names),
        locations="\n".join(f"location @{name} {{ proxy_pass http://{name}; }}" for name, _ in names),
    )
    configuration = directory / "nginx.conf"
    configuration.write_text(text)
    proxy = Server([nginx, "-p", str(directory), "-c", str(configuration)], turn, directory / "nginx.log")
    try:
        proxy.wait_ready()
        yield Fleet(*(f"http://127.0.0.1:{port}" for port in (turn, picked, picker)))
    finally:
        proxy.stop()


def cached_share(streams: Sequence[Observed]) -> float:
    """Of all tokens of prompts, those that a prefix cache had."""
    return sum(stream.num_cached_tokens or 0 for stream in streams) / sum(s.num_prompt_tokens for s in streams)


def figures(streams: Sequence[Observed]) -> dict[str, float]:
    waits = [stream.ttft_ns / 1e6 for stream in streams]
    row = {"cached_share": cached_share(streams)}
    return row | {f"ttft_p{percent}_ms": percentile(waits, percent) for percent in (50, 90, 99)}


def main() -> int:
    parser = part_parser(__doc__, "bench/fleet.json")
    parser.add_argument("--requests", type=int, default=1000, help="of each way, each round; default: %(default)s")
    parser.add_argument("--rate", type=float, default=24.0, help="requests a second; default: %(default)s")
    parser.add_argument("--prefixes", type=int, default=48, help="default: %(default)s")
    parser.add_argument("--blocks", type=int, default=2304, help="of 16 tokens, of a replica; default: %(default)s")
    parser.add_argument("--rounds", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=1, help="of the first round; default: %(default)s")
    parser.add_argument("--nginx", default="nginx", help="default: %(default)s")
    arguments = parser.parse_args()
    sitting = Sitting("fleet")
    load = Load(arguments.requests, arguments.rate, arguments.prefixes)
    rows: dict[str, list[dict[str, float]]] = {arm: [] for arm in ARMS}
    with TemporaryDirectory() as directory, fleet(Path(directory), arguments.nginx, arguments.blocks) as ready:
        for number in range(arguments.rounds):
            for arm in ARMS if number % 2 == 0 else reversed(ARMS):
                row = figures(ready.send(arm, load, arguments.seed + number))
                rows[arm].append(row)
                print(f"  {arm:<14}" + "  ".join(f"{name} {value:.3f}" for name, value in row.items()), flush=True)
        results: dict[str, Any] = {"load": load._asdict(), "blocks": arguments.blocks, "picked": ready.num_picked()}
    for arm, repeats in rows.items():
        results[arm] = {name: msgspec.to_builtins(Spread.of([row[name] for row in repeats])) for name in repeats[0]}
    sitting.write(arguments.out, results)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
