"""Turns a grammar into matchers, which say what token may come next: the one module that knows the library for it.

The library is llguidance (docs/adr/0019-structured-output.md). It works on the bytes of tokens, builds its automata
while it goes, and counts its work, so that neither a compilation nor a mask takes longer than the limits here allow.
Knows no request, no cache and no thread.
"""

import json
import re
import time
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import llguidance
import msgspec
import numpy as np

from roseinfer.engine.core.constraint import MaskArray
from roseinfer.errors import InvalidRequest
from roseinfer.messages import CallGrammar, Grammar
from roseinfer.text.grammar.tokenizer_file import TokenizerFile

MAX_MESSAGE_CHARS = 200
# In which the worst expression grows by about 5 MiB; a usual one is done with growing before.
MAX_FOLLOWED_NS = 50_000_000
MAX_FORCED_TOKENS = 4096  # in a row: each mask before them looks at all, 4 ms for 16,000 characters and 38 for 120,000
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
# No free whitespace, in which a small model can go on for ever: a blank after a comma and a colon, or none.
_JSON_OPTIONS = {
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
    "lenient": False,
}
# What a schema holds that can grow. Half-quoted are words of which there are several: `patternProperties`, `minLength`
# and `maxLength`, `exclusiveMinimum` and `exclusiveMaximum`. And an escape may spell any of them.
_GROWING = ('"pattern', 'Length"', '"format"', '"minimum"', '"maximum"', '"exclusiveM', '"multipleOf"', "\\u")
_SILENT = 0

# What they are called who gave them.
_KINDS = {
    "json_schema": "schema",
    "regex": "regular expression",
    "choice": "list of choices",
    "calls": "schema of a function",
    "lark": "grammar",
}
_TOO_WIDE = "Current row has"  # the library's words for more than `max_items_in_row`
_PLACE = re.compile(r"(?:at )?(\d+)\((\d+)\): ")
_PICTURE = re.compile(r"\n +\d+ \| .*\n *\^ *(?=\n|$)")
_BAD_EXPRESSION = re.compile(
    r"regex parse error:\n    (?P<expression>.*)\n    (?P<before> *)\^+\nerror: (?P<reason>.*)"
)


