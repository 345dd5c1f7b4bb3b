"""No request harms an idle server: every field of every body at its extremes, alone and in pairs, and changed bytes.

Each answer is a 200, or a 4xx in the shape of its API; what comes next is served as ever. `VALUES_OF_PAIRS=4` tries
every two fields together, four times, each with an extreme that is accepted alone, instead of a sample: twenty minutes.
Changed bytes meet a server without a model: most of them are refused before one.
"""

import asyncio
import http.client
import itertools
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial
from random import Random
from typing import Any

import pytest

from roseinfer.errors import InvalidRequest
from roseinfer.server.api.parsing import parse_body
from roseinfer.server.openapi import OPERATIONS
from tests.conftest import requires_all
from tests.e2e.server import running
from tests.fuzz.extremes import Extremes
from tests.fuzz.mutations import corpus, mutated, mutated_objects
from tests.integration.live_server import live
from tests.unit.engine.harness import make_engine
from tests.unit.server.harness import VOCAB_SIZE

VALUES_OF_PAIRS = int(os.environ.get("VALUES_OF_PAIRS", "0"))  # to try of every two fields; 0: a sample of all
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(7200 if VALUES_OF_PAIRS else 600)]

NUM_PAIRS = 40
NUM_MUTATIONS = 2000 if requires_all() else 200
GROUP = 16  # requests between two looks at whether the next is served as ever
PLAIN = {"prompt": "import os", "max_tokens": 6, "temperature": 0}

LEAST: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Hi", "max_tokens": 3},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3},
    "/v1/completions/render": {"prompt": "Hi"},
    "/v1/chat/completions/render": {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 3},
    "/v1/responses/input_tokens": {"input": "Hi"},
    "/v1/embeddings": {"input": "Hi"},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "Hi"}]},
    "/tokenize": {"prompt": "Hi"},
    "/detokenize": {"tokens": [5]},
}

OWN_BODIES = [path for path in LEAST if not path.endswith("/render")]  # which take those of two others

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CONVERSATION = {"messages": [{"role": "user", "content": "Hi"}]}
# What a field needs beside it, or instead of something, to be of use.
NEEDS: dict[str, dict[str, Any]] = {
    "stream_options": {"stream": True},
    "top_logprobs": {"logprobs": True},
    "tool_choice": {"tools": [TOOL]},
    "max_completion_tokens": {"max_tokens": None},
    "add_generation_prompt": CONVERSATION | {"prompt": None},
    "chat_template_kwargs": CONVERSATION | {"prompt": None},
}
NEEDS_OF_MESSAGES: dict[str, dict[str, Any]] = {"tool_choice": {"tools": [{"name": "f"}]}}
NEEDS_OF_RESPONSES: dict[str, dict[str, Any]] = {
    "tool_choice": {"tools": [{"type": "function", "name": "f"}]},
    "stream_options": {"stream": True},
}


def is_error(path: str, answer: Any) -> bool:
    """Whether it has the shape of its API, and names a field unless the body is no JSON object."""
    error = answer["error"]
    is_unread = error["message"].startswith(("The body is", "The body must be"))
    if path.startswith("/v1/messages"):
        return set(answer) == {"type", "error", "request_id"} and ("`" in error["message"] or is_unread)
    return set(error) == {"message", "type", "param", "code"} and (error["param"] is not None or is_unread)


