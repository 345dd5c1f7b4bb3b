"""`roseinfer generate` and `roseinfer chat`, which are thin users of `LLM`: what a person at a terminal sees."""

import io
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from roseinfer.cli.main import main
from roseinfer.engine.link.client import AsyncEngine
from roseinfer.llm.llm import LLM
from tests.integration.fake_llm import expected_tokens, text_of, use_fake_engine, write_tokenizer


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[AsyncEngine]:
    write_tokenizer(tmp_path)
    return use_fake_engine(monkeypatch, tmp_path, latency_s=0.002)


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
    assert capsys.readouterr().err.startswith("roseinfer: max_tokens: ")


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


def test_the_prompt_is_not_among_answers_that_go_to_a_file(
    engines: list[AsyncEngine], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = io.StringIO("Hi\n")
    monkeypatch.setattr(lines, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdin", lines)
    assert main(["chat", "--temperature", "0", "--max-tokens", "4"]) == 0
    out, err = capsys.readouterr()
    prompt = [ord(char) - 0x20 for char in "user:Hi;"]
    assert out == text_of(expected_tokens(prompt, 4)) + "\n"
    assert err.endswith("> > ")


def test_an_answer_that_cannot_be_written_is_no_fault_of_the_input(
    engines: list[AsyncEngine], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of an answer too, which a line of the next input would find unwritten."""
    monkeypatch.setattr(LLM, "stream", lambda *_: iter(()))
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hi\n"))
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main(["chat", "--temperature", "0", "--max-tokens", "4"]) == 2
    assert capsys.readouterr().err.endswith("standard output cannot be written: No space left on device\n")


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Ctrl-C arrives in the first stream after a character; returns the ids of all streams.

    Not after so many pieces: tokens that are due together come as one piece, on a busy machine all of them.
    """
    ids: list[str] = []
    stream = LLM.stream

    def stream_until_ctrl_c(llm: LLM, request_id: str) -> Iterator[str]:
        ids.append(request_id)
        for piece in stream(llm, request_id):
            if len(ids) == 1:
                yield piece[:1]
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


def test_chat_command_takes_a_template_from_a_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tokenizer(tmp_path, chat_template=None)
    use_fake_engine(monkeypatch, tmp_path)
    (tmp_path / "mine.jinja").write_text("{{ messages[0].content }}!")
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hi\n"))
    file = str(tmp_path / "mine.jinja")
    assert main(["chat", "--chat-template", file, "--temperature", "0", "--max-tokens", "9"]) == 0
    prompt = [ord(char) - 0x20 for char in "Hi!"]
    assert capsys.readouterr().out == text_of(expected_tokens(prompt, 9)) + "\n"
    assert main(["chat", "--chat-template", file + "x"]) == 2
    assert "server.chat_template" in capsys.readouterr().err
