"""The clients of a soak, all kinds at once: good, gone, slow and hostile.

Each kind is a coroutine that does one thing and notes what went wrong; `Clients.run` repeats them for some time.
"""

import asyncio
import itertools
import json
import random
import socket
import struct
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

from roseinfer.bench.load.client import Answer, LoadClient
from roseinfer.bench.load.endpoint import Endpoint
from tests.e2e.bad_inputs import cases

MAX_REMEMBERED = 50  # faults that are kept as text; all are counted
PROBE_INTERVAL_S = 1.0
READ_BYTES = 256
FLOOD_PER_S = 100
EXCHANGE_TIMEOUT_S = 60.0  # far more than any exchange takes
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}


class Clients:
    """All clients of a soak, and what they saw."""

    def __init__(self, url: str, seed: int) -> None:
        self._url = url
        self._random = random.Random(seed)
        bad = list(cases())
        self._random.shuffle(bad)
        self._bad = itertools.cycle(bad)
        self.statuses: Counter[str] = Counter()  # "kind status" -> answers
        self.faults: list[str] = []
        self.num_faults = 0
        self.num_server_errors = 0
        self._client: LoadClient

    async def run(self, seconds: float) -> None:
        """All kinds at once for so long; all of their connections are closed at the end."""
        end_s = time.monotonic() + seconds
        async with LoadClient(Endpoint(self._url)) as self._client:
            kinds: list[tuple[int, Callable[[], Awaitable[None]]]] = [
                *((6, self.stream), (3, self.whole), (4, self.leave), (2, self.read_slowly)),
                *((2, self.err), (1, self.dribble), (1, self.probe)),
            ]
            async with asyncio.TaskGroup() as group:
                for number, kind in kinds:
                    for _ in range(number):
                        group.create_task(self._repeat(kind, end_s))

    async def _repeat(self, kind: Callable[[], Awaitable[None]], end_s: float) -> None:
        while time.monotonic() < end_s:
            try:
                async with asyncio.timeout(EXCHANGE_TIMEOUT_S):
                    await kind()
            except OSError as error:
                self._fault(f"{kind.__name__}: {type(error).__name__}: {error}")
                await asyncio.sleep(0.1)

    def _fault(self, text: str) -> None:
        self.num_faults += 1
        if len(self.faults) < MAX_REMEMBERED:
            self.faults.append(text[:500])

    def _count(self, kind: str, answer: Answer, *expected: int) -> None:
        self.statuses[f"{kind} {answer.status}"] += 1
        self.num_server_errors += answer.status >= 500
        if answer.status not in expected:
            self._fault(f"{kind}: {answer.status}: {answer.body[:300]!r}")

    def _prompt(self) -> list[int]:
        """Some share their beginning, as conversations do."""
        shared = [7] * 64 if self._random.random() < 0.3 else []
        return shared + [self._random.randrange(256) for _ in range(self._random.randint(1, 300))]

    def _streamed(self) -> dict[str, Any]:
        return {
            "prompt": self._prompt(),
            "max_tokens": self._random.randint(1, 200),
            "stream": True,
            "ignore_eos": True,
            "temperature": self._random.choice((0, 0.7, 1.5)),
            "frequency_penalty": self._random.choice((0, 0.5)),
            "n": self._random.choice((1, 1, 1, 2)),
        }

    async def stream(self) -> None:
        """Reads a stream to its end, which must be a good one."""
        answer = await self._client.exchange("/v1/completions", self._streamed())
        self._count("stream", answer, 200, 429)
        if answer.status == 200 and not answer.body.rstrip().endswith(b"data: [DONE]"):
            self._fault(f"stream: ends with {answer.body[-300:]!r}")

    async def whole(self) -> None:
        """Asks for whole answers, with one of the features in each."""
        messages = [{"role": "user", "content": "word " * self._random.randint(1, 40)}]
        chat: dict[str, Any] = {"messages": messages, "max_tokens": 60}
        path, body = self._random.choice(
            [
                ("/v1/completions", {"prompt": self._prompt(), "max_tokens": 1, "echo": True, "logprobs": 5}),
                ("/v1/completions", {"prompt": ["a", "b", "c"], "max_tokens": 20, "best_of": 2, "seed": 3}),
                ("/v1/chat/completions", {**chat, "logprobs": True, "top_logprobs": 3, "logit_bias": {"5": -9}}),
                ("/v1/chat/completions", {**chat, "tools": [TOOL], "tool_choice": "required"}),
                (
                    "/v1/chat/completions",
                    {**chat, "response_format": {"type": "json_schema", "json_schema": self._schema()}},
                ),
                ("/tokenize", {"prompt": "word " * 2000}),
            ]
        )
        self._count("whole", await self._client.exchange(path, body), 200, 429)

    def _schema(self) -> dict[str, Any]:
        """Never the same twice for long, so that caches of grammars must let go."""
        name = f"field_{self._random.randrange(10_000)}"
        return {"name": "s", "schema": {**SCHEMA, "properties": {name: {"type": "integer"}}, "required": [name]}}

    async def leave(self) -> None:
        """Disconnects: before the first byte, after some, with FIN or RST; sometimes before all was sent."""
        is_whole = self._random.random() < 0.9
        connection = await open_socket(self._url, json.dumps(self._streamed()).encode(), is_whole=is_whole)
        loop = asyncio.get_running_loop()
        for _ in range(self._random.choice((0, 0, 1, 5, 20)) if is_whole else 0):
            if not await loop.sock_recv(connection, READ_BYTES):
                break
        if self._random.random() < 0.2:
            reset_on_close(connection)
        connection.close()
        self.statuses["leave"] += 1
        await asyncio.sleep(self._random.uniform(0, 0.05))

    async def flood(self, seconds: float) -> None:
        """A hundred clients a second that send a request and go, every fifth with a reset."""
        began_s = time.monotonic()
        for number in range(round(seconds * FLOOD_PER_S)):
            await asyncio.sleep(max(0.0, began_s + number / FLOOD_PER_S - time.monotonic()))
            try:
                connection = await open_socket(self._url, json.dumps(self._streamed()).encode())
            except OSError as error:
                self._fault(f"flood: {error}")
                continue
            if number % 5 == 0:
                reset_on_close(connection)
            connection.close()
            self.statuses["flood"] += 1

    async def read_slowly(self) -> None:
        """Reads a few hundred bytes a second of a long stream, then stops reading, then goes."""
        body = json.dumps({**self._streamed(), "max_tokens": 600, "n": 1}).encode()
        connection = await open_socket(self._url, body, receive_bytes=4096)
        for _ in range(20):
            if not await asyncio.get_running_loop().sock_recv(connection, READ_BYTES):
                break
            await asyncio.sleep(0.2)
        await asyncio.sleep(2.0)
        connection.close()
        self.statuses["read slowly"] += 1

    async def err(self) -> None:
        """Sends one of the bad inputs of the tests; each must be refused for what it is."""
        case = next(self._bad)
        headers = {**case.headers, "Connection": "close"}
        try:
            answer = await self._client.exchange(case.path, case.body, headers, case.method)
            self._count(f"bad: {case.kind}", answer, *range(400, 500))
        except ConnectionError:  # refused while the body was still being sent
            self.statuses[f"bad: {case.kind} cut"] += 1
        await asyncio.sleep(0.05)

    async def dribble(self) -> None:
        """Sends a head a few bytes at a time and gives up."""
        connection = await open_socket(self._url)
        for piece in (b"POST /v1/compl", b"etions HTTP/1.1\r\nHo", b"st: x\r\nContent-Le"):
            await asyncio.get_running_loop().sock_sendall(connection, piece)
            await asyncio.sleep(0.3)
        connection.close()
        self.statuses["dribble"] += 1

    async def probe(self) -> None:
        """Asks what the cluster asks."""
        for path in ("/livez", "/readyz", "/metrics"):
            self._count(f"probe {path}", await self._client.exchange(path), 200)
        await asyncio.sleep(PROBE_INTERVAL_S)


async def open_socket(
    url: str, content: bytes = b"", *, is_whole: bool = True, receive_bytes: int = 0
) -> socket.socket:
    """A connection of its own, on which a request for a stream, or its beginning, has been sent if there is a body."""
    host, port = url.removeprefix("http://").split(":")
    connection = socket.socket()
    connection.setblocking(False)
    if receive_bytes:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(connection, (host, int(port)))
    if content:
        fields = ("Host: x", "Connection: close", "Content-Type: application/json", f"Content-Length: {len(content)}")
        head = "\r\n".join(("POST /v1/completions HTTP/1.1", *fields))
        await loop.sock_sendall(connection, head.encode() + b"\r\n\r\n" + content[: None if is_whole else 40])
    return connection


def reset_on_close(connection: socket.socket) -> None:
    """RST instead of FIN."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
