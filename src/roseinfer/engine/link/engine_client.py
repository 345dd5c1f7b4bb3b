"""The protocol between server and engine, which `client.py:AsyncEngine` implements."""

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Protocol

from roseinfer.engine.link.heartbeat import Account
from roseinfer.engine.queue_estimate import QueueEstimate
from roseinfer.errors import EngineError
from roseinfer.messages import EngineInfo, ProfileEnded, Request, StartupProgress, TokenOutput
from roseinfer.records import RequestTimeline


class EngineClient(Protocol):
    """An engine, wherever it runs. All methods belong to one event loop."""

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
        """None while the engine is alive and makes progress; else why not, in one phrase."""

    @property
    def account(self) -> Account:
        """What the engine is doing, and since when."""

    @property
    def stalled_since_ns(self) -> int:
        """Since when an engine that has work has made no step; 0 without work, and in a pause that has its reason."""

    async def wait_dead(self) -> EngineError:
        """Return once the engine has died, with the reason; pending for as long as it lives."""

    def give_up(self, reason: str) -> None:
        """Count an engine that makes no progress as dead, and end it if that is possible."""

    def open_timeline(self, timeline: RequestTimeline) -> None:
        """Report a received request to the observers. Each opened timeline must be closed exactly once."""

    def generate(
        self, requests: Sequence[Request], timelines: Sequence[RequestTimeline], *, is_streamed: bool = True
    ) -> AsyncGenerator[list[TokenOutput], None]:
        """Run the requests and yield their outputs as they come, all that is due in one list.

        Without `is_streamed` they are due when a sequence ends, or some hundreds have come: no token wakes a reader.
        `timelines[i]`, already open, belongs to `requests[i]` and gets the engine's stamps. The generator ends after
        the last request finished. Closing it early (cancellation, `aclose`) aborts the unfinished ones. Raises
        EngineFailed or EngineDead when the engine goes down, SlowReader when too many outputs were not taken.
        """

    def abort(self, request_id: str) -> None:
        """End one request; its last output, with reason abort, still comes through `generate`."""

    def holds(self, request_id: str) -> bool:
        """Whether the engine has the request and has not reported its end: its id is in use."""

    def close_timeline(self, timeline: RequestTimeline) -> None:
        """End the server's part: every stamp is set, and the finish reason unless the engine's holds.

        It is reported to the observers once the engine's part has ended too.
        """

    def profile(self, num_steps: int, directory: str) -> Awaitable[ProfileEnded]:
        """Profile the next steps; the result comes once the trace is written, or cannot be.

        Raises Conflict while another profile is under way, EngineDead when the engine is not running.
        """

    async def close(self) -> None:
        """Stop the engine. Idempotent."""
