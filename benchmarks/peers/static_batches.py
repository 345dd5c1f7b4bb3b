"""Runs planned requests as static batches, for a library that cannot admit one while a batch runs.

All requests that are due form a batch, which runs to its end; meanwhile the others wait. Token ids in, stamps out: no
HTTP and no text, which flatters such a peer a little. Needs the standard library only.
"""

import time
from collections.abc import Callable
from typing import Any

Emit = Callable[[int], None]
"""Called with a sequence's index in the batch when it got a token."""

RunBatch = Callable[[list[list[int]], int, Emit], None]
"""Continues each prompt by so many tokens, greedily, EOS or not."""

MAX_BATCH = 128


def drive(run_batch: RunBatch, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One answer for each request, in seconds on one clock; `requests` as the workloads describe them, in order."""
    start = time.perf_counter()
    due = [start + request["at"] for request in requests]
    pieces: list[list[float]] = [[] for _ in requests]
    done = 0
    while done < len(requests):
        time.sleep(max(0.0, due[done] - time.perf_counter()))
        now = time.perf_counter()
        batch = [i for i in range(done, min(len(requests), done + MAX_BATCH)) if due[i] <= now]

        def emit(index: int, batch: list[int] = batch) -> None:
            pieces[batch[index]].append(time.perf_counter())

        run_batch([requests[i]["token_ids"] for i in batch], requests[batch[0]]["new_tokens"], emit)
        done += len(batch)
    for request, stamps in zip(requests, pieces, strict=True):
        assert len(stamps) == request["new_tokens"], f"{len(stamps)} tokens in place of {request['new_tokens']}"
    return [
        {"submitted": moment, "pieces": stamps, "num_tokens": len(stamps)}
        for moment, stamps in zip(due, pieces, strict=True)
    ]
