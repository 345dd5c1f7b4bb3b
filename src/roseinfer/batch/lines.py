"""Answers single lines of a batch file, each as the server would answer the request in it.

The form of the lines, in and out, is that of the Batch API of OpenAI: a line names a request
with `custom_id`, and its `url` chooses the endpoint. An answer depends on its line alone, also where it is sampled: a
line without a seed gets one made of its bytes.
"""

import asyncio
import hashlib
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from roseinfer import wiring
from roseinfer.config.options import Config
from roseinfer.engine.link.watch import wait_for_death
from roseinfer.errors import EngineError, InvalidRequest, RequestTimeout, RoseinferError
from roseinfer.messages import Request, StartupProgress
from roseinfer.records import Api, FinishReason, Observer, RequestTimeline
from roseinfer.runtime.validation import Misfit, convert
from roseinfer.server.api.errors import error_body
from roseinfer.server.api.fields import EngineBody, SamplingBody
from roseinfer.server.api.parsing import check_model, parse_body
from roseinfer.server.api.respond import Dialect, Head, Job, generation_request
from roseinfer.server.openai import chat, completions, embeddings, responses
from roseinfer.server.openai.chat_schema import ChatBody
from roseinfer.server.openai.responses_schema import ResponseBody
from roseinfer.server.openai.schema import CompletionBody
from roseinfer.text.generation import NUM_SEEDS, Generation, GenerationRequest
from roseinfer.text.grammar.checker import MAX_WAITING, GrammarChecker
from roseinfer.text.served_model import ServedModel
from roseinfer.text.text_model import TextModel

Prepare = Callable[[Any, ServedModel], Awaitable[tuple[Job, Dialect]]]

GENERATING: Mapping[str, tuple[Api, type[SamplingBody], Prepare]] = {
    "/v1/chat/completions": (Api.CHAT, ChatBody, chat.prepare),
    "/v1/completions": (Api.COMPLETIONS, CompletionBody, completions.prepare),
    "/v1/responses": (Api.RESPONSES, ResponseBody, responses.prepare),
}
EMBEDDINGS = "/v1/embeddings"
MAX_PREPARING = MAX_WAITING // 2  # lines whose text is encoded and whose grammar is checked at a time


class Line(msgspec.Struct, frozen=True):
    """A request of a batch. Fields that OpenAI may add are ignored."""

    custom_id: Annotated[str, Meta(min_length=1)]
    method: Literal["POST"]
    url: Literal["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"]
    body: msgspec.Raw


class Response(msgspec.Struct, frozen=True):
    """What the server would have answered over HTTP."""

    status_code: int
    request_id: str
    body: msgspec.Raw


class LineError(msgspec.Struct, frozen=True):
    """Why a line is no request."""

    code: str
    message: str


