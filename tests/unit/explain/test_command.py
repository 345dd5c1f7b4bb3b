"""`roseinfer explain` on recordings whose answer is known: the words, the JSON, the picture, and what it refuses."""

import dataclasses
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import pytest

from roseinfer.bench.definitions import Observed
from roseinfer.bench.load.report import RESULT_FORMAT, ServeRun, write_result
from roseinfer.cli.main import main
from roseinfer.observe.recorder.recording import Recording
from tests.unit.explain.operations_port import OperationsPort, open_port
from tests.unit.observe.facts import MS
from tests.unit.observe.gaps.test_request_gaps import Bench

CONFIG: dict[str, dict[str, Any]] = {"scheduler": {"max_prefill_tokens": 512, "max_num_seqs": 64}}


def interfered(num_newcomers: int = 10) -> Recording:
    """Four streams, 10 ms a step; every thirtieth step also reads 500 tokens of a newcomer, which takes 50 ms."""
    bench = Bench()
    bench.warm_up()
    streams = list(bench.timelines)
    for number in range(num_newcomers):
        newcomer = bench.arrive(f"long-{number}")
        newcomer.scheduled_ns, newcomer.num_prompt_tokens = bench.now_ns, 500
        bench.step(rows=[*streams, newcomer], newcomers=1, compute_ns=60 * MS, num_prefill_tokens=500)
        newcomer.end_ns = bench.now_ns + MS
        for _ in range(29):
            bench.step(rows=streams)
    recording = bench.recording()
    meta = msgspec.structs.replace(recording.meta, config=CONFIG, model_name="tiny")
    return Recording(
        meta=meta,
        requests=recording.requests,
        steps=recording.steps,
        writes=recording.writes,
        interruptions=recording.interruptions,
    )


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recording") / "interfered.npz"
    interfered().save(path)
    return path


