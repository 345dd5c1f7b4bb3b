"""Lines that cannot be forged, a line a request and a summary with the right numbers, and no waiting for stderr."""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roseinfer.config.options import ObserveConfig
from roseinfer.messages import EngineInfo
from roseinfer.observe.logs import JsonFormatter, LogOutput, Logs, StateLog, TextFormatter, configure, escape
from roseinfer.records import Advanced, FinishReason, LifecycleState
from tests.unit.observe.facts import MS, make_step, make_timeline

S = 1000 * MS


@pytest.fixture
def _own_logging() -> Iterator[None]:
    """Gives the process's logging back as it was."""
    root, ours = logging.getLogger(), logging.getLogger("roseinfer")
    before = (root.handlers[:], root.level, ours.level)
    yield
    root.handlers[:], root.level, ours.level = before
    root.setLevel(before[1])
    ours.setLevel(before[2])


def make_record(message: str, **extra: object) -> logging.LogRecord:
    return logging.getLogger("roseinfer.test").makeRecord(
        "roseinfer.test", logging.WARNING, __file__, 1, message, (), None, extra=extra
    )


def failing_record(message: str) -> logging.LogRecord:
    def fail() -> None:
        raise ValueError(message)

    record = make_record("it failed")
    try:
        fail()
    except ValueError:
        record.exc_info = sys.exc_info()
    return record


@settings(max_examples=50, deadline=None)
@given(st.text(), st.text())
def test_one_record_is_one_line_of_json_that_says_what_was_said(message: str, request_id: str) -> None:
    line = JsonFormatter().format(make_record(message.replace("%", "%%"), request_id=request_id))
    assert line.isascii()
    assert line.isprintable()
    fields = json.loads(line)
    assert fields["request_id"] == request_id
    assert fields["level"] == "warning"
    assert fields["logger"] == "roseinfer.test"


def test_json_has_the_message_the_time_and_the_traceback() -> None:
    fields = json.loads(JsonFormatter().format(failing_record("bad\nvalue")))
    assert fields["message"] == "it failed"
    assert fields["ts"].endswith("+00:00")
    assert "ValueError: bad\nvalue" in fields["exception"]
    assert "test_logs.py" in fields["exception"]


@settings(max_examples=50, deadline=None)
@given(st.text())
def test_text_stays_on_its_line(value: str) -> None:
    record = make_record("%s", request_id=value)
    record.args = (value,)
    assert TextFormatter().format(record).isprintable()


def test_nothing_can_start_a_line_of_its_own_or_move_the_cursor() -> None:
    hostile = "ok\r\n12:00:00 INFO all is well\x1b[2J\x9b\u2028\u202e"
    assert escape(hostile) == "ok\\r\\n12:00:00 INFO all is well\\x1b[2J\\x9b\\u2028\\u202e"
    lines = TextFormatter().format(failing_record(hostile)).splitlines()
    assert [line for line in lines[1:] if not line.startswith("    ")] == []


def test_text_shows_fields_so_that_they_differ() -> None:
    line = TextFormatter().format(make_record("done", request_id="r-1", note="two words", missing=None, empty=""))
    assert line.endswith('done request_id=r-1 note="two words" empty=""')


def test_a_line_has_nothing_that_a_library_puts_into_every_record() -> None:
    record = make_record("done", request_id="r-1", _ray_timestamp_ns=1)
    assert TextFormatter().format(record).endswith("done request_id=r-1")
    assert "_ray_timestamp_ns" not in json.loads(JsonFormatter().format(record))


def request_fields(caplog: pytest.LogCaptureFixture) -> dict[str, object]:
    [record] = [record for record in caplog.records if record.name == "roseinfer.requests"]
    fields: dict[str, object] = json.loads(JsonFormatter().format(record))
    return fields


