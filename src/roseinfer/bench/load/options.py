"""The flags of the load benchmarks. Imports nothing heavy, since every command line is read through this file too."""

import argparse
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, NamedTuple, NoReturn

from msgspec import Meta

from roseinfer.config.flags import Parser, Positive, add_config_flags, parser_of, server_url, url_of
from roseinfer.errors import ConfigError
from roseinfer.messages import Seed, TokenCount
from roseinfer.observe.gaps.causes import Cause

_Milliseconds = Annotated[float, Meta(ge=0, le=3_600_000)]
_Seconds = Annotated[float, Meta(ge=0, le=86_400)]
_PositiveSeconds = Annotated[float, Meta(gt=0, le=86_400)]
_Rate = Annotated[float, Meta(gt=0, le=100_000)]
_Share = Annotated[float, Meta(ge=0, le=1)]
_LagShare = Annotated[float, Meta(ge=0)]  # above 1 for those to whom only counts matter

DEFAULT_NUM_REQUESTS = 64
DEFAULT_COSTS = "default"

LAUNCH_PARTS: Mapping[Cause, tuple[str, ...]] = {
    Cause.GRAPH_CAPTURE: ("capture",),
    Cause.H2D_COPY: ("stage", "h2d"),
    Cause.SAMPLE_SYNC: ("sample",),
}
"""Where in a launch an injected delay of that cause lies, from the outside in: fields of `PhaseTimes`."""
INJECTABLE = (Cause.GC, *LAUNCH_PARTS)
WITHOUT = (Cause.PREFILL_OF_OTHERS, Cause.NOT_SELECTED, Cause.KV_WAIT, Cause.PREEMPTED, *INJECTABLE)
"""Causes that a counterfactual can do without."""


class Lengths(NamedTuple):
    """A length in tokens, each value from `low` to `high` equally likely."""

    low: int
    high: int


class Delay(NamedTuple):
    """A disturbance of every `every`-th step."""

    cause: Cause
    every: int
    duration_ns: int


def add_serve(parser: Parser) -> None:
    """Flags of `bench serve`."""
    parser.add_argument("stray", nargs="?", type=_refuse_stray, help=argparse.SUPPRESS)
    _add_server(parser)
    add_load(parser).add_argument(
        "--sweep",
        type=rates_of,
        metavar="R,R",
        help="one rate after the other, rising, for --duration each; the knee is the last at which the limits hold",
    )
    add_sampling(parser)
    _add_report(parser)


def _refuse_stray(text: str) -> NoReturn:
    """Where `roseinfer explain` and `top` take a URL, this takes a flag. Raises ConfigError."""
    hint = "" if url_of(text) is None else f"; did you mean --url {text}?"
    raise ConfigError(f"is not an argument of roseinfer bench serve{hint}", param=text)


def add_simulate(parser: Parser) -> None:
    """Flags of `bench simulate`."""
    add_load(parser, is_sent=False)
    _add_simulator(parser)
    _add_objective(parser.add_argument_group("report"))
    parser.add_argument("--recording", type=Path, metavar="FILE", help="keep what happened as a recording, an .npz")
    add_config_flags(parser, with_short=False)


def add_replay(parser: Parser) -> None:
    """Flags of `bench replay`."""
    parser.add_argument("file", type=Path, metavar="RECORDING", help="an .npz of roseinfer")
    parser.add_argument("--simulate", action="store_true", help="on the simulator, and not on the server at --url")
    _add_server(parser)
    _add_simulator(parser)
    _add_report(parser)
    _add_seed(parser, "of the prompts", is_sent=True)
    parser.set_defaults(chat=False, ignore_eos=True, stream_interval=None)
    add_config_flags(parser, with_short=False)


def _add_simulator(parser: Parser) -> None:
    group = parser.add_argument_group("simulator")
    group.add_argument(
        "--cost-model",
        metavar="FILE",
        help=f"a recording whose steps say what a step costs, or `{DEFAULT_COSTS}`; default: the load, if it is one",
    )
    group.add_argument(
        "--decision-log",
        type=Path,
        metavar="FILE",
        help="write a line of JSON for each step; one seed gives the same bytes",
    )
    group.add_argument(
        "--without",
        type=Cause,
        choices=WITHOUT,
        action="append",
        default=[],
        metavar="CAUSE",
        help="a world in which that cause does not exist, repeatable: " + ", ".join(WITHOUT),
    )
    group.add_argument(
        "--inject",
        type=delay_of,
        action="append",
        default=[],
        metavar="CAUSE:EVERY:MS",
        help="delay every EVERY-th step, repeatable; causes: " + ", ".join(INJECTABLE),
    )


