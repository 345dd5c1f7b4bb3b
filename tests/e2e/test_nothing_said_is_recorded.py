"""Neither prompts nor completions, as text or as token ids, are in what the server remembers or logs."""

import io
import json
import urllib.request
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tokenizers

import roseinfer
from roseinfer.bench.load.launcher import free_port
from tests.e2e.conftest import StartServer

pytestmark = pytest.mark.e2e

MARKER = "quixotic zeppelin jamboree"
ID_RUN = 4  # this many ids in a row are no coincidence
PATHS = ("steps?limit=8192", "recording", "trace?limit=8192", "requests", "requests/told", "timeline/data?limit=8192")


def fetch(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=20) as response:
        content: bytes = response.read()
        return content


def integer_lists(value: Any) -> Iterator[list[int]]:
    """Every list of integers inside a JSON value."""
    if isinstance(value, dict):
        for inner in value.values():
            yield from integer_lists(inner)
    elif isinstance(value, list):
        if all(isinstance(inner, int) for inner in value):
            yield value
        for inner in value:
            yield from integer_lists(inner)


def holds_run(numbers: list[int], run: list[int]) -> bool:
    return any(numbers[start : start + len(run)] == run for start in range(len(numbers) - len(run) + 1))


def contents(base: str) -> Iterator[tuple[str, bytes, list[list[int]]]]:
    """What each path tells: its name, its bytes with archives unpacked, its lists of integers."""
    for path in PATHS:
        content = fetch(f"{base}/debug/{path}")
        if path == "recording":
            for name, array in np.load(io.BytesIO(content)).items():
                is_json = name in {"meta", "requests"}
                yield name, array.tobytes(), list(integer_lists(json.loads(array.tobytes()))) if is_json else []
        else:
            yield path, content, list(integer_lists(json.loads(content)))


def test_nothing_said_is_recorded(start_server: StartServer) -> None:
    ops_port = free_port()
    server = start_server("--ops-port", str(ops_port), "--observe.log-level", "debug")
    tokenizer = tokenizers.Tokenizer.from_file(f"{roseinfer.__path__[0]}/demo/tokenizer.json")
    body = {"prompt": MARKER, "max_tokens": 24, "ignore_eos": True, "temperature": 0}
    status, reply = server.post("/v1/completions", body, **{"X-Request-Id": "told"})
    assert status == 200
    answer = reply["choices"][0]["text"]
    prompt_ids, answer_ids = tokenizer.encode(MARKER).ids, tokenizer.encode(answer).ids
    assert min(len(prompt_ids), len(answer_ids)) >= ID_RUN
    server.post("/v1/completions", body | {"prompt": prompt_ids}, **{"X-Request-Id": "told-as-ids"})
    told = list(contents(f"http://127.0.0.1:{ops_port}"))
    told.append(("log", server.log_path.read_bytes(), []))
    assert any(b"told-as-ids" in content for _, content, _ in told), "the requests were recorded"
    runs = [ids[start : start + ID_RUN] for ids in (prompt_ids, answer_ids) for start in range(len(ids) - ID_RUN + 1)]
    for name, content, lists in told:
        for text in (*MARKER.split(), answer.strip()):
            assert text.encode() not in content, name
            assert json.dumps(text)[1:-1].encode() not in content, name
        for run in runs:
            for packed in (np.int32, np.int64):
                assert np.array(run, packed).tobytes() not in content, name
            assert ", ".join(map(str, run)).encode() not in content, name
            assert not any(holds_run(numbers, run) for numbers in lists), name


def test_the_scanner_finds_what_is_there() -> None:
    assert holds_run([9, 1, 2, 3, 4, 9], [1, 2, 3, 4])
    assert not holds_run([1, 2, 3], [1, 2, 3, 4])
    assert list(integer_lists({"a": [{"b": [1, 2]}]})) == [[1, 2]]
