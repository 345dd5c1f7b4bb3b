"""Publishes over ZeroMQ which KV blocks the prefix cache gains and loses, for routers that know where prefixes lie.

The wire is that of vLLM's `ZmqEventPublisher`, which llm-d's and production-stack's routers read: a message of three
frames, the topic, a sequence number (8 bytes, big-endian) and `[time, [event, …]]` in msgpack. An event is an array:

    ["BlockStored", [hash, …], hash of the parent or null, [token id, …], block size, null, medium, null, extra keys]
    ["BlockRemoved", [hash, …], medium]
    ["AllBlocksCleared"]

or a map of the same fields, whose names are in `_FIELDS`. A hash is the last 64 bits of the block's digest. The extra
key is the salt that the request's body has, which routers see too; what an API key adds to the salt is left out, since
routers do not know it and would find no prefix. Readers that missed messages ask the replay socket for those from a
number on (8 bytes), and get them as they were, behind an empty frame, until one with the number -1.

The engine only hands its changes to a thread. When too many wait for it some are dropped, and in their place the
readers hear that all blocks are gone: they may miss a block that is there, and never believe in one that is not.
"""

import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import fields
from itertools import count
from typing import Any

import msgspec
import numpy as np

from roseinfer.config.options import Config, KVEventsConfig
from roseinfer.engine.core.engine import Engine
from roseinfer.errors import ConfigError
from roseinfer.records import CachedBlock

END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
MAX_WAITING = 10_000  # steps whose changes wait for the thread
_FIELDS = {
    "BlockStored": (
        *("type", "block_hashes", "parent_block_hash", "token_ids", "block_size"),
        *("lora_id", "medium", "lora_name", "extra_keys"),
    ),
    "BlockRemoved": ("type", "block_hashes", "medium"),
    "AllBlocksCleared": ("type",),
}
MAX_PORT = 65535
MAX_KEPT = 10_000  # messages for the replay socket
_HIGH_WATER = 100_000  # messages that wait for a reader; then it misses some, and sees it by their numbers
_CLOSE_TIMEOUT_S = 1.0
_CONNECT_TIMEOUT_S = 5.0  # of one attempt; the next begins soon after it

Event = list[Any]

_log = logging.getLogger(__name__)


@contextmanager
def publishing(config: Config, engine: Engine) -> Iterator[Callable[[], None]]:
    """Yields what is to be called after each step: it publishes, if that is configured, what changed in the cache."""
    if config.kv_events.endpoint is None:
        for field in fields(KVEventsConfig):
            if getattr(config.kv_events, field.name) != field.default:
                raise ConfigError("needs kv_events.endpoint too", param=f"kv_events.{field.name}")
        yield lambda: None
        return
    cache, info = engine.scheduler.kv_cache.prefix_cache, engine.info
    topic = config.kv_events.topic or f"kv@{socket.gethostname()}@{config.served_model_name}"
    publisher = KVEventPublisher(config.kv_events, topic, info.block_size, "CPU" if info.device == "cpu" else "GPU")
    cache.changes = deque()

    def publish() -> None:
        if cache.changes:
            publisher.publish(list(cache.changes))
            cache.changes.clear()

    with closing(publisher):
        yield publish


def events_of(changes: Sequence[CachedBlock], block_size: int, medium: str) -> Iterator[Event]:
    """The events of changes, in their order; blocks that follow each other are one event."""
    run: list[CachedBlock] = []
    for change in changes:
        if run and not _continues(run[-1], change):
            yield _event(run, block_size, medium)
            run = []
        run.append(change)
    if run:
        yield _event(run, block_size, medium)


def _continues(last: CachedBlock, change: CachedBlock) -> bool:
    if last.content is None or change.content is None:
        return last.content is change.content
    return change.parent == last.digest


def _event(run: Sequence[CachedBlock], block_size: int, medium: str) -> Event:
    first, hashes = run[0], [_hash(change.digest) for change in run]
    if first.content is None:
        return ["BlockRemoved", hashes, medium]
    token_ids = np.frombuffer(b"".join(change.content or b"" for change in run), np.int32).tolist()
    extra_keys = None
    if first.client_salt:
        extra_keys = [[first.client_salt], *[None] * (len(run) - 1)]
    parent = None if first.is_first else _hash(first.parent)
    return ["BlockStored", hashes, parent, token_ids, block_size, None, medium, None, extra_keys]


def _hash(digest: bytes) -> int:
    return int.from_bytes(digest[-8:], "big")