class Target:
    """A server that must bear whatever comes, and one connection to it."""

    def __init__(self, port: int) -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        self._alone: dict[str, list[dict[str, Any]]] = {}
        self._text = self._plain_text()
        self.connection.request("GET", "/openapi.json")
        document = json.loads(self.connection.getresponse().read())
        self.extremes = Extremes(document["components"]["schemas"])
        self.bodies: dict[str, dict[str, Any]] = {
            path: operation["post"]["requestBody"]["content"]["application/json"]["schema"]
            for path, operation in document["paths"].items()
            if "requestBody" in operation.get("post", {})
        }

    def post(self, path: str, body: bytes) -> tuple[int, bytes]:
        self.connection.request("POST", path, body, {"Content-Type": "application/json"})
        response = self.connection.getresponse()
        return response.status, response.read()

    def _plain_text(self) -> str:
        status, content = self.post("/v1/completions", json.dumps(PLAIN).encode())
        assert status == 200, content
        text: str = json.loads(content)["choices"][0]["text"]
        return text

    def accepted(self, path: str, bodies: Iterable[bytes]) -> Iterator[bytes]:
        """Send all, and yield those that were answered with 200. Raises where one does harm."""
        last = list[bytes]()
        for body in bodies:
            last.append(body)
            status, content = self.post(path, body)
            assert self._is_well(path, body, status, content), (path, body[:2000], status, content[:500])
            if status == 200:
                yield body
            if len(last) == GROUP:
                self._check_plain(path, last)
                last.clear()
        self._check_plain(path, last)

    def alone(self, path: str) -> list[dict[str, Any]]:
        """What each body with one extreme that is accepted adds to the least."""
        if path not in self._alone:
            by_body = self.with_one(path)
            self._alone[path] = [by_body[body] for body in self.accepted(path, by_body)]
        return self._alone[path]

    def with_one(self, path: str) -> dict[bytes, dict[str, Any]]:
        """By each body with one extreme, what it adds to the least."""
        fields = self.extremes.of_fields(self.bodies[path])
        adds = [needs_of(path, name, fields) | {name: value} for name in fields for value in fields[name]]
        return {as_json(LEAST[path] | added): added for added in adds}

    def _check_plain(self, path: str, last: list[bytes]) -> None:
        assert self._plain_text() == self._text, f"after one of these at {path}: {[body[:500] for body in last]}"

    def _is_well(self, path: str, body: bytes, status: int, content: bytes) -> bool:
        has_deadline = b"timeout_s" in body  # one of no time at all passes, and that is a 503, a 504 or a stream's end
        if status == 200:
            return has_deadline or b'"error":{' not in content
        if status in {503, 504}:
            return has_deadline
        return 400 <= status < 500 and is_error(path, json.loads(content))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    with running(tmp_path_factory.mktemp("extremes") / "log", "--model.max-model-len", "128") as server:
        target = Target(server.port)
        yield target
        target.connection.close()
        assert server.process.poll() is None
        assert "Traceback" not in server.log()


def as_json(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields).encode()


def needs_of(path: str, name: str, fields: dict[str, list[Any]]) -> dict[str, Any]:
    if path.startswith("/v1/completions"):  # what only the other endpoints serve is null here
        return NEEDS[name] if name == "stream_options" else {}
    if name == "messages" and "prompt" in fields:
        return {"prompt": None}
    if path.startswith("/v1/messages"):
        return NEEDS_OF_MESSAGES.get(name, {})
    if path.startswith("/v1/responses"):
        return NEEDS_OF_RESPONSES.get(name, {})
    return {key: value for key, value in NEEDS.get(name, {}).items() if key in fields}


def test_every_body_is_tried(target: Target) -> None:
    assert target.bodies.keys() == LEAST.keys()


@pytest.mark.parametrize("path", OWN_BODIES)
def test_every_field_at_its_extremes(target: Target, path: str) -> None:
    """What is refused is in the shape of its API; of each field something is accepted."""
    served = {name for added in target.alone(path) for name in added}
    assert served == target.extremes.of_fields(target.bodies[path]).keys()


@pytest.mark.parametrize("path", LEAST)
def test_pairs_of_extremes(target: Target, path: str) -> None:
    by_field: dict[str, list[dict[str, Any]]] = {}
    for added in target.alone(path):
        by_field.setdefault(list(added)[-1], []).append(added)  # after what it needs
    random = Random(1)
    fields = list(itertools.combinations(by_field.values(), 2))
    weights = [len(one) * len(two) for one, two in fields]
    tried = fields * VALUES_OF_PAIRS or random.choices(fields, weights, k=NUM_PAIRS)
    bodies = (as_json(LEAST[path] | random.choice(one) | random.choice(two)) for one, two in tried)
    assert sum(1 for _ in target.accepted(path, bodies))


async def test_changed_bytes() -> None:
    async with live(partial(make_engine, vocab_size=VOCAB_SIZE)) as server:
        await asyncio.to_thread(send_changed_bytes, int(server.url.rpartition(":")[2]))


def send_changed_bytes(port: int) -> None:
    target = Target(port)
    for operation in OPERATIONS:
        if operation.body is None:
            continue
        path, valid = operation.path, list[dict[str, Any]]()
        for body in target.with_one(path):
            with suppress(InvalidRequest):
                parse_body(body, operation.body)
                valid.append(json.loads(body))
        kept = [content for _, content in corpus("body")] if path.startswith("/v1/") else []
        changed = (
            *mutated([*kept, *map(as_json, valid)], NUM_MUTATIONS // 2, seed=1),
            *mutated_objects(valid, NUM_MUTATIONS // 2, seed=1),
        )
        assert sum(1 for _ in target.accepted(path, changed)), path
    target.connection.close()
