"""Streams through HTTP at once: what clients saw, beside what the server's own histograms say of the same requests.

    roseinfer serve &
    python benchmarks/http_streams.py --streams 64 --max-tokens 128

The client runs in this process and the server in its own, so the generator's Python does not hold up the engine's. On a
machine with two cores the three processes still share them, which is why the two columns are printed side by side.
"""

import argparse
import asyncio
import time
from collections.abc import Sequence

from prometheus_client.parser import text_string_to_metric_families

from benchmarks.http_client import prepared
from roseinfer.bench.definitions import Observed, percentile
from roseinfer.bench.load.client import LoadClient, get
from roseinfer.bench.load.endpoint import Endpoint

SERIES = {
    "TTFT": "roseinfer_time_to_first_token_seconds",
    "engine TTFT": "roseinfer_engine_time_to_first_token_seconds",
    "ITL (engine)": "roseinfer_inter_token_latency_seconds",
    "wire gap": "roseinfer_stream_gap_seconds",
    "TPOT": "roseinfer_time_per_output_token_seconds",
    "request": "roseinfer_request_duration_seconds",
}
Buckets = dict[str, dict[float, float]]


def scrape(url: str) -> Buckets:
    """Cumulative counts by upper bound of each series."""
    page = asyncio.run(get(f"{url}/metrics", "", "--url")).decode()
    return {
        family.name: {
            float(s.labels["le"]): s.value
            for s in family.samples
            if s.name.endswith("_bucket") and s.labels.get("streamed") != "false"
        }
        for family in text_string_to_metric_families(page)
        if family.name in SERIES.values()
    }


def quantile(before: dict[float, float], after: dict[float, float], share: float) -> float:
    """As Prometheus' histogram_quantile: linear within the bucket. Seconds; nan without observations."""
    bounds = sorted(after)
    counts = [after[bound] - before[bound] for bound in bounds]
    if not counts[-1]:
        return float("nan")
    rank, lower, below = share * counts[-1], 0.0, 0.0
    for bound, count in zip(bounds, counts, strict=True):
        if count >= rank:
            return lower if bound == float("inf") else lower + (bound - lower) * (rank - below) / max(count - below, 1)
        lower, below = bound, count
    return lower


def report(turn: int, seen: Sequence[Observed], wall: float, before: Buckets, after: Buckets) -> None:
    tokens, num_errors = sum(each.num_tokens for each in seen), sum(bool(each.error) for each in seen)
    pools = {
        "client TTFT": [each.ttft_ns for each in seen if each.token_ns],
        "client gap": [gap for each in seen for gap in each.chunk_gaps_ns()],
    }
    print(f"run {turn + 1}: {len(seen)} streams, {num_errors} errors, {tokens / wall:.0f} tokens/s over {wall:.2f} s")
    print(f"  {'':14} {'p50 ms':>9} {'p99 ms':>9}")
    for name, values in pools.items():
        p50, p99 = (percentile(values, percent) / 1e6 if values else float("nan") for percent in (50, 99))
        print(f"  {name:14} {p50:9.2f} {p99:9.2f}")
    for name, series in SERIES.items():
        p50, p99 = (quantile(before[series], after[series], share) * 1e3 for share in (0.5, 0.99))
        print(f"  {name:14} {p50:9.2f} {p99:9.2f}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--prompt", default="The scheduler decides which sequences get a token in the next step.")
    parser.add_argument("--repeat", type=int, default=3)
    arguments = parser.parse_args()
    for turn in range(arguments.repeat):
        before, start = scrape(arguments.url), time.perf_counter()
        prompts = [f"{turn} {index} {arguments.prompt}" for index in range(arguments.streams)]
        seen = LoadClient(Endpoint(arguments.url)).run([prepared(prompt, arguments.max_tokens) for prompt in prompts])
        report(turn, seen, time.perf_counter() - start, before, scrape(arguments.url))
        if errors := [each.error for each in seen if each.error]:
            print(f"the first error: {errors[0]}")
            return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
