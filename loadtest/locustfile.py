"""Locust users that send a scenario's requests as streams, and what they see in Locust's statistics.

    locust -f loadtest/locustfile.py --headless --scenario steady --html report.html --json-file report.json

A user is an open loop: it sends each request when it is due, whether or not earlier ones have been answered. Besides
the request, four latencies are sent to the event hook `stream_latency` and get rows of their own, as `roseinfer bench
serve` defines them: `TTFT`, `TPOT`, `ITL` and `submit lag`. The row `Aggregated` leaves them out and counts requests.
Scenario, bodies, parsing and report are `roseinfer.bench.load`'s; only the sockets are Locust's, which runs on gevent.
"""

import itertools
import logging
import random
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import gevent
import locust.stats
import msgspec
import urllib3
from gevent.pool import Group
from locust import LoadTestShape, User, events, task
from locust.argument_parser import LocustArgumentParser
from locust.env import Environment
from locust.event import EventHook
from locust.runners import LocalRunner, WorkerRunner
from urllib3.connection import HTTPConnection, HTTPSConnection

from roseinfer.bench.definitions import Observed
from roseinfer.bench.load import report
from roseinfer.bench.load.endpoint import RequestForm, authorization, find_endpoint, key_in
from roseinfer.bench.load.event_stream import read_answer
from roseinfer.bench.load.report import Verdict, lag_p99_ns, mean_interval_ns, objective_of
from roseinfer.bench.load.scenario import PARAM, load_scenario
from roseinfer.bench.report import NS_PER_MS
from roseinfer.cli.output_files import check_folder, check_outputs
from roseinfer.config.flags import url_of
from roseinfer.errors import ConfigError

SCENARIOS = Path(__file__).parent / "scenarios"
DEFAULT_URL = "http://127.0.0.1:8000"
TIMEOUT = urllib3.Timeout(connect=10.0, read=600.0)
JOIN_TOLERANCE_S = 0.5  # a user who joins so shortly before a burst belongs to it: a shape ticks once a second
FINISH_TIMEOUT_S = 120.0  # for answers that are under way when the test ends
EXIT_UNUSABLE = 2

stream_latency = EventHook()
"""Fired with `name` (TTFT, TPOT, ITL or submit lag), `path` and `milliseconds`; for exporters too."""

_log = logging.getLogger("roseinfer.loadtest")
_streams = Group()  # all answers under way, of users that have left too


def to_three_digits(milliseconds: float) -> float:
    """Percentiles are of rounded values. Locust's own rounding, to whole milliseconds, has no room for an ITL."""
    return float(f"{milliseconds:.3g}")


# The statistics offer this function for replacement; its keys may be floats, though it is not declared so.
locust.stats.bucket_response_time = to_three_digits  # type: ignore[assignment]


class _Timed:
    """A connection that keeps when its last request had been written."""

    sent_ns = 0

    def request(self, *args: Any, **kwargs: Any) -> None:
        super().request(*args, **kwargs)  # type: ignore[misc]
        self.sent_ns = time.monotonic_ns()


class _TimedHTTP(_Timed, HTTPConnection):
    pass


class _TimedHTTPS(_Timed, HTTPSConnection):
    pass


class Load:
    """One test run: the scenario, the server, and all requests that are over if a result is asked for."""

    def __init__(self, options: Namespace, host: str | None, keeps_requests: bool) -> None:
        """Raises ConfigError when the scenario cannot be used, or no server answers."""
        self.scenario = load_scenario(scenario_file(options.scenario))
        given = host or DEFAULT_URL
        self.seed, self.url = options.seed, (url_of(given) or given).rstrip("/")
        self.seen: list[Observed] | None = [] if keeps_requests else None
        key = key_in(Path(options.api_key_file) if options.api_key_file else None)
        self.pool = urllib3.connectionpool.connection_from_url(
            self.url, maxsize=1000, timeout=TIMEOUT, retries=False, headers=authorization(key)
        )
        self.pool.ConnectionCls = _TimedHTTPS if self.url.startswith("https:") else _TimedHTTP
        self.endpoint = find_endpoint(self.url, key, "--host")
        self.form = RequestForm.of(
            self.endpoint,
            self.seed,
            is_chat=self.scenario.endpoint == "chat",
            ignore_eos=self.scenario.ignore_eos,
            stream_interval=self.scenario.stream_interval,
        )
        self.started_ns, self.unix_ns = time.monotonic_ns(), time.time_ns()
        self.cpu_s = time.process_time()
        self.ids = itertools.count()
        self.bursts_ns: dict[int, int] = {}  # of each phase: when its first user has joined

    def burst_ns(self) -> int | None:
        """When the first request of a user who joins now is due, in a burst: all of them together. Else None."""
        now_ns = time.monotonic_ns()
        phase = self.scenario.phase_at((now_ns - self.started_ns) / 1e9 + JOIN_TOLERANCE_S)
        return None if phase is None or phase.kind != "burst" else self.bursts_ns.setdefault(id(phase), now_ns)

    def body(self, source: random.Random) -> bytes:
        """Another request, encoded."""
        return self.form.encode(*self.scenario.draw(source, 1 + source.getrandbits(62)))

    def ask(self, body: bytes, due_ns: int) -> Observed:
        """Send one request and read its answer, every piece with its stamp."""
        seen = Observed(request_id=f"locust-{self.unix_ns // 1_000_000:x}-{next(self.ids)}", intended_ns=due_ns)
        headers = self.endpoint.headers(seen.request_id, (self.unix_ns + due_ns - self.started_ns) / 1e9)
        reads: list[tuple[int, bytes]] = []
        try:
            answer = self.pool.urlopen("POST", self.form.path, body, headers, preload_content=False)
            connection = answer.connection
            assert isinstance(connection, _TimedHTTP | _TimedHTTPS)
            seen.sent_ns, seen.status = connection.sent_ns, answer.status
            while data := answer.read1(65536):
                reads.append((time.monotonic_ns(), data))
            answer.release_conn()
        except (urllib3.exceptions.HTTPError, OSError) as error:
            seen.error = f"{type(error).__name__}: {error}"
        seen.end_ns = time.monotonic_ns()
        read_answer(seen, reads, self.form.stream_interval)
        if self.seen is not None:
            self.seen.append(seen)
        return seen


