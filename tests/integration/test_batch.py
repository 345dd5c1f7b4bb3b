"""`roseinfer batch`: lines and their answers, what is wrong with a line, and going on after an end at any point."""

import fcntl
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from roseinfer.cli.main import EXIT_USAGE, main
from roseinfer.server.openai.replies import ChatReply, CompletionReply, EmbeddingsReply
from roseinfer.server.openai.responses_replies import ResponseReply

Lines = Sequence[Mapping[str, Any]]
Answers = list[dict[str, Any]]
FLAGS = ("--engine.transport", "thread", "--log-level", "error")


def chat(name: str, text: str, **fields: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": text}], "max_completion_tokens": 8, "temperature": 0, **fields}
    return {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body}


def request(name: str, path: str, **body: Any) -> dict[str, Any]:
    return {"custom_id": name, "method": "POST", "url": f"/v1/{path}", "body": body}


def write(file: Path, lines: Lines) -> Path:
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def read(file: Path) -> Answers:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def without_times(answers: Answers) -> Answers:
    """Answers without when they were made, what the cache held then, and the random ids of items."""
    cut: Answers = json.loads(json.dumps(answers))
    for answer in cut:
        body = answer["response"]["body"]
        for name in ("created", "created_at", "completed_at"):
            body.pop(name, None)
        body.get("usage", {}).pop("prompt_tokens_details", None)
        for item in body.get("output", ()):
            item.pop("id")
    return cut


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., tuple[Answers, Answers]]:
    def run_lines(lines: Lines, name: str = "out", *flags: str) -> tuple[Answers, Answers]:
        source = write(tmp_path / f"{name}.in.jsonl", lines)
        output = tmp_path / f"{name}.jsonl"
        assert main(["batch", "--input", str(source), "--output", str(output), *FLAGS, *flags]) == 0
        return read(output), read(tmp_path / f"{name}.errors.jsonl")

    return run_lines


def test_each_endpoint_answers_as_over_http(run: Callable[..., tuple[Answers, Answers]]) -> None:
    given = [
        chat("a", "Hello"),
        request("b", "completions", prompt=["One", "Two"], max_tokens=4, logprobs=2, n=2, best_of=2),
        request("c", "responses", input="Hello", max_output_tokens=5),
        request("d", "embeddings", input=["x", "y z"], dimensions=8),
    ]
    answers, errors = run(given)
    assert errors == []
    assert [answer["custom_id"] for answer in answers] == ["a", "b", "c", "d"]
    kinds = (ChatReply, CompletionReply, ResponseReply, EmbeddingsReply)
    for answer, kind in zip(answers, kinds, strict=True):
        assert (answer["response"]["status_code"], answer["error"]) == (200, None)
        if kind is not EmbeddingsReply:
            msgspec.convert(answer["response"]["body"], kind)
    bodies = [answer["response"]["body"] for answer in answers]
    assert bodies[0]["usage"]["completion_tokens"] == 8
    assert len(bodies[1]["choices"]) == 4
    assert [len(item["embedding"]) for item in bodies[3]["data"]] == [8, 8]


def test_an_answer_depends_on_its_line_alone(run: Callable[..., tuple[Answers, Answers]]) -> None:
    given = [chat(str(i), "Tell me " * (i % 7 + 1), temperature=0 if i % 2 else 1) for i in range(24)]
    shuffled = random.Random(1).sample(given, len(given))
    answers, _ = run(given)
    others, _ = run(shuffled, "shuffled")
    assert [other["custom_id"] for other in others] == [line["custom_id"] for line in shuffled]
    assert without_times(sorted(others, key=lambda answer: int(answer["custom_id"]))) == without_times(answers)


BAD = [
    ("no custom_id", {"method": "POST", "url": "/v1/completions", "body": {}}, "Missing field `custom_id`"),
    ("another path", request("p", "audio"), "`url`"),
    ("another method", chat("m", "x") | {"method": "GET"}, "`method`"),
    ("no body", {"custom_id": "n", "method": "POST", "url": "/v1/completions"}, "Missing field `body`"),
    ("its name again", chat("first", "again"), "line 1 has the same"),
]
REFUSED = [
    ("a body that is no object", chat("t", "x") | {"body": "x"}, 400, None),
    ("streamed", chat("s", "x", stream=True), 400, "stream"),
    ("another model", chat("o", "x", model="gpt-5"), 404, "model"),
    ("an unknown field", chat("u", "x", temprature=1), 400, "temprature"),
    ("too long", chat("l", "word " * 5000), 400, "messages"),
    ("a schema that is none", chat("g", "x", structured_outputs={"regex": "("}), 400, "structured_outputs.regex"),
]


