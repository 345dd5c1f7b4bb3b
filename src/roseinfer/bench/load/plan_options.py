"""What the flags of the load benchmarks ask for: a plan, its seed, an objective, and words for them. Adds no flag."""

import argparse
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from roseinfer.bench.load.endpoint import Endpoint
from roseinfer.bench.load.observed import Objective, mean_interval_ns
from roseinfer.bench.load.options import DEFAULT_NUM_REQUESTS, Lengths
from roseinfer.bench.load.plan import NS_PER_S, Arrivals, LongPrompts, PlannedRequest, Workload, plan_of_trace
from roseinfer.bench.load.scenario import Scenario, load_scenario
from roseinfer.errors import ConfigError

Planner = Callable[[int], list[PlannedRequest]]  # of a seed; raises ConfigError where chance leaves no request

_LONG_AT = (1.0,)  # seconds
_NUM_DRAWN_SEEDS = 1_000_000_000
_SAID_BY_SCENARIO = (
    *("num_requests", "duration", "prompt_tokens", "max_tokens", "shared_prefix_share", "long_prompt_tokens"),
    *("num_long", "long_at", "long_max_tokens", "chat", "ignore_eos", "stream_interval"),
)


def take_scenario(arguments: argparse.Namespace) -> None:
    """Read the file of `--scenario`, if there is one, into its place; what it says of requests holds then.

    Limits of the objective are the file's where no flag gives them. Raises ConfigError for a flag that says the same.
    """
    if arguments.scenario is None:
        return
    for name in _SAID_BY_SCENARIO:
        if name in arguments and getattr(arguments, name) != arguments.parser.get_default(name):
            raise ConfigError("has no meaning beside --scenario: the file says it", param="--" + name.replace("_", "-"))
    scenario = load_scenario(arguments.scenario)
    arguments.scenario_file, arguments.scenario = arguments.scenario, scenario
    arguments.prompt_tokens, arguments.max_tokens = scenario.prompt_tokens, scenario.max_tokens
    arguments.shared_prefix_share = scenario.shared_prefix_share
    arguments.chat, arguments.ignore_eos = scenario.endpoint == "chat", scenario.ignore_eos
    arguments.stream_interval = scenario.stream_interval
    if arguments.slo_ttft_ms is None:
        arguments.slo_ttft_ms = scenario.objective.ttft_ms
    if arguments.slo_tpot_ms is None:
        arguments.slo_tpot_ms = scenario.objective.tpot_ms


def settle_seed(arguments: argparse.Namespace, *endpoints: Endpoint | None) -> None:
    """Put a seed in the place of none: 0, or one that is drawn when not all of the endpoints take a cache salt.

    With a salt a server that has answered these prompts does not find them in its prefix cache, so every run can have
    the same load. Without one only other prompts are not found there. None stands for what has answered nothing yet:
    the simulator, or a server that is started for the run.
    """
    if arguments.seed is None:
        are_salted = all(endpoint is None or endpoint.takes_salt for endpoint in endpoints)
        arguments.seed = 0 if are_salted else secrets.randbelow(_NUM_DRAWN_SEEDS)


def echo_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """The flags as plain data, the scenario with all that its file says."""
    echoed: dict[str, Any] = {}
    for name, value in vars(arguments).items():
        match value:
            case Lengths():
                echoed[name] = _range(value)
            case Path():
                echoed[name] = str(value)
            case Scenario():
                echoed[name] = value.echo()
            case bool() | str() | int() | float() | list():
                echoed[name] = value
            case _:  # not given, or no value of a flag
                pass
    return echoed


def plan_of(arguments: argparse.Namespace) -> list[PlannedRequest]:
    """The requests that the flags ask for; a scenario has been read, and the seed settled. Raises ConfigError."""
    return planner_of(arguments)(arguments.seed)


