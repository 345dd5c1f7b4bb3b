"""The flags of the load benchmarks, and the plan, the objective and the words that follow from their values."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from roseinfer.bench.load import (
    NS_PER_S,
    Arrivals,
    Lengths,
    LongPrompts,
    PlannedRequest,
    Workload,
    plan_of_trace,
)
from roseinfer.bench.observed import Objective, mean_interval_ns
from roseinfer.errors import ConfigError
from roseinfer.flags import Parser, Positive, parser_of
from roseinfer.messages import TokenCount

_Milliseconds = Annotated[float, Meta(ge=0, le=3_600_000)]
_Seconds = Annotated[float, Meta(ge=0, le=86_400)]
_PositiveSeconds = Annotated[float, Meta(gt=0, le=86_400)]
_Rate = Annotated[float, Meta(gt=0, le=100_000)]
_Share = Annotated[float, Meta(ge=0, le=1)]
_Seed = Annotated[int, Meta(ge=0, lt=2**63)]

_DEFAULT_NUM_REQUESTS = 64


def add_serve(parser: Parser) -> None:
    """Flags of `bench serve`."""
    _add_server(parser)
    _add_load(parser)
    _add_sampling(parser)
    _add_report(parser)


def add_replay_target(parser: Parser) -> None:
    """Flags of `bench replay` that say where and how; the load is the recording's."""
    _add_server(parser)
    _add_report(parser)


def _add_server(parser: Parser) -> None:
    group = parser.add_argument_group("server")
    group.add_argument(
        "--url", default="http://127.0.0.1:8000", metavar="URL", help="the API port; default: http://127.0.0.1:8000"
    )
    group.add_argument(
        "--ops-url",
        default="http://127.0.0.1:8001",
        metavar="URL",
        help="the operations port, for --recording; default: http://127.0.0.1:8001",
    )
    group.add_argument(
        "--api-key-file", type=Path, metavar="FILE", help="its first key is sent; for a server that asks for one"
    )


def _add_load(parser: Parser) -> None:
    group = parser.add_argument_group("load", "without --rate and --interval-ms all requests are sent at once")
    arrivals = group.add_mutually_exclusive_group()
    arrivals.add_argument("--rate", type=parser_of(_Rate), metavar="R", help="R requests a second, a Poisson process")
    arrivals.add_argument("--interval-ms", type=parser_of(_Milliseconds), metavar="MS", help="one request every MS")
    arrivals.add_argument("--burst", action="store_true", help="all at once; the default")
    arrivals.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="a recording, or lines of JSON: offset_s, prompt_tokens and max_tokens of each request",
    )
    count = parser_of(Positive)
    group.add_argument(
        "--num-requests",
        type=count,
        metavar="N",
        help=f"default: {_DEFAULT_NUM_REQUESTS}, or as many as --duration holds",
    )
    group.add_argument("--duration", type=parser_of(_PositiveSeconds), metavar="S", help="send for so many seconds")
    lengths: dict[str, Any] = {"type": lengths_of, "metavar": "N|LOW-HIGH"}
    group.add_argument("--prompt-tokens", default=Lengths(16, 16), help="of each prompt; default: 16", **lengths)
    group.add_argument("--max-tokens", default=Lengths(128, 128), help="to be generated; default: 128", **lengths)
    group.add_argument(
        "--shared-prefix-share",
        type=parser_of(_Share),
        default=0.0,
        metavar="SHARE",
        help="of each prompt, from its beginning, that all prompts have in common; default: 0",
    )
    group.add_argument(
        "--long-prompt-tokens", type=parser_of(TokenCount), metavar="N", help="long prompts come beside the others"
    )
    group.add_argument("--num-long", type=count, default=1, metavar="N", help="how many; default: 1")
    group.add_argument(
        "--long-at",
        type=seconds_of,
        default=[1.0],
        metavar="S,S",
        help="when they are sent, in seconds, in turn; default: 1",
    )
    group.add_argument(
        "--long-max-tokens", type=parser_of(TokenCount), metavar="N", help="default: what --max-tokens says"
    )
    group.add_argument("--seed", type=parser_of(_Seed), default=0, metavar="S", help="of the whole load; default: 0")


def _add_sampling(parser: Parser) -> None:
    group = parser.add_argument_group("requests")
    group.add_argument(
        "--chat", action="store_true", help="chat completions; prompts are as many words, to which the template adds"
    )
    group.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="always generate as many tokens as were asked for; the default",
    )
    group.add_argument(
        "--stream-interval",
        type=parser_of(Annotated[int, Meta(ge=1, le=1024)]),
        metavar="N",
        help="tokens in each chunk after the first; default: the server's",
    )


