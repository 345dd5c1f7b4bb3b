"""`roseinfer top --once`: one screen that says what a server says, and what it refuses."""

import io
import json
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from rich.text import Text

from roseinfer.cli.main import main
from roseinfer.explain import top
from roseinfer.explain.top import LiveRequest, LiveServer, Sample, render
from roseinfer.observe.gaps.attribution import Attribution
from roseinfer.observe.gaps.causes import Cause
from roseinfer.observe.metrics.metrics import Metrics
from roseinfer.observe.metrics.scrape import Page
from roseinfer.records import Advanced, LifecycleState
from tests.unit.explain.operations_port import OperationsPort, open_port
from tests.unit.observe.facts import MS, make_metrics, make_step, make_timeline

REQUESTS = {
    "now_ns": 1,
    "num_waiting": 1,
    "requests": [
        {"id": "late/1", "stage": "waiting", "age_ms": 1500.0, "num_prompt_tokens": 9, "num_generated_tokens": 0,
         "max_tokens": 64, "place": 0},
        {"id": "stream-1", "stage": "decoding", "age_ms": 2500.0, "num_prompt_tokens": 7, "num_generated_tokens": 30,
         "max_tokens": 64, "place": None},
    ],
}  # fmt: skip
WAITING = {
    "waiting": {
        "sentence": "The first waiting request was left out of the last step because all 8 places are taken.",
        "option": "scheduler.max_active_seqs",
        "value": 8,
    }
}


def page_of(metrics: Metrics) -> bytes:
    return metrics.render("")[0]


def advance(metrics: Metrics, attribution: Attribution) -> None:
    """Two gaps of 64 ms, one first token, and slow gaps that were counted elsewhere."""
    timeline = make_timeline(token_ns=[1031 * MS])
    metrics.on_start(timeline)
    for number in (1, 2):
        timeline.token_ns.append(timeline.token_ns[-1] + 64 * MS)
        state = {"num_running": 3, "num_waiting": 1, "num_used_blocks": 43, "num_generated_tokens": 500}
        step = make_step(step_id=number, tokens_ns=timeline.token_ns[-1], **state)
        metrics.on_step(step, Advanced.newest([timeline]))
    metrics.on_finish(make_timeline())
    attribution.num_slow_gaps[Cause.PREFILL_OF_OTHERS] += 4
    attribution.num_slow_gaps[Cause.GC] += 1


@pytest.fixture
def port() -> Iterator[OperationsPort]:
    metrics, attribution = make_metrics(), Attribution()
    metrics.watch(attribution, lambda: 0)
    metrics.on_lifecycle(LifecycleState.READY)
    before = page_of(metrics)
    advance(metrics, attribution)
    step = {
        **dict.fromkeys(("start_ns", "num_prefill_tokens"), 0),
        "step_id": 812,
        "end_ns": 74 * MS,
        "kind": "decode",
        "num_decode_seqs": 2,
        "blocked_by": "slots",
    }
    with open_port() as port:
        port.answer("/metrics", before, page_of(metrics))
        port.answer("/debug/requests", json.dumps(REQUESTS).encode())
        port.answer("/debug/steps?limit=1", json.dumps({"clock": {}, "steps": [step]}).encode())
        port.answer("/debug/requests/late%2F1", json.dumps(WAITING).encode())
        yield port


