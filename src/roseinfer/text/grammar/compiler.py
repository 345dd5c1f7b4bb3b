"""Compiles grammars into matchers, which say what token may come next. Only this module imports llguidance.

The library (docs/adr/0019-structured-output.md) works on the bytes of tokens, builds its automata while it goes, and
counts its work, so that neither a compilation nor a mask takes longer than the limits here allow.
"""

import dataclasses
import json
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any, TypeGuard, cast

import llguidance
import msgspec
import numpy as np
from msgspec.structs import replace

from roseinfer.engine.core.constraint import MaskArray, Matcher
from roseinfer.errors import InvalidRequest
from roseinfer.messages import CallGrammar, Grammar, ParameterShape, Thought
from roseinfer.text.answers.functions import declared_types, joined_schemas, listed_values, may_be_text
from roseinfer.text.grammar.source import GrammarCache
from roseinfer.text.grammar.thoughts import ThoughtMatcher, ThoughtTokens
from roseinfer.text.grammar.tokenizer_file import TokenizerFile
from roseinfer.text.tokenizer.added_tokens import tokenizer_json
from roseinfer.text.tokenizer.tokenizer import TokenTexts, read_library_tokenizer

MAX_MESSAGE_CHARS = 200
# In which the worst expression grows by about 5 MiB; a usual one is done with growing before.
MAX_FOLLOWED_NS = 50_000_000
ENTRY_BYTES = 128 << 10  # what a compiled grammar of a few properties takes
_BYTES_PER_SOURCE_BYTE = 32  # and what longer ones take more
# And what those with expressions or lengths gain while they are followed; at worst five times it.
_GROWTH_BYTES = 1 << 20
CACHE_BYTES = 32 << 20  # some 200 grammars, or 28 with expressions or lengths, which grow with use
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
# Texts whose tokens the library looks at all at once. The other three of its four for JSON cost 10 to 13 MB each for
# 150,000 tokens, and gain no mask anything that could be measured (docs/log.md, 2026-11-24).
_SLICES = [r'[^"\\\x00-\x1F\x7F]{1,30}']
# No free whitespace, in which a small model can go on for ever: a blank after a comma and a colon, or none.
_JSON_OPTIONS = {
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
    "lenient": False,
}
# The library finds all that must come next at each mask. In a grammar whose terminals overlap, such as `/a+/` before
# `/a+b/`, that may never end, and a matcher cannot be stopped. Of several such lines the last holds.
_UNFORCED = '%llguidance {"no_forcing": true}'
_DATA_KEYS = frozenset({"const", "enum", "default", "examples"})
_NAMING_KEYS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
# What excludes nothing, and the library does not know; zod writes the names' type for each record.
_VOID: Sequence[tuple[str, object]] = (
    ("uniqueItems", False),
    ("propertyNames", {"type": "string"}),
    ("propertyNames", {}),
)
_MINIMA, _MAXIMA = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
_LEAST_ABOVE_0 = 1e-30  # the library writes bounds out, and not with hundreds of zeros
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
_TOO_WIDE = "Current row has"  # the library's words for more than `max_items_in_row`
_PLACE = re.compile(r"(?:at )?(\d+)\((\d+)\): ")
_PICTURE = re.compile(r"(?:\n +\d+ \| .*|\n *\^ *(?=\n|$))+")  # lines of the grammar, with a mark below one
_CALL_RULE = re.compile(r"\| (?:json|value)_(\d+)[_:].*\n *\^")  # the marked line, where `_calls` wrote it
_OF_SCHEMA = "failed to compile JSON schema: "
_BAD_EXPRESSION = re.compile(
    r"regex parse error:\n    (?P<expression>.*)\n    (?P<before> *)\^+\nerror: (?P<reason>.*)"
)


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
        matcher = llguidance.LLMatcher(self._tokenizer, _source(grammar, self._file), log_level=_SILENT, limits=_LIMITS)
        compiled = Compiled(matcher, self._tokenizer.vocab_size, self.vocab_size, can_grow=can_grow(grammar))
        first = compiled.matcher()
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