def test_each_line_that_cannot_be_answered_has_its_error(run: Callable[..., tuple[Answers, Answers]]) -> None:
    answers, errors = run([chat("first", "x"), *(line for _, line, *_ in (*BAD, *REFUSED))])
    assert [answer["custom_id"] for answer in answers] == ["first"]
    for (_, _, words), error in zip(BAD, errors, strict=False):
        assert error["response"] is None
        assert words in error["error"]["message"]
    for (_, _, status, param), error in zip(REFUSED, errors[len(BAD) :], strict=True):
        assert error["error"] is None
        assert error["response"]["status_code"] == status
        assert error["response"]["body"]["error"]["param"] == param


def test_lines_that_are_no_objects(tmp_path: Path) -> None:
    source, output = tmp_path / "in", tmp_path / "out"
    source.write_text("\n".join(["{", json.dumps(chat("a", "x")), "", "[]", "\xff", '{"custom_id": 5}']) + "\n\n")
    assert main(["batch", "--input", str(source), "--output", str(output), *FLAGS]) == 0
    assert [answer["custom_id"] for answer in read(output)] == ["a"]
    errors = read(tmp_path / "out.errors.jsonl")
    assert len(errors) == 4
    assert all(error["response"] is None and error["custom_id"] is None for error in errors)
    numbers = [error["error"]["message"].partition(":")[0] for error in errors]
    assert numbers == ["Line 1", "Line 4", "Line 5", "Line 6"], "a line without a name is found by its number"


def test_a_run_goes_on_from_any_byte_of_the_journal(
    run: Callable[..., tuple[Answers, Answers]], tmp_path: Path
) -> None:
    """As after a kill: the journal of a whole run is cut anywhere, and the next run makes the same files of it."""
    given = [chat(str(i), f"Say {i}") for i in range(6)] + [chat("bad", "x", stream=True)]
    answers, errors = run(given)
    source = write(tmp_path / "cut.in.jsonl", given)
    journal, output = tmp_path / "cut.jsonl.partial", tmp_path / "cut.jsonl"
    whole = _journal_of(given, tmp_path)
    ends = [i + 1 for i, byte in enumerate(whole) if byte == ord("\n")]
    for cut in (0, 10, ends[0], ends[2] - 1, ends[3] + 5, len(whole)):
        journal.write_bytes(whole[:cut])
        assert main(["batch", "--input", str(source), "--output", str(output), *FLAGS]) == 0
        assert not journal.exists()
        assert without_times(read(output)) == without_times(answers)
        assert without_times(read(tmp_path / "cut.errors.jsonl")) == without_times(errors)
        output.unlink()
        (tmp_path / "cut.errors.jsonl").unlink()


def _journal_of(given: Lines, tmp_path: Path) -> bytes:
    """The journal of a run that could not write its output, since a folder has its name."""
    source, blocked = write(tmp_path / "b.in.jsonl", given), tmp_path / "b.jsonl.writing"
    blocked.mkdir()
    assert main(["batch", "--input", str(source), "--output", str(tmp_path / "b.jsonl"), *FLAGS]) == EXIT_USAGE
    return (tmp_path / "b.jsonl.partial").read_bytes()


def test_what_cannot_go_on_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, output = write(tmp_path / "in", [chat("a", "x"), chat("b", "y")]), tmp_path / "out"

    def refusal(*flags: str) -> str:
        assert main(["batch", "--input", str(source), "--output", str(output), *FLAGS, *flags]) == EXIT_USAGE
        return capsys.readouterr().err

    whole = _journal_of([chat("a", "x"), chat("b", "y")], tmp_path)
    journal = tmp_path / "out.partial"
    journal.write_bytes(whole)
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages[0].content }}")
    for flags in (
        ("--quantization", "int8"),
        ("--kv-cache-dtype", "int8"),
        ("--model.generation-config", "ignore"),
        ("--chat-template", str(template)),
        ("--structured.tool-format", "hermes"),
        ("--structured.reasoning-format", "none"),
    ):
        assert "no journal of this batch" in refusal(*flags)
    write(source, [chat("a", "another"), chat("b", "y")])
    assert "--input: " in refusal()
    write(source, [chat("a", "x")])
    assert "out.partial has 1 answers to lines that" in refusal(), "one line of the output for each of the input"
    assert not output.exists()
    with journal.open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert "another process" in refusal()
    journal.unlink()
    output.write_text("")
    assert "is there already" in refusal()
    output.unlink()
    source.unlink()
    assert "cannot be read" in refusal()


