"""Turns a corpus of inputs into inputs like them, by a seed: so that a run finds the same again."""

import copy
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

CORPUS = Path(__file__).parent / "corpus"
_TOKENS = (
    *(b"\r\n", b"\n", b"\r", b"\0", b" ", b":", b",", b"{", b"}", b"[", b"]", b'"', b"\\", b"\\u", b"null", b"true"),
    *(b"NaN", b"-1", b"0", b"1e999", b"9" * 400, b"\xff", b"\xc3", b"\xed\xa0\x80", b"Content-Length: 5\r\n", b"%00"),
    *(b"Transfer-Encoding: chunked\r\n", b"Host: y\r\n", b"HTTP/1.1", b"[" * 300, b'{"a":' * 300, b"\xe2\x80\xae"),
)


def corpus(name: str) -> list[tuple[str, bytes]]:
    """File name and content of each kept input. One that ever failed belongs here."""
    return [(path.name, path.read_bytes()) for path in sorted((CORPUS / name).iterdir())]


def mutated(seeds: Sequence[bytes], num: int, seed: int) -> Iterator[bytes]:
    """`num` inputs, each one to four changes away from an input of the corpus, or from a splice of two."""
    random = Random(seed)
    for _ in range(num):
        content = bytearray(random.choice(seeds))
        for _ in range(random.randint(1, 4)):
            _change(content, seeds, random)
        yield bytes(content)


def check_each(contents: Iterable[bytes], check: Callable[[bytes], object]) -> int:
    """Checks all inputs, and returns of how many the check is true. The error of one shows it, for the corpus."""
    num_true = 0
    for content in contents:
        try:
            num_true += bool(check(content))
        except Exception as error:
            raise AssertionError(f"keep this in the corpus: {content!r}") from error
    return num_true


def _change(content: bytearray, seeds: Sequence[bytes], random: Random) -> None:
    start = random.randint(0, len(content))
    end = min(len(content), start + random.randint(0, 8))
    match random.randint(0, 4):
        case 0:
            content[start:end] = random.choice(_TOKENS)
        case 1:
            content[start:start] = random.choice(_TOKENS)
        case 2:
            content[start:end] = b""
        case 3:
            content[start:end] = random.randbytes(end - start)
        case _:
            other = random.choice(seeds)
            content[start:] = other[random.randint(0, len(other)) :]


def mutated_objects(seeds: Sequence[dict[str, Any]], num: int, seed: int) -> Iterator[bytes]:
    """`num` JSON objects, each one to three values away from the union of two of the seeds."""
    random = Random(seed)
    values = [value for fields in seeds for value in fields.values()]
    for _ in range(num):
        changed: dict[str, Any] = copy.deepcopy(random.choice(seeds) | random.choice(seeds))
        for _ in range(random.randint(1, 3)):
            _change_value(changed, values, random)
        yield json.dumps(changed).encode()


def _change_value(within: dict[str, Any] | list[Any], values: Sequence[Any], random: Random) -> None:
    """Change a value at any depth: to another seed's, to one near it, to none, or to two."""
    places: list[Any] = list(within if isinstance(within, dict) else range(len(within)))
    if not places:
        return
    place = random.choice(places)
    value: Any = within[place]
    if isinstance(value, dict | list) and random.random() < 0.7:
        _change_value(value, values, random)
        return
    match random.randint(0, 3), value:
        case 0, _:
            del within[place]
        case 1, int() | float():
            within[place] = value * random.choice((-1, 0.5, 2, 1 + 2**-52, 1e-9, 1e9))
        case 1, str():
            within[place] = value + random.choice(("", "\0", "é", "😀", "<", "]", "a" * 300)) + value[::-1]
        case 2, list():
            within[place] = value * 2
        case _:
            within[place] = copy.deepcopy(random.choice(values))