def explained(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["explain", "--json", *arguments]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def result_of(recording: str | None) -> dict[str, Any]:
    """The least that a result of a benchmark has."""
    return {"format": RESULT_FORMAT, "recording": recording, "requests": []}


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["explain", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err


GOLDEN = """\
1356 gaps between writes to the socket, of 4 requests in 3.96 s, 40 of them slow
source: {path}
modes:  10.2 ms (97 % of gaps), 60.2 ms (2.9 %)
p50 10.2 ms, p99 60.2 ms, widest 60.2 ms

p99 - p50 = 50 ms went to
  prefill_of_others        50 ms  100 %   p99 without it 10.2 ms

The widest gaps:
   60.2 ms  step 41, 4 gaps, prefill_of_others: prefill of request long-0, 500 tokens
   60.2 ms  step 71, 4 gaps, prefill_of_others: prefill of request long-1, 500 tokens
   60.2 ms  step 101, 4 gaps, prefill_of_others: prefill of request long-2, 500 tokens
   60.2 ms  step 131, 4 gaps, prefill_of_others: prefill of request long-3, 500 tokens
   60.2 ms  step 161, 4 gaps, prefill_of_others: prefill of request long-4, 500 tokens

What would change it:
  prefill_of_others: scheduler.max_prefill_tokens (now 512)
    A smaller value cuts the prompts of newcomers into shorter pieces: every stream waits less for
    them, and they wait longer for their first token.

Unexplained: 0 ms of p99 - p50 (0 %); 0 % of the time of all gaps is unknown.
"""


def test_it_says_in_words_what_was_planted(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(path)]) == 0
    assert capsys.readouterr().out == GOLDEN.format(path=path)


def test_the_json_has_the_same_numbers(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = explained(capsys, str(path))
    assert found["causes"] == [
        {"cause": "prefill_of_others", "seconds": pytest.approx(0.05), "share": pytest.approx(1.0)}
    ]
    assert found["without"] == [
        {"cause": "prefill_of_others", "p99_s": pytest.approx(0.0102), "saved_s": pytest.approx(0.05)}
    ]
    [knob] = found["knobs"]
    assert (knob["option"], knob["value"]) == ("scheduler.max_prefill_tokens", 512)
    assert found["widest"][0]["behind"] == ["long-0"]
    assert (found["clock"], found["num_gaps"], found["num_slow_gaps"]) == ("wire", 1356, 40)
    assert found["unexplained"]["share"] == found["unknown_share"] == 0


def test_the_json_escapes_a_name_that_is_no_utf_8(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    odd = tmp_path / "a\udcff.npz"
    shutil.copy(path, odd)
    assert explained(capsys, str(odd))["source"] == f"{tmp_path}/a\\udcff.npz"


def test_the_engine_has_a_clock_of_its_own(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert explained(capsys, str(path), "--clock", "engine")["clock"] == "engine"


def test_without_a_stream_nothing_was_written_to_a_socket(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench = Bench(is_streamed=False)
    bench.warm_up()
    bench.recording().save(tmp_path / "whole.npz")
    assert explained(capsys, str(tmp_path / "whole.npz"), "--clock", "wire")["clock"] == "engine"


def test_only_the_last_seconds(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = explained(capsys, str(path), "--last", "0.3")
    assert found["num_gaps"] == 30 * 4
    assert found["span_s"] < 0.36


def test_the_directory_of_a_capture_and_a_result_that_names_one(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "capture").mkdir()
    shutil.copy(path, tmp_path / "capture" / "recording.npz")
    (tmp_path / "result.json").write_text(json.dumps(result_of("capture/recording.npz")))
    for source in (tmp_path / "capture", tmp_path / "result.json"):
        assert explained(capsys, str(source))["num_gaps"] == 1356


def test_a_result_without_a_recording_is_explained_from_its_ledgers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def row(number: int, **parts_ms: float) -> dict[str, Any]:
        parts = {name.replace("__", "."): part * MS for name, part in parts_ms.items()}
        ledger = {"parts_ns": {"queue_wait": 77, **parts}, "num_output_tokens": 11}
        return {"request_id": f"r-{number}", "end_s": number, "ledger": ledger}

    rows = [row(i, decode__decode=100) for i in range(95)]
    rows += [row(95 + i, decode__decode=100, decode__gc=300, decode__kv_wait=100) for i in range(5)]
    rows += [{"request_id": "short", "end_s": 1.0, "ledger": {"parts_ns": {}, "num_output_tokens": 1}}]
    rows += [{"request_id": "failed", "end_s": 1.0, "ledger": None}]
    content = result_of(None) | {"settings": {"model": "tiny"}, "requests": rows}
    path = tmp_path / "result.json"
    path.write_text(json.dumps(content))
    found = explained(capsys, str(path))
    assert (found["clock"], found["num_gaps"], found["p50_s"]) == ("ledger", 100, pytest.approx(0.01))
    assert [(cause["cause"], cause["share"]) for cause in found["causes"]] == [
        ("gc", pytest.approx(0.75)),
        ("kv_wait", pytest.approx(0.25)),
    ]
    assert found["widest"][0]["waiting"] == ["r-95"]
    assert main(["explain", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("100 gaps as requests had them on average, of 100 requests")
    assert "     50 ms  request r-95, gc: a garbage collection in the engine took 30 ms" in lines


def test_what_a_benchmark_writes_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ledger = {"parts_ns": {"decode.decode": 30.0 * MS}, "num_output_tokens": 4}
    seen = Observed(request_id="r", intended_ns=1, sent_ns=1, token_ns=[1, 2], token_counts=[1, 3], ledger=ledger)
    write_result(tmp_path / "result.json", ServeRun([seen], None, None), {"model": "tiny"}, None)
    found = explained(capsys, str(tmp_path / "result.json"))
    assert (found["clock"], found["num_gaps"], found["p50_s"]) == ("ledger", 1, pytest.approx(0.01))


def test_a_picture(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    assert main(["explain", str(path), "--plot", str(tmp_path / "gaps.png")]) == 0
    assert (tmp_path / "gaps.png").read_bytes().startswith(b"\x89PNG\r\n")
    assert "cannot be written" in refusal(capsys_after(capsys), str(path), "--plot", str(tmp_path / "no" / "a.png"))


def test_a_picture_that_cannot_be_written_is_refused_before_a_server_is_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    told = refusal(capsys, "http://127.0.0.1:1", "--plot", str(tmp_path / "no" / "a.png"))
    assert told.startswith("roseinfer: --plot: ")


def capsys_after(capsys: pytest.CaptureFixture[str]) -> pytest.CaptureFixture[str]:
    """With what was printed so far forgotten."""
    capsys.readouterr()
    return capsys


def test_without_matplotlib_the_extra_is_named(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("matplotlib", "matplotlib.backends", "matplotlib.backends.backend_agg", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    assert "pip install 'roseinfer[plot]'" in refusal(capsys, str(path), "--plot", "a.png")


# --- what it refuses --------------------------------------------------------------------------------------------------


def test_files_that_hold_no_recording(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.npz").write_text("no archive")
    (tmp_path / "text.json").write_text("{")
    (tmp_path / "other.json").write_text("{}")
    lost = tmp_path / "lost.json"
    lost.write_text(json.dumps(result_of("gone.npz")))
    (tmp_path / "newer.json").write_text(json.dumps(result_of(None) | {"format": "roseinfer bench serve 2"}))
    (tmp_path / "bytes.json").write_bytes(b'{"format": "\xff"}')
    endless = {"request_id": "r", "end_s": 1e300, "ledger": None}
    (tmp_path / "endless.json").write_text(json.dumps(result_of(None) | {"requests": [endless]}))
    recording = Recording.load(path)
    old = Recording(
        meta=msgspec.structs.replace(recording.meta, format_version=99),
        requests=[],
        steps=recording.steps,
        writes=recording.writes,
        interruptions=recording.interruptions,
    )
    old.save(tmp_path / "old.npz")
    damaged = msgspec.structs.replace(recording.meta, config=cast("dict[str, dict[str, Any]]", {"scheduler": 7}))
    dataclasses.replace(recording, meta=damaged).save(tmp_path / "config.npz")
    steps, writes = recording.steps.copy(), recording.writes.copy()
    writes["written_ns"][len(writes) // 2 :] = 2**63 - 1
    writes["written_ns"][: len(writes) // 2] = -(2**63)
    dataclasses.replace(recording, writes=writes).save(tmp_path / "writes.npz")
    steps["num_decode_seqs"] = np.arange(len(steps)) % 3
    steps["num_draft_tokens"] = -(np.arange(len(steps)) % 3)
    dataclasses.replace(recording, steps=steps).save(tmp_path / "steps.npz")
    for name, sentence in (
        ("writes.npz", "It is damaged: its numbers contradict each other."),
        ("steps.npz", "It is damaged: its numbers contradict each other."),
        ("missing.npz", "No such file or directory"),
        ("empty", "holds no recording.npz"),
        ("text.npz", "is no recording of roseinfer"),
        ("text.json", "is not JSON"),
        ("other.json", "is no result of `roseinfer bench serve`"),
        ("lost.json", "No such file or directory"),
        ("newer.json", "Its format is 'roseinfer bench serve 2'"),
        ("bytes.json", "is not JSON"),
        ("endless.json", "requests[0].end_s"),
        ("config.npz", "is damaged: Expected `object`, got `int` - at `$.config[...]`"),
        ("old.npz", "a recording of format 99"),
    ):
        line = refusal(capsys, str(tmp_path / name))
        assert sentence in line, name
        assert line.startswith(f"roseinfer: {tmp_path / name}: ")
        assert line.count(str(tmp_path / name)) == 1


def test_what_a_terminal_would_obey_is_escaped(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recording = Recording.load(path)
    requests = [msgspec.structs.replace(each, request_id=f"\x1b]0;{each.serial}\x07") for each in recording.requests]
    meta = msgspec.structs.replace(recording.meta, trigger="a\x1b[2J\nb")
    dataclasses.replace(recording, meta=meta, requests=requests).save(tmp_path / "sent.npz")
    assert main(["explain", str(tmp_path / "sent.npz")]) == 0
    out = capsys.readouterr().out
    assert out.replace("\n", "").isprintable()
    assert "saved by the rule: a\\x1b[2J\\nb" in out
    assert r"prefill of request \x1b]0;" in out


def test_a_recording_without_gaps(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recording = Recording.load(path)
    Recording(
        meta=recording.meta,
        requests=[],
        steps=recording.steps[:0],
        writes=recording.writes[:0],
        interruptions=recording.interruptions,
    ).save(tmp_path / "quiet.npz")
    assert "no gap between two tokens" in refusal(capsys, str(tmp_path / "quiet.npz"))


@pytest.fixture
def port() -> Iterator[OperationsPort]:
    with open_port() as port:
        yield port


def test_a_running_server(path: Path, port: OperationsPort, capsys: pytest.CaptureFixture[str]) -> None:
    port.answer("/debug/recording", path.read_bytes())
    bare = port.url.removeprefix("http://")
    for address in (port.url, f"{port.url}/", f"{port.url}/debug/timeline"):
        found = explained(capsys, address)
        assert (found["num_gaps"], found["source"]) == (1356, address)
    assert explained(capsys, bare)["source"] == port.url


def test_a_key_is_sent_when_there_is_one(
    path: Path, port: OperationsPort, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    port.answer("/debug/recording", path.read_bytes())
    keys = tmp_path / "keys"
    keys.write_text("# ours\n\nright\nother\n")
    assert explained(capsys, port.url, "--api-key-file", str(keys))["num_gaps"] == 1356
    keys.write_text("wrong\n")
    assert "A valid API key is needed." in refusal(capsys, port.url, "--api-key-file", str(keys))
    keys.write_text("# none\n")
    assert "holds no key" in refusal(capsys, port.url, "--api-key-file", str(keys))


def test_addresses_that_answer_something_else(port: OperationsPort, capsys: pytest.CaptureFixture[str]) -> None:
    told = f"{port.url}: answered 404 for /debug/recording. Is it the operations port (server.ops_port) of roseinfer?"
    assert told in refusal(capsys, port.url)
    port.answer("/debug/recording", b'{"error": {"message": "Not Found: GET /debug/recording"}}', status=404)
    assert told in refusal(capsys, port.url)
    port.answer("/debug/recording", b'{"error": {"message": "The server is loading."}}', status=503)
    assert "answered 503 for /debug/recording: The server is loading." in refusal(capsys, port.url)
    port.answer("/debug/recording", b"<html>")
    assert f"{port.url}: What it sent is no recording of roseinfer" in refusal(capsys, port.url)


@pytest.mark.parametrize("source", ["http://127.0.0.1:1", "http://", "http://[", "http://127.0.0.1:port"])
def test_an_address_without_a_server(source: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert refusal(capsys, source).startswith(f"roseinfer: {source}: ")


def test_a_path_that_cannot_be_looked_at(capsys: pytest.CaptureFixture[str]) -> None:
    """Its name is too long; a directory above it that is closed is told likewise."""
    source = "x" * 300
    assert refusal(capsys, source) == f"roseinfer: {source}: It cannot be read: File name too long.\n"


@pytest.mark.parametrize("flags", [["--last", "0"], ["--last", "soon"], ["--clock", "wall"]])
def test_flags_that_make_no_sense(flags: list[str], path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert flags[0] in refusal(capsys, str(path), *flags)


@pytest.mark.parametrize(
    ("limit", "num_prompt_tokens", "words"),
    [
        (None, 500, "scheduler.target_itl_ms (now on a CPU 30 ms, or twice what a step takes without prompts; else no"),
        (None, 20, "scheduler.max_prefill_seqs (now as many as max_num_seqs 64)"),
        (256, 20, "No prompt has more than 64 tokens, so there is little to cut."),
    ],
)
def test_advice_considers_defaults_and_short_prompts(
    limit: int | None,
    num_prompt_tokens: int,
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    recording = interfered()
    options = {
        "max_prefill_tokens": limit,
        "target_itl_ms": None,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 512,
        "max_prefill_seqs": None,
    }
    requests = [
        msgspec.structs.replace(request, num_prompt_tokens=min(request.num_prompt_tokens, num_prompt_tokens))
        for request in recording.requests
    ]
    meta = msgspec.structs.replace(recording.meta, config={"scheduler": options})
    dataclasses.replace(recording, meta=meta, requests=requests).save(tmp_path / "it.npz")
    assert main(["explain", str(tmp_path / "it.npz")]) == 0
    out = capsys.readouterr().out
    assert words in out
    assert ("shorter pieces" in out) == (num_prompt_tokens == 500)
