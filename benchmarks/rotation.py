"""Runs workloads through entrants in turn, and makes a row of figures for each.

    A B C A B C …: each repeat of a workload is run by every entrant before the next repeat begins.

All but the one whose turn it is are paused. Each repeat has new prompts, the same for every entrant. Where a roof is
asked for, it is before each turn and after it, and the repeat has the mean.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.figures import medians, summarise
from benchmarks.protocol import Entrant, PeerFailed
from benchmarks.workloads import PlannedRequest, Words, requests_of
from roseinfer.bench.definitions import Observed

WARM_UP = "W1x32"  # run once by each entrant and not counted: what comes first in a process is slower


class Limits:
    """How often a workload is repeated: `num_repeats`, or fewer when it would take longer than `budget_s`.

    The shortest workload is over before a scheduler's slice has evened out, so it is repeated more often.
    """

    def __init__(self, num_repeats: int, budget_s: float) -> None:
        self._num_repeats = num_repeats
        self._budget_s = budget_s
        self._most = num_repeats
        self._began = time.monotonic()

    def begin(self, workload: str) -> None:
        self._most = self._num_repeats + (2 if workload == "W1x32" and self._num_repeats > 1 else 0)
        self._began = time.monotonic()

    def allows(self, repeat: int) -> bool:
        """Whether another repeat, as long as the mean of those before, would end inside the budget."""
        elapsed = time.monotonic() - self._began
        return repeat == 0 or (repeat < self._most and elapsed * (repeat + 1) / repeat <= self._budget_s)


def run(
    entrants: Sequence[Entrant],
    words: Words,
    workloads: Sequence[str],
    limits: Limits,
    keep: Callable[[list[dict[str, Any]]], object] = lambda _: None,
    roof: Callable[[], float] | None = None,
) -> list[dict[str, Any]]:
    """Run all workloads in order. Returns a row for each entrant and workload, with an `error` where it failed.

    `keep` is called with the rows so far when a workload is over, `roof` while all entrants are paused.
    """
    rows: list[dict[str, Any]] = []
    failures: dict[str, str] = {}
    for entrant in entrants:
        entrant.pause()
    for entrant in entrants:
        _take_turn(entrant, requests_of(WARM_UP, words, repeat=-1), failures)
    for workload in workloads:
        takers = [entrant for entrant in entrants if workload in entrant.workloads]
        repeats: dict[str, list[dict[str, float]]] = {entrant.name: [] for entrant in takers}
        limits.begin(workload)
        repeat = 0
        while limits.allows(repeat):
            requests = requests_of(workload, words, repeat)
            for entrant in takers:
                before = roof() if roof else 0.0
                streams = _take_turn(entrant, requests, failures)
                if streams is not None:
                    num_prompt_tokens = sum(len(request.token_ids) for request in requests)
                    figures = summarise(streams, num_prompt_tokens)
                    repeats[entrant.name].append(figures | ({"roof": (before + roof()) / 2} if roof else {}))
            repeat += 1
        for entrant in takers:
            row = _row(entrant, workload, repeats[entrant.name], failures.pop(entrant.name, None))
            rows.append(row)
            print(f"  {line_of(row)}", flush=True)
        keep(rows)
    return rows


def _take_turn(entrant: Entrant, requests: Sequence[PlannedRequest], failures: dict[str, str]) -> list[Observed] | None:
    entrant.resume()
    try:
        return entrant.drive(requests)
    except PeerFailed as error:
        failures[entrant.name] = str(error)
        return None
    finally:
        entrant.pause()


def _row(entrant: Entrant, workload: str, repeats: list[dict[str, float]], failure: str | None) -> dict[str, Any]:
    row: dict[str, Any] = {"name": entrant.name, "workload": workload, "repeats": repeats}
    row |= {"median": medians(repeats), "peak_rss_mb": entrant.peak_rss_mb()} if repeats else {}
    return row if failure is None else {**row, "error": failure}


def line_of(row: dict[str, Any]) -> str:
    """The row in one line."""
    if not row["repeats"]:
        return f"{row['name']:24} {row['workload']:6} failed: {row['error']}"
    figures = row["median"]
    pairs = ", ".join(
        f"{name.upper()} {figures[f'{name}_p50_ms']:.1f}/{figures[f'{name}_p99_ms']:.1f}"
        for name in ("ttft", "tpot", "itl")
        if f"{name}_p50_ms" in figures
    )
    rates = ", ".join(f"{repeat['tokens_per_s']:.0f}" for repeat in row["repeats"])
    return f"{row['name']:24} {row['workload']:6} {figures['tokens_per_s']:6.0f} tok/s ({rates}), ms p50/p99: {pairs}"


def absent(name: str, reason: str, workloads: Sequence[str]) -> dict[str, Any]:
    """The row of a rival that could not be measured."""
    return {"name": name, "workload": ", ".join(workloads), "repeats": [], "error": reason}
