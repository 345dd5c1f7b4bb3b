"""`roseinfer bench simulate`: a load through the real scheduler on a virtual clock, in seconds and without a model."""

import argparse
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from roseinfer.bench.load.plan import PlannedRequest, describe, planner_of
from roseinfer.bench.load.report import ServeRun, lines_of, objective_of, write_result
from roseinfer.bench.load.scenario import apply_scenario
from roseinfer.bench.options import DEFAULT_COSTS
from roseinfer.bench.report import say, step_kinds, writing
from roseinfer.bench.simulate import cost_model
from roseinfer.bench.simulate.cost_model import CostModel
from roseinfer.bench.simulate.simulation import Decision, Setup, Simulated, Simulation
from roseinfer.cli.output_files import check_outputs
from roseinfer.cli.progress import Progress
from roseinfer.config.options import Config, options
from roseinfer.config.sources import Given, LoadedConfig, build
from roseinfer.observe.gaps.causes import Cause
from roseinfer.observe.recorder.recording import Recording

_RECORDED_SECTIONS = ("scheduler", "cache", "runner")  # what a recording says of them holds unless a flag differs


def run(arguments: argparse.Namespace, loaded: LoadedConfig) -> int:
    """Print the report. Returns the exit code."""
    apply_scenario(arguments)
    planned = planner_of(arguments)(arguments.seed)
    check_outputs(json=arguments.json, recording=arguments.recording, decision_log=arguments.decision_log)
    recording = recording_of(arguments.cost_model)
    if recording is None and arguments.cost_model is None and arguments.trace is not None:
        recording = _recording_at(arguments.trace)
    costs, costs_line = costs_of(arguments.cost_model, recording)
    setup = setup_of(arguments, loaded, recording, planned, costs)
    header = {"Load": describe(arguments, planned), "Cost model": costs_line}
    report(arguments, setup, simulate(arguments, setup, planned), header)
    return 0


def recording_of(wanted: str | None) -> Recording | None:
    """What `--cost-model` names, if that is a recording. Raises InvalidRequest."""
    return None if wanted in {None, DEFAULT_COSTS} else Recording.load(Path(str(wanted)))


def _recording_at(trace: Path) -> Recording | None:
    """The trace, if it is a recording."""
    with trace.open("rb") as file:
        is_archive = file.read(2) == b"PK"
    return Recording.load(trace) if is_archive else None


def costs_of(wanted: str | None, recording: Recording | None) -> tuple[CostModel, str]:
    """The cost model, and a line about it. Raises ConfigError when a recording holds too few steps."""
    if recording is None or wanted == DEFAULT_COSTS:
        return cost_model.DEFAULT, f"{cost_model.DEFAULT.line()}; the default, of no machine in particular"
    fitted = cost_model.fit(recording)
    return fitted.model, fitted.line()


