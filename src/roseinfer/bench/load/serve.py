"""`roseinfer bench serve`: a load through HTTP, on an absolute schedule, from a process of its own."""

import argparse
import asyncio
import io
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from roseinfer.bench.load import report
from roseinfer.bench.load.client import LoadClient, Pacer, PreparedRequest, find_endpoint, get
from roseinfer.bench.load.endpoint import Endpoint
from roseinfer.bench.load.observed import Verdict, lag_p99_ns
from roseinfer.bench.load.plan import PlannedRequest, Tokens
from roseinfer.bench.load.plan_options import (
    describe,
    echo_of,
    interval_ns_of,
    objective_of,
    planner_of,
    settle_seed,
    take_scenario,
)
from roseinfer.bench.load.report import ServeRun
from roseinfer.bench.load.request_body import RequestForm, fresh_salt
from roseinfer.bench.seeds.session import say
from roseinfer.cli.output_files import check_outputs
from roseinfer.cli.progress import Progress
from roseinfer.config.api_keys import read_keys
from roseinfer.config.sources import LoadedConfig
from roseinfer.errors import ConfigError, InvalidRequest
from roseinfer.observe.recorder.recording import ClockPair, Recording

EXIT_INVALID = 1


def run(arguments: argparse.Namespace, _: LoadedConfig, pacer: Pacer | None = None) -> int:
    """Print the report. Returns the exit code: 1 when the generator did not keep its schedule, or nothing completed."""
    take_scenario(arguments)
    plan = planner_of(arguments)
    check_outputs(json=arguments.json, recording=arguments.recording)
    endpoint = endpoint_of(arguments)
    settle_seed(arguments, endpoint)
    planned = plan(arguments.seed)
    header = {"Load": describe(arguments, planned)}
    measured = measure(arguments, planned, interval_ns_of(arguments, planned), endpoint, header, pacer=pacer)
    return 0 if measured.is_valid and measured.complete else EXIT_INVALID


def measure(
    arguments: argparse.Namespace,
    planned: Sequence[PlannedRequest],
    interval_ns: float,
    endpoint: Endpoint,
    header: Mapping[str, Any],
    title: str = "serve",
    pacer: Pacer | None = None,
) -> ServeRun:
    """Send the plan to the server, print the report and keep the files that were asked for."""
    since_ns = None if arguments.recording is None else clock_ns(arguments.ops_url, endpoint.api_key)
    measured = send(arguments, planned, interval_ns, endpoint, "requests", pacer)
    say(*report.lines_of(measured, {"URL": endpoint.url, "Model": endpoint.model, **header}, title))
    _keep(arguments, measured, endpoint, since_ns)
    return measured


def endpoint_of(arguments: argparse.Namespace) -> Endpoint:
    """Of the server that the flags name. Raises ConfigError."""
    return find_endpoint(arguments.url, key_of(arguments))


def key_of(arguments: argparse.Namespace) -> str:
    """The API key to send, empty without a file of them. Raises ConfigError."""
    key_file: Path | None = arguments.api_key_file
    return "" if key_file is None else read_keys(key_file, "--api-key-file")[0].key


def send(
    arguments: argparse.Namespace,
    planned: Sequence[PlannedRequest],
    interval_ns: float,
    endpoint: Endpoint,
    label: str,
    pacer: Pacer | None = None,
) -> ServeRun:
    """Send the plan and wait for the last answer; `label` is what a person who waits reads."""
    prepared = prepare(planned, endpoint, arguments)
    with Progress(label, total=len(prepared)) as progress:
        seen = LoadClient(endpoint, pacer or Pacer(), progress.count).run(prepared)
    return ServeRun(seen, Verdict(lag_p99_ns(seen), interval_ns, arguments.max_lag_share), objective_of(arguments))


def _keep(arguments: argparse.Namespace, measured: ServeRun, endpoint: Endpoint, since_ns: int | None) -> None:
    """Write the files that were asked for; the result also when the recording cannot be had."""
    recording: Path | None = arguments.recording
    try:
        if recording is not None and since_ns is not None:
            fetch_recording(arguments.ops_url, endpoint.api_key, recording, since_ns)
    except (ConfigError, InvalidRequest):
        recording = None
        raise
    finally:
        if arguments.json is not None:
            settings = {"url": endpoint.url, "model": endpoint.model, "arguments": echo_of(arguments)}
            report.write_result(arguments.json, measured, settings, recording)


class _Steps(msgspec.Struct):
    clock: ClockPair


def clock_ns(ops_url: str, api_key: str) -> int:
    """Where the monotonic clock of the server's host stands. Raises ConfigError."""
    url = f"{ops_url.rstrip('/')}/debug/steps?limit=1"
    body = asyncio.run(get(url, api_key, "--ops-url"))
    try:
        return msgspec.json.decode(body, type=_Steps).clock.monotonic_ns
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise ConfigError(f"{url} says something else than expected", param="--ops-url") from None


def fetch_recording(ops_url: str, api_key: str, file: Path, since_ns: int = 0) -> None:
    """Keep what the server remembers since a moment of its clock. Raises ConfigError or InvalidRequest."""
    url = f"{ops_url.rstrip('/')}/debug/recording?since_ns={since_ns}"
    body = asyncio.run(get(url, api_key, "--ops-url"))
    Recording.read(io.BytesIO(body), f"What {ops_url} sent")  # or an older file would be lost for nothing
    try:
        file.write_bytes(body)
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror}", param="--recording") from None
    say(f"Recording: {file}")


def prepare(
    planned: Sequence[PlannedRequest], endpoint: Endpoint, arguments: argparse.Namespace
) -> list[PreparedRequest]:
    """The bodies, encoded before the clock starts. Raises ConfigError for a request that the server would refuse."""
    tokens, cache_salt = Tokens(arguments.seed, endpoint.vocab_size), fresh_salt(endpoint)
    run_id = f"bench-{time.time_ns() // 1_000_000:x}"
    prepared = []
    for index, request in enumerate(planned):
        num_tokens = request.num_prompt_tokens + request.max_tokens
        if endpoint.max_model_len and num_tokens > endpoint.max_model_len:
            raise ConfigError(
                f"{request.num_prompt_tokens} and {request.max_tokens} tokens to be generated do not fit into the "
                f"{endpoint.max_model_len} tokens of {endpoint.model}",
                param="prompt",
            )
        # Whoever goes away after a token has to see each one.
        interval = arguments.stream_interval if request.abort_after_tokens is None else 1
        form = RequestForm(arguments.chat, arguments.ignore_eos, interval, cache_salt)
        body = form.body(endpoint.model, tokens.of(request.segments), request.max_tokens)
        prepared.append(
            PreparedRequest(
                request_id=f"{run_id}-{index}",
                offset_ns=request.offset_ns,
                path=form.path,
                body=msgspec.json.encode(body),
                stream_interval=interval,
                abort_after_tokens=request.abort_after_tokens,
                abort_after_ns=request.abort_after_ns,
            )
        )
    return prepared
