"""Sends a workload to any server that speaks OpenAI's completions, through the client of `roseinfer bench`.

    python -m benchmarks.http_client URL MODEL        (answers `drive`: for loads that one process cannot read)

Tokens are counted by the server's own usage, since a piece may carry several. Only loopback addresses are driven.
"""

import argparse
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlparse

import msgspec

from benchmarks.protocol import PeerFailed, answer
from benchmarks.workloads import PlannedRequest
from roseinfer.bench.definitions import Observed
from roseinfer.bench.load.client import LoadClient, PreparedRequest
from roseinfer.bench.load.endpoint import Endpoint

ANSWER_TIMEOUT_S = 300.0


class ServerRefused(PeerFailed):
    """The server answered with an error, or with another number of tokens."""


def prepared(
    prompt: str | list[int], max_tokens: int, *, at: float = 0.0, asks_ledger: bool = False, **fields: Any
) -> PreparedRequest:
    """A stream of exactly `max_tokens`, due `at` seconds after the start, greedy unless `fields` say otherwise."""
    body: dict[str, object] = {
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        **fields,
    }
    return PreparedRequest(
        request_id="bench",
        path="/v1/completions",
        body=msgspec.json.encode(body),
        offset_ns=round(at * 1e9),
        asks_ledger=asks_ledger,
    )


def drive(endpoint: Endpoint, requests: Sequence[PlannedRequest]) -> list[Observed]:
    """Send the requests on their schedule and wait for all answers. Raises ServerRefused."""
    if urlparse(endpoint.url).hostname not in ("127.0.0.1", "localhost", "::1"):
        raise ServerRefused(f"{endpoint.url} is not on this host")
    asked = [prepared(request.text, request.new_tokens, at=request.at, model=endpoint.model) for request in requests]
    streams = LoadClient(endpoint, timeout_s=ANSWER_TIMEOUT_S).run(asked)
    for stream, request in zip(streams, requests, strict=True):
        if stream.error:
            raise ServerRefused(stream.error)
        if stream.num_tokens != request.new_tokens:
            raise ServerRefused(f"{stream.num_tokens} tokens in place of {request.new_tokens}")
    return streams


def is_answering(endpoint: Endpoint) -> bool:
    """Whether the server generates: a token was asked for and came."""
    try:
        drive(endpoint, [PlannedRequest(0.0, " import", [], 1)])
    except ServerRefused:
        return False
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("model")
    arguments = parser.parse_args()

    def answer_drive(requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        streams = drive(Endpoint(arguments.url, model=arguments.model), [PlannedRequest(**each) for each in requests])
        return [msgspec.to_builtins(stream) for stream in streams]

    answer({"drive": answer_drive})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
