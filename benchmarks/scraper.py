"""Asks a server for pages at a fixed interval: `python -m benchmarks.scraper SECONDS TIMES PORT PATH...`.

It prints a line when it has asked once, and at the end the median time for all pages in milliseconds. TIMES 0 is until
it is ended. A moment that is missed is not made up for.
"""

import http.client
import statistics
import sys
import time
from collections.abc import Sequence


def scrape(interval_s: float, times: int, port: int, paths: Sequence[str]) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port)
    next_s, durations_ms = time.monotonic(), list[float]()
    while not times or len(durations_ms) < times:
        began_s = time.monotonic()
        for path in paths:
            connection.request("GET", path)
            response = connection.getresponse()
            response.read()
            assert response.status == 200, response.status
        durations_ms.append((time.monotonic() - began_s) * 1e3)
        if len(durations_ms) == 1:
            print("asked", flush=True)
        next_s = max(next_s + interval_s, time.monotonic())
        time.sleep(max(0.0, next_s - time.monotonic()))
    print(statistics.median(durations_ms))


if __name__ == "__main__":
    scrape(float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
