"""An engine's death or hang into a decision: start it again, or give up. Knows neither ports nor requests."""

import asyncio
import time
from collections import deque
from collections.abc import Callable

from roseinfer.config.tree import EngineConfig
from roseinfer.engine.link.engine_client import EngineClient
from roseinfer.errors import EngineError

LOOK_INTERVAL_S = 0.5
MAX_RESTARTS = 1  # what kills two engines in succession will kill a third
RESTART_WINDOW_S = 600.0  # for which a restart counts
_LOOKS_BEFORE_THE_END = 2  # one alone may fall between two stamps


async def wait_for_death(client: EngineClient) -> EngineError:
    """Return when the engine has died, with the reason. One that hangs is ended: a second look must find it so."""
    dead = asyncio.ensure_future(client.wait_dead())
    num_looks = 0
    try:
        while not (await asyncio.wait({dead}, timeout=LOOK_INTERVAL_S))[0]:
            trouble = client.trouble
            num_looks = 0 if trouble is None else num_looks + 1
            if trouble is not None and num_looks >= _LOOKS_BEFORE_THE_END:
                client.give_up(trouble)
        return dead.result()
    finally:
        dead.cancel()


class Restarts:
    """How often the engine may still be started again: so many times in any window of so many seconds."""

    def __init__(self, config: EngineConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = MAX_RESTARTS if config.on_failure == "restart" else 0
        self._clock = clock
        self._taken: deque[float] = deque()

    def take(self) -> bool:
        """Whether to start it again now; if so, that counts."""
        now_s = self._clock()
        while self._taken and now_s - self._taken[0] >= RESTART_WINDOW_S:
            self._taken.popleft()
        if len(self._taken) >= self._limit:
            return False
        self._taken.append(now_s)
        return True
