"""Outputs as they come into lists that a reader takes whole. Knows not whose they are."""

import asyncio

from roseinfer.errors import EngineError
from roseinfer.messages import TokenOutput


class Mailbox:
    """Outputs on their way to one `generate` call: a list that is taken whole, and one wake-up for all in it."""

    __slots__ = ("_arrived", "_error", "_outputs")

    def __init__(self) -> None:
        self._outputs: list[TokenOutput] = []
        self._error: EngineError | None = None
        self._arrived = asyncio.Event()

    def put(self, output: TokenOutput) -> None:
        self._outputs.append(output)
        self._arrived.set()

    def fail(self, error: EngineError) -> None:
        self._error = error
        self._arrived.set()

    async def take(self) -> list[TokenOutput]:
        """All that is due, at least one. Raises the engine's error once everything before it was taken."""
        await self._arrived.wait()
        if not self._outputs and self._error is not None:
            raise self._error
        self._arrived.clear()
        if self._error is not None:
            self._arrived.set()
        outputs, self._outputs = self._outputs, []
        return outputs
