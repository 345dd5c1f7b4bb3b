"""Two replicas behind nginx are restarted in turn while clients stream: no client loses a stream or a token."""

import asyncio
import contextlib
import json
import subprocess
import time
import urllib.error
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import aiohttp
import pytest

from roseinfer.bench.load.launcher import START_TIMEOUT_S, free_port
from tests.conftest import require_tool
from tests.e2e.server import Server, running
from tests.repo.tree import ROOT

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

NUM_CLIENTS = 6
NUM_TOKENS = 96
PROMPTS = [f"Number {index} says: once upon a time" for index in range(NUM_CLIENTS)]


class Answer(NamedTuple):
    """What a client saw of one stream."""

    prompt: str
    status: int
    text: str
    num_tokens: int
    is_whole: bool  # it ended with [DONE]


@contextlib.contextmanager
def proxy(directory: Path, ports: list[int]) -> Iterator[str]:
    """The committed configuration with our addresses in it; yields the proxy's URL."""
    port = free_port()
    text = (ROOT / "deploy" / "nginx" / "nginx.conf").read_text()
    ours = {"listen 8080;": f"listen 127.0.0.1:{port};"}
    ours |= {f"replica-{number}:8000": f"127.0.0.1:{replica}" for number, replica in enumerate(ports, 1)}
    for theirs, wanted in ours.items():
        assert text.count(theirs) == 1, theirs
        text = text.replace(theirs, wanted)
    (directory / "nginx.conf").write_text(text)
    command = [require_tool("nginx"), "-p", str(directory), "-c", str(directory / "nginx.conf")]
    with (directory / "access.log").open("wb") as log, (directory / "error.log").open("wb") as errors:
        process = subprocess.Popen(command, stdout=log, stderr=errors)
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not (directory / "nginx.pid").exists():  # written when it listens
            assert process.poll() is None, (directory / "error.log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(timeout=10)


async def stream(session: aiohttp.ClientSession, url: str, prompt: str) -> Answer:
    body = {"prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}
    async with session.post(f"{url}/v1/completions", json={**body, "stream_options": {"include_usage": True}}) as reply:
        events = [line.removeprefix("data: ") for line in (await reply.text()).splitlines() if line]
        if reply.status != 200 or events[-1:] != ["[DONE]"]:
            return Answer(prompt, reply.status, "\n".join(events), 0, is_whole=False)
        chunks = [json.loads(event) for event in events[:-1]]
        text = "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
        return Answer(prompt, reply.status, text, chunks[-1]["usage"]["completion_tokens"], is_whole=True)


@asynccontextmanager
async def load(url: str) -> AsyncIterator[list[Answer]]:
    """Clients that each stream one answer after the other until the block ends; yields what they have seen so far."""
    answers: list[Answer] = []
    is_over = asyncio.Event()

    async def client(prompt: str) -> None:
        while not is_over.is_set():
            answers.append(await stream(session, url, prompt))

    async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as clients:
        for prompt in PROMPTS:
            clients.create_task(client(prompt))
        yield answers
        is_over.set()


def wait_until_streaming(replica: Server) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not num_streams(replica):
        assert time.monotonic() < deadline, replica.log()
        time.sleep(0.01)


def num_streams(replica: Server) -> float:
    """Under way; none while metrics, which come later than the answers, say 503."""
    try:
        return replica.metrics()["roseinfer_http_inflight_streams"]
    except urllib.error.HTTPError as error:
        if error.code != 503:
            raise
        error.close()
        return 0.0


def restart(replica: Server, again: contextlib.AbstractContextManager[Server], stack: contextlib.ExitStack) -> Server:
    """Stop it while it streams, and return when it is ready again, as a cluster does before it goes on to the next."""
    wait_until_streaming(replica)
    assert replica.stop() == 0, replica.log()
    return stack.enter_context(again)


def test_a_rolling_restart_loses_no_stream_and_no_token(tmp_path: Path) -> None:
    arguments = ["--server.drain-timeout-s", "60", "--scheduler.max-num-seqs", "8"]

    async def scenario(url: str, replicas: list[Server], stack: contextlib.ExitStack) -> list[Answer]:
        async with load(url) as answers:
            for replica in replicas:
                again = running(replica.log_path, *arguments, port=replica.port)
                last = await asyncio.to_thread(restart, replica, again, stack)
            await asyncio.to_thread(wait_until_streaming, last)
        return answers

    with contextlib.ExitStack() as stack:
        replicas = [stack.enter_context(running(tmp_path / f"log-{number}", *arguments)) for number in (1, 2)]
        url = stack.enter_context(proxy(tmp_path, [replica.port for replica in replicas]))
        answers = asyncio.run(scenario(url, replicas, stack))
        expected = {prompt: asyncio.run(one_answer(url, prompt)) for prompt in PROMPTS}

    assert [answer for answer in answers if answer != expected[answer.prompt]] == []
    assert all(answer.is_whole and answer.num_tokens == NUM_TOKENS for answer in expected.values())
    assert len(answers) >= NUM_CLIENTS
    told = [json.loads(line) for line in (tmp_path / "access.log").read_text().splitlines()]
    asked_again = [line for line in told if "," in line["replica"]]
    assert asked_again, "no request met a replica that was away: the test has shown nothing"
    assert {line["status"] for line in told} == {"200"}


async def one_answer(url: str, prompt: str) -> Answer:
    async with aiohttp.ClientSession() as session:
        return await stream(session, url, prompt)