class Vocabulary:
    """The tokens of a checkpoint, as the library wants them: 50,000 are read in 0.3 s and take 45 MB."""

    def __init__(self, tokenizer: llguidance.LLTokenizer, vocab_size: int, file: TokenizerFile) -> None:
        self.vocab_size = vocab_size  # of the model
        self._tokenizer = tokenizer
        self._file = file

    @classmethod
    def load(cls, checkpoint_dir: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> "Vocabulary":
        """Of the checkpoint's tokenizer.json; `vocab_size` is that of the model. Raises ValueError or OSError."""
        eos = [token_id for token_id in eos_token_ids if token_id < vocab_size]
        file = TokenizerFile.read((checkpoint_dir / "tokenizer.json").read_text(encoding="utf-8"), eos)
        tokens = _Tokens(file, vocab_size, eos)
        tokenizer = llguidance.LLTokenizer(cast("llguidance.TokenizerWrapper", tokens), eos_token=eos or None)
        tokens.tokens = []  # the library has its own
        return cls(tokenizer, vocab_size, file)

    def compile(self, grammar: Grammar) -> "Compiled":
        """Takes between a millisecond and seconds, without the interpreter's lock. Raises InvalidRequest."""
        began_ns = time.monotonic_ns()
        matcher = llguidance.LLMatcher(self._tokenizer, _source(grammar, self._file), log_level=_SILENT, limits=_LIMITS)
        compiled = Compiled(matcher, self._tokenizer.vocab_size, self.vocab_size, can_grow=can_grow(grammar))
        first = compiled.matcher()
        # Much is only found out, and made, on the way.
        num_forced = first.try_out(np.zeros(-(-self.vocab_size // 32), np.uint32), self._tokenizer.eos_tokens)
        why_not = first.why(grammar) if first.error else ""
        if num_forced > MAX_FORCED_TOKENS:
            why_not = f"it leaves no choice for {num_forced} tokens in a row, and may for {MAX_FORCED_TOKENS} at most"
        if why_not:
            raise InvalidRequest(f"The {_KINDS[grammar.kind]} cannot be used: {why_not}.")
        compiled.begin(time.monotonic_ns() - began_ns)
        return compiled


class _Tokens:
    """The tokens in the form that the library takes them from Python, so that we say which of them are text.

    From a tokenizer.json alone it takes every added token that is written `<...>` for control, and so refuses the text
    that it has just forced. Here a forced text is tokenised as the model's own tokenizer does, with control tokens
    written out, and each token spells what `text/tokenizer.py` makes of it.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, file: TokenizerFile, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._inner = llguidance.LLTokenizer(file.spelling_control, slices=[])
        num_tokens = max(vocab_size, self._inner.vocab_size)  # the model's head may have rows that no token belongs to
        self.tokens = [self._bytes(token_id) for token_id in range(num_tokens)]
        for token_id, name in file.control.items():
            self.tokens[token_id] = name.encode()
        self.special_token_ids = [*{*file.control, *eos_token_ids}]
        self.eos_token_id = eos_token_ids[0] if eos_token_ids else None

    def _bytes(self, token_id: int) -> bytes:
        """Empty for an id without a token, which the library spells by its number."""
        spelled = self._inner.decode_bytes([token_id])
        return b"" if spelled == b"<[%d]>" % token_id else spelled

    def __call__(self, text: str) -> list[int]:
        """Tokens that spell the text. A tokenizer that changes a text first, to NFC or by a blank, may have others."""
        token_ids = self._inner.tokenize_str(text)
        if self._inner.decode_bytes(token_ids) == text.encode():
            return token_ids
        return self._inner.greedy_tokenize(text)


def can_grow(grammar: Grammar) -> bool:
    """Whether it may gain much while it is followed: it has expressions, lengths or numbers between bounds."""
    return grammar.kind in {"regex", "lark"} or any(word in grammar.source for word in _GROWING)


def _source(grammar: Grammar, file: TokenizerFile) -> str:
    """The grammar in the library's own form."""
    match grammar.kind:
        case "json_schema":
            try:
                schema = msgspec.json.decode(grammar.source, type=dict[str, Any])
            except (msgspec.DecodeError, RecursionError):
                raise InvalidRequest("The schema is no JSON object.") from None
            return llguidance.LLMatcher.grammar_from_json_schema(_with_options(schema))
        case "regex":
            return llguidance.LLMatcher.grammar_from_regex(grammar.source)
        case "choice":
            try:
                choices = msgspec.json.decode(grammar.source, type=list[str])
            except msgspec.DecodeError:
                raise InvalidRequest("The choices are no list of texts in JSON.") from None
            return llguidance.LLMatcher.grammar_from_lark("start: " + " | ".join(map(_quote, choices)))
        case "calls":
            try:
                calls = msgspec.json.decode(grammar.source, type=CallGrammar)
            except msgspec.DecodeError:
                raise InvalidRequest("The calls are not of the form that they have in JSON.") from None
            return llguidance.LLMatcher.grammar_from_lark(_calls(calls))
        case "lark":
            return llguidance.LLMatcher.grammar_from_lark(file.with_ids(grammar.source))


def _calls(grammar: CallGrammar) -> str:
    """Each schema is a root of its own, so that its references stay what they are."""
    more = f" ({_quote(grammar.between)} call){{0,{grammar.most - 1}}}" if grammar.most > 1 else ""
    rules = [f"start: call{more}", "call: " + " | ".join(f"call_{i}" for i in range(len(grammar.shapes)))]
    for i, shape in enumerate(grammar.shapes):
        after = _quote(shape.after) if shape.after else ""
        rules.append(f"call_{i}: {_quote(shape.before)} json_{i} {after}")
        rules.append(f"json_{i}: %json {_with_options(shape.schema)}")
    return "\n".join(rules)


def _with_options(schema: dict[str, Any]) -> str:
    """The schema with the library's options inside, where its own could stand."""
    return json.dumps(schema | {"x-guidance": _JSON_OPTIONS}, ensure_ascii=False)


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


class Compiled:
    """A grammar that makes matchers, each at its beginning. They share what they find out about it.

    So it grows while they are followed, and when it has as many states as the limits allow, none of them, also of those
    that are made then, can go on. The library tells neither; the time that masks took bounds the one, where there is
    something to bound, and the matchers notice the other.
    """

    def __init__(self, template: llguidance.LLMatcher, num_bits: int, vocab_size: int, *, can_grow: bool) -> None:
        self._template = template
        self._bits = np.zeros(-(-max(num_bits, vocab_size) // 32), np.uint32)  # one thread fills masks, one at a time
        self._last_word = np.uint32((1 << (vocab_size % 32)) - 1) if vocab_size % 32 else np.uint32(0xFFFFFFFF)
        self._can_grow = can_grow
        self._compile_ns = 0
        self.followed_ns = 0
        self.has_failed = False

    def begin(self, compile_ns: int) -> None:
        """It has been compiled, in so long; what its masks take counts from now on."""
        self._compile_ns, self.followed_ns = compile_ns, 0

    @property
    def is_worn(self) -> bool:
        """Whoever wants this grammar next should have it compiled anew."""
        return self.has_failed or (self._can_grow and self.followed_ns > MAX_FOLLOWED_NS + 2 * self._compile_ns)

    def matcher(self) -> "LibraryMatcher":
        return LibraryMatcher(self)

    def copy(self) -> llguidance.LLMatcher:
        """The library's own matcher, at its beginning. What it takes grows with the grammar's source."""
        return self._template.deep_copy()

    def fill(self, inner: llguidance.LLMatcher, allowed: MaskArray) -> None:
        """Write what may come next by `inner`, a copy of ours that has not failed."""
        began_ns = time.monotonic_ns()
        inner.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        self.followed_ns += time.monotonic_ns() - began_ns
        self.has_failed |= inner.is_error()
        allowed[:] = self._bits[: len(allowed)]
        allowed[-1] &= self._last_word

    def accept(self, inner: llguidance.LLMatcher, token_id: int) -> None:
        """Lead `inner`, a copy of ours, on by a token."""
        if not inner.consume_token(token_id):
            self.has_failed |= inner.is_error()


class LibraryMatcher:
    """See `engine/core/constraint.py:Matcher`."""

    def __init__(self, compiled: Compiled) -> None:
        self._compiled = compiled

    @cached_property
    def _inner(self) -> llguidance.LLMatcher:
        """Made when it is first asked for: it holds the grammar's whole source, and of many sequences most wait."""
        return self._compiled.copy()

    @property
    def error(self) -> str:
        """Why the matcher cannot go on, in one line; empty while it can."""
        return _one_line(self._inner.get_error()) if self._inner.is_error() else ""

    def why(self, grammar: Grammar) -> str:
        """The error in the words of whoever wrote the grammar: of its own lines, without those that we put around."""
        return _told(self._inner.get_error(), grammar)

    @property
    def is_over(self) -> bool:
        """See Matcher."""
        return self._inner.is_stopped() and not self._inner.is_error()

    @property
    def has_failed(self) -> bool:
        """See Matcher."""
        return self._inner.is_error()

    def fill(self, allowed: MaskArray) -> None:
        """See Matcher."""
        if not self._inner.is_error():
            self._compiled.fill(self._inner, allowed)

    def accept(self, token_id: int) -> None:
        """See Matcher."""
        self._compiled.accept(self._inner, token_id)

    def try_out(self, allowed: MaskArray, end_token_ids: Sequence[int]) -> int:
        """Go some way into the text, by what must follow or else by the first token that may: see `error` then.

        A limit is often met behind the first bracket only. Which of several ways is taken is as good as chance.
        `allowed` is for the masks. Returns how many tokens had to come in a row, at most.
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


def _told(message: str, grammar: Grammar) -> str:
    """The library draws the place under a line of the text; an expression or a schema is only inside such a text."""
    if _TOO_WIDE in message:
        return "too much may come next at one place, such as 500 properties that are not required"
    place = _PLACE.match(message)
    where = f"line {place[1]}, column {place[2]}: " if place and grammar.kind == "lark" else ""
    rest = message[place.end() :] if place else message
    if found := _BAD_EXPRESSION.search(rest):
        what = "" if grammar.kind == "regex" else "an expression in it: "
        at = f" (character {len(found['before']) + 1})" if found["expression"] == grammar.source else ""
        return where + what + _one_line(found["reason"]) + at
    return where + _one_line(_PICTURE.sub("", rest))


def _one_line(message: str) -> str:
    """The library's messages quote grammars over several lines and end with a hint at its own settings."""
    if message.startswith("NoExtension"):
        return "no text can match it"
    words = " ".join(message.replace("<non-verbose/>", "").split())[:MAX_MESSAGE_CHARS]
    return "".join(char if char.isprintable() else "\ufffd" for char in words).rstrip(".")
