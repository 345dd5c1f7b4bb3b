"""Computes the figures of a workload from its streams, and median and spread of a figure over its repeats.

TTFT, TPOT and ITL are those of `roseinfer.bench.definitions.Observed`, from the client's stamps, one for each piece
that arrived; tokens/s are all tokens over the time from the first submission to the last token, and those of prompts
the prompts' tokens over the time until every stream had its first.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from roseinfer.bench.definitions import Observed, percentile
from roseinfer.bench.load.report import latency_pools

STEADY_SHARE = 0.9


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure over its repeats."""

    median: float
    least: float
    most: float
    num_repeats: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        return cls(statistics.median(values), min(values), max(values), len(values))

    def text(self, form: str) -> str:
        """With each number in a form, such as `.2f`."""
        return f"{self.median:{form}} ({self.least:{form}} to {self.most:{form}})"


def summarise(streams: Sequence[Observed], num_prompt_tokens: int = 0) -> dict[str, float]:
    """One repeat of a workload; latencies in milliseconds. Figures that no stream has are left out."""
    tokens = sum(stream.num_tokens for stream in streams)
    began_ns = min(stream.sent_ns for stream in streams)
    elapsed_ns = max(stream.token_ns[-1] for stream in streams) - began_ns
    prompts_ns = max(stream.token_ns[0] for stream in streams) - began_ns
    pools = {pool.name.lower(): pool.values for pool in latency_pools(streams)}
    pools["steady_itl"] = steady_gaps_ns(streams)
    row = {"tokens": float(tokens), "tokens_per_s": tokens / elapsed_ns * 1e9}
    if num_prompt_tokens:
        row["prompt_tokens_per_s"] = num_prompt_tokens / prompts_ns * 1e9
    for name, values in pools.items():
        for percent in (50, 99) if values else ():
            row[f"{name}_p{percent}_ms"] = percentile(values, percent) / 1e6
    return row


def steady_gaps_ns(streams: Sequence[Observed]) -> list[float]:
    """Inter-token latencies while at least STEADY_SHARE of the largest number of streams is running.

    A stream runs from its first piece to its last. While they come and go, gaps are those of other batch sizes and of
    prompts being read, which is the ramp and not the steady state.
    """
    events = sorted(
        [(s.token_ns[0], 1) for s in streams] + [(s.token_ns[-1], -1) for s in streams], key=lambda e: (e[0], -e[1])
    )
    running, most, levels = 0, 0, []
    for moment, change in events:
        running += change
        most = max(most, running)
        levels.append((moment, running))
    enough = [moment for moment, level in levels if level >= STEADY_SHARE * most]
    first = enough[0]
    last = next(moment for moment, level in levels if moment >= enough[-1] and level < STEADY_SHARE * most)
    return [
        (later - earlier) / count
        for stream in streams
        for (earlier, later), count in zip(pairwise(stream.token_ns), stream.token_counts[1:], strict=True)
        if first <= earlier and later <= last
        for _ in range(count)
    ]


def medians(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Of each figure, the median over the repeats that have it."""
    names = {name: None for row in rows for name in row}
    return {name: statistics.median(row[name] for row in rows if name in row) for name in names}
