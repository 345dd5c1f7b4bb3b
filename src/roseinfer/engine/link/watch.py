"""Watches an engine: returns when it has died, and ends one that hangs."""

import asyncio
import time

from roseinfer.engine.link.engine_client import EngineClient
from roseinfer.errors import EngineError
from roseinfer.records import Observer

LOOK_INTERVAL_S = 0.5
STALL_NS = 1_000_000_000  # without a step, from which on observers hear of it
_LOOKS_BEFORE_THE_END = 2  # a single one may fall between two stamps


async def wait_for_death(client: EngineClient, observer: Observer) -> EngineError:
    """Return when the engine has died, with the reason. An engine that hangs at two looks in a row is ended.

    Observers hear of one that has stood still for a second while it has work, and when it goes on.
    """
    dead = asyncio.ensure_future(client.wait_dead())
    num_looks = observed_ns = 0
    try:
        while not (await asyncio.wait({dead}, timeout=LOOK_INTERVAL_S))[0]:
            since_ns = client.stalled_since_ns
            since_ns = since_ns if since_ns and time.monotonic_ns() - since_ns > STALL_NS else 0
            if since_ns != observed_ns:
                observer.on_stall(observed_ns := since_ns)
            trouble = client.trouble
            num_looks = 0 if trouble is None else num_looks + 1
            if trouble is not None and num_looks >= _LOOKS_BEFORE_THE_END:
                client.give_up(trouble)
        return dead.result()
    finally:
        dead.cancel()
