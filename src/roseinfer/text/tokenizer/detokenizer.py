"""Turns token ids into text as they come, and matches stop strings in it.

A token is a run of bytes, and text is the incremental UTF-8 decoding of their concatenation: at most three bytes, the
beginning of a character, are pending at any time, and nothing is decoded twice.
"""

import codecs
from collections.abc import Callable, Iterable, Sequence


class Detokenizer:
    """The text of one sequence.

    `token_bytes` maps an id to the bytes it adds to the text. The text ends before the stop string that is complete
    first (of two complete at once, before the longer), or with `includes_stop` behind it. Characters that could begin
    a stop string are held back until they cannot, so the result does not depend on how the ids were grouped.
    """

    def __init__(
        self, token_bytes: Callable[[int], bytes], stop: Sequence[str] = (), *, includes_stop: bool = False
    ) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._stop = tuple(stop)
        self._includes_stop = includes_stop
        self._longest_stop = max(map(len, self._stop), default=0)
        self._held = ""
        self.num_chars = 0  # decoded so far, held or not: where the next token's text begins
        self.stopped = False
        self.stop_string: str | None = None  # at which the text has stopped

    def push(self, token_ids: Iterable[int]) -> str:
        """Decode tokens and return the text that has become certain; empty after a stop string."""
        return self._match_stop(self._decoder.decode(b"".join(map(self._token_bytes, token_ids))))

    def flush(self) -> str:
        """End the text and return what was held back. A character cut short becomes U+FFFD."""
        text = self._match_stop(self._decoder.decode(b"", final=True))
        held, self._held = self._held, ""
        return text + held

    def _match_stop(self, text: str) -> str:
        """Find a stop string, or hold back what may begin one; return the text before it."""
        if self.stopped or not text:
            return ""
        self.num_chars += len(text)
        if not self._stop:
            return text
        text = self._held + text
        if ends := [(start + len(s), start, s) for s in self._stop if (start := text.find(s)) >= 0]:
            self.stopped, self._held = True, ""
            end, start, self.stop_string = min(ends)
            return text[: end if self._includes_stop else start]
        start = first_candidate(text, self._stop, self._longest_stop)
        self._held = text[start:]
        return text[:start]


def first_candidate(text: str, words: Sequence[str], longest: int) -> int:
    """Where the longest tail of `text` that begins a word, of up to `longest` characters, starts; else `len(text)`."""
    begin = max(0, len(text) - longest + 1)
    if not any(word[0] in text[begin:] for word in words):  # as nearly always
        return len(text)
    for start in range(begin, len(text)):
        tail = text[start:]
        if any(word.startswith(tail) for word in words):
            return start
    return len(text)


def text_offsets(token_bytes: Callable[[int], bytes], token_ids: Iterable[int]) -> list[int]:
    """Characters of the text before each token, and last how many the text has."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    offsets, num_chars = [], 0
    for token_id in token_ids:
        offsets.append(num_chars)
        num_chars += len(decoder.decode(token_bytes(token_id)))
    return [*offsets, num_chars + len(decoder.decode(b"", final=True))]
