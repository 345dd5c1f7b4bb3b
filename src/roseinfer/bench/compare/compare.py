"""`roseinfer bench compare`: two servers, two sets of flags or two sets of results, into effects and a verdict.

Runs are made in turn, A B B A A B ..., so that a machine that changes evenly hits both sides alike. Both runs of a
round have the same prompts, and no two rounds do. Each run, repeated ones too, has a cache salt of its own, so its
prompts are in no prefix cache, whoever has asked them before; servers that are not ours are sent none, so there no two
comparisons have the same prompts. A server that is started here is a new process for each run, since processes of one
program differ among themselves too.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from roseinfer.bench.compare import report as compare_report
from roseinfer.bench.compare.comparison import MIN_RUNS, Thresholds, judge
from roseinfer.bench.compare.report import Comparison
from roseinfer.bench.compare.results import (
    Measured,
    differences,
    figures_of,
    in_turn,
    read_results,
    rows_of,
    told,
)
from roseinfer.bench.load import report
from roseinfer.bench.load.client import find_endpoint
from roseinfer.bench.load.endpoint import Endpoint, base_of
from roseinfer.bench.load.launcher import serving
from roseinfer.bench.load.plan import PlannedRequest
from roseinfer.bench.load.plan_options import describe, echo_of, interval_ns_of, planner_of, settle_seed, take_scenario
from roseinfer.bench.load.report import ServeRun
from roseinfer.bench.load.serve import key_of, send
from roseinfer.bench.seeds.session import say
from roseinfer.cli.output_files import check_folder, check_outputs
from roseinfer.config.sources import LoadedConfig
from roseinfer.errors import ConfigError

EXIT_FAILED = 1
NUM_WARM_UP = 8  # requests at once that are not counted: what comes first in a process is slower
MAX_ATTEMPTS = 3  # at a run in which the generator itself was late
_URL = ("http://", "https://")


class Side(NamedTuple):
    """One of the two, and how to have a server of it for a run."""

    name: str
    what: str
    open: Callable[[], AbstractContextManager[Endpoint]]
    running: Endpoint | None  # of what serves already, and is the same process in all runs


def run(arguments: argparse.Namespace, _: LoadedConfig) -> int:
    """Print the comparison. Returns the exit code: 1 when a metric is so that `--fail-on` names it."""
    thresholds = Thresholds(arguments.confidence, arguments.min_effect, arguments.max_drift)
    texts: list[str] = arguments.sides
    _refuse_equal(arguments)
    check_outputs(json=arguments.json)
    check_folder("keep", arguments.keep)
    if arguments.a is None and arguments.b is None and not any(text.startswith(_URL) for text in texts):
        comparison, header = _of_results(arguments, thresholds)
        settings: dict[str, Any] = {}
    else:
        take_scenario(arguments)
        comparison, header = _of_servers(arguments, thresholds)
        settings = echo_of(arguments)
    say(*compare_report.lines_of(comparison, header))
    if arguments.json is not None:
        compare_report.write_json(arguments.json, comparison, {**header, **settings})
    found = {finding.outcome for finding in comparison.findings} | {comparison.outcome}
    return EXIT_FAILED if found & set(arguments.fail_on) else 0


def _refuse_equal(arguments: argparse.Namespace) -> None:
    """A side that is held against itself by mistake is noise, which would be read as an answer; nor is another one
    noise where equals were asked for. Raises ConfigError.
    """
    texts: list[str] = arguments.sides
    launched = [] if arguments.a is None or arguments.b is None else [arguments.a.split(), arguments.b.split()]
    sides = launched or [[_plain(text)] for text in texts]
    is_equal = len(sides) == 2 and sides[0] == sides[1]
    if arguments.equal_sides:
        if texts and not any(text.startswith(_URL) for text in texts):
            raise ConfigError("needs servers: what was measured once says nothing of itself", param="--equal-sides")
        if len(sides) == 2 and not is_equal:
            raise ConfigError("needs A and B to be the same, and they differ", param="--equal-sides")
    elif is_equal:
        told = "are the same; --equal-sides compares servers with themselves, which shows what is noise here"
        raise ConfigError(told, param="--a and --b" if launched else "A and B")


def _plain(text: str) -> str:
    """A URL or a path without what makes no difference."""
    return base_of(text).lower() if text.startswith(_URL) else str(Path(text).resolve())


def _of_results(arguments: argparse.Namespace, thresholds: Thresholds) -> tuple[Comparison, dict[str, Any]]:
    if len(arguments.sides) != 2:
        raise ConfigError("needs two: URLs, or results; or --a FLAGS and --b FLAGS", param="A B")
    texts: list[str] = arguments.sides
    a, b = (read_results([Path(text)], name) for text, name in zip(texts, "AB", strict=True))
    if differing := differences(a.settings, b.settings, arguments.varied):
        raise ConfigError(f"{told(differing)}; name with --varied what was varied", param="A B")
    header = {"A": texts[0], "B": texts[1]}
    if varied := differences(a.settings, b.settings):
        header["Varied"] = ", ".join(f"{name}: {of_a!r} and {of_b!r}" for name, (of_a, of_b) in varied.items())
    pairs = in_turn(a.runs, b.runs)
    if pairs is None:
        return _judged(a.runs, b.runs, thresholds, is_paired=False), header
    return _judged([run for run, _ in pairs], [run for _, run in pairs], thresholds, is_paired=True), header


def _judged(a: Sequence[Measured], b: Sequence[Measured], thresholds: Thresholds, *, is_paired: bool) -> Comparison:
    objections = [
        f"{name}, run {number}: {measured.objection}"
        for name, side in (("A", a), ("B", b))
        for number, measured in enumerate(side, 1)
        if measured.objection
    ]
    if min(len(a), len(b)) < MIN_RUNS:
        objections.append(f"at least {MIN_RUNS} runs of each side are needed")
    findings, left_out = [], list[str]()
    if not objections:
        metrics, runs_a, runs_b = rows_of(a, b)
        left_out = sorted(
            {metric.name for run in (*a, *b) for metric in run.figures} - {metric.name for metric in metrics}
        )
        findings = judge(metrics, runs_a, runs_b, is_paired=is_paired, thresholds=thresholds)
    return Comparison(findings, objections, (len(a), len(b)), is_paired, thresholds, left_out)


def _sides_of(arguments: argparse.Namespace) -> tuple[Side, Side]:
    """The two that runs are made of; those that are up have been asked what they serve. Raises ConfigError."""
    texts: list[str] = arguments.sides
    if arguments.a is not None or arguments.b is not None:
        if texts or arguments.a is None or arguments.b is None:
            raise ConfigError("--a and --b belong together, without anything else", param="--a")
        return _launched(arguments, "A", arguments.a), _launched(arguments, "B", arguments.b)
    if len(texts) != 2 or not all(text.startswith(_URL) for text in texts):
        raise ConfigError("needs two URLs", param="A B")
    if arguments.both:
        raise ConfigError("needs --a and --b: servers that run already have their flags", param="--both")
    return _running(arguments, "A", texts[0]), _running(arguments, "B", texts[1])


def _running(arguments: argparse.Namespace, name: str, url: str) -> Side:
    endpoint = find_endpoint(url, key_of(arguments))
    return Side(name, url, lambda: nullcontext(endpoint), endpoint)


def _launched(arguments: argparse.Namespace, name: str, flags: str) -> Side:
    both = f"{arguments.both} {flags}".strip()
    return Side(name, f"roseinfer serve {both}".strip(), partial(_started, arguments, name, both), running=None)


@contextmanager
def _started(arguments: argparse.Namespace, name: str, flags: str) -> Iterator[Endpoint]:
    with serving(flags, f"--{name.lower()}", arguments.start_timeout) as url:
        yield find_endpoint(url, key_of(arguments))


def _of_servers(arguments: argparse.Namespace, thresholds: Thresholds) -> tuple[Comparison, dict[str, Any]]:
    """Make the runs, and tell of each."""
    plan = planner_of(arguments)
    sides = _sides_of(arguments)
    settle_seed(arguments, *(side.running for side in sides))
    b = f"{sides[1].what}, equal to A" if arguments.equal_sides else sides[1].what
    header = {"A": sides[0].what, "B": b, "Load": describe(arguments, plan(arguments.seed))}
    measured: dict[str, list[Measured]] = {side.name: [] for side in sides}
    models: dict[str, str] = {}
    for index in range(arguments.rounds):
        turn = argparse.Namespace(**{**vars(arguments), "seed": arguments.seed + index})
        planned = plan(turn.seed)
        for side in sides if index % 2 == 0 else sides[::-1]:
            made, models[side.name] = _run_once(turn, side, planned, index)
            measured[side.name].append(made)
            say(f"round {index + 1}/{arguments.rounds}, {side.name}: {_brief(made)}")
    if len(set(models.values())) > 1 and "model" not in arguments.varied:
        raise ConfigError(f"serve different models: {' and '.join(models.values())}; or --varied model", param="A B")
    return _judged(measured["A"], measured["B"], thresholds, is_paired=True), header


def _run_once(
    turn: argparse.Namespace, side: Side, planned: Sequence[PlannedRequest], index: int
) -> tuple[Measured, str]:
    """A run of one side, and its model; again when the generator was late, since that says nothing of the server."""
    interval_ns = interval_ns_of(turn, planned)
    with side.open() as endpoint:
        for _ in range(MAX_ATTEMPTS):
            # A server that is up and has not served yet would become faster over the first rounds: that is a drift.
            _warm_up(turn, planned if side.running is not None and index == 0 else planned[:NUM_WARM_UP], endpoint)
            label = f"round {index + 1}, {side.name}"
            made = send(turn, planned, interval_ns, endpoint, label)
            if made.is_valid:
                break
    if turn.keep is not None:
        _keep(turn, side, made, endpoint, index)
    return figures_of(made), endpoint.model


def _warm_up(turn: argparse.Namespace, planned: Sequence[PlannedRequest], endpoint: Endpoint) -> None:
    first = [msgspec.structs.replace(request, offset_ns=0) for request in planned]
    other_prompts = argparse.Namespace(**{**vars(turn), "seed": turn.seed + 1_000_000})
    send(other_prompts, first, 0.0, endpoint, "warm-up")


def _keep(turn: argparse.Namespace, side: Side, made: ServeRun, endpoint: Endpoint, index: int) -> None:
    """The run's result, in a folder of its side."""
    folder = Path(turn.keep) / side.name.lower()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be made: {error.strerror}", param="--keep") from None
    settings = {"url": endpoint.url, "model": endpoint.model, "arguments": echo_of(turn)}
    report.write_result(folder / f"{index + 1:03}.json", made, settings, recording=None)


def _brief(measured: Measured) -> str:
    shown = [
        f"{metric.name} {value:.2f} {metric.unit}" for metric, value in measured.figures.items() if "p50" in metric.name
    ]
    return measured.objection or ", ".join(shown)
