"""A server without an engine: an `EngineClient` that does exactly what a test tells it, and a vocabulary of bytes.

Ids 0 to 255 are the bytes themselves, so `list("text".encode())` is a prompt; above them lie a few added tokens.
"""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import aiohttp
import tokenizers
from aiohttp import web
from tokenizers import decoders, models, pre_tokenizers, processors

from roseinfer.config.api_keys import parse_keys
from roseinfer.config.options import Config, ServerConfig
from roseinfer.engine.link.heartbeat import Account, Activity
from roseinfer.engine.queue_estimate import QueueEstimate
from roseinfer.errors import Conflict, EngineDead, EngineError, NotReady, RoseinferError
from roseinfer.messages import EngineInfo, ProfileEnded, Request, StartupProgress, TokenLogprobs, TokenOutput
from roseinfer.observe.gaps.attribution import Attribution
from roseinfer.records import Arrival, EngineTimes, FinishReason, LifecycleState, Observer, RequestTimeline
from roseinfer.server.app import Instruments, build_app, build_ops_app, build_runner
from roseinfer.server.connection import connection, listener
from roseinfer.server.connection.api_keys import ApiKeys
from roseinfer.server.exchange import Ledgers
from roseinfer.server.ops.probes import judge_of
from roseinfer.server.service import Service
from roseinfer.text.answers.reasoning import find_reasoning_format
from roseinfer.text.templates import ChatTemplate
from roseinfer.text.text_model import TextModel
from roseinfer.text.tokenizer.tokenizer import Tokenizer