def _source(grammar: Grammar, file: TokenizerFile) -> str:
    """The grammar in the library's own form: up to where a thought begins, or from where it has ended."""
    form = _form(grammar, file)
    if grammar.thought is None:
        return form
    start = "BLANKS? @form"
    if not grammar.thought.is_open:
        control_id = next((i for i, name in file.control.items() if name == grammar.thought.opening), None)
        opening = _quote(grammar.thought.opening) if control_id is None else f"<[{control_id}]>"
        start = f"@form | {opening}"
    # Models write up to two ends of line behind a thought.
    return _joined(f"start: {start}\nBLANKS: /[ \\n]{{1,2}}/", form=form)


def _joined(frame: str, **parts: str) -> str:
    """A grammar in Lark that has others, in the library's own form, as parts that it calls by their names."""
    grammars: list[dict[str, Any]] = [{"lark_grammar": frame}]
    for name, part in parts.items():
        first, *others = json.loads(part)["grammars"] if part.startswith("{") else [{"lark_grammar": part}]
        grammars += [first | {"name": name}, *others]
    return json.dumps({"grammars": grammars}, ensure_ascii=False)


def _form(grammar: Grammar, file: TokenizerFile) -> str:
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
            lark = llguidance.LLMatcher.grammar_from_lark(_calls(calls))
            return (
                lark
                if calls.form is None
                else _joined("start: @calls | @text", calls=lark, text=_form(calls.form, file))
            )
        case "lark":
            return llguidance.LLMatcher.grammar_from_lark(f"{file.with_ids(grammar.source)}\n{_UNFORCED}")
        case "text":
            raise InvalidRequest("Any text is no grammar.")


def _calls(grammar: CallGrammar) -> str:
    """The grammar of calls in Lark. Each schema is a root of its own, so that its references stay valid."""
    more = f" ({_quote(grammar.between)} call){{0,{grammar.most - 1}}}" if grammar.most > 1 else ""
    calls = " | ".join(f"call_{i}" for i in range(len(grammar.shapes)))
    rules = [f"start: {_quote(grammar.before)} call{more} {_quote(grammar.after)}", f"call: {calls}"]
    for i, shape in enumerate(grammar.shapes):
        arguments = f"json_{i}" if shape.parameters is None else f"first_{i}_0"
        rules.append(f"call_{i}: {_quote(shape.before)} {arguments} {_quote(shape.after)}")
        if shape.parameters is None:
            rules.append(f"json_{i}: %json {_with_options(shape.schema)}")
        else:
            whole = _moved(shape.schema)
            roots = [replace(each, schema=_as_root(each.schema, whole)) for each in shape.parameters]
            rules += _parameters(i, roots, _quote(shape.between))
    return "\n".join(rules)


def _parameters(call: int, parameters: Sequence[ParameterShape], between: str) -> Iterator[str]:
    """The rules of parameters in their order: `first` is what may come at a place before any, `more` behind another."""
    for i, shape in enumerate(parameters):
        at, after = f"{call}_{i}", f"{call}_{i + 1}"
        yield f"parameter_{at}: {_quote(shape.before)} value_{at}"
        yield from _value(f"value_{at}", shape)
        without_first, without_more = ("", "") if shape.is_required else (f" | first_{after}", f" | more_{after}")
        yield f"first_{at}: parameter_{at} more_{after}{without_first}"
        yield f"more_{at}: {between} parameter_{at} more_{after}{without_more}"
    yield f'first_{call}_{len(parameters)}: ""'
    yield f'more_{call}_{len(parameters)}: ""'


def _value(name: str, shape: ParameterShape) -> Iterator[str]:
    if not shape.is_text:
        yield f"{name}: {name}_json {_quote(shape.after)}"
        yield f"{name}_json: %json {_with_options(shape.schema)}"
        return
    leaves = _leaves(shape.schema)
    if leaves and all(listed_values(leaf) or not may_be_text(declared_types(leaf)) for leaf in leaves):
        values = [value for leaf in leaves for value in listed_values(leaf)]
        texts = [value if isinstance(value, str) else json.dumps(value, ensure_ascii=False) for value in values]
        others = [leaf for leaf in leaves if not listed_values(leaf)]
        ways = [*map(_quote, texts), *(f"{name}_json_{i}" for i in range(len(others)))]
        yield f"{name}: ({' | '.join(ways)}) {_quote(shape.after)}"
        shared = {key: shape.schema[key] for key in ("$defs",) if key in shape.schema}
        for i, leaf in enumerate(others):
            yield f"{name}_json_{i}: %json {_with_options(leaf | shared)}"
        return
    end = shape.after.strip()  # where it ends for the parser too
    yield f"{name}: {name}_text {_quote(shape.after[shape.after.index(end) + len(end) :])}"
    yield f"{name}_text[lazy]: /(?s:.*){re.escape(end).replace('/', chr(92) + '/')}/"


