"""Time stamps of streams into figures, and repeats of a figure into median and spread. Knows no engine and no clock.

    TTFT = first token − submission      TPOT = (last token − first token) / (tokens − 1)
    ITL  = gaps between neighbouring stamps of one stream, pooled over all streams
    tokens/s = all tokens / (last token − first submission)

Stamps are the client's: one for each piece that arrived, which may carry several tokens. Percentiles are the engine's
own benchmarks' (`bench/definitions.py`): linear between the two nearest ranks.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from roseinfer.bench.definitions import percentile

STEADY_SHARE = 0.9


@dataclass(frozen=True, slots=True)
class Stream:
    """One answered request; seconds on one clock."""

    submitted: float
    pieces: Sequence[float]  # when each piece of the answer arrived, at least one
    num_tokens: int


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


def streams_of(answers: Iterable[Mapping[str, Any]]) -> list[Stream]:
    """From the JSON of a driver."""
    return [Stream(answer["submitted"], answer["pieces"], answer["num_tokens"]) for answer in answers]


def summarise(streams: Sequence[Stream]) -> dict[str, float]:
    """One repeat of a workload; latencies in milliseconds. Figures that no stream has are left out."""
    tokens = sum(stream.num_tokens for stream in streams)
    began = min(stream.submitted for stream in streams)
    ended = max(stream.pieces[-1] for stream in streams)
    pools = {
        "ttft": [stream.pieces[0] - stream.submitted for stream in streams],
        "tpot": [
            (stream.pieces[-1] - stream.pieces[0]) / (stream.num_tokens - 1)
            for stream in streams
            if stream.num_tokens > 1 and len(stream.pieces) > 1
        ],
        "itl": [later - earlier for stream in streams for earlier, later in pairwise(stream.pieces)],
        "steady_itl": steady_gaps(streams),
    }
    row = {"tokens": float(tokens), "tokens_per_s": tokens / (ended - began)}
    for name, values in pools.items():
        for percent in (50, 99) if values else ():
            row[f"{name}_p{percent}_ms"] = percentile(values, percent) * 1e3
    return row


def steady_gaps(streams: Sequence[Stream]) -> list[float]:
    """Gaps that begin and end while at least STEADY_SHARE of the largest number of streams is running.

    A stream runs from its first piece to its last. While they come and go, gaps are those of other batch sizes and of
    prompts being read, which is the ramp and not the steady state.
    """
    events = sorted(
        [(s.pieces[0], 1) for s in streams] + [(s.pieces[-1], -1) for s in streams], key=lambda e: (e[0], -e[1])
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
        later - earlier
        for stream in streams
        for earlier, later in pairwise(stream.pieces)
        if first <= earlier and later <= last
    ]


def medians(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Of each figure, the median over the repeats that have it."""
    names = {name: None for row in rows for name in row}
    return {name: statistics.median(row[name] for row in rows if name in row) for name in names}