class AnsweredLine(msgspec.Struct, frozen=True):
    """A line of the output. One of `response` and `error` is null."""

    id: str
    custom_id: str | None
    response: Response | None
    error: LineError | None


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to one line, encoded as a line without its end, and the timelines of its sequences."""

    line: bytes
    is_error: bool
    timelines: Sequence[RequestTimeline] = ()


def digest_of(raw: bytes) -> str:
    """Names a line by its bytes: 24 hexadecimal digits."""
    return hashlib.sha256(raw).hexdigest()[:24]


def parse_line(raw: bytes) -> Line:
    """Raises InvalidRequest that names the field."""
    try:
        return msgspec.json.decode(raw, type=Line)
    except RecursionError:
        raise InvalidRequest("The line is nested too deeply.") from None
    except ValueError:
        pass
    try:
        given = msgspec.json.decode(raw, type=dict[str, Any])
        if "body" in given:
            given["body"] = msgspec.Raw(msgspec.json.encode(given["body"]))
        return convert(given, Line)
    except Misfit as misfit:
        raise InvalidRequest(misfit.sentence(), param=misfit.where) from None
    except ValueError as error:
        raise InvalidRequest(f"The line is no JSON object: {error}.") from None


def refuse(raw: bytes, error: RoseinferError, custom_id: str | None = None) -> Answer:
    """The answer to a line that is no request."""
    refused = AnsweredLine(f"batch_req_{digest_of(raw)}", custom_id, None, LineError(error.public_code, error.message))
    return Answer(msgspec.json.encode(refused), is_error=True)


class LineEngine:
    """An engine that answers lines, many at a time; everything runs on one event loop."""

    def __init__(self, config: Config, on_progress: Callable[[StartupProgress], None] = lambda _: None) -> None:
        self._config = config
        self._client = wiring.build_client(config, Observer())
        self._on_progress = on_progress
        self._preparing = asyncio.Semaphore(MAX_PREPARING)
        self._num_answered = 0
        self._opened = ExitStack()
        self._watch: asyncio.Task[EngineError] | None = None

    async def start(self) -> None:
        """Start the engine. Raises ConfigError or EngineError."""
        config, client = self._config, self._client
        try:
            info = await client.start(self._on_progress)
            self._watch = asyncio.create_task(wait_for_death(client, client.observer))  # it ends one that hangs
            checker = self._opened.enter_context(closing(GrammarChecker(config.structured, lambda: client.info)))
            text_model = TextModel.loader(config)(Path(info.checkpoint_dir))
            self._served = ServedModel(config, client, checker)
            self._opened.callback(self._served.close)
            self._served.open(text_model)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Stop the engine. Idempotent."""
        if self._watch is not None:
            self._watch.cancel()
        self._opened.close()
        await self._client.close()

    async def answer(self, raw: bytes) -> Answer:
        """Answer one line. What is wrong with it is in the answer. Raises EngineError when the engine has died."""
        try:
            line = parse_line(raw)
        except InvalidRequest as error:
            return refuse(raw, error, custom_id_of(raw))
        digest = digest_of(raw)
        timelines: list[RequestTimeline] = []
        status, is_error = 200, False
        try:
            body = await self._reply(line, digest, timelines)
        except RoseinferError as error:
            if isinstance(error, EngineError) and self._client.trouble is not None:
                raise
            body, status, is_error = error_body(error), error.status, True
        response = Response(status, f"req_{digest}", msgspec.Raw(body))
        answered = AnsweredLine(f"batch_req_{digest}", line.custom_id, response, None)
        return Answer(msgspec.json.encode(answered), is_error, timelines)

    async def _reply(self, line: Line, digest: str, timelines: list[RequestTimeline]) -> bytes:
        """The body of an answer. Adds the timelines of its sequences. Raises RequestError or EngineError."""
        served, raw = self._served, bytes(line.body)
        if line.url == EMBEDDINGS:
            wanted_vectors = parse_body(raw, embeddings.EmbeddingsBody)
            check_model(wanted_vectors, served)
            async with self._preparing:
                wanted = await embeddings.prepare(wanted_vectors, served)
            generation = await self._run(wanted, wanted_vectors, Api.EMBEDDINGS, timelines)
            return msgspec.json.encode(await embeddings.reply(wanted_vectors, generation, served, None))
        api, body_type, prepare = GENERATING[line.url]
        body = parse_body(raw, body_type)
        check_model(body, served)
        if body.stream:
            raise InvalidRequest("`stream`: the answers of a batch are whole.", param="stream")
        if body.seed is None:
            body = msgspec.structs.replace(body, seed=int(digest, 16) % NUM_SEEDS)
        async with self._preparing:
            job, dialect = await prepare(body, served)
        wanted = generation_request(job, dialect, served)
        head = Head(f"{dialect.id_prefix}{digest}", int(time.time()), body.model or served.model_names[0])
        generation = await self._run(wanted, body, api, timelines, lambda begun: dialect.begin(head, begun))
        deltas = [choice.pop_delta() for choice in generation.best_choices()]
        return msgspec.json.encode(await dialect.reply(deltas, None))

    async def _run(
        self,
        wanted: GenerationRequest,
        body: EngineBody,
        api: Api,
        timelines: list[RequestTimeline],
        begin: Callable[[Generation], None] = lambda _: None,
    ) -> Generation:
        """Run the sequences of one line to their ends, with a timeline for each."""
        now_ns = time.monotonic_ns()
        wanted = replace(  # by what the body asks for; the server's own deadlines are for clients that wait
            wanted,
            deadline_ns=None if body.timeout_s is None else now_ns + int(body.timeout_s * 1e9),
            queue_deadline_ns=None if body.queue_timeout_s is None else now_ns + int(body.queue_timeout_s * 1e9),
        )
        self._num_answered += 1
        requests = wanted.build_requests(self._client.info, f"line-{self._num_answered}/{{}}".format)
        timelines += [_timeline(request, api, now_ns) for request in requests]
        for timeline in timelines:
            self._client.open_timeline(timeline)
        try:
            generation = Generation(wanted, requests, timelines, self._client, self._served.text_model.tokenizer)
            begin(generation)
            await generation.run()
        except RoseinferError as error:
            reason = FinishReason.TIMEOUT if isinstance(error, RequestTimeout) else FinishReason.ERROR
            for timeline in timelines:
                timeline.finish_reason, timeline.error_code = timeline.finish_reason or reason, error.public_code
            raise
        finally:
            for timeline in timelines:
                timeline.end_ns = time.monotonic_ns()
                timeline.finish_reason = timeline.finish_reason or FinishReason.ABORT
                self._client.close_timeline(timeline)
        return generation


def _timeline(request: Request, api: Api, begun_ns: int) -> RequestTimeline:
    """Opens where the line's text is tokens: what came before is not latency of the engine."""
    return RequestTimeline(
        request_id=request.request_id, recv_ns=begun_ns, parsed_ns=begun_ns, tokenized_ns=begun_ns, api=api
    )


def custom_id_of(raw: bytes) -> str | None:
    """The name of a line, also of one that is no request; None where it has none."""
    try:
        found = msgspec.json.decode(raw, type=dict[str, Any]).get("custom_id")
    except ValueError:
        found = _named_loosely(raw)
    except RecursionError:
        return None
    return found if isinstance(found, str) else None


def _named_loosely(raw: bytes) -> Any:
    """The name in a line that Python's reader takes and msgspec does not, such as one with NaN or half a character."""
    try:
        line = json.loads(raw)
        name = line.get("custom_id") if isinstance(line, dict) else None
        json.dumps(name, ensure_ascii=False).encode()  # half a character cannot be written
    except (ValueError, RecursionError):
        return None
    return name