BOS, EOS, TOOL, HUGE = 256, 257, 258, 259
HUGE_TEXT = "#" * 50_000
VOCAB_SIZE = 300
TEMPLATE = (
    "{% for message in messages %}\n"
    "    {% if message.role == 'system' and not loop.first %}{{ raise_exception('system comes first') }}{% endif %}\n"
    "<{{ message.role }}>{{ message.content }}\n"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def ids(text: str) -> list[int]:
    return list(text.encode())


def bytes_alone() -> tokenizers.Tokenizer:
    """A vocabulary of the 256 bytes, whose ids are the bytes themselves, and of the two special tokens above them."""
    alphabet = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in alphabet]
    vocab = {chr(byte): byte for byte in alphabet} | {chr(0x100 + i): byte for i, byte in enumerate(others)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|bos|>", "<|eos|>"])
    return tokenizer


def byte_tokenizer(*, with_bos: bool = False) -> tokenizers.Tokenizer:
    tokenizer = bytes_alone()
    tokenizer.add_tokens(["<tool call>", HUGE_TEXT])
    if with_bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", BOS)])
    return tokenizer


def write_checkpoint(directory: Path, *, template: str | None = TEMPLATE, with_bos: bool = False) -> Path:
    byte_tokenizer(with_bos=with_bos).save(str(directory / "tokenizer.json"))
    config = {"bos_token": "<|bos|>", "eos_token": {"content": "<|eos|>"}} | (
        {"chat_template": template} if template else {}
    )
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def times(num_cached_tokens: int = 0) -> EngineTimes:
    return EngineTimes(inbox_ns=1, scheduled_ns=2, num_cached_tokens=num_cached_tokens, num_preemptions=0)


def engine_info(**changed: Any) -> EngineInfo:
    fields: dict[str, Any] = {
        "checkpoint_dir": "",
        "model_type": "scripted",
        "num_parameters": 0,
        "vocab_size": VOCAB_SIZE,
        "max_model_len": 128,
        "eos_token_ids": [EOS],
        "device": "cpu",
        "dtype": "float32",
        "attention": "none",
        "linear": "none",
        "num_threads": 1,
        "block_size": 16,
        "num_blocks": 64,
        "startup_s": {},
    }
    return EngineInfo(**(fields | changed))


Reply = Callable[[Request], Iterable[TokenOutput]]


def says(text: str, finish_reason: FinishReason = FinishReason.LENGTH, num_cached_tokens: int = 0) -> Reply:
    """One byte a step, and the finish reason with the last."""

    def reply(request: Request) -> Iterable[TokenOutput]:
        *most, last = ids(text)
        for token_id in most:
            yield TokenOutput(request.request_id, [token_id])
        yield TokenOutput(request.request_id, [last], None, finish_reason, None, times(num_cached_tokens))

    return reply


def logprobs_of(token_id: int, num_top: int) -> TokenLogprobs:
    """Descending from the token itself."""
    top = [(token_id + i) % 256 for i in range(num_top)]
    return TokenLogprobs(-0.5, 1, top, [-0.5 - i for i in range(num_top)])


class ScriptedEngine:
    """An engine that answers each request with `reply` or, without one, waits for `tell`."""

    def __init__(self, reply: Reply | None = None, info: EngineInfo | None = None) -> None:
        self.reply = reply
        self.engine_info = info or engine_info()
        self.requests: list[Request] = []
        self.are_streamed: list[bool] = []  # of each call of `generate`
        self.aborted: list[str] = []
        self.opened: list[RequestTimeline] = []
        self.closed: list[RequestTimeline] = []
        self.trouble: str | None = None
        self.stalled_since_ns = 0
        self.queue_estimate = QueueEstimate(64)
        self.started = asyncio.Event()  # until it is set, `start` waits
        self.start_error: Exception | None = None
        self.progress: list[StartupProgress] = []
        self.death: asyncio.Future[EngineError] = asyncio.get_running_loop().create_future()
        self.num_closes = 0
        self.profiles: list[tuple[int, str, asyncio.Future[ProfileEnded]]] = []
        self._arrival = asyncio.Event()
        self._mailboxes: dict[str, asyncio.Queue[list[TokenOutput] | RoseinferError]] = {}

    async def start(self, on_progress: Callable[[StartupProgress], None]) -> EngineInfo:
        for progress in self.progress:
            on_progress(progress)
        await self.started.wait()
        if self.start_error is not None:
            raise self.start_error
        return self.engine_info

    @property
    def account(self) -> Account:
        return Account(Activity.IDLE if self.trouble is None else Activity.STUCK, time.monotonic_ns())

    def give_up(self, reason: str) -> None:
        self.die(EngineDead(reason))

    @property
    def info(self) -> EngineInfo:
        if not self.started.is_set():
            raise NotReady("The engine is starting.")
        return self.engine_info

    async def wait_dead(self) -> EngineError:
        return await asyncio.shield(self.death)

    def die(self, error: EngineError) -> None:
        self.trouble = error.message
        self.death.set_result(error)
        for mailbox in self._mailboxes.values():
            mailbox.put_nowait(error)

    def open_timeline(self, timeline: RequestTimeline) -> None:
        assert timeline.request_id not in {t.request_id for t in self.opened if t not in self.closed}
        self.opened.append(timeline)

    def close_timeline(self, timeline: RequestTimeline) -> None:
        assert any(timeline is opened for opened in self.opened)
        assert not any(timeline is closed for closed in self.closed)
        self.closed.append(timeline)

    async def received(self, num_requests: int = 1) -> None:
        """Return once that number of requests is there."""
        while len(self.requests) < num_requests:
            self._arrival.clear()
            await self._arrival.wait()

    async def generate(
        self, requests: Sequence[Request], timelines: Sequence[RequestTimeline], *, is_streamed: bool = True
    ) -> AsyncGenerator[list[TokenOutput], None]:
        self.are_streamed.append(is_streamed)
        mailbox: asyncio.Queue[list[TokenOutput] | RoseinferError] = asyncio.Queue()
        for request, timeline in zip(requests, timelines, strict=True):
            assert request.request_id == timeline.request_id
            assert any(timeline is opened for opened in self.opened)
            self._mailboxes[request.request_id] = mailbox
            for output in self.reply(request) if self.reply else ():
                mailbox.put_nowait([output])
        self.requests += requests
        self._arrival.set()
        unfinished = {request.request_id for request in requests}
        try:
            while unfinished:
                outputs = await mailbox.get()
                if isinstance(outputs, RoseinferError):
                    raise outputs
                unfinished -= {output.request_id for output in outputs if output.finish_reason is not None}
                now_ns = time.monotonic_ns()
                by_id = {timeline.request_id: timeline for timeline in timelines}
                for output in outputs:
                    by_id[output.request_id].arrivals += [Arrival(now_ns, now_ns, now_ns)] * len(output.token_ids)
                yield outputs
        finally:
            for request_id in unfinished:
                self.abort(request_id)

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)
        self.tell(TokenOutput(request_id, [], None, FinishReason.ABORT, None, times()))

    def holds(self, request_id: str) -> bool:
        """What was aborted stays here for ever: its echo never arrives."""
        return request_id in self.aborted

    def tell(self, *outputs: TokenOutput) -> None:
        """Deliver outputs of one exchange as one step's."""
        self._mailboxes[outputs[0].request_id].put_nowait(list(outputs))

    def say(self, text: str, finish_reason: FinishReason | None = None, index: int = 0) -> None:
        """Deliver a text, in one step, to the request that came `index`-th."""
        end = times() if finish_reason is not None else None
        self.tell(TokenOutput(self.requests[index].request_id, ids(text), None, finish_reason, None, end))

    def fail(self, error: RoseinferError, index: int = 0) -> None:
        """Have the request that came `index`-th end with an error."""
        self._mailboxes[self.requests[index].request_id].put_nowait(error)

    def flood(self, index: int = 0) -> None:
        """Deliver 15 MB of text, more than the buffers of a connection hold, in 300 steps."""
        for _ in range(300):
            self.tell(TokenOutput(self.requests[index].request_id, [HUGE]))

    def profile(self, num_steps: int, directory: str) -> Awaitable[ProfileEnded]:
        if self.profiles and not self.profiles[-1][2].done():
            raise Conflict("One is running.")
        self.profiles.append((num_steps, directory, asyncio.get_running_loop().create_future()))
        return self.profiles[-1][2]

    async def close(self) -> None:
        self.num_closes += 1


