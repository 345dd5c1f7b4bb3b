"""Streams through HTTP at once: what clients saw, beside what the server's own histograms say of the same requests.

    roseinfer serve &
    python benchmarks/http_streams.py --streams 64 --max-tokens 128

The client runs in this process, the server in its own, so the generator's Python does not hold up the engine's; on a
machine with two cores the three processes still share them, which is why the two columns are printed side by side.
"""

import argparse
import asyncio
import json
import statistics
import time
from dataclasses import dataclass, field

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

SERIES = {
    "TTFT": "roseinfer_time_to_first_token_seconds",
    "engine TTFT": "roseinfer_engine_time_to_first_token_seconds",
    "ITL (engine)": "roseinfer_inter_token_latency_seconds",
    "wire gap": "roseinfer_stream_gap_seconds",
    "TPOT": "roseinfer_time_per_output_token_seconds",
    "request": "roseinfer_request_duration_seconds",
}
Buckets = dict[str, dict[float, float]]


@dataclass
class Seen:
    """One stream as its client saw it; seconds since the request was sent."""

    chunks: list[float] = field(default_factory=list)
    num_tokens: int = 0
    error: str = ""


async def stream(session: aiohttp.ClientSession, url: str, body: dict[str, object]) -> Seen:
    seen, start = Seen(), time.perf_counter()
    try:
        async with session.post(f"{url}/v1/completions", json=body) as response:
            if response.status != 200:
                seen.error = f"{response.status} {await response.text()}"
                return seen
            async for line in response.content:
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    if "error" in event:
                        seen.error = str(event["error"])
                    elif event.get("usage"):
                        seen.num_tokens = event["usage"]["completion_tokens"]
                    else:
                        seen.chunks.append(time.perf_counter() - start)
    except aiohttp.ClientError as error:
        seen.error = repr(error)
    return seen


async def scrape(session: aiohttp.ClientSession, url: str) -> Buckets:
    """Cumulative counts by upper bound of each series."""
    async with session.get(f"{url}/metrics") as response:
        page = await response.text()
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


def percentile(values: list[float], share: float) -> float:
    return statistics.quantiles(values, n=1000, method="inclusive")[round(share * 1000) - 1] if values else float("nan")


async def run(arguments: argparse.Namespace) -> int:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=600)) as session:
        for turn in range(arguments.repeat):
            before, start = await scrape(session, arguments.url), time.perf_counter()
            bodies = [
                {
                    "prompt": f"{turn} {index} {arguments.prompt}", "max_tokens": arguments.max_tokens, "stream": True,
                    "temperature": 0, "ignore_eos": True, "stream_options": {"include_usage": True},
                }
                for index in range(arguments.streams)
            ]  # fmt: skip
            seen = await asyncio.gather(*(stream(session, arguments.url, body) for body in bodies))
            wall = time.perf_counter() - start
            report(turn, seen, wall, before, await scrape(session, arguments.url))
            if errors := [entry.error for entry in seen if entry.error]:
                print(f"the first error: {errors[0]}")
                return 1
    return 0


def report(turn: int, seen: list[Seen], wall: float, before: Buckets, after: Buckets) -> None:
    firsts = [entry.chunks[0] for entry in seen if entry.chunks]
    gaps = [b - a for entry in seen for a, b in zip(entry.chunks, entry.chunks[1:], strict=False)]
    tokens = sum(entry.num_tokens for entry in seen)
    num_errors = sum(bool(entry.error) for entry in seen)
    print(f"run {turn + 1}: {len(seen)} streams, {num_errors} errors, {tokens / wall:.0f} tokens/s over {wall:.2f} s")
    print(f"  {'':14} {'p50 ms':>9} {'p99 ms':>9}")
    for name, values in (("client TTFT", firsts), ("client gap", gaps)):
        print(f"  {name:14} {percentile(values, 0.5) * 1e3:9.2f} {percentile(values, 0.99) * 1e3:9.2f}")
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
    return asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    raise SystemExit(main())