def planner_of(arguments: argparse.Namespace) -> Planner:
    """The same for any seed, so that wrong flags are told before a server is asked for what settles it.

    Raises ConfigError for those, and InvalidRequest for a trace that cannot be read.
    """
    if arguments.scenario is not None:
        scenario: Scenario = arguments.scenario
        return scenario.plan
    if arguments.trace is not None:
        for name in ("num_requests", "duration", "long_prompt_tokens"):
            if getattr(arguments, name) is not None:
                raise ConfigError("has no meaning beside --trace", param="--" + name.replace("_", "-"))
        planned = plan_of_trace(arguments.trace)
        return lambda _: planned
    interval_ns = (arguments.interval_ms or 0.0) * 1e6
    arrivals = Arrivals(interval_ns) if arguments.rate is None else Arrivals(NS_PER_S / arguments.rate, is_poisson=True)
    num_requests = arguments.num_requests
    if arguments.duration is None:
        num_requests = num_requests or DEFAULT_NUM_REQUESTS
    elif not arrivals.interval_ns:
        raise ConfigError("needs --rate or --interval-ms: a burst has no duration", param="--duration")
    workload = Workload(
        arrivals=arrivals,
        num_requests=num_requests,
        duration_ns=None if arguments.duration is None else round(arguments.duration * NS_PER_S),
        prompt=arguments.prompt_tokens,
        output=arguments.max_tokens,
        shared_prefix_share=arguments.shared_prefix_share,
        long=_long_prompts(arguments),
        seed=0,
    )
    return lambda seed: workload._replace(seed=seed).plan()


def interval_ns_of(arguments: argparse.Namespace, planned: Sequence[PlannedRequest]) -> float:
    """What the generator's lag is held against: the mean interval of the schedule, 0 for a burst."""
    if arguments.rate is not None:
        return NS_PER_S / float(arguments.rate)
    if arguments.trace is not None or arguments.scenario is not None:
        return mean_interval_ns([request.offset_ns for request in planned])
    return float(arguments.interval_ms or 0.0) * 1e6


def _long_prompts(arguments: argparse.Namespace) -> LongPrompts | None:
    if arguments.long_prompt_tokens is None:
        for name in ("num_long", "long_at", "long_max_tokens"):
            if getattr(arguments, name) is not None:
                raise ConfigError("needs --long-prompt-tokens", param="--" + name.replace("_", "-"))
        return None
    moments: Sequence[float] = arguments.long_at or _LONG_AT
    offsets = tuple(round(moments[index % len(moments)] * NS_PER_S) for index in range(arguments.num_long or 1))
    return LongPrompts(arguments.long_prompt_tokens, arguments.long_max_tokens or arguments.max_tokens.high, offsets)


def objective_of(arguments: argparse.Namespace) -> Objective | None:
    ttft_ms, tpot_ms = arguments.slo_ttft_ms, arguments.slo_tpot_ms
    if ttft_ms is None and tpot_ms is None:
        return None
    return Objective(None if ttft_ms is None else ttft_ms * 1e6, None if tpot_ms is None else tpot_ms * 1e6)


def describe(arguments: argparse.Namespace, planned: Sequence[PlannedRequest]) -> str:
    """The load in words, so that two reports can be compared."""
    if arguments.trace is not None:
        return f"{len(planned)} requests of {arguments.trace}, seed {arguments.seed}"
    if arguments.scenario is not None:
        return f"{len(planned)} requests of {arguments.scenario_file}, seed {arguments.seed}"
    num_long = 0 if arguments.long_prompt_tokens is None else arguments.num_long or 1
    when = "at once"
    if arguments.rate is not None:
        when = f"at {arguments.rate:g} a second (Poisson)"
    elif arguments.interval_ms:
        when = f"every {arguments.interval_ms:g} ms"
    words = [
        f"{len(planned) - num_long} requests {when}",
        f"{_range(arguments.prompt_tokens)} prompt and {_range(arguments.max_tokens)} output tokens each",
    ]
    if arguments.shared_prefix_share:
        words.append(f"{arguments.shared_prefix_share:.0%} of each prompt shared")
    if num_long:
        moments = "/".join(f"{moment:g}" for moment in arguments.long_at or _LONG_AT)
        words.append(f"{num_long} of {arguments.long_prompt_tokens} prompt tokens at {moments} s")
    return ", ".join([*words, f"seed {arguments.seed}"])


def _range(lengths: Lengths) -> str:
    return str(lengths.low) if lengths.low == lengths.high else f"{lengths.low}-{lengths.high}"