def _leaves(schema: dict[str, Any]) -> list[dict[str, Any]]:
    """The schemas that a value may follow: those behind references and in lists, in the place of what leads there."""
    leads = ("anyOf", "oneOf", "allOf")
    parts = [schema] if listed_values(schema) else joined_schemas(schema, leads)
    return [part for part in parts if listed_values(part) or not part.keys() & {"$ref", *leads}]


def _as_root(schema: dict[str, Any], whole: dict[str, Any]) -> dict[str, Any]:
    """A schema from within another, which its references go by, as one that stands alone; `whole` is moved."""
    moved: dict[str, Any] = _moved(schema)
    return moved if moved == schema else moved | {"$defs": {"whole": whole}}


def _moved(schema: Any) -> Any:
    """The schema with references that go by another, which is in its `$defs`."""
    if isinstance(schema, list):
        return list(map(_moved, schema))
    if not isinstance(schema, dict):
        return schema
    moved: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _NAMING_KEYS and isinstance(value, dict):  # names may be any words
            moved[key] = dict(zip(value, map(_moved, value.values()), strict=True))
        elif key == "$ref" and isinstance(value, str) and value.startswith("#"):
            moved[key] = f"#/$defs/whole{value[1:]}"
        else:
            moved[key] = value if key in _DATA_KEYS else _moved(value)
    return moved


def _with_options(schema: dict[str, Any]) -> str:
    """The schema with the library's options inside, where its own could stand."""
    return json.dumps(_for_library(schema) | {"x-guidance": _JSON_OPTIONS}, ensure_ascii=False)


def _for_library(schema: Any) -> Any:
    """The schema without what excludes nothing, and with bounds that the library excludes where they are excluded.

    Of numbers above 2 and up to 2.5, or of others with one whole part, it allows 2 too. Above the float that follows 2
    it does not, and nothing is lost. Data in a schema, such as a `const`, stays as it is.
    """
    # By `map`, since a comprehension is a second frame at each level, and a body may have 500.
    if isinstance(schema, list):
        return list(map(_for_library, schema))
    if not isinstance(schema, dict):
        return schema
    strict: dict[str, Any] = {}
    for key, value in schema.items():
        if (key, value) in _VOID:
            continue
        if key in _NAMING_KEYS and isinstance(value, dict):  # names may be any words
            strict[key] = dict(zip(value, map(_for_library, value.values()), strict=True))
        else:
            strict[key] = value if key in _DATA_KEYS else _for_library(value)
    low, high = strict.get("exclusiveMinimum"), strict.get("exclusiveMaximum")
    if _is_number(low) and low >= 0 and any(low < end < low + 1 for end in _numbers(strict, _MAXIMA)):
        strict["exclusiveMinimum"] = math.nextafter(low, math.inf) if low else _LEAST_ABOVE_0
    elif _is_number(high) and high < 0 and any(high - 1 < end < high for end in _numbers(strict, _MINIMA)):
        strict["exclusiveMaximum"] = math.nextafter(high, -math.inf)
    return strict


def _numbers(schema: dict[str, Any], keys: Iterable[str]) -> list[int | float]:
    """The numbers that these keywords have."""
    return [value for key in keys if _is_number(value := schema.get(key))]


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


