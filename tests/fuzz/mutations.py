"""Turns a corpus of inputs into inputs like them, by a seed: so that a run finds the same again. Knows no format."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random

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
