"""Asks a server for pages at a fixed interval: `python -m benchmarks.scraper SECONDS TIMES PORT PATH...`.

It asks as Prometheus and the pickers of gateways do, for gzip on one connection, and spends as little as it can, since
theirs is another machine. It prints a line when it has asked once, and at the end the median time for all pages in
milliseconds. TIMES 0 is until it is ended. A moment that is missed is not made up for.
"""

import re
import socket
import statistics
import sys
import time
from collections.abc import Sequence

_LENGTH = re.compile(rb"content-length: (\d+)", re.IGNORECASE)


def scrape(interval_s: float, times: int, port: int, paths: Sequence[str]) -> None:
    heads = [f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAccept-Encoding: gzip\r\n\r\n".encode() for path in paths]
    next_s, durations_ms = time.monotonic(), list[float]()
    with socket.create_connection(("127.0.0.1", port)) as connection:
        while not times or len(durations_ms) < times:
            began_s = time.monotonic()
            for head in heads:
                connection.sendall(head)
                read_answer(connection)
            durations_ms.append((time.monotonic() - began_s) * 1e3)
            if len(durations_ms) == 1:
                print("asked", flush=True)
            next_s = max(next_s + interval_s, time.monotonic())
            time.sleep(max(0.0, next_s - time.monotonic()))
    print(statistics.median(durations_ms))


def read_answer(connection: socket.socket) -> None:
    content = connection.recv(1 << 17)
    head, _, body = content.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200"), content
    length = _LENGTH.search(head)
    assert length is not None, head
    num_left = int(length[1]) - len(body)
    while num_left:
        num_left -= len(connection.recv(num_left))


if __name__ == "__main__":
    scrape(float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
