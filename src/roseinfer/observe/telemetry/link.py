"""One end of the socket between a front end and its telemetry process: messages in order, questions with deadlines.

A side that does not read costs the other no wait and bounded memory: from MAX_WAITING_BYTES on `on_full` is called, and
`on_empty` when all has been taken.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial

import msgspec

from roseinfer import errors
from roseinfer.errors import NotReady, RoseinferError
from roseinfer.observe.telemetry.facts import Answer, Fact, Message, Question
from roseinfer.runtime.frames import FrameBuffer, encode_frame

_NO_ANSWER = (NotReady.__name__, "There is no answer in time.", None)
MAX_WAITING_BYTES = 4 << 20  # about ten thousand steps of 64 streams

Reply = Callable[[bytes], bytes | Awaitable[bytes]]
"""Answers one kind of question, at once or in a task. A RoseinferError is an answer too."""

_log = logging.getLogger(__name__)


class Link(asyncio.Protocol):
    """One end. `take` gets what is neither question nor answer."""

    def __init__(
        self,
        replies: Mapping[str, Reply],
        take: Callable[[Fact], None],
        on_lost: Callable[[], None],
        on_full: Callable[[], None] = lambda: None,
        on_empty: Callable[[], None] = lambda: None,
    ) -> None:
        self._replies = replies
        self._take = take
        self._on_lost, self._on_full, self._on_empty = on_lost, on_full, on_empty
        self._is_full = False
        self._buffer = FrameBuffer()
        self._decode = msgspec.msgpack.Decoder(Message).decode
        self._transport: asyncio.Transport | None = None  # while the link is up
        self._held: list[bytes] | None = None  # see `together`
        self._num_asked = 0
        self._asked: dict[int, Callable[[Answer], None]] = {}
        self._deadlines: dict[int, float] = {}  # of `ask_then`, all with the same timeout
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()  # running: the event loop itself holds them weakly

    # --- sending ------------------------------------------------------------------------------------------------------

    def send(self, message: Message | bytes) -> None:
        """Sends a message, or what the other side expects before any message. Ignored when the link is down."""
        if self._transport is not None and not self._transport.is_closing():  # else asyncio warns of each write
            frame = encode_frame(message)
            if len(frame) > MAX_WAITING_BYTES and not self._is_full:  # what is larger than all that may wait, waits
                self._transport.set_write_buffer_limits(high=len(frame) + MAX_WAITING_BYTES, low=0)
            if self._held is None:
                self._transport.write(frame)
            else:
                self._held.append(frame)

    def together(self, work: Callable[[], None]) -> None:
        """Sends what the work sends in one write, since a write wakes the other process."""
        held: list[bytes] = []
        self._held = held
        try:
            work()
        finally:
            self._held = None
            if self._transport is not None and held:
                self._transport.write(b"".join(held))

    def notify(self, name: str, payload: bytes) -> None:
        """Asks without waiting for an answer."""
        self.send(Question(0, name, payload))

    def begin(self, name: str, payload: bytes, take: Callable[[Answer], None]) -> int:
        """Asks, and returns the question's number; `take` gets the answer, unless that is waited for no more.

        Raises NotReady when the link is down or full.
        """
        if self._transport is None or self._is_full:
            raise NotReady("The other process does not answer.")
        self._num_asked += 1
        self._asked[self._num_asked] = take
        self.send(Question(self._num_asked, name, payload))
        return self._num_asked

    def ask_then(self, name: str, timeout_s: float, take: Callable[[bytes | None], None]) -> None:
        """Asks, and calls `take` with the answer, or with None where there is none in time.

        Without a task or a future, each of which is another turn of the event loop, and with one timer for many.
        """

        def end(answer: Answer) -> None:
            self._deadlines.pop(answer.number, None)
            take(None if answer.error else answer.payload)

        try:
            number = self.begin(name, b"", end)
        except NotReady:
            take(None)
            return
        self._deadlines[number] = time.monotonic() + timeout_s
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(timeout_s, self._give_up)

    def _give_up(self) -> None:
        """Ends the questions whose time is up."""
        self._timer, now_s = None, time.monotonic()
        for number in [number for number, until_s in self._deadlines.items() if until_s <= now_s]:
            self._asked.pop(number)(Answer(number, b"", _NO_ANSWER))
        if self._deadlines and self._timer is None:
            wait_s = min(self._deadlines.values()) - now_s
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._give_up)

    async def ask(self, name: str, payload: bytes = b"", timeout_s: float | None = None) -> bytes:
        """Returns the other side's answer.

        Raises NotReady when the link is down, full or ends, TimeoutError, and what the other side raised.
        """
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        number = self.begin(name, payload, partial(_settle, answer))
        try:
            # Not `timeout`, which gives up an answer that has come while this process had no core to read it.
            await asyncio.wait({answer}, timeout=timeout_s)
            if not answer.done():
                raise TimeoutError
            return answer.result()
        finally:
            self._asked.pop(number, None)

    def close(self) -> None:
        """Closes it once all was sent."""
        if self._transport is not None:
            self._transport.close()

    # --- what asyncio calls -------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.set_write_buffer_limits(high=MAX_WAITING_BYTES, low=0)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        for payload in self._buffer.feed(data):
            match self._decode(payload):
                case Question() as question:
                    self.together(partial(self._begin_answer, question))
                case Answer() as answer:
                    if (take := self._asked.pop(answer.number, None)) is not None:  # else it came too late
                        take(answer)
                case message:
                    self._take(message)

    def pause_writing(self) -> None:
        self._is_full = True
        self._on_full()

    def resume_writing(self) -> None:
        self._is_full = False
        if self._transport is not None:
            self._transport.set_write_buffer_limits(high=MAX_WAITING_BYTES, low=0)
            self._on_empty()

    def connection_lost(self, _: BaseException | None) -> None:
        self._transport = None
        asked, self._asked = self._asked, {}
        for number, take in asked.items():
            take(Answer(number, b"", (NotReady.__name__, "The other process has ended.", None)))
        self._on_lost()

    # --- questions ----------------------------------------------------------------------------------------------------

    def _begin_answer(self, question: Question) -> None:
        try:
            payload = self._replies[question.name](question.payload)
        except RoseinferError as error:
            self._send_error(question, error)
            return
        if isinstance(payload, bytes):
            self._send_answer(question, payload)
            return
        task = asyncio.create_task(self._answer(question, payload), name=f"answer-{question.name}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, question: Question, payload: Awaitable[bytes]) -> None:
        try:
            self._send_answer(question, await payload)
        except RoseinferError as error:
            self._send_error(question, error)

    def _send_answer(self, question: Question, payload: bytes) -> None:
        if question.number:
            self.send(Answer(question.number, payload))

    def _send_error(self, question: Question, error: RoseinferError) -> None:
        if question.number:
            self.send(Answer(question.number, b"", (type(error).__name__, error.message, error.param)))


def _settle(waiting: "asyncio.Future[bytes]", answer: Answer) -> None:
    if waiting.done():  # it was given up
        return
    if answer.error is None:
        waiting.set_result(answer.payload)
    else:
        name, message, param = answer.error
        error: RoseinferError = getattr(errors, name)(message)
        error.param = param
        waiting.set_exception(error)
