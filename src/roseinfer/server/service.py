"""Holds what all handlers share: the state of the server, its engine, its text side, and the requests in flight."""

import asyncio
import secrets
from collections.abc import Sequence
from itertools import islice

from aiohttp import web

from roseinfer.config.options import Config
from roseinfer.engine.link.engine_client import EngineClient
from roseinfer.errors import EngineDead, NotReady, Overloaded, RequestAborted
from roseinfer.messages import MOST_URGENT, Request
from roseinfer.records import LifecycleState, Observer
from roseinfer.server.connection.api_keys import ApiKeys, Caller
from roseinfer.server.connection.body_budget import LongWork
from roseinfer.server.exchange import Exchange, Ledgers
from roseinfer.server.port import Port
from roseinfer.text.grammar.checker import GrammarChecker
from roseinfer.text.served_model import ServedModel
from roseinfer.text.text_model import TextModel

_ORDER = list(LifecycleState)  # a server goes through the states in this order, and may leave some out


class Service(ServedModel, Port):
    """The state of the server: STARTING → LOADING → WARMUP → READY → DRAINING, and FAILED from anywhere.

    It goes back only for a new engine after one that died, to STARTING.
    """

    def __init__(
        self,
        config: Config,
        client: EngineClient,
        observer: Observer,
        api_keys: ApiKeys | None,
        ledgers: Ledgers,
        grammar_checker: GrammarChecker | None = None,
    ) -> None:
        ServedModel.__init__(self, config, client, grammar_checker)
        Port.__init__(self, config.server, observer, api_keys)
        self.has_been_ready = False
        self.long_bodies = LongWork("body")  # decoding keeps the GIL, so of long bodies one is decoded at a time
        self._ledgers = ledgers
        self._exchanges: dict[str, Exchange] = {}
        self._abandoned: dict[str, list[str]] = {}  # keys not to be used again yet: their requests in the engine
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        observer.on_lifecycle(self.state)

    def enter(self, state: LifecycleState) -> None:
        """Go on to `state`, unless the server is there or past it."""
        if _ORDER.index(state) <= _ORDER.index(self.state):
            return
        self.state = state
        self.observer.on_lifecycle(state)

    def open(self, text_model: TextModel) -> None:
        """Begin to serve: everything is loaded."""
        super().open(text_model)
        self.has_been_ready = True
        self.enter(LifecycleState.READY)

    def restart(self) -> None:
        """Go back to STARTING, as a new engine starts: the probes say so, and requests are refused."""
        self.state = LifecycleState.STARTING
        self.observer.on_lifecycle(self.state)

    @property
    def is_ready(self) -> bool:
        return self.state is LifecycleState.READY and self.client.trouble is None

    @property
    def activity(self) -> str:
        return "warming up" if self.state is LifecycleState.WARMUP else self.state

    def admit(self) -> None:
        """Raise NotReady, EngineDead or Overloaded unless one more exchange, open already, can be served.

        Its body is not read yet; `admit_sequences` checks again what it asks for.
        """
        if self.state is LifecycleState.FAILED:
            raise EngineDead("The engine is gone.")
        if self.state is not LifecycleState.READY:
            raise NotReady(f"The server is {self.activity}.", retry_after_s=5)
        if self.client.trouble is not None:
            raise EngineDead("The engine is dead or makes no progress.")
        if len(self._exchanges) > self.config.max_inflight:
            limit = self.config.max_inflight
            message = f"{limit} HTTP requests are being served already, and that is the limit (server.max_inflight)."
            retry_after_s = self.client.queue_estimate.retry_after_s(priority=0)  # the usual one
            raise Overloaded(message, retry_after_s=retry_after_s)
        self._check_wait(MOST_URGENT)

    def admit_sequences(self, requests: Sequence[Request]) -> None:
        """Raise Overloaded unless the engine can serve the requests of one exchange too.

        Others may have gone there since `admit`, while the body came and its text was encoded. The limit of tokens, of
        prompts and of what may be generated, does not hold for an exchange that is alone.
        """
        limit, estimate = self.config.max_inflight_tokens, self.client.queue_estimate
        num_tokens = sum(len(request.prompt_token_ids) + request.params.max_tokens for request in requests)
        if limit is not None and estimate.num_sequences and estimate.num_tokens + num_tokens > limit:
            message = (
                f"{estimate.num_tokens} tokens are being served already; with these it would be more than {limit} "
                "(server.max_inflight_tokens)."
            )
            raise Overloaded(message, retry_after_s=estimate.retry_after_s(priority=requests[0].priority))
        self._check_wait(requests[0].priority)

    def _check_wait(self, priority: int) -> None:
        limit_s, estimate = self.config.max_queue_wait_s, self.client.queue_estimate
        if estimate.is_measured and (wait_s := estimate.predict_wait_s(priority)) > limit_s:
            message = (
                f"The first token would take some {wait_s:.1f} s; {limit_s:g} s is the limit (server.max_queue_wait_s)."
            )
            raise Overloaded(message, retry_after_s=estimate.retry_after_s(limit_s, priority=priority))

    def open_exchange(self, request: web.Request, request_id: str) -> Exchange:
        key = request_id
        while key in self._exchanges or key in self._abandoned:  # the engine must not get an id twice
            key = f"{request_id}~{secrets.token_hex(4)}"  # `~` is in no client's id
        exchange = self._exchanges[key] = Exchange(self.client, key, request, self._ledgers)
        self._is_idle.clear()
        return exchange

    def close_exchange(self, exchange: Exchange) -> None:
        del self._exchanges[exchange.key]
        if not self._exchanges:
            self._is_idle.set()
        if exchange.is_in_engine:
            self._abandoned[exchange.key] = [timeline.request_id for timeline in exchange.timelines]
            self._forget_abandoned()
        exchange.close()

    def _forget_abandoned(self) -> None:
        """Check the two oldest, so that few are kept which the engine has ended."""
        for key in list(islice(self._abandoned, 2)):
            request_ids = self._abandoned.pop(key)
            if any(map(self.client.holds, request_ids)):
                self._abandoned[key] = request_ids

    def abort(self, request_id: str, caller: Caller | None) -> bool:
        """End the caller's exchanges whose given id or answer's id is this; says whether there was one."""
        found = [
            exchange
            for exchange in self._exchanges.values()
            if request_id in {exchange.key.partition("~")[0], exchange.reply_id} and exchange.caller == caller
        ]
        for exchange in found:
            exchange.interrupt(RequestAborted("The request was aborted by another one."))
        return bool(found)

    @property
    def num_exchanges(self) -> int:
        """Requests for tokens in flight."""
        return len(self._exchanges)

    async def wait_idle(self) -> None:
        """Return once no exchange is open."""
        await self._is_idle.wait()

    def interrupt_all(self, error: NotReady) -> None:
        """End every open exchange with `error`."""
        for exchange in self._exchanges.values():
            exchange.interrupt(error)

    def close(self) -> None:
        """Begin no more work."""
        self.long_bodies.close()
        super().close()


SERVICE = web.AppKey("service", Service)
