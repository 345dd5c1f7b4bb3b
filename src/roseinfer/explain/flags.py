"""Adds the flags of `roseinfer explain` and `roseinfer top`; imports nothing heavy, since every command does it."""

from pathlib import Path
from typing import Annotated

from msgspec import Meta

from roseinfer.config.flags import Parser, add_alias, parser_of, url_or_path

_Interval = Annotated[float, Meta(ge=0.1, le=3600)]
_Seconds = Annotated[float, Meta(gt=0, le=1e9)]


def add_explain(parser: Parser) -> None:
    """Adds the flags of `explain`."""
    parser.add_argument(
        "source",
        type=url_or_path,
        metavar="URL|FILE",
        help="operations port of a running server, such as http://127.0.0.1:8001; a recording (.npz); the directory of "
        "a capture; or the result of `bench serve` (.json)",
    )
    parser.add_argument("--json", action="store_true", help="print the explanation as JSON")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="also draw it, as PNG; needs the extra `plot`")
    parser.add_argument(
        "--clock",
        choices=("wire", "engine"),
        default="wire",
        help="wire, the default: gaps between the socket writes of a stream; engine: between tokens",
    )
    parser.add_argument(
        "--last", type=parser_of(_Seconds), metavar="SECONDS", help="only what the recording's last seconds hold"
    )
    _add_key_flag(parser)


def _add_key_flag(parser: Parser) -> None:
    add_alias(parser, "--api-key-file", "server.api_key_file", "File whose first key opens the operations port.")


def add_top(parser: Parser) -> None:
    """Adds the flags of `top`."""
    parser.add_argument("url", metavar="URL", help="operations port of a running server, such as http://127.0.0.1:8001")
    parser.add_argument("--once", action="store_true", help="print one frame, of the --interval from now on, and leave")
    parser.add_argument(
        "--interval", type=parser_of(_Interval), default=1.0, metavar="SECONDS", help="between frames; default: 1"
    )
    parser.add_argument(
        "--window",
        type=parser_of(_Interval),
        default=10.0,
        metavar="SECONDS",
        help="that rates and percentiles are of; default: 10; without meaning for --once",
    )
    _add_key_flag(parser)
