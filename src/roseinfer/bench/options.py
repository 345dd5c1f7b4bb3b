"""The flags of all benchmarks. Imports nothing heavy, since every command line is read through this file too.

Flags of `bench streaming` and `bench scheduler` have the seeds' names, aliases of options wherever there is one.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, NamedTuple, NoReturn

from msgspec import Meta

from roseinfer.config.flags import (
    Parser,
    Positive,
    add_alias,
    add_config_flags,
    parser_of,
    positives,
    server_url,
    url_of,
    url_or_path,
)
from roseinfer.config.sources import Given
from roseinfer.errors import ConfigError
from roseinfer.messages import Seed, Temperature, TokenCount, TopK, TopP
from roseinfer.observe.gaps.causes import Cause

_COUNT = parser_of(Annotated[int, Meta(ge=0)])
_POSITIVE = parser_of(Positive)
MAX_REQUESTS = 1_000_000  # of one load, which is planned before it begins
_NUM_REQUESTS = parser_of(Annotated[int, Meta(ge=1, le=MAX_REQUESTS)])
_TOKENS = parser_of(TokenCount)
_MILLISECONDS = parser_of(Annotated[float, Meta(ge=0, le=3_600_000)])
_MOMENT = parser_of(Annotated[float, Meta(ge=0, le=86_400)])  # seconds
_SECONDS = parser_of(Annotated[float, Meta(gt=0, le=86_400)])
_RATE = parser_of(Annotated[float, Meta(gt=0, le=100_000)])
_SHARE = parser_of(Annotated[float, Meta(ge=0, le=1)])

DEFAULT_NUM_REQUESTS = 64
DEFAULT_COSTS = "default"
DEFAULT_ROUNDS = 12  # finds 5 % in nine of ten comparisons where runs of equal sides lie 2 % apart
DEFAULTS = {  # the seeds' own, so reports compare
    "scheduler.max_num_seqs": Given("8", "the benchmarks' default"),
    "runner.cuda_graphs": Given("off", "the benchmarks' default"),
}

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


def _add(
    group: argparse._ActionsContainer,
    name: str,
    parse: Callable[[str], Any],
    metavar: str,
    text: str,
    default: object = None,
) -> None:
    group.add_argument(name, type=parse, metavar=metavar, help=text, default=default)


# --- of each benchmark ------------------------------------------------------------------------------------------------


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
    _add_sampling(parser)
    _add_report(parser)


def add_simulate(parser: Parser) -> None:
    """Flags of `bench simulate`."""
    add_load(parser, is_sent=False)
    _add_simulator(parser)
    _add_objective(parser.add_argument_group("report"))
    _add(parser, "--recording", Path, "FILE", "keep what happened as a recording, an .npz")
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


def add_compare(parser: Parser) -> None:
    """Flags of `bench compare`."""
    group = parser.add_argument_group("sides", "two URLs, two sets of results, or --a and --b")
    group.add_argument(
        "sides",
        nargs="*",
        type=url_or_path,
        metavar="A B",
        help="two URLs of servers, or two results of `bench serve --json` or folders",
    )
    _add(group, "--a", str, "FLAGS", "start `roseinfer serve FLAGS` for each run of A; --a='' for the defaults")
    _add(group, "--b", str, "FLAGS", "and for each run of B")
    group.add_argument(
        "--equal-sides",
        action="store_true",
        help="A and B are the same server, or the same flags: how far do runs of equals lie apart here?",
    )
    _add(group, "--both", str, "FLAGS", "flags of both servers, such as the model", "")
    _add(group, "--start-timeout", _SECONDS, "S", "a started server is ready within; default: 600", 600.0)
    _add(group, "--api-key-file", Path, "FILE", "its first key is sent; for servers that ask for one")
    add_load(parser)
    _add_sampling(parser)
    _add_judgement(parser.add_argument_group("comparison"))


def add_streaming(parser: Parser) -> None:
    """Flags of `bench streaming`."""
    group = _add_workload(parser)
    group.add_argument("--pretok", action="store_true", help="tokenise before the clock starts")
    workers = "0: tokenise inside the submission; N: tokenise N at a time while the submission returns"
    _add(group, "--tokenize-workers", _COUNT, "N", workers, 0)
    _add(group, "--submit-interval-ms", _MILLISECONDS, "MS", "0, the default, is a burst", 0.0)
    group.add_argument(
        "--submit-schedule",
        choices=("absolute", "relative"),
        default="absolute",
        help="absolute: request i is due at i intervals, however late the one before was; relative: sleep in between",
    )
    _add(group, "--max-inflight-requests", _POSITIVE, "N", "refuse more unfinished ones than this")
    engine = _add_engine(parser)
    add_alias(
        engine, "--stream-interval", "server.stream_interval", "Tokens between two flushes of a stream. Default: 1."
    )
    add_alias(engine, "--prefill-max-tokens", "scheduler.max_prefill_tokens", "Most prefill tokens in one step.")
    add_alias(engine, "--prefill-admission-policy", "scheduler.admission", "Order of admission. Default: fifo.")
    add_alias(
        engine, "--prefill-admission-lookahead", "scheduler.lookahead", "How many waiting requests pack considers."
    )
    add_alias(
        engine, "--prefill-force-fifo-every", "scheduler.fifo_every", "Under pack, how often the oldest goes first."
    )
    add_alias(
        engine, "--max-active-requests", "scheduler.max_active_seqs", "Sequences that hold KV blocks. Default: all."
    )
    add_config_flags(parser, with_short=False)


def add_scheduler(parser: Parser) -> None:
    """Flags of `bench scheduler`."""
    group = _add_workload(parser)
    group.add_argument(
        "--mode",
        choices=("online", "offline"),
        default="online",
        help="online: each request on its own, with its latency; offline: all prompts as one batch, throughput only",
    )
    _add_engine(parser)
    add_config_flags(parser, with_short=False)


# --- groups of flags --------------------------------------------------------------------------------------------------


def _add_workload(parser: Parser) -> argparse._ArgumentGroup:
    group = parser.add_argument_group("workload")
    group.add_argument("--prompt", default="Hello", metavar="TEXT", help="default: Hello")
    repeats = "request i repeats the prompt as often as the i-th of these, in turn, so lengths mix"
    _add(group, "--prompt-repeats", positives, "N,N", repeats, [1])
    group.add_argument("--unique-prompts", action="store_true", help="end each prompt with its number: no prefix hits")
    _add(group, "--num-requests", _NUM_REQUESTS, "N", "default: 16", 16)
    _add(group, "--max-new-tokens", _TOKENS, "N", "for each request; default: 64", 64)
    _add(group, "--warmup-runs", _COUNT, "N", "not measured; default: 1", 1)
    _add(group, "--repeat-runs", _POSITIVE, "N", "measured; default: 1", 1)
    group.add_argument(
        "--no-reset-prefix-cache", action="store_true", help="let a run hit prefixes that the runs before it computed"
    )
    group.add_argument("--no-stop-on-eos", action="store_true", help="always generate --max-new-tokens")
    group.add_argument("--do-sample", action="store_true", help="sample; greedy otherwise")
    _add(group, "--temperature", parser_of(Temperature), "T", "with --do-sample", 1.0)
    _add(group, "--top-k", parser_of(TopK), "K", "with --do-sample; 0 keeps all", 0)
    _add(group, "--top-p", parser_of(TopP), "P", "with --do-sample", 1.0)
    _add(group, "--json", Path, "FILE", "also write the report, with all settings, as JSON")
    return group


def _add_engine(parser: Parser) -> argparse._ArgumentGroup:
    group = parser.add_argument_group("engine, by the seeds' names")
    add_alias(group, "--hf-model-id", "model.path", "Model. Default: the embedded one.")
    add_alias(group, "--device", "runner.device", "cpu or cuda. Default: auto.")
    add_alias(group, "--bf16", "model.dtype", "bfloat16.", const="bfloat16")
    add_alias(group, "--max-batch-size", "scheduler.max_num_seqs", "Sequences decoded in one step. Default: 8.")
    add_alias(group, "--prefill-max-batch-size", "scheduler.max_prefill_seqs", "Sequences admitted in one step.")
    add_alias(group, "--no-prefix-cache", "cache.prefix_caching", "Compute every prompt anew.", const="false")
    add_alias(group, "--nvtx", "observe.nvtx", "Mark the phases of each step for Nsight.", const="true")
    group.add_argument("--paged-attn", action="store_true", help="accepted; attention is always paged here")
    add_alias(group, "--cuda-graph", "runner.cuda_graphs", "Steps as CUDA graphs, captured first.", const="startup")
    return group


def _add_simulator(parser: Parser) -> None:
    group = parser.add_argument_group("simulator")
    costs = f"a recording whose steps say what a step costs, or `{DEFAULT_COSTS}`; default: the load, if it is one"
    _add(group, "--cost-model", str, "FILE", costs)
    decisions = "write a line of JSON for each step; one seed gives the same bytes"
    _add(group, "--decision-log", Path, "FILE", decisions)
    share = "of an answer's tokens, those that drafts foretell; default: those that held in the recording, else none"
    _add(group, "--draft-share", _SHARE, "SHARE", share)
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
    url, ops_url = "http://127.0.0.1:8000", "http://127.0.0.1:8001"
    _add(group, "--url", server_url, "URL", f"the API port, with or without /v1; default: {url}", url)
    _add(group, "--ops-url", server_url, "URL", f"the operations port, for --recording; default: {ops_url}", ops_url)
    _add(group, "--api-key-file", Path, "FILE", "its first key is sent; for a server that asks for one")


def add_load(parser: Parser, *, is_sent: bool = True) -> argparse._MutuallyExclusiveGroup:
    """When requests are sent, and how long they are. Returns the flags of arrivals, of which one may be given.

    With `is_sent` a server may have answered the same load before, so `settle_seed` chooses the default of the seed.
    """
    group = parser.add_argument_group("load", "without --rate and --interval-ms all requests are sent at once")
    arrivals = group.add_mutually_exclusive_group()
    _add(arrivals, "--rate", _RATE, "R", "R requests a second, a Poisson process")
    _add(arrivals, "--interval-ms", _MILLISECONDS, "MS", "one request every MS")
    arrivals.add_argument("--burst", action="store_true", help="all at once; the default")
    trace = "a recording, or lines of JSON: offset_s, prompt_tokens and max_tokens of each request"
    _add(arrivals, "--trace", Path, "FILE", trace)
    _add(arrivals, "--scenario", Path, "FILE", "users and phases as Locust has them; see loadtest/README.md")
    num_requests = f"default: {DEFAULT_NUM_REQUESTS}, or as many as --duration holds"
    _add(group, "--num-requests", _NUM_REQUESTS, "N", num_requests)
    _add(group, "--duration", _SECONDS, "S", "send for S seconds")
    _add(group, "--prompt-tokens", lengths_of, "N|LOW-HIGH", "of each prompt; default: 16", Lengths(16, 16))
    _add(group, "--max-tokens", lengths_of, "N|LOW-HIGH", "to be generated; default: 128", Lengths(128, 128))
    shared = "of each prompt, from its beginning, that all prompts have in common; default: 0"
    _add(group, "--shared-prefix-share", _SHARE, "SHARE", shared, 0.0)
    _add(group, "--long-prompt-tokens", _TOKENS, "N", "long prompts come beside the others")
    _add(group, "--num-long", _NUM_REQUESTS, "N", "how many; default: 1")
    _add(group, "--long-at", seconds_of, "S,S", "when they are sent, in seconds, in turn; default: 1")
    _add(group, "--long-max-tokens", _TOKENS, "N", "default: what --max-tokens says")
    drawn = "arrivals, lengths and prompts" if is_sent else "arrivals, lengths, prompts and tokens"
    _add_seed(group, f"of {drawn}", is_sent=is_sent)
    return arrivals


def _add_seed(group: argparse._ActionsContainer, what: str, *, is_sent: bool) -> None:
    drawn = ", or a new one for each run where the server takes no cache salt" if is_sent else ""
    _add(group, "--seed", parser_of(Seed), "S", f"{what}; default: 0{drawn}", None if is_sent else 0)


def _add_sampling(parser: Parser) -> None:
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
    interval = parser_of(Annotated[int, Meta(ge=1, le=1024)])
    _add(group, "--stream-interval", interval, "N", "tokens in each chunk after the first; default: the server's")


def _add_limits(group: argparse._ArgumentGroup) -> None:
    """What a good request keeps."""
    limits = {"--slo-ttft-ms": "the time to the first token", "--slo-tpot-ms": "the time per output token"}
    for name, what in limits.items():
        _add(group, name, _MILLISECONDS, "MS", f"goodput: {what} of a good request")


def _add_max_lag_share(group: argparse._ArgumentGroup) -> None:
    share = parser_of(Annotated[float, Meta(ge=0, le=1e9)])  # above 1 for users to whom only counts matter
    text = "the report is invalid when the generator's own lag, p99, is a larger share of the interval; default: 0.1"
    _add(group, "--max-lag-share", share, "SHARE", text, 0.1)


def _add_objective(group: argparse._ArgumentGroup) -> None:
    _add_limits(group)
    _add(group, "--json", Path, "FILE", "also write the report and every request, for roseinfer explain")


def _add_report(parser: Parser) -> None:
    group = parser.add_argument_group("report")
    _add_objective(group)
    _add_max_lag_share(group)
    _add(group, "--recording", Path, "FILE", "fetch what the server recorded meanwhile, an .npz, into FILE")


def _add_judgement(group: argparse._ArgumentGroup) -> None:
    rounds = parser_of(Annotated[int, Meta(ge=6, le=1000)])
    text = f"runs of each side, in turn A B B A; default: {DEFAULT_ROUNDS}"
    _add(group, "--rounds", rounds, "N", text, DEFAULT_ROUNDS)
    confidence = parser_of(Annotated[float, Meta(ge=0.5, le=0.999)])
    text = "of all intervals together; default: 0.97, which gives fewer than 5 %% false alarms"
    _add(group, "--confidence", confidence, "SHARE", text, 0.97)
    text = "a smaller difference is noise, however sure it is; default: 0.01"
    _add(group, "--min-effect", _SHARE, "SHARE", text, 0.01)
    text = "a metric that moves by more over the session is void; default: 0.05"
    _add(group, "--max-drift", _SHARE, "SHARE", text, 0.05)
    group.add_argument(
        "--varied",
        action="append",
        default=[],
        metavar="NAME",
        help="results of two files may differ in this setting, repeatable; every other one must be the same",
    )
    group.add_argument(
        "--fail-on",
        action="append",
        choices=("worse", "void"),
        default=[],
        help="exit with 1 when a metric is so, repeatable; default: never",
    )
    _add_limits(group)
    _add_max_lag_share(group)
    _add(group, "--json", Path, "FILE", "also write the findings, for a gate")
    _add(group, "--keep", Path, "FOLDER", "keep the result of each run")


# --- values -----------------------------------------------------------------------------------------------------------


def _refuse_stray(text: str) -> NoReturn:
    """Where `roseinfer explain` and `top` take a URL, this takes a flag. Raises ConfigError."""
    hint = "" if url_of(text) is None else f"; did you mean --url {text}?"
    raise ConfigError(f"is not an argument of roseinfer bench serve{hint}", param=text)


def lengths_of(text: str) -> Lengths:
    """`16`, or `16-64` for any length in between."""
    low, dash, high = text.partition("-")
    try:
        lengths = Lengths(_TOKENS(low), _TOKENS(high if dash else low))
    except argparse.ArgumentTypeError:
        problem = f"expected a number of tokens or a range such as 16-64, got {text!r}"
        raise argparse.ArgumentTypeError(problem) from None
    if lengths.high < lengths.low:
        raise argparse.ArgumentTypeError(f"{lengths.high} is less than {lengths.low}, got {text!r}")
    return lengths


def seconds_of(text: str) -> Sequence[float]:
    """`2.0,4.5`: a comma list of seconds."""
    return [_MOMENT(part.strip()) for part in text.split(",")]


def rates_of(text: str) -> Sequence[float]:
    """`5,10,20`: rising rates in requests a second."""
    rates: list[float] = [_RATE(part.strip()) for part in text.split(",")]
    if any(later <= earlier for earlier, later in pairwise(rates)):
        raise argparse.ArgumentTypeError(f"expected rates that rise, got {text!r}")
    return rates


def delay_of(text: str) -> Delay:
    """`gc:100:20`: a collection of 20 ms in every 100th step."""
    cause, _, rest = text.partition(":")
    every, _, milliseconds = rest.partition(":")
    if cause not in INJECTABLE:
        raise argparse.ArgumentTypeError(f"expected one of {', '.join(INJECTABLE)}, got {cause!r}")
    duration_ms = _MILLISECONDS(milliseconds)
    return Delay(Cause(cause), _POSITIVE(every), round(duration_ms * 1e6))
