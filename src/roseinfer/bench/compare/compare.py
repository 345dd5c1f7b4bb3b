"""`roseinfer bench compare`: measures two servers, sets of flags or sets of results against each other.

Runs are made in turn, A B B A A B ..., so that a machine that changes evenly hits both sides alike. Both runs of a
round have the same prompts, and no two rounds do. Each run, repeated ones too, has a cache salt of its own, so it finds
its prompts in no prefix cache; another server than roseinfer is sent none, so there no two comparisons have the same
prompts. A server that is started here is a new process for each run, since processes of one program differ too.
"""

import argparse
import shlex
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from roseinfer.bench.compare.comparison import MIN_RUNS, Finding, Outcome, Thresholds, judge, overall
from roseinfer.bench.compare.results import (
    Measured,
    describe_differences,
    differences,
    figures_of,
    in_turn,
    read_results,
    rows_of,
)
from roseinfer.bench.load.endpoint import Endpoint, base_of
from roseinfer.bench.load.launcher import LaunchFailed, serving
from roseinfer.bench.load.plan import PlannedRequest, describe, echo_of, interval_ns_of, planner_of, refuse_flags
from roseinfer.bench.load.report import ServeRun, write_result
from roseinfer.bench.load.scenario import apply_scenario
from roseinfer.bench.load.serve import endpoint_of, send, settings_of, settle_seed
from roseinfer.bench.report import header_lines, say, write_json
from roseinfer.cli.output_files import check_folder, check_outputs
from roseinfer.config.sources import LoadedConfig
from roseinfer.errors import ConfigError

COMPARISON_FORMAT = "roseinfer bench compare 1"
EXIT_FAILED = 1
_OF_RUNS = (
    *("rate", "interval_ms", "burst", "trace", "scenario", "num_requests", "duration", "prompt_tokens", "max_tokens"),
    *("shared_prefix_share", "long_prompt_tokens", "num_long", "long_at", "long_max_tokens", "seed", "chat"),
    *("ignore_eos", "stream_interval", "slo_ttft_ms", "slo_tpot_ms", "max_lag_share", "rounds", "keep"),
    *("both", "start_timeout", "api_key_file"),
)
NUM_WARM_UP = 8  # requests at once that are not counted: what comes first in a process is slower
MAX_ATTEMPTS = 3  # at a run in which the generator itself was late
_URL = ("http://", "https://")


class Comparison(NamedTuple):
    """The findings, or the objections for which nothing was judged."""

    findings: list[Finding]
    objections: list[str]
    num_runs: tuple[int, int]
    is_interleaved: bool
    thresholds: Thresholds
    left_out: list[str]  # metrics that some run has no figure of, or none above zero

    @property
    def outcome(self) -> Outcome:
        return Outcome.VOID if self.objections else overall(self.findings)


class Side(NamedTuple):
    """One side of a comparison: a server that runs already, the same process in all runs, or flags of new ones."""

    name: str
    what: str
    running: Endpoint | None
    flags: str = ""

    @contextmanager
    def open(self, arguments: argparse.Namespace) -> Iterator[Endpoint]:
        """A server of this side for a run. Raises ConfigError when it does not start."""
        if self.running is not None:
            yield self.running
            return
        with started_server(self.flags, f"--{self.name.lower()}", arguments.start_timeout) as url:
            yield endpoint_of(arguments, url)


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
        apply_scenario(arguments)
        comparison, header = _of_servers(arguments, thresholds)
        settings = echo_of(arguments)
    say(*lines_of(comparison, header))
    if arguments.json is not None:
        write_comparison(arguments.json, comparison, {**header, **settings})
    found = {finding.outcome for finding in comparison.findings} | {comparison.outcome}
    return EXIT_FAILED if found & set(arguments.fail_on) else 0


def _refuse_equal(arguments: argparse.Namespace) -> None:
    """Raises ConfigError when the sides are equal without `--equal-sides`, or differ with it."""
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
        problem = "are the same; --equal-sides compares servers with themselves, which shows what is noise here"
        raise ConfigError(problem, param="--a and --b" if launched else "A and B")


def _plain(text: str) -> str:
    """A URL or a path without what makes no difference."""
    return base_of(text).lower() if text.startswith(_URL) else str(Path(text).resolve())