class Running:
    """The run under way, if there is one; Locust makes users and shapes without arguments."""

    load: Load | None = None


class StreamingUser(User):
    """Sends requests as a Poisson process of the scenario's rate."""

    host = None
    _number = itertools.count()

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        runner = environment.runner
        worker = runner.worker_index if isinstance(runner, WorkerRunner) else 0
        self._load = Running.load
        self._source = random.Random(f"{self._load and self._load.seed} {worker} {next(self._number)}")
        self._due_ns, self._body = 0, b""  # of the next request; 0 before it is known

    def wait_time(self) -> float:
        """Seconds until the next request is due."""
        return max(0.0, (self._due_ns - time.monotonic_ns()) / 1e9)

    @task
    def ask_when_due(self) -> None:
        """Called when a request is due, and once before."""
        load = self._load
        if load is None:
            gevent.sleep(1.0)  # the test did not start, which has been logged
            return
        burst_ns = None if self._due_ns else load.burst_ns()
        if self._due_ns:
            _streams.spawn(self._stream, load, self._body, self._due_ns)
        if burst_ns is None:
            interval_ns = round(self._source.expovariate(load.scenario.rate_per_user) * 1e9)
            self._due_ns = (self._due_ns or time.monotonic_ns()) + interval_ns
        else:
            self._due_ns = burst_ns
        self._body = load.body(self._source)  # now, and not when it is due

    def _stream(self, load: Load, body: bytes, due_ns: int) -> None:
        seen, path = load.ask(body, due_ns), load.form.path
        self.environment.events.request.fire(
            request_type="POST",
            name=path,
            response_time=(seen.end_ns - (seen.sent_ns or due_ns)) / NS_PER_MS,
            response_length=seen.num_tokens,
            exception=RuntimeError(seen.error) if seen.error else None,
            context={},
        )
        if seen.sent_ns:
            stream_latency.fire(name="submit lag", path=path, milliseconds=seen.submit_lag_ns / NS_PER_MS)
        if not seen.is_complete:
            return
        stream_latency.fire(name="TTFT", path=path, milliseconds=seen.ttft_ns / NS_PER_MS)
        if (tpot_ns := seen.tpot_ns) is not None:
            stream_latency.fire(name="TPOT", path=path, milliseconds=tpot_ns / NS_PER_MS)
        for gap_ns in seen.inter_token_latencies_ns():
            stream_latency.fire(name="ITL", path=path, milliseconds=gap_ns / NS_PER_MS)


class ScenarioShape(LoadTestShape):
    """The scenario's users, second by second; with `--free` those that the command line or the page asks for."""

    use_common_options = True

    def tick(self) -> tuple[int, float] | None:
        """Users, and how many may join in a second; None ends the test."""
        assert self.runner is not None
        options, offset_s = self.runner.environment.parsed_options, self.get_run_time()
        assert options is not None
        begin(self.runner.environment)  # a shape ticks before the test has started
        if Running.load is None or (options.run_time and offset_s >= options.run_time):
            return None
        if options.free:
            return options.num_users or 1, options.spawn_rate or 1
        scenario = Running.load.scenario
        if scenario.phase_at(offset_s) is None:
            return None
        return scenario.users_at(offset_s), max(1, *(phase.users for phase in scenario.phases))