def setup_of(
    arguments: argparse.Namespace,
    loaded: LoadedConfig,
    recording: Recording | None,
    planned: Sequence[PlannedRequest],
    costs: CostModel,
) -> Setup:
    """Of flags, then what the recording says, then defaults. By default the pool holds every active sequence."""
    config = config_of(loaded, recording)
    engine = None if recording is None else recording.meta.engine
    longest = max(request.num_prompt_tokens + request.max_tokens for request in planned)
    max_model_len = config.model.max_model_len or (engine.max_model_len if engine else longest)
    enough = config.scheduler.limits.max_active_seqs * -(-max_model_len // config.cache.block_size)
    num_blocks = config.cache.num_blocks or (engine.num_blocks if engine else enough)
    is_gpu = config.runner.device == "cuda" or (engine is not None and engine.device == "cuda")
    setup = Setup(
        scheduler=config.scheduler,
        cache=config.cache,
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        costs=costs,
        vocab_size=engine.vocab_size if engine else Setup._field_defaults["vocab_size"],
        pipeline_depth=config.runner.pipeline_depth_on("cuda" if is_gpu else "cpu"),  # as the server has it
        is_asynchronous=is_gpu,
        delays=tuple(arguments.inject),
        seed=arguments.seed,
        draft_share=draft_share_of(arguments, recording),
    )
    for cause in arguments.without:
        setup = without(setup, cause)
    return setup


def draft_share_of(arguments: argparse.Namespace, recording: Recording | None) -> float:
    """The share of an answer's tokens that drafts foretell: by the flag, or those of the recording that held."""
    if arguments.draft_share is not None or recording is None:
        return arguments.draft_share or 0.0
    num_accepted = int(recording.steps["num_accepted_tokens"].sum())
    return num_accepted / max(num_accepted + int(recording.steps["num_decode_seqs"].sum()), 1)


def config_of(loaded: LoadedConfig, recording: Recording | None) -> Config:
    """The tree, with what a recording says where no flag was given. Raises ConfigError."""
    if recording is None:
        return loaded.config
    given = {}
    for path, option in options().items():
        recorded: dict[str, Any] = recording.meta.config.get(option.section, {})
        if path in loaded.sources:
            value = getattr(getattr(loaded.config, option.section), option.name)
            given[path] = Given(value, loaded.sources[path])
        elif option.section in _RECORDED_SECTIONS and option.name in recorded:
            given[path] = Given(recorded[option.name], "the recording")
    return build(given).config


def without(setup: Setup, cause: Cause) -> Setup:
    """The same where that cause does not exist."""
    setup = setup._replace(delays=tuple(delay for delay in setup.delays if delay.cause is not cause))
    limits = setup.scheduler.limits
    match cause:
        case Cause.PREFILL_OF_OTHERS:
            return setup._replace(costs=setup.costs._replace(prefill_is_free=True))
        case Cause.NOT_SELECTED:  # the budget grows by the rows, so that prompts keep theirs
            scheduler = replace(
                setup.scheduler,
                max_num_seqs=limits.max_active_seqs,
                max_prefill_seqs=limits.max_prefill_seqs,
                max_active_seqs=limits.max_active_seqs,
                max_num_batched_tokens=limits.max_num_batched_tokens + limits.max_active_seqs - limits.max_num_seqs,
                max_prefill_tokens=limits.max_prefill_tokens,
            )
            return setup._replace(scheduler=scheduler)
        case Cause.KV_WAIT | Cause.PREEMPTED:  # one block of margin each: what an admission asks for
            each = -(-setup.max_model_len // setup.cache.block_size) + 1
            return setup._replace(num_blocks=max(setup.num_blocks, limits.max_active_seqs * each))
        case _:
            return setup


class Timed(NamedTuple):
    """A simulation, and how long it took here."""

    simulated: Simulated
    wall_s: float


def simulate(arguments: argparse.Namespace, setup: Setup, planned: Sequence[PlannedRequest]) -> Timed:
    """Run, with the decision log and the display that were asked for."""
    start = time.monotonic()
    with (
        _decision_log(arguments.decision_log) as on_decision,
        Progress("requests", total=len(planned)) as progress,
    ):
        simulated = Simulation(setup, on_decision=on_decision, on_ended=progress.count).run(planned)
    return Timed(simulated, time.monotonic() - start)


@contextmanager
def _decision_log(file: Path | None) -> Iterator[Any]:
    """A function that writes a decision as a line of JSON; None without a file. Raises ConfigError."""
    if file is None:
        yield None
        return
    encode = msgspec.json.Encoder().encode
    with writing(file, "--decision-log"), file.open("wb") as log:

        def write(decision: Decision) -> None:
            log.write(encode(decision) + b"\n")

        yield write


def report(
    arguments: argparse.Namespace,
    setup: Setup,
    outcome: Timed,
    header: Mapping[str, Any],
    title: str = "simulated",
) -> ServeRun:
    """Print what happened and keep what was asked for."""
    simulated, wall_s = outcome
    seen = simulated.observed()
    measured = ServeRun(seen, None, objective_of(arguments.slo_ttft_ms, arguments.slo_tpot_ms))
    steps, limits = simulated.steps, setup.scheduler.limits
    hit, queried = (sum(getattr(step, f"num_prefix_{word}_tokens") for step in steps) for word in ("hit", "queried"))
    virtual_s = (steps[-1].end_ns - simulated.timelines[0].recv_ns) / 1e9
    facts = {
        "Limits": f"{limits.max_num_seqs} rows, {limits.max_active_seqs} active, {limits.max_prefill_tokens} prompt "
        f"tokens of {limits.max_num_batched_tokens} a step, {setup.num_blocks} blocks of {setup.cache.block_size}",
        "Without": ", ".join(arguments.without) or "nothing",
        "Simulated": f"{virtual_s:.3f} s in {wall_s:.3f} s",
        "Engine steps": step_kinds([step.kind for step in steps]),
        "Prefix cache": f"{hit} of {queried} prompt tokens hit",
        "Preemptions": sum(step.num_preemptions for step in steps),
    }
    if num_drafted := sum(step.num_draft_tokens for step in steps):
        facts["Drafts"] = f"{sum(step.num_accepted_tokens for step in steps)} of {num_drafted} tokens held"
    say(*lines_of(measured, {**header, **facts}, title))
    if arguments.recording is not None:
        with writing(arguments.recording, "--recording"):
            simulated.recording().save(arguments.recording)
    if arguments.json is not None:
        write_result(arguments.json, measured, {**header, **facts}, arguments.recording)
    return measured
