"""What others offer to HTTP, as functions that the wiring hands over. Knows none of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from aiohttp import web
from aiohttp.typedefs import Handler

from roseinfer.records import RequestTimeline
from roseinfer.text.grammar.checker import GrammarChecker

Ledger = Callable[[RequestTimeline, int], dict[str, object]]
"""A request's time up to a moment, in nanoseconds of the monotonic clock, as JSON can say it."""


@dataclass(frozen=True, slots=True)
class Instruments:
    """`debug_routes` are for the operations port alone."""

    metrics: Handler
    ledger: Ledger
    debug_routes: Sequence[web.RouteDef] = ()
    grammars: GrammarChecker | None = None
