"""The workloads that are served: lists of requests, with texts of an exact number of tokens.

| name | requests | apart | prompt tokens | new tokens |
|---|---|---|---|---|
| W1x32 | 32 | at once | 4 | 8 |
| W2 | 64 | 20 ms, absolute | 1 to 4 | 128 |
| W3 | 128 | at once | 8 and 32 in turn | 128 |
| W4 | 8 | at once | 512 | 64 |
| W4b | 8 | at once | 512, of which 448 in common | 64 |
| S1 | 1 | | 32 | 96 |
| S8 | 8 | at once | 64 | 64 |
| L4 | 4 | at once | 1,500 | 1 |

The first five are GPT-2's, the last three those of the shape of Qwen3-0.6B: one stream, eight, and prompts alone.

Every repeat has prompts of its own, so no server finds them in its cache; in W4b the common prefix is new too, so what
is gained there is gained inside the burst.
"""

import random
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Shape:
    """What a workload looks like, whatever its words are."""

    num_requests: int
    interval_s: float
    prompt_lengths: tuple[int, ...]  # in turn
    new_tokens: int
    num_shared: int = 0  # leading prompt tokens that all requests have in common


WORKLOADS = {
    "W1x32": Shape(32, 0.0, (4,), 8),
    "W2": Shape(64, 0.020, (1, 2, 3, 4), 128),
    "W3": Shape(128, 0.0, (8, 32), 128),
    "W4": Shape(8, 0.0, (512,), 64),
    "W4b": Shape(8, 0.0, (512,), 64, num_shared=448),
    "S1": Shape(1, 0.0, (32,), 96),
    "S8": Shape(8, 0.0, (64,), 64),
    "L4": Shape(4, 0.0, (1500,), 1),
}
GPT2_WORKLOADS = ("W1x32", "W2", "W3", "W4", "W4b")
QWEN3_WORKLOADS = ("S1", "S8", "L4")
BATCH = 128  # sequences in a step that every server is allowed: the most that a workload has


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request: due `at` seconds after the start."""

    at: float
    text: str
    token_ids: list[int]
    new_tokens: int


class Words:
    """Random texts of whole words that are one token each, so that a text's length in tokens is known."""

    def __init__(self, tokenizer_file: Path) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(tokenizer_file))
        words = sorted(
            word
            for word in self._tokenizer.get_vocab()
            if word[0] == "Ġ" and word[1:].isascii() and word[1:].isalpha() and len(word) > 3
        )
        encoded = self._tokenizer.encode_batch([f" {word[1:]}" for word in words], add_special_tokens=False)
        self._words = [word for word, tokens in zip(words, encoded, strict=True) if len(tokens.ids) == 1]

    def draw(self, generator: random.Random, length: int) -> str:
        return "".join(f" {word[1:]}" for word in generator.choices(self._words, k=length))

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids


def requests_of(name: str, words: Words, repeat: int, shape: Shape | None = None) -> list[PlannedRequest]:
    """The requests of one repeat, the same whenever name and repeat are."""
    shape = shape or WORKLOADS[name]
    generator = random.Random(f"{name} {repeat}")
    shared = words.draw(generator, shape.num_shared)
    planned = []
    for i, length in zip(range(shape.num_requests), cycle(shape.prompt_lengths), strict=False):
        text = shared + words.draw(generator, length - shape.num_shared)
        ids = words.encode(text)
        assert len(ids) == length, f"{len(ids)} tokens in place of {length}"
        planned.append(PlannedRequest(i * shape.interval_s, text, ids, shape.new_tokens))
    return planned
