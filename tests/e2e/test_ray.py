"""Ray: a batch on two actors that are harmed, a dataset, Ray's own client, and an application that grows."""

import importlib.util
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from roseinfer.cli.main import EXIT_USAGE, main
from roseinfer.errors import ConfigError
from tests.conftest import go_without
from tests.e2e.processes import descendants, words_of
from tests.e2e.server import Server
from tests.integration.test_batch import FLAGS, Answers, chat, read, request, without_times, write
from tests.repo.tree import ROOT

TIMEOUT_S = 110

pytestmark = [pytest.mark.e2e, pytest.mark.filterwarnings("ignore")]  # those of Ray's modules


@pytest.fixture(autouse=True, scope="module")
def ray_is_installed() -> Iterator[None]:
    """Takes back what an import of Ray changes for the whole process: what makes log records."""
    factory = logging.getLogRecordFactory()
    if importlib.util.find_spec("ray") is None:
        go_without("ray is not installed; `make .venv/.ray` does it")
    yield
    logging.setLogRecordFactory(factory)


def environment() -> dict[str, str]:
    """Nothing is reported to Ray's makers, measures are frequent, and actors are no nicer than other tests."""
    frequent = "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S"
    return os.environ | {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0", frequent: "0.5"}


def actors_of(pid: int) -> list[int]:
    """The processes of Ray's that hold engines for this one."""
    return [child for child in descendants(pid) if words_of(child)[0].startswith("ray::MapWorker")]


def engines_of(actor: int) -> list[int]:
    """The process of its engine, once there is one."""
    return [child for child in descendants(actor) if words_of(child)[-3:-1] == ["engine", "--fd"]]


LOOPBACK = {"0100007F", 24 * "0" + "01000000", 16 * "0" + "FFFF00000100007F"}  # of IPv4, IPv6, and the one in the other


def listened_at(pids: Sequence[int]) -> set[str]:
    """The addresses at which these processes listen, as the kernel writes them."""
    sockets = set()
    for pid in pids:
        with suppress(OSError):  # it has ended
            sockets |= {os.readlink(file) for file in Path(f"/proc/{pid}/fd").iterdir()}
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return {row[1].partition(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in sockets}


def test_a_batch_on_two_actors_is_that_of_one_engine_although_both_lose_theirs(tmp_path: Path) -> None:
    given = [
        *(chat(str(i), f"Count to {i}", max_completion_tokens=24, temperature=i % 2) for i in range(200)),
        request("words", "embeddings", input=["x", "y z"], dimensions=8),
        chat("streamed", "x", stream=True),
        chat("0", "its name again"),
    ]
    source, output = write(tmp_path / "in.jsonl", given), tmp_path / "ray.jsonl"
    few = ("--runner.num-threads", "1", "--max-num-seqs", "4")
    command = [sys.executable, "-m", "roseinfer", "batch", "--input", str(source), "--output", str(output), *few]
    journal, actors, engines = tmp_path / "ray.jsonl.partial", list[int](), list[int]()
    with subprocess.Popen([*command, "--ray-engines", "2"], env=environment(), stdout=subprocess.PIPE) as process:
        try:
            deadline = time.monotonic() + TIMEOUT_S
            while len(actors) < 2 or not engines or journal.read_bytes().count(b"\n") < 3:
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.05)
                actors = actors_of(process.pid)
                engines = engines_of(actors[0]) if actors else []
            assert listened_at([process.pid, *descendants(process.pid)]) <= LOOPBACK
            os.kill(engines[0], signal.SIGKILL)
            os.kill(actors[1], signal.SIGKILL)
            said = process.communicate(timeout=TIMEOUT_S)[0].decode()
        finally:
            process.terminate()  # which it heeds by ending Ray
    assert process.returncode == 0
    assert "lines: 203 answered, 2 with errors" in said
    assert "time to first token" in said
    alone = tmp_path / "alone.jsonl"
    assert main(["batch", "--input", str(source), "--output", str(alone), *FLAGS, *few]) == 0
    for one, two in ((alone, output), (tmp_path / "alone.errors.jsonl", tmp_path / "ray.errors.jsonl")):
        assert comparable(read(two)) == comparable(read(one))


def comparable(answers: Answers) -> Answers:
    return [answer if answer["response"] is None else without_times([answer])[0] for answer in answers]


@pytest.fixture(scope="module")
def seen(ray_is_installed: None, server: Server, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the session saw, beside a server of ours outside of Ray."""
    out = tmp_path_factory.mktemp("ray") / "seen.json"
    command = [sys.executable, "-m", "tests.e2e.ray_session", server.url, str(out)]
    loopback = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}  # Ray's switch for listening at nothing else
    with subprocess.Popen(command, cwd=ROOT, env=environment() | loopback) as session:
        try:
            assert session.wait(TIMEOUT_S) == 0
        finally:
            session.terminate()  # which it heeds by ending Ray
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def test_the_lines_of_a_dataset_are_answered_in_columns_beside_its_own(seen: dict[str, Any]) -> None:
    rows = sorted(seen["lines"], key=lambda row: int(row["mine"]))
    assert [row["is_error"] for row in rows] == [False, False, False, True]
    assert [row["answer"]["custom_id"] for row in rows] == ["0", "1", "2", None]
    assert rows[0]["answer"]["response"]["body"]["usage"]["completion_tokens"] == 6


def test_ray_data_llm_asks_a_server_of_ours(seen: dict[str, Any], server: Server) -> None:
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 6, "temperature": 0}
    status, answer = server.post("/v1/chat/completions", body)
    assert status == 200
    assert seen["llm"] == [answer["choices"][0]["message"]["content"]] * 4


def test_an_application_answers_as_the_server_does(seen: dict[str, Any]) -> None:
    app = seen["served"]
    assert app["models"]["data"][0]["id"] == "roseinfer-demo"
    assert app["encoding"] is None, "nothing is asked for in a client's name"
    status, headers, body = app["whole"]
    whole = json.loads(body)
    assert (status, headers["x-request-id"]) == (200, "mine")
    status, headers, body = app["streamed"]
    assert (status, headers["content-type"].partition(";")[0]) == (200, "text/event-stream")
    events = [line.removeprefix("data: ") for line in body.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    text = "".join(json.loads(event)["choices"][0]["delta"].get("content") or "" for event in events[:-1])
    assert text == whole["choices"][0]["message"]["content"]
    status, _, body = app["refused"]
    assert (status, json.loads(body)["error"]["param"]) == (400, "temprature")


def test_a_client_that_leaves_and_a_replica_that_is_killed_leave_nothing_at_work(seen: dict[str, Any]) -> None:
    assert seen["served"]["is_left_noticed"]
    assert seen["served"]["num_servers"] == 2
    assert seen["served"]["are_servers_gone"]


def test_an_application_grows_when_requests_are_predicted_to_wait(seen: dict[str, Any]) -> None:
    assert seen["served"]["replicas"] == 1
    assert seen["served"]["replicas_later"] == 2
    assert set(seen["served"]["under_load"]) == {200}


def test_replicas_follow_the_wait_above_its_target_and_requests_below() -> None:
    from roseinfer.ray.serve import WaitPolicy

    def replicas(num_requests: float, *waits_s: float) -> float:
        context: Any = SimpleNamespace(
            current_num_replicas=2,
            total_num_requests=num_requests,
            aggregated_metrics={"predicted_wait_s": dict(enumerate(waits_s))} if waits_s else {},
            config=SimpleNamespace(get_target_ongoing_requests=lambda: 10.0),
        )
        return WaitPolicy(target_wait_s=2.0)(context)[0]

    assert replicas(20) == 2, "nothing is measured yet"
    assert replicas(5, 0.0, 0.0) == 0.5, "Ray rounds up"
    assert replicas(20, 1.0, 2.0) == 2
    assert replicas(20, 2.0, 4.0) == 3
    assert replicas(90, 2.0, 4.0) == 9


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"model.pth": "x"}, "model.pth: names no option; did you mean model.path?"),
        ({"runner.num_threads": 0}, "runner.num_threads"),
        ({"max_replica": 3}, "max_replica: is no field of Ray's AutoscalingConfig; did you mean max_replicas?"),
        ({"max_replicas": "many"}, "max_replicas"),
        ({"min_replicas": 3, "max_replicas": 2}, "max_replicas"),
        ({"target_wait_s": 0}, "target_wait_s: expected seconds above 0, got 0"),
        ({"server.tls_cert_file": "c", "server.tls_key_file": "k"}, "server.tls_cert_file"),
    ],
)
def test_an_argument_that_is_wrong_is_named(arguments: dict[str, Any], words: str) -> None:
    from roseinfer.ray import build_app

    with pytest.raises(ConfigError) as caught:
        build_app(arguments)
    assert words in str(caught.value)


def test_a_cluster_that_does_not_answer_is_not_replaced_by_one_of_this_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    addresses = []

    def init(address: str, **_: Any) -> None:
        addresses.append(address)
        raise ConnectionError("Failed to connect to Ray cluster at 192.0.2.1:6379")

    monkeypatch.setattr(ray, "init", init)
    source = write(tmp_path / "in.jsonl", [chat("a", "x")])
    command = ["batch", "--input", str(source), "--output", str(tmp_path / "out"), *FLAGS, "--ray-engines", "1"]
    assert main(command) == EXIT_USAGE
    assert "RAY_ADDRESS: Failed to connect to Ray cluster at 192.0.2.1:6379" in capsys.readouterr().err
    assert addresses == ["auto"]