def _add_server(parser: Parser) -> None:
    group = parser.add_argument_group("server")
    group.add_argument(
        "--url",
        type=server_url,
        default="http://127.0.0.1:8000",
        metavar="URL",
        help="the API port, with or without /v1; default: http://127.0.0.1:8000",
    )
    group.add_argument(
        "--ops-url",
        type=server_url,
        default="http://127.0.0.1:8001",
        metavar="URL",
        help="the operations port, for --recording; default: http://127.0.0.1:8001",
    )
    group.add_argument(
        "--api-key-file", type=Path, metavar="FILE", help="its first key is sent; for a server that asks for one"
    )


def add_load(parser: Parser, *, is_sent: bool = True) -> argparse._MutuallyExclusiveGroup:
    """When requests are sent, and how long they are. Returns the flags of arrivals, of which one may be given.

    With `is_sent` a server may have answered the same load before, so no seed stands until `settle_seed` has one.
    """
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
    arrivals.add_argument(
        "--scenario", type=Path, metavar="FILE", help="users and phases as Locust has them; see loadtest/README.md"
    )
    count = parser_of(Positive)
    group.add_argument(
        "--num-requests",
        type=count,
        metavar="N",
        help=f"default: {DEFAULT_NUM_REQUESTS}, or as many as --duration holds",
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
    group.add_argument("--num-long", type=count, metavar="N", help="how many; default: 1")
    group.add_argument(
        "--long-at",
        type=seconds_of,
        metavar="S,S",
        help="when they are sent, in seconds, in turn; default: 1",
    )
    group.add_argument(
        "--long-max-tokens", type=parser_of(TokenCount), metavar="N", help="default: what --max-tokens says"
    )
    drawn = "arrivals, lengths and prompts" if is_sent else "arrivals, lengths, prompts and tokens"
    _add_seed(group, f"of {drawn}", is_sent=is_sent)
    return arrivals


def _add_seed(group: argparse._ActionsContainer, what: str, *, is_sent: bool) -> None:
    drawn = ", or a new one for each run where the server takes no cache salt" if is_sent else ""
    default = None if is_sent else 0
    group.add_argument("--seed", type=parser_of(Seed), default=default, metavar="S", help=f"{what}; default: 0{drawn}")


def add_sampling(parser: Parser) -> None:
    """What requests have in common."""
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


def add_limits(group: argparse._ArgumentGroup) -> None:
    """What a good request keeps."""
    milliseconds: dict[str, Any] = {"type": parser_of(_Milliseconds), "metavar": "MS"}
    group.add_argument("--slo-ttft-ms", help="goodput: the time to the first token of a good request", **milliseconds)
    group.add_argument("--slo-tpot-ms", help="goodput: the time per output token of a good request", **milliseconds)


def add_max_lag_share(group: argparse._ArgumentGroup) -> None:
    """When the generator may no longer be believed."""
    group.add_argument(
        "--max-lag-share",
        type=parser_of(_LagShare),
        default=0.1,
        metavar="SHARE",
        help="the report is invalid when the generator's own lag, p99, is a larger share of the interval; default: 0.1",
    )


def _add_objective(group: argparse._ArgumentGroup) -> None:
    add_limits(group)
    group.add_argument(
        "--json", type=Path, metavar="FILE", help="also write the report and every request, for roseinfer explain"
    )


def _add_report(parser: Parser) -> None:
    group = parser.add_argument_group("report")
    _add_objective(group)
    add_max_lag_share(group)
    group.add_argument(
        "--recording", type=Path, metavar="FILE", help="fetch what the server recorded meanwhile, an .npz, into FILE"
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


def rates_of(text: str) -> Sequence[float]:
    """`5,10,20`: rising rates in requests a second."""
    rates: list[float] = [parser_of(_Rate)(part.strip()) for part in text.split(",")]
    if any(later <= earlier for earlier, later in pairwise(rates)):
        raise argparse.ArgumentTypeError(f"expected rates that rise, got {text!r}")
    return rates


def delay_of(text: str) -> Delay:
    """`gc:100:20`: a collection of 20 ms in every 100th step."""
    cause, _, rest = text.partition(":")
    every, _, milliseconds = rest.partition(":")
    if cause not in INJECTABLE:
        raise argparse.ArgumentTypeError(f"expected one of {', '.join(INJECTABLE)}, got {cause!r}")
    duration_ms = parser_of(_Milliseconds)(milliseconds)
    return Delay(Cause(cause), parser_of(Positive)(every), round(duration_ms * 1e6))
