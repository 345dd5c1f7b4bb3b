"""What all reports of the benchmarks share: distributions, lines of text, and files of JSON."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roseinfer.bench import definitions as d
from roseinfer.errors import ConfigError
from roseinfer.observe.logs import escape

PERCENTS = (50, 95, 99)
NS_PER_MS = 1e6


@dataclass(frozen=True, slots=True)
class Pool:
    """A distribution in a report: nanoseconds, pooled over requests."""

    name: str
    values: Sequence[float]
    unit: str = "ms"

    def percentiles_line(self) -> str:
        return f"{self.name} p50/p95/p99: {self.percentiles()} {self.unit}"

    def percentiles(self) -> str:
        """`1.00/2.00/3.00`."""
        return "/".join(f"{d.percentile(self.values, percent) / NS_PER_MS:.2f}" for percent in PERCENTS)

    def mean_line(self) -> str:
        shown = f"{d.percentile(self.values, 50) / NS_PER_MS:.2f}/{d.mean(self.values) / NS_PER_MS:.2f}"
        return f"{self.name} p50/mean: {shown} {self.unit}"

    def summary(self) -> dict[str, float | str]:
        """For JSON."""
        figures = {f"p{percent}": d.percentile(self.values, percent) / NS_PER_MS for percent in PERCENTS}
        return {"unit": self.unit, "count": len(self.values), "mean": d.mean(self.values) / NS_PER_MS, **figures}


def header_lines(header: Mapping[str, Any]) -> list[str]:
    return [f"{name}: {value}" for name, value in header.items()]


def step_kinds(kinds: Sequence[str]) -> str:
    """How many steps there were, and how many of each kind."""
    return f"{len(kinds)} ({', '.join(f'{kinds.count(kind)} {kind}' for kind in ('prefill', 'mixed', 'decode'))})"


def say(*lines: str) -> None:
    """Print to standard output at once: a benchmark may be read while it runs.

    A reader that has gone, as in `| head`, ends no work: its files and its exit code are still to come.
    """
    with suppress(BrokenPipeError):
        print("\n".join(map(escape, lines)), flush=True)  # a server's words may be anybody's


@contextmanager
def writing(file: Path, param: str) -> Iterator[None]:
    """Turns an OSError inside into a ConfigError that names the file and the flag."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror}", param=param) from None


def write_json(file: Path, content: Mapping[str, Any]) -> None:
    """Raises ConfigError."""
    with writing(file, "--json"):
        file.write_text(json.dumps(content, indent=1) + "\n")