class KVEventPublisher:
    """A thread with the two sockets. `publish` never blocks; it and `close` belong to the engine's thread."""

    def __init__(self, config: KVEventsConfig, topic: str, block_size: int, medium: str) -> None:
        """Binds an address with `*` or `::` in it, and connects to another. Raises ConfigError."""
        try:
            import zmq
        except ImportError as error:
            message = "needs pyzmq: pip install 'roseinfer[kv-events]'"
            raise ConfigError(message, param="kv_events.endpoint") from error
        assert config.endpoint is not None
        self._zmq, self._context = zmq, zmq.Context()
        self._address = config.endpoint
        self._topic, self._block_size, self._medium = topic.encode(), block_size, medium
        self._numbers = count()
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=MAX_KEPT)
        # None stands for changes that are lost; the first, for those of an engine before this one.
        self._waiting: deque[Sequence[CachedBlock] | None] = deque([None])
        self._is_map = config.form == "map"
        self._is_closing = False
        self._attempts: Any = None  # a socket that has what becomes of attempts to connect
        self._is_heard = True  # as far as is known
        try:
            self._events = self._open(zmq.PUB, config.endpoint, "kv_events.endpoint")
            self._replay = None
            if config.replay_endpoint is not None:
                self._replay = self._open(zmq.ROUTER, config.replay_endpoint, "kv_events.replay_endpoint")
            self._bell = self._context.socket(zmq.PAIR)  # wakes the thread
            self._bell.bind("inproc://bell")
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def _open(self, kind: int, address: str, param: str) -> Any:
        zmq = self._zmq
        port = address.rpartition(":")[2]
        if port.isdecimal() and int(port) > MAX_PORT:  # of which ZeroMQ takes the lowest 16 bits, another port
            raise ConfigError(f"{address} cannot be used: a port is {MAX_PORT} at most", param=param)
        opened = self._context.socket(kind)
        opened.set_hwm(_HIGH_WATER)
        opened.setsockopt(zmq.IPV6, 1)
        try:
            is_ours = "*" in address or "::" in address or address.startswith(("ipc://", "inproc://"))
            if is_ours or kind == zmq.ROUTER:
                opened.bind(address)
            else:
                opened.setsockopt(zmq.CONNECT_TIMEOUT, int(_CONNECT_TIMEOUT_S * 1e3))
                self._attempts = opened.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_CONNECT_RETRIED)
                opened.connect(address)
        except zmq.ZMQError as error:
            raise ConfigError(f"{address} cannot be used: {error.strerror}", param=param) from None
        return opened

    def publish(self, changes: list[CachedBlock]) -> None:
        """Hand over what changed in a step."""
        if len(self._waiting) < MAX_WAITING:
            self._waiting.append(changes)
        elif self._waiting[-1] is not None:
            self._waiting.append(None)
        self._ring()

    def close(self) -> None:
        """Send what is left, for a second at most."""
        self._is_closing = True
        self._ring()
        self._thread.join(_CLOSE_TIMEOUT_S)
        self._bell.close(linger=0)
        if not self._thread.is_alive():
            self._context.destroy(linger=int(_CLOSE_TIMEOUT_S * 1e3))

    def _ring(self) -> None:
        with suppress(self._zmq.Again):  # it has been rung often enough
            self._bell.send(b"", self._zmq.NOBLOCK)

    # --- on the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        zmq = self._zmq
        bell = self._context.socket(zmq.PAIR)
        bell.connect("inproc://bell")
        poller = zmq.Poller()
        for opened in filter(None, (bell, self._replay, self._attempts)):
            poller.register(opened, zmq.POLLIN)
        while not self._is_closing or self._waiting:
            ready = dict(poller.poll())
            while bell in ready and bell.poll(0):
                bell.recv()
            self._send_waiting()
            if self._replay in ready:
                self._answer()
            if self._attempts in ready:
                self._note_attempt()
        bell.close(linger=0)

    def _note_attempt(self) -> None:
        """Log when nothing listens at the address that is connected to, and when something does after that."""
        from zmq.utils.monitor import recv_monitor_message

        is_heard = recv_monitor_message(self._attempts)["event"] == self._zmq.EVENT_HANDSHAKE_SUCCEEDED
        if is_heard and not self._is_heard:
            _log.info("kv_events.endpoint: %s is connected", self._address)
        elif self._is_heard and not is_heard:
            message = "kv_events.endpoint: nothing listens at %s, so events are lost until something does"
            _log.warning(message, self._address)
        self._is_heard = is_heard

    def _send_waiting(self) -> None:
        while self._waiting:
            changes = self._waiting.popleft()
            events: list[Any] = [["AllBlocksCleared"]]
            if changes is not None:
                events = list(events_of(changes, self._block_size, self._medium))
            if self._is_map:
                events = [dict(zip(_FIELDS[event[0]], event, strict=True)) for event in events]
            number, payload = next(self._numbers), msgspec.msgpack.encode([time.time(), events])
            self._kept.append((number, payload))
            self._events.send_multipart(self._message(number, payload))

    def _message(self, number: int, payload: bytes) -> tuple[bytes, ...]:
        return self._topic, number.to_bytes(8, "big"), payload

    def _answer(self) -> None:
        """Answer a request of a REQ or a DEALER socket; what is no request is passed over."""
        assert self._replay is not None
        frames = self._replay.recv_multipart()
        if len(frames) != 3 or len(frames[2]) != 8:
            return
        first = int.from_bytes(frames[2], "big")
        for number, payload in self._kept:
            if number >= first:
                self._replay.send_multipart((*frames[:2], *self._message(number, payload)))
        self._replay.send_multipart((*frames[:2], b"", END_OF_REPLAY, b""))
