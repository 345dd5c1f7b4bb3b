"""Compiles grammars into matchers, which say what token may come next. Only this folder imports llguidance.

The library (docs/adr/0019-structured-output.md) works on the bytes of tokens, builds its automata while it goes, and
counts its work, so that neither a compilation nor a mask takes longer than the limits here allow.
"""

import dataclasses
import re
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path
from typing import cast

import llguidance
import numpy as np
from msgspec.structs import replace

from roseinfer.engine.core.constraint import MaskArray, Matcher
from roseinfer.errors import InvalidRequest
from roseinfer.messages import Grammar, Thought
from roseinfer.text.grammar.library_source import explain, one_line, source_of
from roseinfer.text.grammar.source import GrammarCache
from roseinfer.text.grammar.thoughts import ThoughtMatcher, ThoughtTokens
from roseinfer.text.grammar.tokenizer_file import TokenizerFile
from roseinfer.text.tokenizer.added_tokens import tokenizer_json
from roseinfer.text.tokenizer.tokenizer import read_library_tokenizer
from roseinfer.text.tokenizer.vocabulary import TokenTexts

# In which the worst expression grows by about 5 MiB; a usual one is done with growing before.
MAX_FOLLOWED_NS = 50_000_000
ENTRY_BYTES = 128 << 10  # what a compiled grammar of a few properties takes
_BYTES_PER_SOURCE_BYTE = 32  # and what longer ones take more
# And what those with expressions or lengths gain while they are followed; at worst five times it.
_GROWTH_BYTES = 1 << 20
CACHE_BYTES = 32 << 20  # some 200 grammars, or 28 with expressions or lengths, which grow with use
MAX_FORCED_TOKENS = 4096  # in a row: each mask before them looks at all, 4 ms for 16,000 characters and 38 for 120,000
_LEAST_BETWEEN = 64  # tokens for which a matcher goes on with states of its own before it may have new ones again
_NUM_TRIED = 8  # times that a new grammar is followed: by all that must come next, or by one token of those that may

# Where the library's own default would allow half a gigabyte of automaton; the others are its defaults, written down
# because the bounds in docs/structured-output.md rest on them.
_LIMITS = llguidance.LLParserLimits(
    max_items_in_row=2_000,  # some 490 optional properties; the first mask with 2,000 takes 34 ms
    initial_lexer_fuel=1_000_000,  # about 20 ms
    step_lexer_fuel=200_000,  # about 15 ms; the first mask of a huge schema took 49
    step_max_items=50_000,  # about 3 ms
    max_lexer_states=50_000,  # 1 to 2 kB each
    max_grammar_size=500_000,
    verbose_errors=False,  # they would put the client's grammar into our messages
)
# Texts whose tokens the library looks at all at once. The other three of its four for JSON cost 10 to 13 MB each for
# 150,000 tokens, and gain no mask anything that could be measured (docs/log.md, 2026-11-24).
_SLICES = [r'[^"\\\x00-\x1F\x7F]{1,30}']
# What a schema holds that can grow. Half-quoted are words of which there are several: `patternProperties`, `minLength`
# and `maxLength`, `exclusiveMinimum` and `exclusiveMaximum`. And an escape may spell any of them.
_GROWING = (
    *('"pattern', 'Length"', '"format"', '"minimum"', '"maximum"', '"exclusiveM', '"multipleOf"', "\\u"),
    *('"kind":"regex"', '"kind":"lark"'),  # of a text beside calls
)
_SILENT = 0

# What they are called in errors.
_KINDS = {
    "json_schema": "schema",
    "regex": "regular expression",
    "choice": "list of choices",
    "calls": "schema of a function",
    "lark": "grammar",
    "text": "text",
}


