"""Planned requests into time stamps: streams from any server that speaks OpenAI's completions. Knows no server by name.

    python -m benchmarks.http_client URL MODEL        (answers `drive`: for loads that one process cannot read)

Every request goes out when it is due, answered or not. A piece's stamp is taken when its line has arrived, before it is
parsed. Tokens are counted by the server's own usage, since a piece may carry several and one whose bytes are not
complete carries none. Only loopback addresses are driven.
"""

import argparse
import asyncio
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, NamedTuple
from urllib.parse import urlparse

import aiohttp
import msgspec

from benchmarks.figures import Stream
from benchmarks.protocol import answer
from benchmarks.workloads import PlannedRequest

ANSWER_TIMEOUT_S = 300.0


class ServerRefused(RuntimeError):
    """The server answered with an error, or not as agreed."""


class Endpoint(NamedTuple):
    """Where a server listens, and what it calls its model."""

    url: str
    model: str


def drive(endpoint: Endpoint, requests: Sequence[PlannedRequest]) -> list[Stream]:
    """Send the requests on their schedule and wait for all answers. Raises ServerRefused."""
    if urlparse(endpoint.url).hostname not in ("127.0.0.1", "localhost", "::1"):
        raise ServerRefused(f"{endpoint.url} is not on this host")
    try:
        return asyncio.run(_drive(endpoint, requests))
    except (aiohttp.ClientError, TimeoutError) as error:
        raise ServerRefused(repr(error)) from None


def is_answering(endpoint: Endpoint) -> bool:
    """Whether the server generates: a token was asked for and came."""
    try:
        drive(endpoint, [PlannedRequest(0.0, " import", [], 1)])
    except ServerRefused:
        return False
    return True


async def _drive(endpoint: Endpoint, requests: Sequence[PlannedRequest]) -> list[Stream]:
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=ANSWER_TIMEOUT_S)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        start = time.perf_counter()
        return list(await asyncio.gather(*(_stream(session, endpoint, request, start) for request in requests)))


async def _stream(session: aiohttp.ClientSession, endpoint: Endpoint, request: PlannedRequest, start: float) -> Stream:
    body = msgspec.json.encode(
        {
            "model": endpoint.model,
            "prompt": request.text,
            "max_tokens": request.new_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )
    if (wait := start + request.at - time.perf_counter()) > 0:
        await asyncio.sleep(wait)
    submitted = time.perf_counter()
    pieces: list[float] = []
    num_tokens = 0
    headers = {"Content-Type": "application/json"}
    async with session.post(f"{endpoint.url}/v1/completions", data=body, headers=headers) as response:
        if response.status != 200:
            raise ServerRefused(f"{response.status}: {(await response.text())[:300]}")
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            now = time.perf_counter()
            event: dict[str, Any] = msgspec.json.decode(line[6:])
            if "error" in event:
                raise ServerRefused(str(event["error"])[:300])
            if any(choice.get("text") for choice in event.get("choices") or ()):
                pieces.append(now)
            if usage := event.get("usage"):
                num_tokens = usage["completion_tokens"]
    if num_tokens != request.new_tokens or not pieces:
        raise ServerRefused(f"{num_tokens} tokens in {len(pieces)} pieces in place of {request.new_tokens} tokens")
    return Stream(submitted, pieces, num_tokens)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("model")
    arguments = parser.parse_args()

    def answer_drive(requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        planned = [PlannedRequest(**request) for request in requests]
        return [asdict(stream) for stream in drive(Endpoint(arguments.url, arguments.model), planned)]

    answer({"drive": answer_drive})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