def _of_results(arguments: argparse.Namespace, thresholds: Thresholds) -> tuple[Comparison, dict[str, Any]]:
    if len(arguments.sides) != 2:
        raise ConfigError("needs two: URLs, or results; or --a FLAGS and --b FLAGS", param="A B")
    refuse_flags(arguments, _OF_RUNS, "has no meaning for results: their runs have been made")
    texts: list[str] = arguments.sides
    a, b = (read_results([Path(text)], name) for text, name in zip(texts, "AB", strict=True))
    if differing := differences(a.settings, b.settings, arguments.varied):
        raise ConfigError(f"{describe_differences(differing)}; name with --varied what was varied", param="A B")
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
    """The two sides; those that run already have reported what they serve. Raises ConfigError."""
    texts: list[str] = arguments.sides
    if arguments.a is not None or arguments.b is not None:
        if texts or arguments.a is None or arguments.b is None:
            raise ConfigError("--a and --b belong together, without anything else", param="--a")
        both = {name: f"{arguments.both} {flags}".strip() for name, flags in (("A", arguments.a), ("B", arguments.b))}
        for name, flags in both.items():  # before a run of the other side
            words_of(flags, f"--{name.lower()}")
        a, b = (Side(name, f"roseinfer serve {flags}".strip(), None, flags) for name, flags in both.items())
        return a, b
    if len(texts) != 2 or not all(text.startswith(_URL) for text in texts):
        raise ConfigError("needs two URLs", param="A B")
    if arguments.both:
        raise ConfigError("needs --a and --b: servers that run already have their flags", param="--both")
    a, b = (Side(name, url, endpoint_of(arguments, url)) for name, url in zip("AB", texts, strict=True))
    return a, b


def words_of(flags: str, param: str) -> list[str]:
    """The words of flags, as a shell has them. Raises ConfigError."""
    try:
        return shlex.split(flags)
    except ValueError as error:
        raise ConfigError(f"{error}, got {flags!r}", param=param) from None


@contextmanager
def started_server(flags: str, param: str, timeout_s: float) -> Iterator[str]:
    """The URL of a new server with these flags. Raises ConfigError when it does not start."""
    words = words_of(flags, param)
    with tempfile.TemporaryDirectory(prefix="roseinfer-compare-") as folder:
        try:
            with serving(*words, log=Path(folder) / "log", timeout_s=timeout_s) as server:
                yield server.url
        except LaunchFailed as error:
            raise ConfigError(str(error), param=param) from None


def _of_servers(arguments: argparse.Namespace, thresholds: Thresholds) -> tuple[Comparison, dict[str, Any]]:
    """Make the runs, with a line for each."""
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
    """Make a run of one side, again when the generator was late, and return its figures and model."""
    interval_ns = interval_ns_of(turn, planned)
    with side.open(turn) as endpoint:
        for _ in range(MAX_ATTEMPTS):
            # A running server that has not served yet would become faster over the first rounds, which is a drift.
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
    write_result(folder / f"{index + 1:03}.json", made, settings_of(turn, endpoint), recording=None)


def _brief(measured: Measured) -> str:
    shown = [
        f"{metric.name} {value:.2f} {metric.unit}" for metric, value in measured.figures.items() if "p50" in metric.name
    ]
    return measured.objection or ", ".join(shown)


def lines_of(comparison: Comparison, header: Mapping[str, Any]) -> list[str]:
    """The report."""
    num_a, num_b = comparison.num_runs
    turns = "in turn" if comparison.is_interleaved else "NOT in turn: a machine that changed in between looks like this"
    lines = ["=== comparison ===", *header_lines(header), f"Runs: {num_a} of A and {num_b} of B, {turns}"]
    if comparison.objections:
        return [*lines, *(f"Void: {objection}" for objection in comparison.objections)]
    if comparison.left_out:
        lines.append(f"Left out, without a figure above zero in every run: {', '.join(comparison.left_out)}")
    sure, effect, drift = comparison.thresholds
    lines.append(f"Intervals: {sure:.0%} for all together; noise below {effect:.1%}, void above {drift:.1%} of drift")
    outcomes = Counter(finding.outcome for finding in comparison.findings)
    said = ", ".join(f"{outcomes[outcome]} {outcome}" for outcome in Outcome if outcomes[outcome])
    return [*lines, *_table(comparison.findings), f"Verdict: {comparison.outcome} ({said})"]


def _table(findings: Sequence[Finding]) -> list[str]:
    rows: list[tuple[str, ...]] = [("metric", "A", "B", "effect", "interval", "drift", "verdict")]
    for finding in findings:
        interval = f"{finding.low:+.1%} to {finding.high:+.1%}"
        values = (f"{finding.a:.4g}", f"{finding.b:.4g}", f"{finding.effect:+.1%}", interval, f"{finding.drift:.1%}")
        rows.append((f"{finding.metric}, {finding.unit}", *values, finding.outcome))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [text.rjust(width) for text, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join([row[0].ljust(widths[0]), *cells]))
    return lines


def write_comparison(file: Path, comparison: Comparison, settings: Mapping[str, Any]) -> None:
    """Effects, intervals and drift are shares: 0.05 is five percent. Raises ConfigError."""
    content = {
        "format": COMPARISON_FORMAT,
        "outcome": comparison.outcome,
        "objections": comparison.objections,
        "num_runs": {"a": comparison.num_runs[0], "b": comparison.num_runs[1]},
        "is_interleaved": comparison.is_interleaved,
        "thresholds": comparison.thresholds._asdict(),
        "settings": settings,
        "left_out": comparison.left_out,
        "findings": msgspec.to_builtins(comparison.findings),
    }
    write_json(file, content)
