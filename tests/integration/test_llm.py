"""`LLM` from the threads that use it: streams, results, aborts, stop strings, and an end that leaves nothing behind."""

import io
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path

import pytest

from roseinfer.bench.runs import StepLog
from roseinfer.cli import main
from roseinfer.config import Config, EngineConfig, ServerConfig
from roseinfer.engine.client import AsyncEngine
from roseinfer.errors import EngineDead, InvalidRequest, Overloaded, PromptTooLong
from roseinfer.llm import LLM
from roseinfer.messages import SamplingParams
from roseinfer.records import FinishReason
from tests.integration.fake_llm import text_of, use_fake_engine, write_tokenizer
from tests.unit.engine.harness import make_request, run_alone


def greedy(max_tokens: int, **params: object) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **params)  # type: ignore[arg-type]


def expected_tokens(prompt: list[int], max_tokens: int) -> list[int]:
    return run_alone(make_request("alone", prompt, max_tokens=max_tokens))


def until(condition: Callable[[], bool]) -> None:
    """Wait for what another thread is about to do."""
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    write_tokenizer(tmp_path)
    return tmp_path


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch, checkpoint: Path) -> list[AsyncEngine]:
    return use_fake_engine(monkeypatch, checkpoint, latency_s=0.002)


@pytest.fixture
def log() -> StepLog:
    return StepLog()


@pytest.fixture
def llm(engines: list[AsyncEngine], log: StepLog) -> Iterator[LLM]:
    with LLM(observers=[log]) as llm:
        yield llm


def test_a_stream_is_the_text_of_the_engines_tokens(llm: LLM) -> None:
    prompt = llm.encode("Hello")
    tokens = expected_tokens(prompt, 20)
    assert "".join(llm.stream(llm.submit("Hello", greedy(20)))) == text_of(tokens)
    pieces = list(llm.stream_tokens(llm.submit(prompt, greedy(20))))
    assert [token for piece in pieces for token in piece] == tokens
    done = llm.result(llm.submit(prompt, greedy(20)))
    assert (done.text, done.token_ids, done.finish_reason) == (text_of(tokens), tokens, FinishReason.LENGTH)


def test_generate_keeps_the_order_of_mixed_prompts(llm: LLM) -> None:
    prompts: list[str | list[int]] = ["one", [1, 2, 3], "a longer one " * 3, "one"]
    done = llm.generate(prompts, greedy(7))
    ids = [prompt if isinstance(prompt, list) else llm.encode(prompt) for prompt in prompts]
    assert [completion.token_ids for completion in done] == [expected_tokens(prompt, 7) for prompt in ids]
    assert [completion.timeline.num_prompt_tokens for completion in done] == [len(prompt) for prompt in ids]


def test_the_timeline_is_whole_and_in_order(llm: LLM) -> None:
    timeline = llm.result(llm.submit("Hello", greedy(5))).timeline
    stamps = [
        *(timeline.recv_ns, timeline.parsed_ns, timeline.tokenized_ns, timeline.inbox_ns, timeline.scheduled_ns),
        *(*timeline.token_ns, timeline.end_ns),
    ]
    assert len(timeline.token_ns) == 5
    assert stamps[0] > 0
    assert stamps == sorted(stamps)
    assert llm.timeline(timeline.request_id) is timeline


def test_the_stream_interval_groups_tokens_and_moves_no_stamp(engines: list[AsyncEngine]) -> None:
    with LLM(Config(server=ServerConfig(stream_interval=4))) as llm:
        request_id = llm.submit("Hello", greedy(11))
        assert [len(piece) for piece in llm.stream_tokens(request_id)] == [1, 4, 4, 2]
        timeline = llm.timeline(request_id)
        assert (len(timeline.token_ns), len(timeline.write_ns)) == (11, 4)


def test_an_unknown_id_ends_at_once(llm: LLM) -> None:
    assert list(llm.stream("nobody")) == []
    assert list(llm.stream_tokens("nobody")) == []
    llm.abort("nobody")
    with pytest.raises(KeyError):
        llm.result("nobody")
    request_id = llm.submit("Hello", greedy(2))
    assert "".join(llm.stream(request_id)) != ""
    assert list(llm.stream(request_id)) == [], "a stream can be read once"


def test_leaving_a_stream_early_aborts_the_request(llm: LLM, engines: list[AsyncEngine], log: StepLog) -> None:
    request_id = llm.submit("Hello", greedy(100))
    with closing(llm.stream_tokens(request_id)) as pieces:  # type: ignore[type-var]
        assert len(list(islice(pieces, 3))) == 3
    until(lambda: engines[0].num_unfinished == 0)
    timeline = llm.timeline(request_id)
    assert timeline.finish_reason is FinishReason.ABORT
    assert len(timeline.token_ns) < 100
    assert log.steps[-1].num_used_blocks == 0