def _add_report(parser: Parser) -> None:
    group = parser.add_argument_group("report")
    milliseconds: dict[str, Any] = {"type": parser_of(_Milliseconds), "metavar": "MS"}
    group.add_argument("--slo-ttft-ms", help="goodput: the time to the first token of a good request", **milliseconds)
    group.add_argument("--slo-tpot-ms", help="goodput: the time per output token of a good request", **milliseconds)
    group.add_argument(
        "--max-lag-share",
        type=parser_of(_Share),
        default=0.1,
        metavar="SHARE",
        help="the report is invalid when the generator's own lag, p99, is a larger share of the interval; default: 0.1",
    )
    group.add_argument(
        "--json", type=Path, metavar="FILE", help="also write the report and every request, for roseinfer explain"
    )
    group.add_argument(
        "--recording", type=Path, metavar="FILE", help="at the end fetch the server's recording, an .npz, into FILE"
    )


def lengths_of(text: str) -> Lengths:
    """`16`, or `16-64` for any length in between."""
    low, dash, high = text.partition("-")
    count = parser_of(TokenCount)
    lengths = Lengths(count(low), count(high) if dash else count(low))
    if lengths.high < lengths.low:
        raise argparse.ArgumentTypeError(f"{lengths.high} is less than {lengths.low}, got {text!r}")
    return lengths


def seconds_of(text: str) -> Sequence[float]:
    """`2.0,4.5`: a comma list of seconds."""
    return [parser_of(_Seconds)(part.strip()) for part in text.split(",")]


def plan_of(arguments: argparse.Namespace) -> list[PlannedRequest]:
    """The requests that the flags ask for. Raises ConfigError."""
    if arguments.trace is not None:
        for name in ("num_requests", "duration", "long_prompt_tokens"):
            if getattr(arguments, name) is not None:
                raise ConfigError("has no meaning beside --trace", param="--" + name.replace("_", "-"))
        return plan_of_trace(arguments.trace)
    interval_ns = (arguments.interval_ms or 0.0) * 1e6
    arrivals = Arrivals(interval_ns) if arguments.rate is None else Arrivals(NS_PER_S / arguments.rate, is_poisson=True)
    num_requests = arguments.num_requests
    if arguments.duration is None:
        num_requests = num_requests or _DEFAULT_NUM_REQUESTS
    elif not arrivals.interval_ns:
        raise ConfigError("needs --rate or --interval-ms: a burst has no duration", param="--duration")
    return Workload(
        arrivals=arrivals,
        num_requests=num_requests,
        duration_ns=None if arguments.duration is None else round(arguments.duration * NS_PER_S),
        prompt=arguments.prompt_tokens,
        output=arguments.max_tokens,
        shared_prefix_share=arguments.shared_prefix_share,
        long=_long_prompts(arguments),
        seed=arguments.seed,
    ).plan()


def interval_ns_of(arguments: argparse.Namespace, planned: Sequence[PlannedRequest]) -> float:
    """What the generator's lag is held against: the mean interval of the schedule, 0 for a burst."""
    if arguments.rate is not None:
        return NS_PER_S / float(arguments.rate)
    if arguments.trace is not None:
        return mean_interval_ns([request.offset_ns for request in planned])
    return float(arguments.interval_ms or 0.0) * 1e6


def _long_prompts(arguments: argparse.Namespace) -> LongPrompts | None:
    if arguments.long_prompt_tokens is None:
        return None
    moments: Sequence[float] = arguments.long_at
    offsets = tuple(round(moments[index % len(moments)] * NS_PER_S) for index in range(arguments.num_long))
    return LongPrompts(arguments.long_prompt_tokens, arguments.long_max_tokens or arguments.max_tokens.high, offsets)


def objective_of(arguments: argparse.Namespace) -> Objective | None:
    ttft_ms, tpot_ms = arguments.slo_ttft_ms, arguments.slo_tpot_ms
    if ttft_ms is None and tpot_ms is None:
        return None
    return Objective(None if ttft_ms is None else ttft_ms * 1e6, None if tpot_ms is None else tpot_ms * 1e6)


def describe(arguments: argparse.Namespace, planned: Sequence[PlannedRequest]) -> str:
    """The load in words, so that two reports can be compared."""
    if arguments.trace is not None:
        return f"{len(planned)} requests of {arguments.trace}"
    num_long = 0 if arguments.long_prompt_tokens is None else arguments.num_long
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
        moments = "/".join(f"{moment:g}" for moment in arguments.long_at)
        words.append(f"{num_long} of {arguments.long_prompt_tokens} prompt tokens at {moments} s")
    return ", ".join([*words, f"seed {arguments.seed}"])


def _range(lengths: Lengths) -> str:
    return str(lengths.low) if lengths.low == lengths.high else f"{lengths.low}-{lengths.high}"
