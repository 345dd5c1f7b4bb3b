"""One local Ray, and all that is tested on it. Arguments: the URL of a server of ours; the file for what was seen.

A process of its own, since Ray leaves threads and handlers of signals in the process that it was in.
"""

import http.client
import json
import os
import re
import signal
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.data.llm import HttpRequestProcessorConfig, build_processor

from roseinfer.bench.load.launcher import free_port
from roseinfer.config.options import Config, EngineConfig, RunnerConfig
from roseinfer.ray import answer_lines, build_app
from tests.e2e.processes import descendants, words_of

PATIENCE_S = 40.0
DISCONNECTS = r"^roseinfer_client_disconnects_total\{.*\} [1-9]"
ONE_THREAD = Config(runner=RunnerConfig(num_threads=1), engine=EngineConfig(transport="thread"))


@contextmanager
def local_ray() -> Iterator[None]:
    """Two processors, whatever there are, and nothing that another machine could reach."""
    ray.init("local", num_cpus=2, include_dashboard=False, logging_level="ERROR")
    ray.data.DataContext.get_current().enable_progress_bars = False
    try:
        yield
    finally:
        ray.shutdown()


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 6, "temperature": 0, **fields}


def answered_lines() -> list[dict[str, Any]]:
    """A dataset with a column of its own, answered by one engine; the last line is none."""
    lines = [
        json.dumps({"custom_id": str(i), "method": "POST", "url": "/v1/chat/completions", "body": chat()})
        for i in range(3)
    ]
    dataset = ray.data.from_items([{"line": line, "mine": i} for i, line in enumerate([*lines, "{"])])
    rows = answer_lines(dataset, ONE_THREAD).take_all()
    return [row | {"answer": json.loads(row["answer"])} for row in rows]


def through_ray_llm(url: str) -> list[str]:
    """The answers that `ray.data.llm` reads from a server over HTTP."""
    config = HttpRequestProcessorConfig(url=f"{url}/v1/chat/completions", concurrency=1, batch_size=4)
    processor = build_processor(
        config,
        preprocess=lambda row: {"payload": chat(seed=row["id"])},
        postprocess=lambda row: {"text": row["http_response"]["choices"][0]["message"]["content"]},
    )
    return [row["text"] for row in processor(ray.data.range(4)).take_all()]


class Client:
    """Asks the application over HTTP."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._url = f"http://127.0.0.1:{port}"

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self._url + path, timeout=PATIENCE_S) as answer:
            text: str = answer.read().decode()
            return text

    def encoding_of(self, path: str) -> str | None:
        """In what the answer is compressed to a client that says nothing of it."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=PATIENCE_S)
        connection.putrequest("GET", path, skip_accept_encoding=True)
        connection.endheaders()
        encoding = connection.getresponse().getheader("content-encoding")
        connection.close()
        return encoding

    def leave(self, path: str, body: dict[str, Any]) -> None:
        """Ask, and close the connection when the answer has begun."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=PATIENCE_S)
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        connection.getresponse().read(1)
        connection.close()

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, str], str]:
        request = urllib.request.Request(
            self._url + path, json.dumps(body).encode(), {"Content-Type": "application/json", "X-Request-ID": "mine"}
        )
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
                return answer.status, dict(answer.headers), answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, dict(error.headers), error.read().decode()


def served() -> dict[str, Any]:
    """An application of one place, with one replica, and with a second one when requests wait."""
    port = free_port()
    serve.start(http_options={"host": "127.0.0.1", "port": port}, proxy_location="HeadOnly")
    arguments = {
        "runner.num_threads": 1,
        "engine.transport": "thread",  # fewer processes, which start sooner
        "scheduler.max_num_seqs": 1,
        "target_wait_s": 0.05,
        "target_ongoing_requests": 1000,
        "max_replicas": "2",
        "upscale_delay_s": 0,
        "look_back_period_s": 1,
        "metrics_interval_s": 0.5,
    }
    serve.run(build_app(arguments), name="roseinfer", route_prefix="/llm")
    client = Client(port)
    streamed = client.post("/llm/v1/chat/completions", chat(stream=True))
    seen = {
        "models": json.loads(client.get("/llm/v1/models")),
        "encoding": client.encoding_of("/llm/metrics"),
        "whole": client.post("/llm/v1/chat/completions", chat()),
        "streamed": streamed,
        "refused": client.post("/llm/v1/chat/completions", chat(temprature=1)),
        "replicas": num_running(),
    }
    client.leave("/llm/v1/chat/completions", chat(max_tokens=900, ignore_eos=True, n=16, stream=True))
    seen["is_left_noticed"] = wait_until(lambda: bool(re.search(DISCONNECTS, client.get("/llm/metrics"), re.MULTILINE)))
    long = chat(max_tokens=400, ignore_eos=True)
    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(client.post, "/llm/v1/chat/completions", long) for _ in range(40)]
        seen["replicas_later"] = wait_until(lambda: num_running() == 2) and num_running()
        seen["under_load"] = [answer.result()[0] for answer in answers]
    servers = processes("roseinfer.ray.child")
    seen["num_servers"] = len(servers)
    for replica in processes("ray::ServeReplica:"):
        os.kill(replica, signal.SIGKILL)
    seen["are_servers_gone"] = wait_until(lambda: not any("roseinfer.ray.child" in words_of(pid) for pid in servers))
    serve.shutdown()
    return seen


def processes(word: str) -> list[int]:
    """The processes of this session in whose command a word begins so."""
    return [pid for pid in descendants(os.getpid()) if any(other.startswith(word) for other in words_of(pid))]


def num_running() -> int:
    [deployment] = serve.status().applications["roseinfer"].deployments.values()
    return int(deployment.replica_states.get("RUNNING", 0))


def wait_until(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def main() -> None:
    seen: dict[str, Any] = {}
    with local_ray():
        for name, look in (
            ("lines", answered_lines),
            ("llm", lambda: through_ray_llm(sys.argv[1])),
            ("served", served),
        ):
            began_s = time.monotonic()
            seen[name] = look()
            print(f"{name}: {time.monotonic() - began_s:.1f} s", file=sys.stderr, flush=True)
    Path(sys.argv[2]).write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
