"""Lines and files of a batch that are not what they should be."""

import os
from pathlib import Path

import pytest

from roseinfer.batch.command import read_lines
from roseinfer.batch.lines import custom_id_of, parse_line
from roseinfer.errors import ConfigError, InvalidRequest


def test_a_line_that_is_nested_too_deeply_is_refused_by_itself() -> None:
    """The lines around it have their answers."""
    line = b'{"custom_id":"a","body":' + b"[" * 200_000 + b"]" * 200_000 + b"}"
    assert custom_id_of(line) is None
    with pytest.raises(InvalidRequest, match="The line is nested too deeply"):
        parse_line(line)


def test_what_can_be_read_only_once_is_refused() -> None:
    """The lines are counted first, so that of a pipe none would be left."""
    reading, writing = os.pipe()
    os.write(writing, b"{}\n")
    os.close(writing)
    try:
        with pytest.raises(ConfigError, match=r"--input: /dev/fd/.* is no regular file"):
            list(read_lines(Path(f"/dev/fd/{reading}")))
    finally:
        os.close(reading)


def test_a_mark_of_byte_order_and_ends_of_windows_are_no_part_of_lines(tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    file.write_bytes(b"\xef\xbb\xbf{}\r\n\r\n{}")
    assert list(read_lines(file)) == [(0, b"{}"), (2, b"{}")]


@pytest.mark.parametrize("value", ["NaN", r'"\ud800"'])
def test_what_another_reader_takes_leaves_a_line_its_name(value: str) -> None:
    """Python's `json.dumps` writes either: the error of such a line is found by its name."""
    line = f'{{"custom_id":"a","method":"POST","url":"/v1/completions","body":{{"prompt":{value}}}}}'.encode()
    assert custom_id_of(line) == "a"
    with pytest.raises(InvalidRequest, match="The line is no JSON object"):
        parse_line(line)


@pytest.mark.parametrize("line", [b"{", b"[]", b"\xff", rb'{"custom_id":"\ud800"}', b'{"custom_id":NaN}'])
def test_a_line_without_a_name_that_can_be_written_has_none(line: bytes) -> None:
    assert custom_id_of(line) is None
