"""An HTTP/1.1 connection that stamps each read of an answer.

A load client shares the machine with the server that it measures, and reads thousands of pieces a second. Here a piece
wakes no task, so it costs a fraction of what it costs in an HTTP library.
"""

import asyncio
import ssl
from collections.abc import Callable, Mapping
from urllib.parse import urlsplit

Reader = Callable[[int, bytes], bool]
"""Gets the stamp and the bytes of each read of a body; when it returns False the connection closes."""

CONNECT_TIMEOUT_S = 10.0
SILENCE_TIMEOUT_S = 600.0  # between two reads


class Connection(asyncio.Protocol):
    """Sends one request at a time, and reads its answer; `open_connection` makes it.

    `status` and `headers`, with names in lower case, are the last answer's.
    """

    def __init__(self, host: str, clock: Callable[[], int]) -> None:
        self._host = host
        self._clock = clock
        self._transport: asyncio.Transport
        self._done: asyncio.Future[None] | None = None
        self.is_open = False
        self._begin(lambda _, __: True)

    def _begin(self, on_read: Reader) -> None:
        self._on_read = on_read
        self._head = b""
        self._line = b""  # of a chunk's size, as far as it has been read
        self._num_left: float = 0  # bytes of the body, or of its chunk
        self._is_chunked, self._is_last_chunk = False, False
        self._num_reads = 0
        self.status, self.sent_ns = 0, 0
        self.headers: dict[str, str] = {}

    async def ask(self, method: str, path: str, headers: Mapping[str, str], body: bytes, on_read: Reader) -> None:
        """Send a request and wait for the end of its answer. Raises OSError, of which TimeoutError is one."""
        self._begin(on_read)
        self._done = asyncio.get_running_loop().create_future()
        fields = {"Host": self._host, **headers, "Content-Length": str(len(body))}
        head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        self._transport.write(f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + body)
        self.sent_ns = self._clock()
        try:
            await self._wait(self._done)
        except BaseException:
            self._done.cancel()
            self.close()
            raise
        if self.headers.get("connection", "").lower() == "close":
            self.close()

    async def _wait(self, done: "asyncio.Future[None]") -> None:
        num_reads = -1
        while not done.done():
            if num_reads == self._num_reads:
                raise TimeoutError(f"nothing came for {SILENCE_TIMEOUT_S:g} s")
            num_reads = self._num_reads
            await asyncio.wait([done], timeout=SILENCE_TIMEOUT_S)
        done.result()

    def close(self) -> None:
        self.is_open = False
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        assert isinstance(transport, asyncio.Transport)
        self._transport, self.is_open = transport, True

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        self.is_open = False
        if self._num_left == float("inf"):  # a body without a length ends with its connection
            self._finish(exc)
        elif exc is None or isinstance(exc, OSError):
            self._finish(exc or ConnectionResetError("the server closed the connection before the end of its answer"))
        else:
            self._finish(ConnectionError(f"the answer is not HTTP: {exc}"))

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        try:
            self._read(self._clock(), data)
        except (ValueError, LookupError, OverflowError) as error:  # asyncio would log it with a traceback
            self._finish(ConnectionError(f"the answer is not HTTP: {error}"))
            self.close()

    def _read(self, now_ns: int, data: bytes) -> None:
        while not self.status:
            self._head += data
            head, end, data = self._head.partition(b"\r\n\r\n")
            if not end:
                return
            self._read_head(head.decode("latin-1"))
            if self.status < 200:  # such as 100 or 103: the answer itself follows
                self.status, self._head = 0, b""
        if self._is_chunked:
            data, is_over = self._unchunk(data)
        else:
            data = data[: None if self._num_left == float("inf") else int(self._num_left)]
            self._num_left -= len(data)
            is_over = not self._num_left
        self._num_reads += 1
        if not self._on_read(now_ns, data):
            self.close()
            is_over = True
        if is_over:
            self._finish(None)

    def _read_head(self, head: str) -> None:
        first, *lines = head.split("\r\n")
        self.status = int(first.split()[1])
        self.headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        self._is_chunked = self.headers.get("transfer-encoding", "").lower() == "chunked"
        has_no_body = self.status < 200 or self.status in {204, 304}
        self._num_left = 0
        if not self._is_chunked and not has_no_body:
            self._num_left = float(self.headers.get("content-length", "inf"))

    def _unchunk(self, data: bytes) -> tuple[bytes, bool]:
        """The bytes without the framing of chunks, and whether the body is over."""
        parts, at, num_left = [], 0, int(self._num_left)
        is_over = False
        while at < len(data) and not is_over:
            if num_left:
                parts.append(data[at : at + num_left])
                at, num_left = at + len(parts[-1]), num_left - len(parts[-1])
                continue
            end = data.find(b"\n", at)
            self._line += data[at : end if end >= 0 else None]
            at = end + 1 or len(data)
            if end >= 0:
                size, self._line = self._line.strip(), b""
                if size and not self._is_last_chunk:
                    num_left = int(size.partition(b";")[0], 16)
                    if num_left < 0:
                        raise ValueError(f"a chunk of {num_left} bytes")
                    self._is_last_chunk = not num_left
                else:  # each chunk ends with an empty line
                    is_over = self._is_last_chunk and not size
        self._num_left = num_left
        return b"".join(parts), is_over

    def _finish(self, error: Exception | None) -> None:
        if self._done is not None and not self._done.done():
            if error is None:
                self._done.set_result(None)
            else:
                self._done.set_exception(error)


async def open_connection(url: str, clock: Callable[[], int]) -> Connection:
    """A connection to the host of a URL. Raises OSError."""
    parts = urlsplit(url)
    context = ssl.create_default_context() if parts.scheme == "https" else None
    port = parts.port or (80 if context is None else 443)
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            _, connection = await loop.create_connection(
                lambda: Connection(parts.netloc.rpartition("@")[2], clock), parts.hostname or "", port, ssl=context
            )
    except TimeoutError as error:  # asyncio's says nothing
        raise TimeoutError(str(error) or f"no connection within {CONNECT_TIMEOUT_S:g} s") from None
    return connection