def test_it_says_what_it_waits_for(port: OperationsPort, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", port.url, "--once", "--interval", "0.1"]) == 0
    told = capsys.readouterr()
    assert told.err == "asking again in 0.1 s: rates and percentiles are of what comes in between\n"
    assert "asking" not in told.out


def test_a_sample_is_of_the_moment_of_its_page(port: OperationsPort, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates are of two pages: how long the other answers take is no part of the time between them."""
    server, asked = LiveServer(port.url, None), list[str]()
    get = server._get

    def note(path: str) -> bytes:
        asked.append(path)
        return get(path)

    monkeypatch.setattr(server, "_get", note)
    monkeypatch.setattr(top, "time", SimpleNamespace(monotonic=lambda: float(len(asked))))
    assert server.sample().at_s == 1.0
    assert asked[0] == "/metrics"
    assert len(asked) > 1


def test_a_place_that_is_not_certain_says_so(port: OperationsPort, capsys: pytest.CaptureFixture[str]) -> None:
    port.answer("/debug/requests", json.dumps(REQUESTS | {"is_place_exact": False}).encode())
    assert "waiting, about 0 before it" in screen(capsys, port.url)


def screen(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["top", *arguments, "--once", "--interval", "0.1"]) == 0
    return capsys.readouterr().out


def test_one_screen_says_it_all(port: OperationsPort, capsys: pytest.CaptureFixture[str]) -> None:
    text = screen(capsys, port.url)
    lines = [line.rstrip() for line in text.splitlines()]
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith(f"roseinfer top  tiny  ready  {port.url}")
    assert lines[2] == "running 3   waiting 1   KV cache █████████░░░░░░░░░░░ 43%"
    assert "generated " in lines[3]
    assert lines[4].startswith("first token  p50 ")
    assert lines[5].startswith("token gap    p50 6")
    assert lines[6] == "slow gaps    prefill_of_others 4, gc 1"
    assert lines[7] == "last step    812, decode, 74 ms, 2 decoding, 0 prompt tokens"
    assert lines[8] == "waiting for  scheduler.max_active_seqs = 8: all 8 places are taken."
    assert [line.split() for line in lines[11:]] == [
        ["stream-1", "decoding", "2.5", "s", "7", "30/64"],
        ["late/1", "waiting,", "0", "before", "it", "1.5", "s", "9", "0/64"],
    ]


def make_sample(num_requests: int) -> Sample:
    requests = [LiveRequest(f"request-{i:03}", "decoding", 1000.0 - i, 5, i, 64) for i in range(num_requests)]
    return Sample(0.0, Page.parse(page_of(make_metrics()).decode()), requests, [], "")


def drawn(samples: list[Sample], width: int = 80, height: int = 24, where: str = "here") -> list[str]:
    console = Console(width=width, height=height, file=io.StringIO())
    console.print(render(samples, Text(where), width, height))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_rates_are_of_what_came_in_between() -> None:
    metrics, attribution = make_metrics(), Attribution()
    metrics.watch(attribution, lambda: 0)
    pages = [Page.parse(page_of(metrics).decode())]
    advance(metrics, attribution)
    pages.append(Page.parse(page_of(metrics).decode()))
    samples = [Sample(at_s, page, [], [], "") for at_s, page in zip((10.0, 10.5), pages, strict=True)]
    assert drawn(samples)[3].rstrip() == "tokens/s  generated 4   prompt 0   over 0.5 s", "two tokens in half a second"


@pytest.mark.parametrize(("width", "height"), [(80, 24), (40, 14), (200, 60)])
@pytest.mark.parametrize("num_requests", [0, 1, 12, 13, 14, 500])
def test_it_fits_the_screen_and_says_what_does_not(width: int, height: int, num_requests: int) -> None:
    lines = drawn([make_sample(num_requests)], width, height)
    assert len(lines) <= height
    assert max(map(len, lines)) <= width
    shown = sum(line.startswith("req") and "decoding" in line for line in lines)
    told = next((int(line.split()[1]) for line in lines if line.startswith("and ")), 0)
    assert shown + told == num_requests


def test_what_a_server_calls_its_requests_is_no_markup() -> None:
    sample = make_sample(0)
    named = LiveRequest("[/] [red]a", "[bold]waiting", 1.0, 5, 0, 64)
    lines = drawn([Sample(0.0, sample.page, [named], [], "")])
    assert lines[11].startswith("[/] [red]a ")
    assert "[bold]waiting" in lines[11]


def test_a_single_sample_has_no_rates(capsys: pytest.CaptureFixture[str]) -> None:
    lines = drawn([make_sample(0)], where="it does not answer")
    assert "it does not answer" in lines[0]
    assert "generated -" in lines[3]


@pytest.mark.parametrize(
    ("path", "body", "sentence"),
    [
        ("/metrics", b"<html>", "metrics page"),
        ("/metrics", b"go_threads 7\n", "names nothing of roseinfer"),
        ("/debug/requests", b"{}", "/debug/requests says something else than expected"),
        ("/debug/steps?limit=1", b"<html>", "/debug/steps?limit=1 says something else than expected"),
        ("/debug/requests", b'{"requests": [{"id": "\xff"}]}', "/debug/requests says something else than expected"),
    ],
)
def test_a_server_that_is_none_of_ours(
    port: OperationsPort, path: str, body: bytes, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    port.answer(path, body)
    assert sentence in refusal(capsys, port.url, "--once")


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["top", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["http://127.0.0.1:1", "--once"], "http://127.0.0.1:1: does not answer: Connection refused."),
        (["127.0.0.1:1", "--once"], "http://127.0.0.1:1: does not answer: Connection refused."),
        (["server", "--once"], "server: It is no URL"),
        (["http://127.0.0.1:1"], "needs a terminal; --once prints one frame anywhere"),
        (["http://127.0.0.1:1", "--interval", "0"], "--interval"),
    ],
)
def test_what_it_refuses(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert sentence in refusal(capsys, *arguments)


def test_debug_pages_that_are_off_are_named(port: OperationsPort, capsys: pytest.CaptureFixture[str]) -> None:
    error: dict[str, Any] = {"error": {"message": "/debug/* is off: no API key is configured."}}
    port.answer("/debug/requests", json.dumps(error).encode(), status=404)
    assert "/debug/* is off" in refusal(capsys, port.url, "--once")


def test_a_terminal_that_is_closed_is_no_traceback(port: OperationsPort) -> None:
    program = (
        "import fcntl, signal, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
        "signal.signal(signal.SIGHUP, signal.SIG_DFL); from roseinfer.cli.main import main; sys.exit(main())"
    )
    command = [sys.executable, "-c", program, "top", port.url, "--interval", "3600"]
    terminal, inside = pty.openpty()
    with subprocess.Popen(
        command, stdin=inside, stdout=inside, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        os.close(inside)
        shown = b""
        while b"stream-1" not in shown:
            shown += os.read(terminal, 65536)
        os.close(terminal)
        _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (129, "")