class Compiled:
    """A grammar that makes matchers, each at its beginning, which share the states that they find.

    So it grows while it is followed, and when it has as many states as the limits allow, none of its matchers can go
    on, nor any made later. The library reports neither: `followed_ns` bounds the growth, and the matchers notice the
    limit.
    """

    def __init__(self, template: llguidance.LLMatcher, num_bits: int, vocab_size: int, *, can_grow: bool) -> None:
        self.template = template
        self.bits = np.zeros(-(-max(num_bits, vocab_size) // 32), np.uint32)  # one thread fills masks, one at a time
        self.last_word = np.uint32((1 << (vocab_size % 32)) - 1) if vocab_size % 32 else np.uint32(0xFFFFFFFF)
        self._can_grow = can_grow
        self._compile_ns = 0
        self.followed_ns = 0  # that masks took since `begin`
        self.has_failed = False

    def begin(self, compile_ns: int) -> None:
        """End the compilation, which took so long."""
        self._compile_ns, self.followed_ns = compile_ns, 0

    @property
    def is_worn(self) -> bool:
        """The next sequence with this grammar should have it compiled anew."""
        return self.has_failed or (self._can_grow and self.followed_ns > MAX_FOLLOWED_NS + 2 * self._compile_ns)

    def matcher(self) -> "LibraryMatcher":
        return LibraryMatcher(self)


class LibraryMatcher:
    """See `engine/core/constraint.py:Matcher`."""

    def __init__(self, compiled: Compiled) -> None:
        self._compiled = compiled

    @cached_property
    def _inner(self) -> llguidance.LLMatcher:
        """Copied when it is first needed: it holds the grammar's whole source, and most sequences wait."""
        return self._compiled.template.deep_copy()

    @property
    def error(self) -> str:
        """Why the matcher cannot go on, in one line; empty while it can."""
        return _one_line(self._inner.get_error()) if self._inner.is_error() else ""

    def why(self, grammar: Grammar) -> str:
        """The error in terms of the grammar as its author wrote it, without the lines put around it."""
        return _explain(self._inner.get_error(), grammar)

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
        compiled.has_failed |= self._inner.is_error()
        allowed[:] = compiled.bits[: len(allowed)]
        allowed[-1] &= compiled.last_word

    def accept(self, token_id: int) -> None:
        if not self._inner.consume_token(token_id):
            self._compiled.has_failed |= self._inner.is_error()

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


def _explain(message: str, grammar: Grammar) -> str:
    """The library's message as one line. Its places count in the text it was given, which may have more lines."""
    if _TOO_WIDE in message:
        return "too much may come next at one place, such as 500 properties that are not required"
    place = _PLACE.match(message)
    where = f"line {place[1]}, column {place[2]}: " if place and grammar.kind == "lark" else ""
    rest = message[place.end() :] if place else message
    if grammar.kind == "calls":
        rest, where = rest.removeprefix(_OF_SCHEMA), _called(rest, grammar)
    if found := _BAD_EXPRESSION.search(rest):
        what = "" if grammar.kind == "regex" else "an expression in it: "
        at = f" (character {len(found['before']) + 1})" if found["expression"] == grammar.source else ""
        return where + what + _one_line(found["reason"]) + at
    return where + _one_line(_PICTURE.sub("", rest))


def _called(message: str, grammar: Grammar) -> str:
    """Which function's schema the library's message is about, where it says so."""
    shapes = msgspec.json.decode(grammar.source, type=CallGrammar).shapes
    rule = _CALL_RULE.search(message)
    at = int(rule[1]) if rule else len(shapes)
    return f"in `{shapes[at].name}`, " if at < len(shapes) else ""


def _one_line(message: str) -> str:
    """A message on one line, without what the library quotes of the grammar or says of its own settings."""
    if message.startswith("NoExtension"):
        return "no text can match it"
    words = " ".join(message.replace("<non-verbose/>", "").split())[:MAX_MESSAGE_CHARS]
    return "".join(char if char.isprintable() else "\ufffd" for char in words).rstrip(".")


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
        self._thread = ThreadPoolExecutor(1, "grammar")

    @property
    def vocab_size(self) -> int:
        return self._vocabulary.vocab_size

    def open(self, grammar: Grammar) -> "Future[Matcher]":
        """The future raises InvalidRequest for what does not compile."""
        return self._thread.submit(self._open, grammar)

    def _open(self, grammar: Grammar) -> Matcher:
        thought = grammar.thought
        if thought is None:
            return self._compile(grammar).matcher()
        tokens = self._vocabulary.thought_tokens(thought)
        if grammar.kind == "text":
            return ThoughtMatcher(thought, tokens, None, None)
        # Thoughts of any length share what is compiled.
        before, behind = (
            self._compile(replace(grammar, thought=replace(thought, is_open=is_open, max_tokens=None))).matcher()
            for is_open in (thought.is_open, True)
        )
        return ThoughtMatcher(thought, tokens, before, behind)

    def _compile(self, grammar: Grammar) -> Compiled:
        compiled = self._cache.get(grammar)
        if compiled is not None and compiled.is_worn:  # its sequences use it to their end
            self._cache.remove(grammar)
            compiled = None
        if compiled is None:
            compiled = self._vocabulary.compile(grammar)
            self._cache.put(grammar, compiled)
        return compiled