def test_a_request_is_one_line_at_its_end(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    logs = Logs(summary_interval_s=10.0)
    logs.on_start(make_timeline())
    logs.on_finish(make_timeline(num_cached_tokens=4))
    fields = request_fields(caplog)
    del fields["ts"]
    assert fields == {
        "level": "info",
        "logger": "roseinfer.requests",
        "message": "request ended",
        "request_id": "r-1",
        "finish_reason": "length",
        "prompt_tokens": 7,
        "cached_tokens": 4,
        "output_tokens": 3,
        "ttft_ms": 63.0,
        "tpot_ms": 64.0,
        "queue_ms": 8.0,
        "duration_ms": 191.0,
    }


def test_a_request_that_was_never_scheduled_says_only_what_it_knows(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    rejected = make_timeline(
        **dict.fromkeys(["parsed_ns", "tokenized_ns", "inbox_ns", "scheduled_ns"], 0),
        token_ns=[],
        write_ns=[],
        finish_reason=FinishReason.REJECTED,
        error_code="overloaded",
    )
    Logs(summary_interval_s=10.0).on_finish(rejected)
    fields = request_fields(caplog)
    assert fields["error_code"] == "overloaded"
    assert fields.keys().isdisjoint({"ttft_ms", "tpot_ms", "queue_ms"})


def test_a_fault_of_the_server_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    Logs(summary_interval_s=10.0).on_finish(make_timeline(finish_reason=FinishReason.ERROR, error_code="engine_dead"))
    assert request_fields(caplog)["level"] == "warning"


def test_the_log_has_why_a_grammar_failed_beside_the_id_of_its_request(caplog: pytest.LogCaptureFixture) -> None:
    error = "Current row has 2003 items; max is 2000"
    Logs(summary_interval_s=10.0).on_finish(make_timeline(finish_reason=FinishReason.ERROR, grammar_error=error))
    fields = request_fields(caplog)
    assert (fields["request_id"], fields["grammar_error"]) == ("r-1", error)


def test_lifecycle_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    for state in (LifecycleState.WARMUP, LifecycleState.DRAINING):
        StateLog().on_lifecycle(state)
    assert caplog.messages == ["server is warming up", "server is draining"]
    assert [vars(record)["state"] for record in caplog.records] == ["warmup", "draining"]


def run_steps(logs: Logs, start_ns: int, count: int) -> None:
    """`count` steps of 100 ms, each with a token for two requests, whose gaps are 100 ms and 10 ms."""
    for index in range(count):
        end_ns = start_ns + (index + 1) * 100 * MS
        step = make_step(
            start_ns=end_ns - 100 * MS,
            tokens_ns=end_ns,
            end_ns=end_ns,
            num_running=2,
            num_waiting=1,
            num_used_blocks=25,
            num_decode_seqs=2,
        )
        slow = make_timeline(token_ns=[end_ns - 100 * MS, end_ns])
        fast = make_timeline(token_ns=[end_ns - 10 * MS, end_ns])
        logs.on_step(step, Advanced.newest([slow, fast]))


def summaries(caplog: pytest.LogCaptureFixture) -> list[dict[str, object]]:
    return [vars(record) for record in caplog.records if record.getMessage() == "summary"]


def test_there_is_a_summary_each_interval_while_there_is_work(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    run_steps(Logs(summary_interval_s=10.0), start_ns=50 * S, count=250)
    told = summaries(caplog)
    assert len(told) == 2
    for fields in told:
        assert (fields["running"], fields["waiting"], fields["kv_usage"]) == (2, 1, 0.25)
        assert fields["tokens_per_s"] == 20.0
        assert fields["itl_p50_ms"] == pytest.approx(10, rel=0.06)
        assert fields["itl_p99_ms"] == pytest.approx(100, rel=0.06)


def test_idle_time_does_not_dilute_the_rate(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    logs = Logs(summary_interval_s=10.0)
    run_steps(logs, start_ns=50 * S, count=99)
    run_steps(logs, start_ns=5000 * S, count=100)
    assert [fields["tokens_per_s"] for fields in summaries(caplog)] == [20.0]


def test_an_interval_of_zero_means_no_summaries(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    run_steps(Logs(summary_interval_s=0.0), start_ns=50 * S, count=250)
    assert summaries(caplog) == []


@pytest.mark.usefixtures("_own_logging")
@pytest.mark.parametrize(("log_format", "is_json"), [("auto", True), ("json", True), ("text", False)])
def test_a_file_gets_json_unless_text_is_asked_for(log_format: str, is_json: bool, tmp_path: Path) -> None:
    path = tmp_path / "log"
    config = ObserveConfig(log_format=log_format)  # type: ignore[arg-type]
    with path.open("w") as stream:
        output = configure(config, stream)
        logging.getLogger("roseinfer.test").info("hello", extra={"request_id": "r-1"})
        output.close()
        output.close()
    [line] = path.read_text().splitlines()
    assert line.startswith("{") == is_json
    assert "hello" in line
    assert "r-1" in line
    assert output.num_dropped == 0


@pytest.mark.usefixtures("_own_logging")
def test_a_terminal_gets_text() -> None:
    leader, follower = os.openpty()
    with os.fdopen(leader, "rb"), os.fdopen(follower, "w") as stream:
        output = configure(ObserveConfig(), stream)
        logging.getLogger("roseinfer.test").info("hello")
        output.close()
        assert os.read(leader, 1000).rstrip().endswith(b"INFO    hello")


@pytest.mark.usefixtures("_own_logging")
def test_libraries_speak_from_warning_on_and_we_from_the_level_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("w") as stream:
        output = configure(ObserveConfig(log_level="debug", log_format="text"), stream)
        for name in ("roseinfer.test", "aiohttp"):
            for level in (logging.DEBUG, logging.WARNING):
                logging.getLogger(name).log(level, "%s %d", name, level)
        output.close()
    words = [line.split()[2:] for line in path.read_text().splitlines()]
    assert words == [["roseinfer.test", "10"], ["roseinfer.test", "30"], ["aiohttp", "30"]]


@pytest.mark.usefixtures("_own_logging")
def test_what_is_said_after_the_end_is_no_line_of_another_form(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A thread of an exporter may outlive the log, with a collector that does not answer."""
    with (tmp_path / "log").open("w") as file:
        configure(ObserveConfig(), file).close()
    logging.getLogger("roseinfer.late").warning("late")
    assert capsys.readouterr().err == ""


def test_a_reader_that_stalls_costs_lines_and_nothing_else() -> None:
    reader, writer = os.pipe()
    output = LogOutput(writer, JsonFormatter(), num_lines=10)
    output.start()
    for _ in range(2000):
        output.handler.handle(make_record("x" * 1000))
    assert output.num_dropped >= 1000
    with open(reader, "rb", buffering=0) as pipe:
        first = pipe.read(65536)
        assert first is not None
        assert json.loads(first.splitlines()[0])["message"] == "x" * 1000
    # The reader has gone: what is still queued is dropped too, and the thread ends all the same.
    output.close()
    os.close(writer)
    assert output.num_dropped >= 1900


def test_a_record_that_cannot_be_formatted_is_dropped_and_counted(capsys: pytest.CaptureFixture[str]) -> None:
    output = LogOutput(2, JsonFormatter())
    record = make_record("%d")
    record.args = ("not a number",)
    output.handler.handle(record)
    assert output.num_dropped == 1
    assert capsys.readouterr().err == ""


def test_a_line_survives_a_stream_that_others_made_non_blocking() -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    output = LogOutput(writer, JsonFormatter())
    output.start()
    for _ in range(100):
        output.handler.handle(make_record("y" * 2000))
    with os.fdopen(reader) as pipe:
        lines = [json.loads(pipe.readline())["message"] for _ in range(100)]
        output.close()
        os.close(writer)
        assert pipe.read() == ""
    assert lines == ["y" * 2000] * 100
    assert output.num_dropped == 0


STALLED = """
import logging, sys
from roseinfer.config.options import ObserveConfig
from roseinfer.messages import EngineInfo
from roseinfer.observe.logs import configure

output = configure(ObserveConfig(), sys.stderr)
for _ in range(20_000):
    logging.getLogger("roseinfer").info("z" * 500)
output.close(timeout_s=0.2)
sys.exit(3 if output.num_dropped else 4)
"""


def test_a_process_whose_stderr_is_stuck_still_exits_with_its_own_code() -> None:
    process = subprocess.Popen([sys.executable, "-c", STALLED], stderr=subprocess.PIPE)
    try:
        assert process.wait(timeout=60) == 3
    finally:
        process.kill()
        process.communicate()


def test_every_field_of_a_line_is_documented(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    logs = Logs(summary_interval_s=10.0)
    logs.on_finish(make_timeline(finish_reason=FinishReason.ERROR, error_code="engine_dead"))
    run_steps(logs, start_ns=50 * S, count=150)
    assert len(caplog.records) == 2
    fields = {name for record in caplog.records for name in json.loads(JsonFormatter().format(record))}
    fields |= {*json.loads(JsonFormatter().format(failing_record("x"))), *EngineInfo.__struct_fields__}
    page = (Path(__file__).parents[3] / "docs" / "logging.md").read_text(encoding="utf-8")
    assert [name for name in sorted(fields) if f"`{name}`" not in page] == []
