"""`roseinfer bench serve`: a load through HTTP, on an absolute schedule, from a process of its own."""

import argparse
import io
import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from roseinfer.bench.load import report
from roseinfer.bench.load.client import LoadClient, Pacer, PreparedRequest
from roseinfer.bench.load.endpoint import Endpoint, RequestForm, find_endpoint, get, key_in
from roseinfer.bench.load.plan import PlannedRequest, describe, echo_of, interval_ns_of, planner_of
from roseinfer.bench.load.report import ServeRun, Verdict, lag_p99_ns, objective_of
from roseinfer.bench.load.scenario import apply_scenario
from roseinfer.bench.report import say, writing
from roseinfer.cli.output_files import check_outputs
from roseinfer.cli.progress import Progress
from roseinfer.config.sources import LoadedConfig
from roseinfer.errors import ConfigError, InvalidRequest
from roseinfer.observe.recorder.recording import ClockPair, Recording

_NUM_DRAWN_SEEDS = 1_000_000_000
RECORDING_TIMEOUT_S = 120.0  # a server compresses it with what processor time its requests leave
EXIT_INVALID = 1


def run(arguments: argparse.Namespace, _: LoadedConfig, pacer: Pacer | None = None) -> int:
    """Print the report. Returns the exit code: 1 when the generator did not keep its schedule, or nothing completed."""
    apply_scenario(arguments)
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


def endpoint_of(arguments: argparse.Namespace, url: str | None = None) -> Endpoint:
    """The server that the flags or `url` name. Raises ConfigError."""
    return find_endpoint(url or arguments.url, key_in(arguments.api_key_file))


def settle_seed(arguments: argparse.Namespace, *endpoints: Endpoint | None) -> None:
    """Without `--seed`, set it to 0, or to a random one when some endpoint takes no cache salt.

    With a salt a server that has answered these prompts before does not find them in its prefix cache, so every run can
    have the same load. None is an endpoint that has answered nothing yet: the simulator, or a server that a run starts.
    """
    if arguments.seed is None:
        are_salted = all(endpoint is None or endpoint.takes_salt for endpoint in endpoints)
        arguments.seed = 0 if are_salted else secrets.randbelow(_NUM_DRAWN_SEEDS)


def send(
    arguments: argparse.Namespace,
    planned: Sequence[PlannedRequest],
    interval_ns: float,
    endpoint: Endpoint,
    label: str,
    pacer: Pacer | None = None,
) -> ServeRun:
    """Send the plan and wait for the last answer, under a progress display with that label."""
    prepared = prepare(planned, endpoint, arguments)
    with Progress(label, total=len(prepared)) as progress:
        seen = LoadClient(endpoint, pacer, progress.count).run(prepared)
    verdict = Verdict(lag_p99_ns(seen), interval_ns, arguments.max_lag_share)
    return ServeRun(seen, verdict, objective_of(arguments.slo_ttft_ms, arguments.slo_tpot_ms))


def _keep(arguments: argparse.Namespace, measured: ServeRun, endpoint: Endpoint, since_ns: int | None) -> None:
    """Write the files that the flags name; the result also when the recording cannot be fetched."""
    recording: Path | None = arguments.recording
    try:
        if recording is not None and since_ns is not None:
            fetch_recording(arguments.ops_url, endpoint.api_key, recording, since_ns)
    except (ConfigError, InvalidRequest):
        recording = None
        raise
    finally:
        if arguments.json is not None:
            report.write_result(arguments.json, measured, settings_of(arguments, endpoint), recording)


def settings_of(arguments: argparse.Namespace, endpoint: Endpoint) -> dict[str, Any]:
    """What a result file names of its run."""
    return {"url": endpoint.url, "model": endpoint.model, "arguments": echo_of(arguments)}


class _Steps(msgspec.Struct):
    clock: ClockPair


def clock_ns(ops_url: str, api_key: str) -> int:
    """The monotonic clock of the server's host, now. Raises ConfigError."""
    url = f"{ops_url.rstrip('/')}/debug/steps?limit=1"
    body = get(url, api_key, "--ops-url")
    try:
        return msgspec.json.decode(body, type=_Steps).clock.monotonic_ns
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise ConfigError(f"{url} says something else than expected", param="--ops-url") from None


def fetch_recording(ops_url: str, api_key: str, file: Path, since_ns: int = 0) -> None:
    """Write the server's recording since a moment of its clock to a file. Raises ConfigError or InvalidRequest."""
    url = f"{ops_url.rstrip('/')}/debug/recording?since_ns={since_ns}"
    body = get(url, api_key, "--ops-url", RECORDING_TIMEOUT_S)
    Recording.read(io.BytesIO(body), f"What {ops_url} sent")  # checked before an older file is overwritten
    with writing(file, "--recording"):
        file.write_bytes(body)
    say(f"Recording: {file}")


def prepare(
    planned: Sequence[PlannedRequest], endpoint: Endpoint, arguments: argparse.Namespace
) -> list[PreparedRequest]:
    """Encode the bodies, before the clock starts. Raises ConfigError for a request that the server would refuse."""
    form = RequestForm.of(
        endpoint,
        arguments.seed,
        is_chat=arguments.chat,
        ignore_eos=arguments.ignore_eos,
        stream_interval=arguments.stream_interval,
    )
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
        # A client that disconnects after a token must see each one.
        asked = form if request.abort_after_tokens is None else form._replace(stream_interval=1)
        prepared.append(
            PreparedRequest(
                request_id=f"{run_id}-{index}",
                offset_ns=request.offset_ns,
                path=asked.path,
                body=asked.encode(request.segments, request.max_tokens),
                stream_interval=asked.stream_interval,
                abort_after_tokens=request.abort_after_tokens,
                abort_after_ns=request.abort_after_ns,
            )
        )
    return prepared