@events.init_command_line_parser.add_listener
def add_options(parser: LocustArgumentParser) -> None:
    """All options but the files can be changed on the page too."""
    parser.add_argument("--scenario", default="steady", help="a file, or the name of one in loadtest/scenarios")
    parser.add_argument(
        "--free", action="store_true", help="not the scenario's phases, but --users and --spawn-rate, or the page's"
    )
    parser.add_argument("--seed", type=int, default=0, help="of prompts and arrivals")
    parser.add_argument("--api-key-file", default="", help="its first key is sent", include_in_web_ui=False)
    parser.add_argument(
        "--max-lag-share",
        type=float,
        default=0.1,
        help="the result is invalid when the submit lag's p99 is a larger share of the mean interval",
        include_in_web_ui=False,
    )
    parser.add_argument(
        "--result",
        default="",
        help="print the report of `roseinfer bench serve` too and keep every request in this file, for "
        "`roseinfer bench compare` and `roseinfer explain`; one process only",
        include_in_web_ui=False,
    )


@events.init.add_listener
def prepare(environment: Environment, **_: object) -> None:
    """Count what streams show, and without a page refuse at once what cannot be used."""
    stats, options = environment.stats, environment.parsed_options
    assert options is not None

    def count(name: str, path: str, milliseconds: float, **_: object) -> None:
        stats.get(path, name).log(milliseconds, 0)  # type: ignore[arg-type]  # it adds and compares, as for requests

    stream_latency.add_listener(count)
    if options.headless and not isinstance(environment.runner, WorkerRunner):
        try:
            _load_of(environment)
        except ConfigError as error:
            sys.stderr.write(f"{text_of(error)}\n")
            sys.exit(EXIT_UNUSABLE)


@events.test_start.add_listener
def begin(environment: Environment, **_: object) -> None:
    """Read the scenario and find the server; each test does so once, before its first user."""
    if Running.load is not None:
        return
    try:
        Running.load = _load_of(environment)
    except ConfigError as error:
        environment.process_exit_code = EXIT_UNUSABLE
        _log.error(text_of(error))


@events.test_stop.add_listener
def finish(environment: Environment, **_: object) -> None:
    """Wait for the answers under way, so that none is cut, then report."""
    load, options = Running.load, environment.parsed_options
    Running.load = None
    if not _streams.join(timeout=FINISH_TIMEOUT_S):
        _log.warning("after %.0f s %d answers are still under way", FINISH_TIMEOUT_S, len(_streams))
    if load is None or not load.seen or options is None:
        return
    verdict = Verdict(
        lag_p99_ns(load.seen), mean_interval_ns([seen.intended_ns for seen in load.seen]), options.max_lag_share
    )
    limits = load.scenario.objective
    run = report.ServeRun(load.seen, verdict, objective_of(limits.ttft_ms, limits.tpot_ms))
    wall_s = (time.monotonic_ns() - load.started_ns) / 1e9
    header = {
        "URL": load.url,
        "Model": load.endpoint.model,
        "Load": f"{options.scenario}, seed {load.seed}",
        "Processor time of the generator": f"{(time.process_time() - load.cpu_s) / wall_s:.1%} of a core",
    }
    print("\n".join(report.lines_of(run, header, "locust")), flush=True)
    arguments = {
        "scenario": msgspec.to_builtins(load.scenario),
        "seed": load.seed,
        "free": options.free,
        "tool": "locust",
    }
    settings = {"url": load.url, "model": load.endpoint.model, "arguments": arguments}
    Path(options.result).parent.mkdir(parents=True, exist_ok=True)
    report.write_result(Path(options.result), run, settings, recording=None)
    if not verdict.is_valid:
        environment.process_exit_code = 1


def _load_of(environment: Environment) -> Load:
    """Raises ConfigError."""
    options = environment.parsed_options
    assert options is not None
    if options.result and not isinstance(environment.runner, LocalRunner):
        raise ConfigError("needs one process, which sees all requests", param="--result")
    if options.result:
        file = Path(options.result)
        check_folder("result", file.parent)
        if file.exists():
            check_outputs(result=file)
    return Load(options, environment.host, keeps_requests=bool(options.result))


def text_of(error: ConfigError) -> str:
    hint = "; `make serve` starts a server" if error.message.startswith("nothing answers") else ""
    return f"loadtest: {error.param}: {error.message}{hint}"


def scenario_file(text: str) -> Path:
    """The file, or one of ours by its name. Raises ConfigError."""
    ours = {file.stem: file for file in sorted(SCENARIOS.glob("*.yaml"))}
    file = ours.get(text, Path(text))
    if not file.is_file():
        raise ConfigError(f"{text} is no file and none of {', '.join(ours)}", param=PARAM)
    return file