def test_abort_ends_what_nobody_reads(llm: LLM, engines: list[AsyncEngine]) -> None:
    ids = [llm.submit("Hello", greedy(100)) for _ in range(20)]
    for request_id in ids:
        llm.abort(request_id)
    until(lambda: engines[0].num_unfinished == 0)
    until(lambda: {llm.timeline(request_id).finish_reason for request_id in ids} == {FinishReason.ABORT})


def test_a_stop_string_ends_the_text_before_it(llm: LLM, engines: list[AsyncEngine]) -> None:
    text = text_of(expected_tokens(llm.encode("Hello"), 60))
    stop = text[10:13]
    done = llm.result(llm.submit("Hello", greedy(60), stop=[stop]))
    assert done.text == text[: text.index(stop)]
    assert done.finish_reason is FinishReason.STOP
    until(lambda: engines[0].num_unfinished == 0)
    assert len(llm.timeline(done.timeline.request_id).token_ns) < 60


def test_a_stop_token_is_counted_and_not_shown(llm: LLM) -> None:
    tokens = expected_tokens(llm.encode("Hello"), 30)
    stop = next(token for token in tokens[5:] if token < 95)
    done = llm.result(llm.submit("Hello", greedy(30, stop_token_ids=(stop,))))
    end = tokens.index(stop)
    assert done.token_ids == tokens[: end + 1]
    assert done.text == text_of(tokens[:end])
    assert done.finish_reason is FinishReason.STOP


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "error"),
    [("", 1, InvalidRequest), ([], 1, InvalidRequest), ([97], 1, InvalidRequest), ([-1], 1, InvalidRequest),
     ("x" * 129, 1, PromptTooLong), ("x" * 100, 29, PromptTooLong)],
)  # fmt: skip
def test_a_prompt_that_cannot_run_is_refused(
    prompt: str | list[int], max_tokens: int, error: type[Exception], llm: LLM, engines: list[AsyncEngine]
) -> None:
    with pytest.raises(error):
        llm.submit(prompt, greedy(max_tokens))
    with pytest.raises(error):
        llm.generate(["fine", prompt], greedy(max_tokens))
    assert engines[0].num_unfinished == 0
    assert llm.result(llm.submit("x" * 100, greedy(28))).finish_reason is FinishReason.LENGTH


def test_tokenize_workers_take_encoding_off_the_caller(engines: list[AsyncEngine]) -> None:
    with LLM(tokenize_workers=2) as llm:
        ids = [llm.submit("Hello", greedy(5)) for _ in range(8)]
        tokens = expected_tokens(llm.encode("Hello"), 5)
        assert [llm.result(request_id).token_ids for request_id in ids] == [tokens] * 8
        refused = llm.submit("x" * 200, greedy(5))
        with pytest.raises(PromptTooLong):
            llm.result(refused)
        assert llm.timeline(refused).finish_reason is FinishReason.REJECTED


def test_max_inflight_refuses_and_places_come_back(engines: list[AsyncEngine]) -> None:
    with LLM(max_inflight=2) as llm:
        ids = [llm.submit("Hello", greedy(50)) for _ in range(2)]
        with pytest.raises(Overloaded):
            llm.submit("Hello", greedy(1))
        for request_id in ids:
            llm.result(request_id)
        with pytest.raises(PromptTooLong):
            llm.submit("x" * 200, greedy(1))  # takes no place for good
        assert [llm.result(llm.submit("Hello", greedy(1))).token_ids for _ in range(3)]


def test_prefixes_are_shared_within_a_salt_only(llm: LLM) -> None:
    prompt = "a shared beginning of forty characters!!"
    cached = [
        llm.result(llm.submit(prompt, greedy(2), cache_salt=salt)).timeline.num_cached_tokens
        for salt in ("a", "a", "b")
    ]
    assert cached[0] == cached[2] == 0
    assert cached[1] > 0


def test_close_ends_streams_joins_threads_and_may_be_called_twice(engines: list[AsyncEngine]) -> None:
    before = set(threading.enumerate())
    llm = LLM()
    request_id = llm.submit("Hello", greedy(120))
    received: list[str] = []
    reader = threading.Thread(target=lambda: received.extend(llm.stream(request_id)))
    reader.start()
    until(lambda: bool(received))
    llm.close()
    reader.join(10)
    assert not reader.is_alive()
    assert llm.timeline(request_id).finish_reason is FinishReason.ABORT
    until(lambda: set(threading.enumerate()) <= before)
    llm.close()


