"""Commands and events as frames on a stream socket, each one msgspec struct as msgpack.

`EngineLink` is the engine's end, without an event loop: reads and writes that do not block, and one place to sleep.
"""

import select
import socket
import time
from collections import deque

import msgspec
from msgspec.structs import replace

from roseinfer.messages import Command, Event, Request, SamplingParams
from roseinfer.runtime.frames import FrameBuffer, encode_frame

_READ_BYTES = 1 << 18
_MAX_OUTBOX_BYTES = 64 << 20  # some ten thousand steps


class SameParams(msgspec.Struct, frozen=True, tag=True, omit_defaults=True, gc=False):
    """A request with the parameters of the request before it, except for the seed, which is its own."""

    request: Request
    has_same_prompt: bool = False  # as the request before it; it has none here


Sent = Command | SameParams  # what goes over; `CommandDecoder` makes commands of it


class CommandEncoder:
    """Encodes commands for one engine.

    An HTTP request is up to 512 sequences, which follow one another and differ in prompt and seed alone. Their grammar,
    of up to 256 KiB, and their biases are sent once, and so is a prompt with several choices.
    """

    def __init__(self) -> None:
        self._params: SamplingParams | None = None  # of the last request, with no seed
        self._prompt: list[int] = []  # of the same request

    def encode(self, command: Command) -> bytes:
        """Encode a command. Raises as msgspec does; the next command then does not refer to this one."""
        if not isinstance(command, Request):
            return encode_frame(command)
        params = command.params
        # `LLM` takes a list of stop tokens too, which no tuple equals.
        seedless = replace(params, seed=0, stop_token_ids=tuple(params.stop_token_ids))
        if seedless == self._params:
            # The same list, not an equal one, which takes too long to compare.
            has_same_prompt = command.prompt_token_ids is self._prompt
            prompt = [] if has_same_prompt else command.prompt_token_ids
            short = replace(command, params=SamplingParams(seed=params.seed), prompt_token_ids=prompt)
            frame = encode_frame(SameParams(short, has_same_prompt))
        else:
            frame = encode_frame(command)
            # With a copy of the caller's dict, which may change before the next request.
            self._params = replace(seedless, logit_bias=dict(params.logit_bias))
        self._prompt = command.prompt_token_ids
        return frame


class CommandDecoder:
    """Decodes the payloads of a `CommandEncoder`, in their order."""

    def __init__(self) -> None:
        self._decoder = msgspec.msgpack.Decoder(Sent)
        self._last: Request | None = None

    def decode(self, payload: bytes) -> Command:
        """Decode a payload. Raises ValueError or RecursionError for what no peer of ours would send."""
        sent: Sent = self._decoder.decode(payload)
        if isinstance(sent, SameParams):
            if self._last is None:
                raise ValueError("a request refers to the one before it, and none came")
            prompt = (self._last if sent.has_same_prompt else sent.request).prompt_token_ids
            params = replace(self._last.params, seed=sent.request.params.seed)
            sent = replace(sent.request, params=params, prompt_token_ids=prompt)
        if isinstance(sent, Request):
            self._last = sent
        return sent


class EngineLink:
    """The engine's end of the link: `Inbox` and `Outbox` of `engine/loop.py` over one socket.

    Sends go into an ordered outbox, and from there to the kernel as far as it takes them. A front end that does not
    read costs memory up to a bound and then stops the stepping, but never blocks the engine inside a send.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._decoder = CommandDecoder()
        self._buffer = FrameBuffer()
        self._received: deque[bytes] = deque()
        self._frames: deque[bytes] = deque()  # the first may be the rest of one begun
        self._outbox_bytes = 0

    @property
    def depth(self) -> int:
        return len(self._frames)

    @property
    def is_full(self) -> bool:
        return self._outbox_bytes >= _MAX_OUTBOX_BYTES

    def send(self, event: Event) -> None:
        frame = encode_frame(event)
        self._frames.append(frame)
        self._outbox_bytes += len(frame)
        self._flush()

    def _flush(self) -> None:
        """Give the kernel as much as it takes. Raises EOFError when the other side has gone."""
        while self._frames:
            frame = self._frames[0]
            try:
                sent = self._socket.send(frame)
            except BlockingIOError:
                return
            except OSError as error:
                raise EOFError from error
            self._outbox_bytes -= sent
            if sent == len(frame):
                self._frames.popleft()
            else:
                self._frames[0] = frame[sent:]

    def receive(self, *, wait: bool, timeout_s: float | None = None) -> list[Command]:
        """See `Inbox.receive`."""
        self._exchange()
        if wait and not self._received:
            self._sleep(timeout_s)
            self._exchange()
        commands = [self._decoder.decode(payload) for payload in self._received]
        self._received.clear()
        return commands

    def receive_bytes(self) -> bytes:
        """Wait for the first payload, which is no command but the configuration."""
        while not self._received:
            self._sleep(None)
            self._exchange()
        return self._received.popleft()

    def drain(self, timeout_s: float) -> None:
        """Give the other side up to `timeout_s` to take what is left in the outbox, then close for sending."""
        deadline = time.monotonic() + timeout_s
        self._flush()
        while self._frames and (left_s := deadline - time.monotonic()) > 0:
            self._poll(select.POLLOUT, left_s)
            self._flush()
        self._socket.shutdown(socket.SHUT_WR)

    def _sleep(self, timeout_s: float | None) -> None:
        self._poll(select.POLLIN | (select.POLLOUT if self._frames else 0), timeout_s)

    def _poll(self, events: int, timeout_s: float | None) -> None:
        poller = select.poll()  # not select(), which takes no descriptor above 1023
        poller.register(self._socket, events)
        poller.poll(None if timeout_s is None else timeout_s * 1e3)

    def _exchange(self) -> None:
        """Send and read as much as is possible without waiting. Raises EOFError when the other side has gone."""
        self._flush()
        while True:
            try:
                data = self._socket.recv(_READ_BYTES)
            except BlockingIOError:
                return
            except OSError as error:
                raise EOFError from error
            if not data:
                raise EOFError
            self._received.extend(self._buffer.feed(data))
