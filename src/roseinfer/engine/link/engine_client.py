"""What a front end may ask of an engine, wherever the engine runs; `client.py` is the one that answers."""

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Protocol

from roseinfer.engine.link.heartbeat import Account
from roseinfer.engine.queue_estimate import QueueEstimate
from roseinfer.errors import EngineError
from roseinfer.messages import EngineInfo, ProfileEnded, Request, StartupProgress, TokenOutput
from roseinfer.records import RequestTimeline


class EngineClient(Protocol):
    """What the server needs of an engine, wherever it runs. All methods belong to one event loop."""

    async def start(self, on_progress: Callable[[StartupProgress], None]) -> EngineInfo:
        """Start the engine and wait until it is warm. One that has died may be started again.

        Raises ConfigError for a value the user gave, EngineFailed or EngineDead otherwise.
        """

    @property
    def info(self) -> EngineInfo:
        """What the engine reported when it became ready. Raises NotReady before."""

    @property
    def queue_estimate(self) -> QueueEstimate:
        """Predicts how long requests wait."""

    @property
    def trouble(self) -> str | None:
        """None while the engine is alive and makes progress; else one phrase: it died, or no step came in time."""

    @property
    def account(self) -> Account:
        """What the engine does, and since when."""

    async def wait_dead(self) -> EngineError:
        """Return once the engine has died, with the reason; pending for as long as it lives."""

    def give_up(self, reason: str) -> None:
        """It makes no progress: let it count as dead, and end it if that can be done."""

    def open_timeline(self, timeline: RequestTimeline) -> None:
        """A request was received: tell the observers. Each opened timeline must be closed exactly once."""

    def generate(
        self, requests: Sequence[Request], timelines: Sequence[RequestTimeline]
    ) -> AsyncGenerator[list[TokenOutput], None]:
        """Run the requests and yield their outputs as they come, all that is due in one list.

        `timelines[i]`, already open, belongs to `requests[i]` and gets the engine's stamps. The generator ends after
        the last request finished. Closing it early (cancellation, `aclose`) aborts whatever has not finished. Raises
        EngineFailed or EngineDead when the engine goes down, SlowReader when its outputs are not taken and become too
        many to keep.
        """

    def abort(self, request_id: str) -> None:
        """End one request; its last output, with reason abort, still comes through `generate`."""

    def holds(self, request_id: str) -> bool:
        """The engine has the request and has not told its end: nobody else may use the id yet."""

    def close_timeline(self, timeline: RequestTimeline) -> None:
        """The server's part is over: every stamp and, unless the engine's own holds, the finish reason is set.

        The observers hear of it as soon as the engine's part has ended too.
        """

    def profile(self, num_steps: int, directory: str) -> Awaitable[ProfileEnded]:
        """Have the next steps profiled; what is returned comes true once the trace has been written, or never will be.

        Raises Conflict while another profile is under way, EngineDead when the engine is not running.
        """

    async def close(self) -> None:
        """Stop the engine. Idempotent."""
