"""Turns grammars into matchers in a thread beside the engine's, and keeps the grammars that were used last.

Everything here has passed `checker.py` in the front end, so it compiles, in about the time that it took there; the
library gives the interpreter up meanwhile, so steps go on. Knows no sequence.
"""

from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor

from roseinfer.engine.core.constraint import Matcher
from roseinfer.messages import Grammar
from roseinfer.text.grammar.library import Compiled, Vocabulary, can_grow

ENTRY_BYTES = 128 << 10  # what a compiled grammar of a few properties takes
_BYTES_PER_SOURCE_BYTE = 32  # and what longer ones take more
# And what those with expressions or lengths gain while they are followed; at worst five times it.
_GROWTH_BYTES = 1 << 20

CACHE_BYTES = 32 << 20  # some 200 grammars, or 28 with expressions or lengths, which grow with use


class GrammarCache:
    """Compiled grammars, least recently used first, up to a number of bytes. One thread uses it.

    The newest stays however large it is: the other sequences of its request want it next.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[Grammar, Compiled] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, grammar: Grammar) -> Compiled | None:
        compiled = self._entries.get(grammar)
        if compiled is not None and compiled.is_worn:  # its sequences keep it to their end
            del self._entries[grammar]
            self.num_bytes -= entry_bytes(grammar)
            return None
        if compiled is not None:
            self._entries.move_to_end(grammar)
        return compiled

    def put(self, grammar: Grammar, compiled: Compiled) -> None:
        self._entries[grammar] = compiled
        self.num_bytes += entry_bytes(grammar)
        while self.num_bytes > self._max_bytes and len(self._entries) > 1:
            oldest, _ = self._entries.popitem(last=False)
            self.num_bytes -= entry_bytes(oldest)


def entry_bytes(grammar: Grammar) -> int:
    """About what a compiled grammar takes."""
    growth = _GROWTH_BYTES if can_grow(grammar) else 0
    return ENTRY_BYTES + _BYTES_PER_SOURCE_BYTE * len(grammar.source) + growth


class GrammarCompiler:
    """`engine/core/constraint.py:Grammars` with one thread."""

    def __init__(self, vocabulary: Vocabulary, cache_bytes: int = CACHE_BYTES) -> None:
        self._vocabulary = vocabulary
        self._cache = GrammarCache(cache_bytes)
        self._thread = ThreadPoolExecutor(1, "grammar")

    @property
    def vocab_size(self) -> int:
        """See Grammars."""
        return self._vocabulary.vocab_size

    def open(self, grammar: Grammar) -> "Future[Matcher]":
        """See Grammars. The future raises InvalidRequest for what does not compile."""
        return self._thread.submit(self._open, grammar)

    def _open(self, grammar: Grammar) -> Matcher:
        compiled = self._cache.get(grammar)
        if compiled is None:
            compiled = self._vocabulary.compile(grammar)
            self._cache.put(grammar, compiled)
        return compiled.matcher()
