"""Planned requests into the bodies that are sent, and a server's recording into a file."""

import io
import json
import re
from argparse import Namespace
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from roseinfer.bench.definitions import Observed
from roseinfer.bench.load import serve
from roseinfer.bench.load.client import PreparedRequest
from roseinfer.bench.load.endpoint import GET_TIMEOUT_S, Endpoint, read_models
from roseinfer.bench.load.plan import PlannedRequest, Segment
from roseinfer.bench.load.serve import fetch_recording, prepare
from roseinfer.cli import main as cli
from roseinfer.errors import ConfigError, InvalidRequest
from tests.unit.bench.recordings import make_recording
from tests.unit.explain.operations_port import open_port

ENDPOINT = Endpoint("http://127.0.0.1:8000", "", "tiny", max_model_len=64, vocab_size=100, takes_salt=True)


def prepared(stream_interval: int | None = None, **changes: Any) -> tuple[PreparedRequest, dict[str, Any]]:
    planned = PlannedRequest(offset_ns=7, segments=(Segment(1, 5),), max_tokens=9, **changes)
    arguments = Namespace(seed=0, chat=False, ignore_eos=True, stream_interval=stream_interval)
    [request] = prepare([planned], ENDPOINT, arguments)
    body: dict[str, Any] = msgspec.json.decode(request.body)
    return request, body


def test_a_body_asks_for_exactly_what_was_planned() -> None:
    request, body = prepared()
    assert (len(body["prompt"]), body["max_tokens"], body["stream"]) == (5, 9, True)
    assert request.offset_ns == 7
    assert "stream_interval" not in body


@pytest.mark.parametrize("chat", [False, True])
def test_a_run_shares_a_salt_with_no_other_one_and_with_all_of_its_requests(chat: bool) -> None:
    planned = [PlannedRequest(offset_ns=0, segments=(Segment(key, 5),), max_tokens=9) for key in (1, 2)]
    arguments = Namespace(seed=0, chat=chat, ignore_eos=True, stream_interval=None)

    def salts(endpoint: Endpoint) -> list[str | None]:
        return [
            msgspec.json.decode(request.body).get("cache_salt") for request in prepare(planned, endpoint, arguments)
        ]

    ours = read_models("http://ours", "", b'{"data":[{"id":"m","vocab_size":100}]}')
    first, second = salts(ours), salts(ours)
    assert len({*first}) == len({*second}) == 1
    assert first[0]
    assert first != second
    other = read_models("http://other", "", b'{"data":[{"id":"m","max_model_len":64}]}')
    assert salts(other) == [None, None]


@dataclass
class Runs:
    """What `bench serve` sends to a server that is not there, and prints and keeps of it."""

    endpoint: Endpoint
    file: Path
    sent: list[list[PreparedRequest]] = field(default_factory=list)

    def answer(self, prepared: list[PreparedRequest]) -> list[Observed]:
        self.sent.append(prepared)
        return [
            Observed(request_id=str(index), intended_ns=1, sent_ns=1, token_ns=[2], token_counts=[1], end_ns=3)
            for index in range(len(prepared))
        ]

    def run(self, *flags: str) -> tuple[int, list[bytes]]:
        """Its seed as the result has it, and the prompts."""
        assert (
            cli.main(["bench", "serve", "--num-requests", "3", "--max-tokens", "9", "--json", str(self.file), *flags])
            == 0
        )
        seed = json.loads(self.file.read_text())["settings"]["arguments"]["seed"]
        return seed, [msgspec.json.decode(request.body)["prompt"] for request in self.sent[-1]]


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runs:
    made = Runs(ENDPOINT, tmp_path / "result.json")
    monkeypatch.setattr(serve, "find_endpoint", lambda url, key: made.endpoint)
    monkeypatch.setattr(serve, "LoadClient", lambda *_: SimpleNamespace(run=made.answer))
    return made


def test_a_server_that_takes_salts_has_the_same_load_each_time(runs: Runs) -> None:
    assert runs.run() == runs.run() == runs.run("--seed", "0")
    assert runs.run()[0] == 0
    assert runs.run("--seed", "1")[1] != runs.run()[1]


