"""Grammars that strangers send: each known way in which one hurt a server is a refusal here, and the next one works.

The names of the flaws are those of docs/structured-output.md.
"""

import asyncio
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from roseinfer.config.options import StructuredConfig
from roseinfer.errors import InvalidRequest, NotReady, Overloaded
from roseinfer.messages import Grammar
from roseinfer.runtime import child_process
from roseinfer.text.grammar import checker, source
from roseinfer.text.grammar.checker import GrammarChecker
from roseinfer.text.grammar.source import GrammarCache
from tests.unit.text.grammar import vocabulary as checkpoint

SOUND = Grammar("regex", "[0-9]+")


def make_checker(directory: Path, **config: float) -> GrammarChecker:
    info = checkpoint.engine_info(checkpoint.write_checkpoint(directory))
    return GrammarChecker(StructuredConfig(**config), lambda: info)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GrammarChecker]:
    made = make_checker(tmp_path_factory.mktemp("checkpoint"))
    yield made
    made.close()


def schema(of: object) -> Grammar:
    return Grammar("json_schema", json.dumps(of))


def nested(depth: int) -> dict[str, object]:
    made: dict[str, object] = {"type": "integer"}
    for _ in range(depth):
        made = {"items": made}
    return made


def hidden(depth: int) -> dict[str, object]:
    """Closing brackets in texts, which a count of brackets would take for the ends of objects."""
    made: dict[str, object] = {"type": "integer"}
    for _ in range(depth):
        made = {"description": "}}}]]]", "items": made}
    return made


def count_children(monkeypatch: pytest.MonkeyPatch) -> list["subprocess.Popen[bytes]"]:
    started: list[subprocess.Popen[bytes]] = []
    start_process = child_process.start_process

    def start(*args: Any, **kwargs: Any) -> "subprocess.Popen[bytes]":
        started.append(start_process(*args, **kwargs))
        return started[-1]

    monkeypatch.setattr(child_process, "start_process", start)
    return started


def is_alive(made: GrammarChecker) -> bool:
    return made.check(SOUND, "x").result() is None