class Listener(Observer):
    """An observer that remembers the states."""

    def __init__(self) -> None:
        self.states: list[LifecycleState] = []

    def on_lifecycle(self, state: LifecycleState) -> None:
        self.states.append(state)


class Page(NamedTuple):
    content: bytes = b"# the metrics\n"
    content_type: str = "text/plain; charset=utf-8"
    is_compressed: bool = False


async def pages(accept: str, *, is_load: bool, takes_gzip: bool) -> Page:
    return Page()


def ledgers_of(attribution: Attribution) -> Ledgers:
    """The ledgers of an attribution in this process."""

    async def ledgers(timelines: Sequence[RequestTimeline], until_ns: int) -> list[dict[str, object]]:
        return [attribution.ledger(timeline, until_ns) for timeline in timelines]

    return ledgers


INSTRUMENTS = Instruments(pages=pages, ledgers=ledgers_of(Attribution()))


def ops_app(service: Service, routes: Sequence[web.RouteDef] = ()) -> web.Application:
    """The operations port of a service in this process."""
    return build_ops_app(service, pages, judge_of(service), routes)


@dataclass
class Answer:
    """A whole HTTP answer."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    reason: str | None = None  # the phrase after the status

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"]
        assert error["code"]
        return error

    @property
    def events(self) -> list[Any]:
        """The stream's events: objects, and `[DONE]` as that string."""
        *frames, rest = self.body.decode().split("\n\n")
        assert rest == ""
        assert all(frame.startswith("data: ") and "\n" not in frame for frame in frames)
        payloads = (frame.removeprefix("data: ") for frame in frames)
        return [payload if payload == "[DONE]" else json.loads(payload) for payload in payloads]


@dataclass
class Server:
    """A running API port, and a client for it."""

    engine: ScriptedEngine
    service: Service
    url: str
    session: aiohttp.ClientSession
    runner: listener.Listener
    listener: Listener = field(default_factory=Listener)

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    async def request(self, method: str, path: str, **options: Any) -> Answer:
        async with self.session.request(method, self.url + path, **options) as response:
            return Answer(response.status, response.headers, await response.read(), response.reason)

    async def open(self, **body: Any) -> aiohttp.ClientResponse:
        """A streamed completion, once its headers are there; to be used as a context, read one write at a time."""
        return await self.session.post(self.url + "/v1/completions", json={"prompt": "Hi", "stream": True} | body)

    async def get(self, path: str, **options: Any) -> Answer:
        return await self.request("GET", path, **options)

    async def complete(self, headers: dict[str, str] | None = None, **body: Any) -> Answer:
        return await self.request("POST", "/v1/completions", json={"prompt": "Hi"} | body, headers=headers)

    async def chat(self, headers: dict[str, str] | None = None, **body: Any) -> Answer:
        messages = [{"role": "user", "content": "Hi"}]
        body = {"messages": messages} | body
        return await self.request("POST", "/v1/chat/completions", json=body, headers=headers)


def text_model(*, template: str | None = TEMPLATE, with_bos: bool = False) -> TextModel:
    inner = byte_tokenizer(with_bos=with_bos)
    tokenizer = Tokenizer.from_bytes(inner.to_str().encode())
    specials = {"bos_token": "<|bos|>", "eos_token": "<|eos|>"}
    return TextModel(
        tokenizer, ChatTemplate(template, specials) if template else None, find_reasoning_format("auto", template)
    )


@asynccontextmanager
async def answering(app: web.Application) -> AsyncIterator[tuple[str, listener.Listener]]:
    """An application on a free port of the loopback: its URL and its runner."""
    runner = build_runner(app, 0.5)
    try:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}", runner
    finally:
        await runner.cleanup()


@asynccontextmanager
async def serving(
    engine: ScriptedEngine,
    *,
    text: TextModel | None = None,
    is_ready: bool = True,
    keys: list[str] | None = None,
    observer: Observer | None = None,
    instruments: Instruments = INSTRUMENTS,
    head_timeout_s: float = connection.HEAD_TIMEOUT_S,
    least_connections: int = connection.LEAST_CONNECTIONS,
    **server: Any,
) -> AsyncIterator[Server]:
    """The API port over a scripted engine, on a free port of the loopback."""
    listener = Listener()
    config = Config(server=ServerConfig(**{"served_model_name": "scripted"} | server))
    api_keys = ApiKeys(parse_keys(keys, "")) if keys else None
    service = Service(config, engine, observer or listener, api_keys, instruments.ledgers)
    if is_ready:
        engine.started.set()
        service.open(text or text_model())
    with mock.patch.multiple(connection, HEAD_TIMEOUT_S=head_timeout_s, LEAST_CONNECTIONS=least_connections):
        runner = build_runner(build_app(service, instruments), 0.5)
        try:
            await runner.setup()
            with contextlib.closing(await runner.listen("127.0.0.1", 0, None)) as listening:
                url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
                async with aiohttp.ClientSession() as session:
                    yield Server(engine, service, url, session, runner, listener)
        finally:
            await runner.cleanup()
            service.close()
    assert len(engine.closed) == len(engine.opened), "every opened timeline is closed, exactly once"
