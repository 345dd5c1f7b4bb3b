"""Headers that lie: of their own length, of where tensors begin and end, of what they overlap. Never a crash."""

import contextlib
import json
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from roseinfer.errors import ConfigError
from tests.unit.model.conftest import Shape, write_checkpoint
from tests.unit.model.weights.test_checkpoint import build, refusal

SHAPE = Shape()
Header = dict[str, Any]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "tiny", SHAPE)


def split(directory: Path) -> tuple[Header, bytes]:
    content = (directory / "model.safetensors").read_bytes()
    (length,) = struct.unpack_from("<Q", content)
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def join(directory: Path, header: bytes | Header, data: bytes, length: int | None = None) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    prefix = struct.pack("<Q", len(text) if length is None else length)
    (directory / "model.safetensors").write_bytes(prefix + text + data)


def first_two(header: Header) -> tuple[Header, Header]:
    one, two, *_ = sorted((entry for name, entry in header.items() if name != "__metadata__"), key=offsets)
    return one, two


def offsets(entry: Header) -> list[int]:
    found: list[int] = entry["data_offsets"]
    return found


def past_the_end(header: Header, size: int) -> None:
    first_two(header)[0]["data_offsets"] = [size, size + 4]


def overlapping(header: Header, _: int) -> None:
    one, two = first_two(header)
    begin, end = offsets(two)
    two["data_offsets"] = [begin - 4, end - 4]
    assert one is not two


def same_bytes_twice(header: Header, _: int) -> None:
    one, two = first_two(header)
    two.update(one)


def backwards(header: Header, _: int) -> None:
    one, _two = first_two(header)
    one["data_offsets"] = one["data_offsets"][::-1]


def negative(header: Header, _: int) -> None:
    first_two(header)[0]["data_offsets"] = [-4, 0]


def too_large_to_count(header: Header, _: int) -> None:
    first_two(header)[0]["data_offsets"] = [0, 2**64 - 1]


def shape_without_end(header: Header, _: int) -> None:
    first_two(header)[0]["shape"] = [2**62, 2**62]


def unknown_type(header: Header, _: int) -> None:
    first_two(header)[0]["dtype"] = "OBJECT"


def hole(header: Header, _: int) -> None:
    name = next(name for name, entry in header.items() if entry is first_two(header)[0])
    del header[name]


LIES = [past_the_end, overlapping, same_bytes_twice, backwards, negative]
LIES += [too_large_to_count, shape_without_end, unknown_type, hole]


@pytest.mark.parametrize("lie", LIES, ids=lambda lie: lie.__name__)
def test_a_header_that_lies_is_refused(directory: Path, lie: Any) -> None:
    header, data = split(directory)
    lie(header, len(data))
    join(directory, header, data)
    refusal(directory)


@pytest.mark.parametrize("length", [0, 1, 2**31, 2**63 - 1, 2**64 - 1])
def test_a_length_that_lies_is_refused(directory: Path, length: int) -> None:
    header, data = split(directory)
    join(directory, header, data, length)
    refusal(directory)


@pytest.mark.parametrize("text", [b"{", b"[]", b"null", b'{"a": 1}', b"\xff\xfe", b"[" * 100_000])
def test_a_header_that_is_no_table_is_refused(directory: Path, text: bytes) -> None:
    join(directory, text, split(directory)[1])
    refusal(directory)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.lists(st.tuples(st.integers(0, 1 << 16), st.integers(0, 255)), min_size=1, max_size=6))
def test_any_bytes_in_a_header_are_a_model_or_a_sentence(directory: Path, changes: list[tuple[int, int]]) -> None:
    path = directory / "model.safetensors"
    original = path.read_bytes()
    length = 8 + struct.unpack_from("<Q", original)[0]
    changed = bytearray(original)
    for place, value in changes:
        changed[place % length] = value
    path.write_bytes(bytes(changed))
    with contextlib.suppress(ConfigError):  # a changed name in the metadata, say, is no fault
        build(directory)
    path.write_bytes(original)


@pytest.mark.parametrize("file", ["../model.safetensors", "/etc/passwd", "sub/model.safetensors", "..", "", 7])
def test_an_index_names_files_beside_it_and_no_others(directory: Path, file: object) -> None:
    names = load_file(directory / "model.safetensors")
    index = {"weight_map": dict.fromkeys(names, file)}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "is no safetensors file beside it" in refusal(directory)