class Vocabulary:
    """The tokens of a checkpoint in the library's form: 50,000 are read in 0.3 s and take 45 MB."""

    def __init__(
        self, tokenizer: llguidance.LLTokenizer, vocab_size: int, file: TokenizerFile, texts: TokenTexts
    ) -> None:
        self.vocab_size = vocab_size  # of the model
        self._tokenizer = tokenizer
        self._file = file
        self._texts = texts
        self._thought_tokens: dict[tuple[str, str], ThoughtTokens] = {}  # by their tags

    @classmethod
    def load(cls, checkpoint_dir: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> "Vocabulary":
        """Read the checkpoint's tokenizer.json; `vocab_size` is the model's. Raises ValueError or OSError."""
        eos = [token_id for token_id in eos_token_ids if token_id < vocab_size]
        file = TokenizerFile.read(tokenizer_json(checkpoint_dir).decode(), eos)
        tokens = _Tokens(file, vocab_size, eos)
        wrapper = cast("llguidance.TokenizerWrapper", tokens)
        tokenizer = llguidance.LLTokenizer(wrapper, eos_token=eos or None, slices=_SLICES)
        tokens.tokens = []  # the library has its own
        tokens.spell_otherwise = tokenizer.greedy_tokenize
        return cls(tokenizer, vocab_size, dataclasses.replace(file, spelling_control=b""), tokens.texts)

    def thought_tokens(self, thought: Thought) -> ThoughtTokens:
        """What thoughts between these tags are made of: any text, and the tags also where they are control."""
        tags = (thought.opening, thought.closing)
        if tags not in self._thought_tokens:
            self._thought_tokens[tags] = self._find_thought_tokens(*tags)
        return self._thought_tokens[tags]

    def knows_tags(self, thought: Thought | None) -> bool:
        """Whether `thought_tokens` has found those between these tags before."""
        return thought is None or (thought.opening, thought.closing) in self._thought_tokens

    def _find_thought_tokens(self, opening: str, closing: str) -> ThoughtTokens:
        tags = {token_id: name for token_id, name in self._file.control.items() if name in {opening, closing}}
        ids = {name: token_id for token_id, name in tags.items()}
        is_allowed = np.zeros(-(-self.vocab_size // 32) * 32, np.bool_)
        is_allowed[: self.vocab_size] = self._texts.lengths[: self.vocab_size] > 0
        is_allowed[list(tags)] = True
        is_allowed_in_tag = is_allowed.copy()
        is_allowed_in_tag[self._texts.find(re.escape(closing[-1].encode()) + rb"\s*[^\s\xff]")] = False
        tokens = ThoughtTokens(
            allowed=np.packbits(is_allowed, bitorder="little").view(np.uint32),
            allowed_in_tag=np.packbits(is_allowed_in_tag, bitorder="little").view(np.uint32),
            spell=lambda token_id: tags[token_id].encode() if token_id in tags else self._texts[token_id],
            encode=lambda text: [ids[text]] if text in ids else self._tokenizer.tokenize_str(text),
        )
        if b"".join(map(tokens.spell, tokens.encode(closing))) != closing.encode():
            raise InvalidRequest(f"The vocabulary has no tokens that spell the tag {closing!r}.")
        return tokens

    def compile(self, grammar: Grammar) -> "Compiled":
        """Compile a grammar, in a millisecond to seconds without the interpreter's lock. Raises InvalidRequest."""
        began_ns = time.monotonic_ns()
        source = source_of(grammar, self._file)
        matcher = llguidance.LLMatcher(self._tokenizer, source, log_level=_SILENT, limits=_LIMITS)
        anew = partial(self.compile, grammar)
        compiled = Compiled(
            matcher, self._tokenizer.vocab_size, self.vocab_size, can_grow=can_grow(grammar), compile_anew=anew
        )
        first = LibraryMatcher(compiled)
        # The library finds many errors, and builds many states, only while a grammar is followed.
        num_forced = first.try_out(np.zeros(-(-self.vocab_size // 32), np.uint32), self._tokenizer.eos_tokens)
        why_not = first.why(grammar) if first.error else ""
        if num_forced > MAX_FORCED_TOKENS:
            why_not = f"it leaves no choice for {num_forced} tokens in a row, and may for {MAX_FORCED_TOKENS} at most"
        if why_not:
            raise InvalidRequest(f"The {_KINDS[grammar.kind]} cannot be used: {why_not}.")
        compiled.begin(time.monotonic_ns() - began_ns)
        return compiled


class _Tokens:
    """Gives the library the tokens one by one, and says which of them are text.

    From a tokenizer.json the library takes every added token written `<...>` for control, and so refuses the text that
    it has just forced. Here a forced text is tokenised as the model's own tokenizer does, with control tokens written
    out, and each token spells what `text/tokenizer/tokenizer.py` makes of it.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None
    spell_otherwise: Callable[[str], list[int]]  # by the longest tokens

    def __init__(self, file: TokenizerFile, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._inner = read_library_tokenizer(file.spelling_control)
        self._inner.no_truncation()
        self._inner.no_padding()
        num_tokens = max(vocab_size, file.num_ids)  # the model's head may have rows that no token belongs to
        pieces = map(self._inner.id_to_token, range(num_tokens))
        texts = (b"" if piece is None else file.spell(piece) for piece in pieces)
        # The byte 255, which no text has, marks control tokens in the library.
        self.tokens = [b"" if text.startswith(b"\xff") else text for text in texts]
        self.texts = TokenTexts(b"" if token_id in file.control else text for token_id, text in enumerate(self.tokens))
        for token_id, name in file.control.items():
            self.tokens[token_id] = name.encode()
        self.special_token_ids = [*{*file.control, *eos_token_ids}]
        self.eos_token_id = eos_token_ids[0] if eos_token_ids else None

    def __call__(self, text: str) -> list[int]:
        """Tokens that spell the text. A tokenizer that changes a text first, to NFC for one, may have others."""
        token_ids: list[int] = self._inner.encode(text, add_special_tokens=False).ids
        if b"".join(map(self.texts.__getitem__, token_ids)) == text.encode():
            return token_ids
        return self.spell_otherwise(text)


def can_grow(grammar: Grammar) -> bool:
    """Whether it may grow much while it is followed: it has expressions, lengths or bounded numbers."""
    return grammar.kind in {"regex", "lark"} or any(word in grammar.source for word in _GROWING)


class Compiled:
    """A grammar that makes matchers, each at its beginning, which share the states that they find.

    So it grows while it is followed, and when it has as many states as the limits allow, none of its matchers can go
    on, nor any made later. The library reports neither: `followed_ns` bounds the growth, and the matchers notice the
    limit. Each then goes on with states of its own, so that no answer ends because of others with its grammar.
    """

    def __init__(
        self,
        template: llguidance.LLMatcher,
        num_bits: int,
        vocab_size: int,
        *,
        can_grow: bool,
        compile_anew: "Callable[[], Compiled]",
    ) -> None:
        self.template = template
        self.bits = np.zeros(-(-max(num_bits, vocab_size) // 32), np.uint32)  # one thread fills masks, one at a time
        self.last_word = np.uint32((1 << (vocab_size % 32)) - 1) if vocab_size % 32 else np.uint32(0xFFFFFFFF)
        self.can_grow = can_grow
        self._compile_anew = compile_anew
        self._compile_ns = 0
        self.followed_ns = 0  # that masks took since `begin`
        self.has_failed = False

    def begin(self, compile_ns: int) -> None:
        """End the compilation, which took so long."""
        self._compile_ns, self.followed_ns = compile_ns, 0

    @property
    def is_worn(self) -> bool:
        """The next sequence with this grammar should have it compiled anew."""
        return self.has_failed or (self.can_grow and self.followed_ns > MAX_FOLLOWED_NS + 2 * self._compile_ns)

    def matcher(self) -> "LibraryMatcher":
        return LibraryMatcher(self, [] if self.can_grow else None)

    def compile_anew(self) -> "Compiled | None":
        """The same without the states that were found; None where all streams would wait too long for it."""
        if self._compile_ns > MAX_FOLLOWED_NS:
            return None
        with suppress(InvalidRequest):  # of what has compiled before; it would end the engine
            return self._compile_anew()
        return None


class LibraryMatcher:
    """See `engine/core/constraint.py:Matcher`."""

    def __init__(self, compiled: Compiled, accepted: list[int] | None = None) -> None:
        """With `accepted`, the tokens up to here, it goes on with states of its own when there are too many."""
        self._compiled = compiled
        self._accepted = accepted
        self._next_anew = 0  # tokens that it must have accepted by then

    @cached_property
    def _inner(self) -> llguidance.LLMatcher:
        """Copied when it is first needed: it holds the grammar's whole source, and most sequences wait."""
        return self._compiled.template.deep_copy()

    @property
    def error(self) -> str:
        """Why the matcher cannot go on, in one line; empty while it can."""
        return one_line(self._inner.get_error()) if self._inner.is_error() else ""

    def why(self, grammar: Grammar) -> str:
        """The error in terms of the grammar as its author wrote it, without the lines put around it."""
        return explain(self._inner.get_error(), grammar)

    @property
    def is_over(self) -> bool:
        return self._inner.is_stopped() and not self._inner.is_error()

    @property
    def has_failed(self) -> bool:
        return self._inner.is_error()

    def fill(self, allowed: MaskArray) -> None:
        if self._inner.is_error():
            return
        compiled, began_ns = self._compiled, time.monotonic_ns()
        self._inner.unsafe_compute_mask_ptr(compiled.bits.ctypes.data, compiled.bits.nbytes)
        compiled.followed_ns += time.monotonic_ns() - began_ns
        if self._inner.is_error() and self._begin_anew():
            self.fill(allowed)
            return
        allowed[:] = compiled.bits[: len(allowed)]
        allowed[-1] &= compiled.last_word

    def accept(self, token_id: int) -> None:
        if self._accepted is not None:
            self._accepted.append(token_id)
        if not self._inner.consume_token(token_id) and self._inner.is_error():
            self._begin_anew()

    def _begin_anew(self) -> bool:
        """Go on with states of its own, in the milliseconds of a compilation. Returns False where that is no help."""
        self._compiled.has_failed = True
        if self._accepted is None or len(self._accepted) < self._next_anew:
            return False
        compiled = self._compiled.compile_anew()
        if compiled is None or not compiled.template.consume_tokens(self._accepted):
            return False
        self._compiled, self._inner = compiled, compiled.template
        self._next_anew = len(self._accepted) + _LEAST_BETWEEN
        return True

    def copy(self) -> "LibraryMatcher":
        copied = LibraryMatcher(self._compiled)
        copied._inner = self._inner.deep_copy()  # half a microsecond
        return copied

    def forced(self) -> list[int]:
        return self._inner.compute_ff_tokens()

    def try_out(self, allowed: MaskArray, end_token_ids: Sequence[int]) -> int:
        """Follow the grammar some way, since limits are often met late. Returns the longest run of forced tokens.

        It takes what must come next, or else the first token that may. `allowed` is scratch space for masks.
        """
        most = 0
        for _ in range(_NUM_TRIED):
            self.fill(allowed)
            if self.has_failed or self.is_over:
                break
            forced = self._inner.compute_ff_tokens()
            most = max(most, len(forced))
            tokens = forced or _first_token(allowed, end_token_ids)
            if not tokens or not self._inner.consume_tokens(tokens):
                break
        return most


def _first_token(allowed: MaskArray, end_token_ids: Sequence[int]) -> list[int]:
    """The first token that a mask allows, but for those that end the text; none where nothing else can follow."""
    rest = allowed.copy()
    for token_id in end_token_ids:
        if token_id // 32 < len(rest):
            rest[token_id // 32] &= ~np.uint32(1 << (token_id % 32))
    places = rest.nonzero()[0]
    if not len(places):
        return []
    word = int(rest[places[0]])
    return [32 * int(places[0]) + (word & -word).bit_length() - 1]


def entry_bytes(grammar: Grammar) -> int:
    """About the memory of a compiled grammar."""
    growth = _GROWTH_BYTES if can_grow(grammar) else 0
    return ENTRY_BYTES + _BYTES_PER_SOURCE_BYTE * len(grammar.source) + growth


class GrammarCompiler:
    """Compiles grammars in one thread beside the engine's: `engine/core/constraint.py:Grammars`.

    Everything here has passed `checker.py`, so it compiles, and in about the time that it took there.
    """

    def __init__(self, vocabulary: Vocabulary, cache_bytes: int = CACHE_BYTES) -> None:
        self._vocabulary = vocabulary
        self._cache = GrammarCache[Compiled](cache_bytes, lambda grammar, _: entry_bytes(grammar))
        self._caching = threading.Lock()  # the engine's thread opens what is known, and this one puts what it compiled
        self._thread = ThreadPoolExecutor(1, "grammar")

    @property
    def vocab_size(self) -> int:
        return self._vocabulary.vocab_size

    def open(self, grammar: Grammar) -> "Future[Matcher]":
        """The future raises InvalidRequest for what does not compile. It is done where nothing has to be compiled."""
        known = [self._find(part) for part in _parts(grammar)]
        compiled = [part for part in known if part is not None]
        if len(compiled) < len(known) or not self._vocabulary.knows_tags(grammar.thought):
            return self._thread.submit(self._open, grammar)
        opened: Future[Matcher] = Future()
        opened.set_result(self._matcher(grammar, compiled))
        return opened

    def _open(self, grammar: Grammar) -> Matcher:
        return self._matcher(grammar, [self._compile(part) for part in _parts(grammar)])

    def _matcher(self, grammar: Grammar, compiled: list[Compiled]) -> Matcher:
        if grammar.thought is None:
            return compiled[0].matcher()
        tokens = self._vocabulary.thought_tokens(grammar.thought)
        before, behind = [part.matcher() for part in compiled] or (None, None)
        return ThoughtMatcher(grammar.thought, tokens, before, behind)

    def _compile(self, grammar: Grammar) -> Compiled:
        compiled = self._find(grammar)
        if compiled is None:
            compiled = self._vocabulary.compile(grammar)
            with self._caching:
                self._cache.put(grammar, compiled)
        return compiled

    def _find(self, grammar: Grammar) -> Compiled | None:
        with self._caching:
            compiled = self._cache.get(grammar)
            if compiled is None or not compiled.is_worn:
                return compiled
            self._cache.remove(grammar)  # its sequences use it to their end
            return None


def _parts(grammar: Grammar) -> list[Grammar]:
    """What has to be compiled: of a form with thoughts, one for the text's beginning and one behind the thoughts."""
    thought = grammar.thought
    if thought is None:
        return [grammar]
    if grammar.kind == "text":
        return []
    # Thoughts of any length share what is compiled.
    return [
        replace(grammar, thought=replace(thought, is_open=is_open, max_tokens=None))
        for is_open in (thought.is_open, True)
    ]