def test_ray_is_asked_for_where_it_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # an import of it fails
    monkeypatch.delitem(sys.modules, "roseinfer.ray.data", raising=False)
    source, output = write(tmp_path / "in", [chat("a", "x")]), tmp_path / "out"
    command = ["batch", "--input", str(source), "--output", str(output), *FLAGS]
    assert main([*command, "--ray-engines", "2"]) == EXIT_USAGE
    missing = capsys.readouterr().err  # pyarrow, which the extra brings too, is imported first
    assert re.match("roseinfer: --ray-engines: needs (ray|pyarrow), which the extra `ray` brings: pip install", missing)
    assert not list(tmp_path.glob("out*"))
    for wrong in ("0", "3-1", "many", "2-"):
        assert main([*command, "--ray-engines", wrong]) == EXIT_USAGE
        assert "roseinfer: --ray-engines: " in capsys.readouterr().err


def command_of(source: Path, output: Path) -> list[str]:
    """It hears of signals that the tests may not hear of: SIGHUP under `nohup`, SIGINT in a script's background."""
    heard = "import signal, sys; signal.signal(signal.SIGHUP, signal.SIG_DFL); "
    heard += "signal.signal(signal.SIGINT, signal.default_int_handler); "
    program = heard + "from roseinfer.cli.main import main; sys.exit(main())"
    return [sys.executable, "-c", program, "batch", "--input", str(source), "--output", str(output), *FLAGS[2:]]


def test_killed_twice_it_makes_the_same_file(run: Callable[..., tuple[Answers, Answers]], tmp_path: Path) -> None:
    given = [chat(str(i), f"Count to {i}", max_completion_tokens=4) for i in range(2000)]
    answers, _ = run(given)
    source, output = write(tmp_path / "killed.in.jsonl", given), tmp_path / "killed.jsonl"
    journal = tmp_path / "killed.jsonl.partial"
    command = command_of(source, output)
    for least in (200, 1100):
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True) as process:
            deadline = time.monotonic() + 60
            while (journal.read_bytes().count(b"\n") if journal.exists() else 0) < least:
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.005)
            os.killpg(process.pid, signal.SIGKILL)
        assert not output.exists()
    assert subprocess.run(command, stdout=subprocess.DEVNULL, timeout=120, check=True).returncode == 0
    assert without_times(read(output)) == without_times(answers)


def test_a_signal_is_heard_among_lines_that_wait_for_nothing(tmp_path: Path) -> None:
    """They were refused, or answered by an earlier run, in one turn of the event loop."""
    source, output = tmp_path / "in", tmp_path / "out"
    source.write_text("{\n" * 3_000_000)
    with subprocess.Popen(command_of(source, output), stdout=subprocess.PIPE, text=True) as process:
        journal, deadline = tmp_path / "out.partial", time.monotonic() + 60
        while (journal.stat().st_size if journal.exists() else 0) < 10_000:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "of 3000000 lines are answered; the same command goes on" in said


def test_a_reader_that_leaves_ends_no_batch(tmp_path: Path) -> None:
    """As in `| head -1`: what it prints is less than what it writes."""
    source, output = write(tmp_path / "in", [chat("a", "x")]), tmp_path / "out"
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb") as nobody:
        command = command_of(source, output)
        done = subprocess.run(command, stdout=nobody, stderr=subprocess.PIPE, timeout=60, check=False)
    assert (done.returncode, b"Error" in done.stderr) == (0, False)
    assert [answer["custom_id"] for answer in read(output)] == ["a"]


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)], ids=["INT", "TERM", "HUP"]
)
def test_a_signal_or_two_end_it_and_say_how_to_go_on(number: signal.Signals, code: int, tmp_path: Path) -> None:
    source = write(tmp_path / "in", [chat(str(i), "x", max_completion_tokens=64) for i in range(3000)])
    with subprocess.Popen(command_of(source, tmp_path / "out"), stdout=subprocess.PIPE, text=True) as process:
        journal, deadline = tmp_path / "out.partial", time.monotonic() + 60
        while (journal.read_bytes().count(b"\n") if journal.exists() else 0) < 3:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        process.send_signal(number)
        process.send_signal(number)
        said, _ = process.communicate(timeout=30)
    assert process.returncode == code
    assert "of 3000 lines are answered; the same command goes on" in said
    assert read(journal)