@pytest.mark.parametrize(
    "grammar",
    [
        pytest.param(schema({"type": 7}), id="bad schema, CVE-2025-48942"),
        pytest.param(schema({"properties": []}), id="bad schema of another kind, CVE-2025-48942"),
        pytest.param(Grammar("regex", "([)"), id="bad regex, CVE-2025-48943"),
        pytest.param(schema({"type": "string", "pattern": "\\d+(?<=x)"}), id="bad pattern, CVE-2025-48944"),
        pytest.param(schema(nested(5000 // 8)), id="nested schema, CVE-2026-25048"),
        pytest.param(schema(hidden(100)), id="nested schema with brackets in texts, CVE-2026-25048"),
        pytest.param(Grammar("lark", "start: " + "(" * 9000 + '"a"' + ")" * 9000), id="nested groups, CVE-2026-2069"),
        pytest.param(Grammar("regex", "(" * 3000 + "a" + ")" * 3000), id="nested expression, CVE-2026-2069"),
        pytest.param(Grammar("lark", "start: start"), id="rule of itself, CVE-2025-57809"),
        pytest.param(schema({"$ref": "#"}), id="reference to itself, CVE-2025-57809"),
        pytest.param(schema({"$ref": "file:///etc/passwd"}), id="reference to a file"),
        pytest.param(schema({"$ref": "http://127.0.0.1:9/x"}), id="reference to the network"),
        pytest.param(Grammar("regex", "a" * 100_000), id="long expression"),
        pytest.param(schema({"enum": ["x" * 100] * 2000}), id="long schema"),
        pytest.param(Grammar("regex", "a\0"), id="null character"),
        pytest.param(Grammar("regex", "\ud800"), id="half a character"),
        *(
            pytest.param(Grammar(kind, source), id=f"half a character spelled in a {kind}")  # type: ignore[arg-type]
            for kind, source in (
                ("json_schema", r'{"const": "\ud800"}'),
                ("choice", r'["\ud800"]'),
                ("calls", r'{"shapes": [{"before": "\ud800", "schema": {}, "after": ""}], "between": "", "most": 1}'),
                ("regex", r"\ud800"),
                ("lark", r'start: "\ud800"'),
            )
        ),
        pytest.param(Grammar("choice", "5"), id="choices that are none"),
        pytest.param(Grammar("calls", "[]"), id="calls that are none"),
        pytest.param(Grammar("json_schema", "{" * 5000), id="no JSON"),
    ],
)
def test_a_hostile_grammar_is_refused_by_its_field_and_the_next_one_is_checked(
    shared: GrammarChecker, grammar: Grammar
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        shared.check(grammar, "some.field").result()
    assert caught.value.param == "some.field"
    assert "some.field" in caught.value.message
    assert "too large or too complex" not in caught.value.message, "it ended the process that looked at it"
    assert is_alive(shared)


def test_depth_is_counted_as_it_is() -> None:
    assert source._json_depth(json.dumps(nested(10))) == 11
    assert source._json_depth(json.dumps(hidden(10))) == 11
    assert source._bracket_depth(r"((\)\)(") == 3


def test_what_takes_too_long_is_ended_with_its_process(tmp_path: Path) -> None:
    made = make_checker(tmp_path, compile_timeout_s=0.05)
    try:
        assert is_alive(made)
        first = made._child.process
        assert first is not None
        slow = schema({"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(3000)}})
        with pytest.raises(InvalidRequest, match=r"more than 0\.05 s"):
            made.check(slow, "x").result()
        assert first.returncode is not None
        assert is_alive(made)
        assert slow not in made._verdicts.entries, "another time the machine may have less to do"
    finally:
        made.close()


def test_what_takes_too_much_memory_ends_its_process_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checker, "COMPILE_MEMORY_BYTES", 64 << 20)
    made = make_checker(tmp_path, compile_timeout_s=60)
    try:
        assert is_alive(made)
        child = made._child.process
        assert child is not None
        limits = resource.prlimit(child.pid, resource.RLIMIT_AS)
        used = int(Path(f"/proc/{child.pid}/statm").read_text().split()[0]) * resource.getpagesize()
        assert used <= limits[0] < used + (65 << 20)
        resource.prlimit(child.pid, resource.RLIMIT_AS, (used, used))  # as if a grammar had taken all of it
        big = schema({"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(2000)}})
        with pytest.raises(InvalidRequest, match="too large or too complex"):
            made.check(big, "x").result()
        assert is_alive(made)
    finally:
        made.close()


def test_a_verdict_is_remembered_and_what_is_remembered_is_bounded(
    shared: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CVE-2025-32381: one new schema a request must not fill the memory."""
    verdicts = GrammarCache(20 << 10, checker._num_bytes)
    monkeypatch.setattr(shared, "_verdicts", verdicts)
    for i in range(200):
        shared.check(Grammar("regex", f"a{{{i}}}"), "x").result()
    assert verdicts.num_bytes <= 20 << 10
    texts = sum(sys.getsizeof(each.source) + sys.getsizeof(verdict) for each, verdict in verdicts.entries.items())
    assert verdicts.num_bytes == 512 * len(verdicts.entries) + texts
    assert 10 < len(verdicts.entries) < 60
    assert Grammar("regex", "a{199}") in verdicts.entries


def test_nothing_is_written_to_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CVE-2025-29770: a cache on disk, one file for each schema that a client thinks of."""
    home = tmp_path / "home"
    home.mkdir()
    for name in ("HOME", "TMPDIR", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(home))
    elsewhere = tmp_path / "checkpoint"
    elsewhere.mkdir()
    monkeypatch.chdir(home)
    made = make_checker(elsewhere)
    try:
        for i in range(20):
            made.check(schema({"const": i}), "x").result()
    finally:
        made.close()
    assert os.listdir(home) == []


def test_checks_beyond_the_limit_are_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checker, "MAX_WAITING", 2)
    made = make_checker(tmp_path)
    try:
        waiting = [made.check(Grammar("regex", text), "x") for text in ("a", "b")]
        with pytest.raises(Overloaded):
            made.check(Grammar("regex", "c"), "x")
        assert [future.result() for future in waiting] == [None, None]
        assert is_alive(made)
    finally:
        made.close()


def test_a_grammar_that_was_checked_before_waits_for_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else one client's slow grammars would hold up, or have refused, the forms that all others use every day."""
    monkeypatch.setattr(checker, "MAX_WAITING", 1)
    started = count_children(monkeypatch)
    made = make_checker(tmp_path, compile_timeout_s=60)
    wrong = Grammar("regex", "([)")
    try:
        assert is_alive(made)
        with pytest.raises(InvalidRequest) as first:
            made.check(wrong, "x").result()
        started[0].send_signal(signal.SIGSTOP)
        waiting = made.check(Grammar("regex", "b"), "x")
        assert made.check(SOUND, "x").done()
        with pytest.raises(InvalidRequest) as second:
            made.check(wrong, "x").result(timeout=0)
        assert second.value.message == first.value.message
        assert not waiting.done()
        started[0].send_signal(signal.SIGCONT)
        assert waiting.result() is None
    finally:
        made.close()


async def test_a_burst_with_one_grammar_takes_one_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a server has just started, and the child reads the vocabulary."""
    monkeypatch.setattr(checker, "MAX_WAITING", 1)
    made = make_checker(tmp_path)
    try:
        await asyncio.gather(*(checker.check_form((SOUND, "x"), made) for _ in range(20)))
        assert made.under_way == {}
    finally:
        made.close()


def test_a_vocabulary_that_no_grammar_can_use_names_the_field_and_asks_one_child(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not a 503 that asks to come again for ever, with a process for each time."""
    started = count_children(monkeypatch)
    made = make_checker(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["model"]["vocab"]["#" * 300] = 258
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    try:
        for grammar in (SOUND, SOUND, Grammar("regex", "b")):
            with pytest.raises(
                InvalidRequest, match=r"^`some\.field`: Grammars cannot be used .* has 300 characters"
            ) as caught:
                made.check(grammar, "some.field").result()
            assert caught.value.param == "some.field"
        assert len(started) == 1
        assert started[0].returncode is not None
    finally:
        made.close()


def test_a_file_that_cannot_be_read_may_be_there_another_time(tmp_path: Path) -> None:
    made = make_checker(tmp_path)
    (tmp_path / "tokenizer.json").rename(tmp_path / "elsewhere")
    try:
        with pytest.raises(NotReady, match="ended while it started") as caught:
            made.check(SOUND, "x").result()
        assert str(tmp_path) not in caught.value.message
        (tmp_path / "elsewhere").rename(tmp_path / "tokenizer.json")
        assert is_alive(made)
    finally:
        made.close()


def test_a_child_that_got_no_processor_has_its_time_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = count_children(monkeypatch)
    made = make_checker(tmp_path, compile_timeout_s=1.0)
    try:
        assert is_alive(made)
        started[0].send_signal(signal.SIGSTOP)
        waiting = made.check(Grammar("regex", "b"), "x")
        time.sleep(1.2)
        assert not waiting.done()
        started[0].send_signal(signal.SIGCONT)
        assert waiting.result() is None
        started[0].send_signal(signal.SIGSTOP)
        with pytest.raises(InvalidRequest, match="takes more than 1 s to compile"):
            made.check(Grammar("regex", "c"), "x").result()
        assert len(started) == 1
    finally:
        made.close()


def test_a_child_that_ended_without_a_word_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = count_children(monkeypatch)
    made = make_checker(tmp_path)
    try:
        monkeypatch.setattr(checker, "START_TIMEOUT_S", 0.0)
        with pytest.raises(NotReady, match="ended while it started"):
            made.check(SOUND, "x").result()
        monkeypatch.undo()
        assert is_alive(made)
        assert started[0].returncode is not None
    finally:
        made.close()


def test_a_child_that_was_killed_between_two_grammars_is_replaced_before_the_second(tmp_path: Path) -> None:
    made = make_checker(tmp_path)
    try:
        assert is_alive(made)
        assert made._child.process is not None
        made._child.process.kill()
        made._child.process.wait()
        made.check(Grammar("regex", "b"), "x").result()
    finally:
        made.close()


def test_a_signal_for_the_server_that_reaches_its_child_too_fails_no_check(tmp_path: Path) -> None:
    made = make_checker(tmp_path)
    try:
        assert is_alive(made)
        child = made._child.process
        assert child is not None
        child.send_signal(signal.SIGSTOP)
        waiting = made.check(Grammar("regex", "b"), "x")
        child.send_signal(signal.SIGTERM)
        child.send_signal(signal.SIGCONT)
        assert waiting.result() is None
    finally:
        made.close()


PARENT = """
import sys
from pathlib import Path
from tests.unit.text.grammar.test_checker import SOUND, make_checker

made = make_checker(Path(sys.argv[1]))
made.check(SOUND, "x").result()
print(made._child.process.pid, flush=True)
sys.stdin.read()
"""


def test_a_child_ends_with_a_parent_that_is_killed_whatever_it_does(tmp_path: Path) -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path)], stdin=pipe, stdout=pipe) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        os.kill(pid, signal.SIGSTOP)  # it reads no end of its input, as in a grammar that never ends
        parent.kill()
    stat = Path(f"/proc/{pid}/stat")
    deadline_s = time.monotonic() + 60
    while stat.exists() and ") Z " not in stat.read_text():
        assert time.monotonic() < deadline_s, "it runs on"
        time.sleep(0.01)