def test_a_server_that_takes_none_has_other_prompts_each_time_unless_a_seed_is_given(
    runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    runs.endpoint = ENDPOINT._replace(takes_salt=False)
    first, second = runs.run(), runs.run()
    assert first[0] != second[0]
    assert first[1] != second[1]
    assert re.findall(r"^Load: .*, seed (\d+)$", capsys.readouterr().out, re.MULTILINE) == [
        str(first[0]),
        str(second[0]),
    ]
    assert runs.run("--seed", str(first[0])) == first


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--duration 5", "--duration: needs --rate or --interval-ms"),
        ("--num-long 2", "--num-long: needs --long-prompt-tokens"),
        ("--trace none --num-requests 3", "--num-requests: has no meaning beside --trace"),
        ("--trace none --prompt-tokens 3", "--prompt-tokens: has no meaning beside --trace: the file says it"),
        ("--trace none --long-at 3", "--long-at: has no meaning beside --trace"),
        ("--trace none", "--trace: none cannot be read"),
        ("--sweep 5 --slo-ttft-ms 9 --long-at 2", "--long-at: needs --long-prompt-tokens"),
    ],
)
def test_wrong_flags_are_refused_before_the_server_is_asked(
    flags: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", "serve", "--url", "http://127.0.0.1:9", *flags.split()]) == cli.EXIT_USAGE
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("stream_interval", [None, 8])
def test_a_client_that_goes_away_after_a_token_sees_each_one(stream_interval: int | None) -> None:
    """Chunks are what is counted until then, whatever interval the server has."""
    request, body = prepared(stream_interval, abort_after_tokens=3)
    assert body["stream_interval"] == request.stream_interval == 1
    request, body = prepared(stream_interval)
    assert body.get("stream_interval") == request.stream_interval == stream_interval


def test_what_the_server_would_refuse_is_refused_before_anything_is_sent() -> None:
    planned = PlannedRequest(offset_ns=0, segments=(Segment(1, 60),), max_tokens=5)
    with pytest.raises(ConfigError, match="do not fit into the 64 tokens of tiny"):
        prepare([planned], ENDPOINT, Namespace(seed=0, chat=False, ignore_eos=True, stream_interval=None))


def test_what_is_no_recording_replaces_none(tmp_path: Path) -> None:
    file = tmp_path / "before.npz"
    file.write_bytes(b"an older one")
    with open_port() as port:
        port.answer("/debug/recording?since_ns=0", b"<html>")
        with pytest.raises(InvalidRequest, match="is no recording"):
            fetch_recording(port.url, "", file)
    assert file.read_bytes() == b"an older one"


CLOCK = b'{"clock": {"monotonic_ns": 5, "unix_ns": 7}, "steps": []}'


def test_the_recording_begins_with_the_run(runs: Runs, tmp_path: Path) -> None:
    content = io.BytesIO()
    make_recording().write(content)
    with open_port() as port:
        port.answer("/debug/steps?limit=1", CLOCK)
        port.answer("/debug/recording?since_ns=5", content.getvalue())
        runs.run("--ops-url", port.url, "--recording", str(tmp_path / "a.npz"))
    assert json.loads(runs.file.read_text())["recording"] == "a.npz"
    assert (tmp_path / "a.npz").read_bytes() == content.getvalue()


def test_a_busy_server_has_time_for_its_recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content, asked = io.BytesIO(), []
    make_recording().write(content)

    def get(_url: str, _api_key: str, _param: str, timeout_s: float = GET_TIMEOUT_S) -> bytes:
        asked.append(timeout_s)
        return content.getvalue()

    monkeypatch.setattr(serve, "get", get)
    fetch_recording("http://ops", "", tmp_path / "a.npz")
    assert min(asked) > 60


def test_the_result_names_no_recording_that_could_not_be_had(runs: Runs, tmp_path: Path) -> None:
    with open_port() as port:
        port.answer("/debug/steps?limit=1", CLOCK)
        flags = ["--ops-url", port.url, "--recording", str(tmp_path / "a.npz"), "--json", str(runs.file)]
        assert cli.main(["bench", "serve", "--num-requests", "2", "--max-tokens", "9", *flags]) == cli.EXIT_USAGE
    content = json.loads(runs.file.read_text())
    assert (content["recording"], len(content["requests"])) == (None, 2)


def test_a_port_without_a_clock_is_named_before_the_load(
    runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with open_port() as port:
        port.answer("/debug/steps?limit=1", b"<html>")
        flags = ["--ops-url", port.url, "--recording", str(tmp_path / "a.npz")]
        assert cli.main(["bench", "serve", "--num-requests", "2", "--max-tokens", "9", *flags]) == cli.EXIT_USAGE
        assert f"--ops-url: {port.url}/debug/steps?limit=1 says something else" in capsys.readouterr().err
    assert runs.sent == []


@pytest.mark.parametrize("url", ["127.0.0.1:9", "http://127.0.0.1:9/", "http://127.0.0.1:9/v1", "127.0.0.1:9/v1/"])
def test_the_server_may_be_named_as_clients_of_openai_name_it(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "serve", "--url", url]) == cli.EXIT_USAGE
    assert "--url: nothing answers at http://127.0.0.1:9/v1/models: " in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--url", "--ops-url"])
@pytest.mark.parametrize("url", ["localhost", "ftp://127.0.0.1:9", ""])
def test_what_is_no_url_gets_an_example_of_one(flag: str, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "serve", flag, url]) == cli.EXIT_USAGE
    assert f"{flag}: expected a URL such as http://127.0.0.1:8000, got {url!r}" in capsys.readouterr().err