def test_a_start_that_fails_leaves_no_thread(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use_fake_engine(monkeypatch, tmp_path)  # a directory without a tokenizer
    before = set(threading.enumerate())
    with pytest.raises(Exception, match=re.escape("tokenizer.json")):
        LLM()
    until(lambda: set(threading.enumerate()) <= before)


def test_a_dead_engine_ends_every_stream_with_an_error(llm: LLM, engines: list[AsyncEngine]) -> None:
    ids = [llm.submit("Hello", greedy(100)) for _ in range(3)]
    stream = llm.stream(ids[0])
    next(stream)
    llm._loop.call_soon_threadsafe(engines[0]._on_death, "the engine's process has ended")
    with pytest.raises(EngineDead, match="has ended"):
        list(stream)
    for request_id in ids[1:]:
        with pytest.raises(EngineDead):
            llm.result(request_id)
    assert {llm.timeline(request_id).finish_reason for request_id in ids} == {FinishReason.ERROR}
    with pytest.raises(EngineDead):
        llm.result(llm.submit("Hello", greedy(1)))


# --- the terminal's commands, which are thin users of the same object ----------------------------------------------


def test_generate_command_streams_the_completion(
    engines: list[AsyncEngine], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "Hello", "--max-tokens", "9"]) == 0
    prompt = [ord(char) - 0x20 for char in "Hello"]
    assert capsys.readouterr().out == text_of(expected_tokens(prompt, 9)) + "\n"


def test_generate_command_refuses_what_does_not_fit(
    engines: list[AsyncEngine], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "Hello", "--max-tokens", "500"]) == 2
    assert capsys.readouterr().err.startswith("roseinfer: prompt: ")


def test_chat_command_keeps_the_conversation_and_clears_it(
    engines: list[AsyncEngine], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = ["Hi", "/nope", "", "/help", "/clear", "Hi", "x" * 120, "/exit", "never read"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    assert main(["chat", "--system", "be brief", "--temperature", "0", "--max-tokens", "8"]) == 0
    out, err = capsys.readouterr()
    prompt = [0 if char == " " else ord(char) - 0x20 for char in "system:be brief;user:Hi;"]
    assert out == (text_of(expected_tokens(prompt, 8)) + "\n") * 2
    assert "no command /nope" in err
    assert "/clear   forget the conversation" in err
    assert "do not fit" in err


def test_chat_command_answers_until_the_end_of_input(
    engines: list[AsyncEngine], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hi\nAnd\n"))
    assert main(["chat", "--temperature", "0", "--max-tokens", "4"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    conversation = f"user:Hi;assistant:{first};user:And;"
    prompt = [0 if char == " " else ord(char) - 0x20 for char in conversation]
    assert second == text_of(expected_tokens(prompt, 4))


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Ctrl-C arrives in the first stream after three pieces; returns the ids of all streams."""
    ids: list[str] = []
    stream = LLM.stream

    def stream_until_ctrl_c(llm: LLM, request_id: str) -> Iterator[str]:
        ids.append(request_id)
        for i, piece in enumerate(stream(llm, request_id)):
            if i == 3 and len(ids) == 1:
                raise KeyboardInterrupt
            yield piece

    monkeypatch.setattr(LLM, "stream", stream_until_ctrl_c)
    return ids


def test_ctrl_c_stops_the_answer_and_not_the_conversation(
    engines: list[AsyncEngine],
    interrupted: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hi\nAnd\n"))
    assert main(["chat", "--temperature", "0", "--max-tokens", "9"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    prompt = [ord(char) - 0x20 for char in "user:Hi;"]
    whole = text_of(expected_tokens(prompt, 9))
    assert whole.startswith(first)
    assert 0 < len(first) < len(whole)
    assert second
    assert len(interrupted) == 2


def test_ctrl_c_ends_generate(engines: list[AsyncEngine], interrupted: list[str]) -> None:
    assert main(["generate", "Hello", "--max-tokens", "20"]) == 130
    assert engines[0].num_unfinished == 0


def test_chat_command_needs_a_template(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tokenizer(tmp_path, chat_template=None)
    use_fake_engine(monkeypatch, tmp_path)
    assert main(["chat"]) == 2
    assert "has no chat template" in capsys.readouterr().err


def test_the_engine_config_reaches_the_client(engines: list[AsyncEngine]) -> None:
    with LLM(Config(engine=EngineConfig(step_timeout_s=3))) as llm:
        assert llm.config.engine.step_timeout_s == 3
        assert engines[0]._step_timeout_ns == 3_000_000_000
