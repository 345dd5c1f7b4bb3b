"""A bounded mailbox of token outputs between the engine's client and one reader."""

import asyncio

from roseinfer.errors import RoseinferError, SlowReader
from roseinfer.messages import TokenOutput

MAX_TAKEN = 256  # outputs: with twenty log-probabilities each, some milliseconds of the event loop
MAX_WAITING = 1 << 20  # tokens and log-probabilities that were not taken: a hundred megabytes


class Mailbox:
    """Outputs for one `generate` call: a list to take, and one wake-up for all in it.

    The engine waits for no reader. What a reader does not take is kept up to a bound; then all of it is dropped.
    """

    __slots__ = ("_arrived", "_error", "_has_more", "_num_waiting", "_outputs")

    def __init__(self) -> None:
        self._outputs: list[TokenOutput] = []
        self._has_more = False  # than the last list had
        self._num_waiting = 0
        self._error: RoseinferError | None = None
        self._arrived = asyncio.Event()

    def put_output(self, output: TokenOutput) -> None:
        if isinstance(self._error, SlowReader):
            return
        self._outputs.append(output)
        self._num_waiting += _size(output)
        if self._num_waiting > MAX_WAITING:
            self._outputs.clear()
            self._error = SlowReader("The answer was read so slowly that what waited for it became too much to keep.")
        self._arrived.set()

    def fail(self, error: RoseinferError) -> None:
        self._error = error
        self._arrived.set()

    async def take_outputs(self) -> list[TokenOutput]:
        """Take what is due, at least one output and at most MAX_TAKEN. Raises the error once all before it was taken.

        Other tasks have their turn before the rest of what was too much for one list is taken.
        """
        if self._has_more:
            await asyncio.sleep(0)
        await self._arrived.wait()
        if not self._outputs and self._error is not None:
            raise self._error
        taken, self._outputs = self._outputs[:MAX_TAKEN], self._outputs[MAX_TAKEN:]
        self._has_more = bool(self._outputs)
        self._num_waiting = self._num_waiting - sum(map(_size, taken)) if self._has_more else 0
        if not self._has_more and self._error is None:
            self._arrived.clear()
        return taken


def _size(output: TokenOutput) -> int:
    """Tokens and log-probabilities; those of a prompt are bounded by its request."""
    if output.logprobs is None:
        return len(output.token_ids)
    return sum(2 + len(scores.top_logprobs) for scores in output.logprobs)
