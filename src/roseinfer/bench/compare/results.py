"""Reads the figures of runs and result files, and checks that their settings agree."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from roseinfer.bench.compare.comparison import Metric, Runs
from roseinfer.bench.load.report import RESULT_FORMAT, ServeRun, duration_s, result_of
from roseinfer.bench.report import PERCENTS
from roseinfer.errors import ConfigError

THROUGHPUT = Metric("Throughput", "tokens/s", is_higher_better=True)
GOODPUT = Metric("Goodput", "requests/s", is_higher_better=True)

# Settings that do not change the load: where it was sent, what was kept of it, and the seed, from which prompts follow.
_NOT_OF_THE_LOAD = (
    *("url", "ops_url", "json", "recording", "api_key_file", "seed", "scenario_file", "COMMAND", "BENCHMARK"),
)
_SHOWN = 8


class Measured(NamedTuple):
    """One run: its figures by metric, and why they are not to be believed, if that is so."""

    figures: dict[Metric, float]
    began_s: float  # on the clock of its host
    objection: str = ""


class ResultSet(NamedTuple):
    """Runs with the settings that all of them had."""

    runs: list[Measured]
    settings: dict[str, Any]


def figures_of(run: ServeRun) -> Measured:
    """The figures of a run that has just been made."""
    measured = _of_serve(result_of(run, {}, None))
    if run.objective is not None and not measured.objection:
        num_good = sum(run.objective.is_met(request) for request in run.complete)
        measured.figures[GOODPUT] = num_good / duration_s(run.requests)
    return measured


def _percentiles(distributions: Mapping[str, Mapping[str, Any]]) -> dict[Metric, float]:
    return {
        Metric(f"{name} p{percent}", str(summary["unit"])): float(summary[f"p{percent}"])
        for name, summary in distributions.items()
        for percent in PERCENTS
    }


def read_results(paths: Sequence[Path], name: str) -> ResultSet:
    """Results of `bench serve --json`, Locust's `--result` or `bench streaming --json`; a folder is all that are in it.

    Raises ConfigError, in the name of the side, for what is none, or for settings that differ inside the side.
    """
    try:
        files = [file for path in paths for file in (sorted(path.glob("*.json")) if path.is_dir() else [path])]
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be read: {error.strerror}", param=name) from None
    if not files:
        raise ConfigError(f"{', '.join(map(str, paths))} holds no result", param=name)
    runs, settings = list[Measured](), None
    for file in files:
        read = _read(file, name)
        runs += read.runs
        if settings is not None and (differing := differences(settings, read.settings)):
            raise ConfigError(f"{file} differs from {files[0]}: {describe_differences(differing)}", param=name)
        settings = read.settings
    assert settings is not None
    return ResultSet(runs, settings)


def _read(file: Path, name: str) -> ResultSet:
    try:
        content = json.loads(file.read_bytes())
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}", param=name) from None
    except (ValueError, RecursionError):  # the first also of what is not UTF-8
        raise ConfigError(f"{file} is not JSON", param=name) from None
    try:
        settings = _flat(content["settings"])
        if content.get("format") == RESULT_FORMAT:
            return ResultSet([_of_serve(content)], settings)
        return ResultSet([_of_streaming(run, index) for index, run in enumerate(content["runs"])], settings)
    except (KeyError, TypeError, AttributeError, ValueError, ArithmeticError):
        raise ConfigError(f"{file} is no result of roseinfer bench", param=name) from None


def _of_serve(content: Mapping[str, Any]) -> Measured:
    requests, verdict = content["requests"], content["verdict"]
    began_s = min(request["intended_s"] for request in requests)
    if verdict is not None and not verdict["is_valid"]:
        return Measured({}, began_s, "the load generator did not keep its schedule")
    if num_failed := sum(bool(request["error"]) for request in requests):
        problem = f"{num_failed} of {len(requests)} requests failed"
        return Measured({}, began_s, f"{problem}, and the latencies of the rest are those of a smaller load")
    seconds = max(request["end_s"] for request in requests) - min(request["sent_s"] for request in requests)
    num_tokens = sum(request["num_tokens"] for request in requests if not request.get("was_aborted"))
    return Measured({**_percentiles(content["distributions"]), THROUGHPUT: num_tokens / seconds}, began_s)


def _of_streaming(run: Mapping[str, Any], index: int) -> Measured:
    """Its runs are of one process, one after the other; when they began is not kept."""
    objection = f"{run['num_rejected']} requests were rejected" if run["num_rejected"] else ""
    figures = _percentiles(run["distributions"])
    return Measured({**figures, THROUGHPUT: float(run["throughput_tokens_per_s"])}, float(index), objection)


def _flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """`arguments` and `config` in one level with the rest: `scheduler.max_active_seqs`."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        if name == "arguments":
            flat |= value
        elif name == "config":
            flat |= {
                f"{section}.{leaf}": setting for section, leaves in value.items() for leaf, setting in leaves.items()
            }
        else:
            flat[name] = value
    return {name: value for name, value in flat.items() if name not in _NOT_OF_THE_LOAD}


def differences(a: Mapping[str, Any], b: Mapping[str, Any], varied: Iterable[str] = ()) -> dict[str, tuple[Any, Any]]:
    """Settings that are not the same on both sides, but for those that may vary."""
    names = sorted({*a, *b} - set(varied))
    return {name: (a.get(name), b.get(name)) for name in names if a.get(name) != b.get(name)}


def describe_differences(differing: Mapping[str, tuple[Any, Any]]) -> str:
    """The first few of these settings, with both values, in one line."""
    shown = [f"{name} is {a!r} and {b!r}" for name, (a, b) in list(differing.items())[:_SHOWN]]
    return "; ".join(shown + [f"and {len(differing) - _SHOWN} more"] * (len(differing) > _SHOWN))


def rows_of(a: Sequence[Measured], b: Sequence[Measured]) -> tuple[list[Metric], Runs, Runs]:
    """The metrics that every run has a figure of, above zero, and the figures."""
    runs = [*a, *b]
    metrics = [
        metric
        for metric in runs[0].figures
        if all(math.isfinite(run.figures.get(metric, 0.0)) and run.figures.get(metric, 0.0) > 0 for run in runs)
    ]

    def of(side: Sequence[Measured]) -> Runs:
        figures = np.array([[run.figures[metric] for metric in metrics] for run in side], dtype=np.float64)
        return Runs(figures, np.array([run.began_s for run in side]))

    return metrics, of(a), of(b)


def in_turn(a: Sequence[Measured], b: Sequence[Measured]) -> list[tuple[Measured, Measured]] | None:
    """Pairs of neighbours in time, one of each side; None when the runs were not made so."""
    if len(a) != len(b):
        return None
    order = sorted(
        [(run.began_s, 0, run) for run in a] + [(run.began_s, 1, run) for run in b], key=lambda entry: entry[:2]
    )
    pairs = []
    for first, second in zip(order[::2], order[1::2], strict=True):
        if first[1] == second[1] or first[0] == second[0]:
            return None
        pairs.append((first[2], second[2]) if first[1] == 0 else (second[2], first[2]))
    return pairs
