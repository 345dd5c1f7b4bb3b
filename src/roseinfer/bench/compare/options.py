"""The flags of `bench compare`. Imports nothing heavy, since every command line is read through this file too."""

import argparse
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from roseinfer.bench.load import options as load_options
from roseinfer.config.flags import Parser, parser_of, url_or_path

DEFAULT_ROUNDS = 12  # finds 5 % in nine of ten comparisons where runs of equal sides lie 2 % apart
FAILING = ("worse", "void")

_Rounds = Annotated[int, Meta(ge=6, le=1000)]
_Share = Annotated[float, Meta(ge=0, le=1)]
_Confidence = Annotated[float, Meta(ge=0.5, le=0.999)]
_Seconds = Annotated[float, Meta(gt=0, le=86_400)]


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
    flags: dict[str, Any] = {"metavar": "FLAGS"}
    group.add_argument("--a", help="start `roseinfer serve FLAGS` for each run of A; --a='' for the defaults", **flags)
    group.add_argument("--b", help="and for each run of B", **flags)
    group.add_argument(
        "--equal-sides",
        action="store_true",
        help="A and B are the same server, or the same flags: how far do runs of equals lie apart here?",
    )
    group.add_argument("--both", default="", help="flags of both servers, such as the model", **flags)
    group.add_argument(
        "--start-timeout",
        type=parser_of(_Seconds),
        default=600.0,
        metavar="S",
        help="a started server is ready within; default: 600",
    )
    group.add_argument(
        "--api-key-file", type=Path, metavar="FILE", help="its first key is sent; for servers that ask for one"
    )
    load_options.add_load(parser)
    load_options.add_sampling(parser)
    _add_judgement(parser.add_argument_group("comparison"))


def _add_judgement(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--rounds",
        type=parser_of(_Rounds),
        default=DEFAULT_ROUNDS,
        metavar="N",
        help=f"runs of each side, in turn A B B A; default: {DEFAULT_ROUNDS}",
    )
    group.add_argument(
        "--confidence",
        type=parser_of(_Confidence),
        default=0.97,
        metavar="SHARE",
        help="of all intervals together; default: 0.97, which gives fewer than 5 %% false alarms",
    )
    group.add_argument(
        "--min-effect",
        type=parser_of(_Share),
        default=0.01,
        metavar="SHARE",
        help="a smaller difference is noise, however sure it is; default: 0.01",
    )
    group.add_argument(
        "--max-drift",
        type=parser_of(_Share),
        default=0.05,
        metavar="SHARE",
        help="a metric that moves by more over the session is void; default: 0.05",
    )
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
        choices=FAILING,
        default=[],
        help="exit with 1 when a metric is so, repeatable; default: never",
    )
    load_options.add_limits(group)
    load_options.add_max_lag_share(group)
    group.add_argument("--json", type=Path, metavar="FILE", help="also write the findings, for a gate")
    group.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the result of each run")
