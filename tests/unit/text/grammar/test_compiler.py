"""Grammars into masks with the library itself: what is allowed, where a text ends, what is refused."""

import json
import re
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import llguidance
import msgspec
import numpy as np
import pytest

from roseinfer.engine.core.constraint import Matcher
from roseinfer.errors import InvalidRequest
from roseinfer.messages import CallGrammar, CallShape, Grammar, Thought
from roseinfer.text.answers.functions import Function
from roseinfer.text.answers.tool_formats import FORMATS
from roseinfer.text.answers.tool_use import ToolUse
from roseinfer.text.grammar.compiler import (
    MAX_FOLLOWED_NS,
    MAX_FORCED_TOKENS,
    Compiled,
    GrammarCompiler,
    Vocabulary,
    can_grow,
    entry_bytes,
)
from roseinfer.text.grammar.source import GrammarCache
from roseinfer.text.grammar.tokenizer_file import MAX_TOKEN_CHARS
from roseinfer.text.tokenizer.tokenizer import Tokenizer
from tests.unit.text.grammar import vocabulary as checkpoint

DEMO = Path(__file__).parents[4] / "src/roseinfer/demo"
EOS = checkpoint.EOS


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    """Ids 0 to 255 are the bytes; the model has more rows than the vocabulary has tokens."""
    directory = checkpoint.write_checkpoint(tmp_path_factory.mktemp("checkpoint"))
    return Vocabulary.load(directory, checkpoint.VOCAB_SIZE, [EOS])


def schema(of: object) -> Grammar:
    return Grammar("json_schema", json.dumps(of))


def allowed(matcher: Matcher, vocab_size: int = checkpoint.VOCAB_SIZE) -> set[int]:
    mask = np.zeros(-(-vocab_size // 32), np.uint32)
    matcher.fill(mask)
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def follow(vocabulary: Vocabulary, grammar: Grammar, text: str) -> Matcher:
    """The matcher behind a text, each byte of which was allowed, and forced where nothing else was."""
    matcher = vocabulary.compile(grammar).matcher()
    for byte in text.encode():
        ahead, forced, may = matcher.copy(), matcher.copy().forced(), allowed(matcher)
        assert byte in may, (text, chr(byte))
        assert may == {byte} or not forced
        assert not forced or forced[0] == byte
        matcher.accept(byte)
        assert allowed(ahead) == may, "a copy goes its own way"
        ahead.accept(byte)
        assert allowed(ahead) == allowed(matcher)
    return matcher


@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        (schema({"type": "object"}), '{"a":[1,{"b":null}], "c": "\\n"}'),
        (schema({"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}), '{"n": 12}'),
        (schema({"enum": ["one", 2, None]}), "null"),
        (schema({"$ref": "#/$defs/x", "$defs": {"x": {"const": "y"}}}), '"y"'),
        (Grammar("choice", '["yes", "no", "\\"quoted\\"\\n"]'), '"quoted"\n'),
        (Grammar("lark", 'start: "a" start "b" | "c"'), "aacbb"),
        (Grammar("regex", "[a-f]{2}|x"), "af"),
    ],
)
def test_a_text_that_fits_is_allowed_and_is_over_at_its_end(
    vocabulary: Vocabulary, grammar: Grammar, text: str
) -> None:
    matcher = follow(vocabulary, grammar, text)
    assert matcher.is_over
    assert not matcher.has_failed


def test_the_end_token_is_allowed_where_the_text_may_end_and_nowhere_else(vocabulary: Vocabulary) -> None:
    grammar = Grammar("regex", "[0-9]{2,4}")
    assert EOS not in allowed(follow(vocabulary, grammar, "1"))
    matcher = follow(vocabulary, grammar, "12")
    assert allowed(matcher) == {EOS, *map(ord, "0123456789")}
    assert not matcher.is_over


def test_a_token_that_the_model_has_no_row_for_is_not_allowed(tmp_path: Path) -> None:
    vocabulary = Vocabulary.load(checkpoint.write_checkpoint(tmp_path), ord("d"), [])
    assert allowed(vocabulary.compile(Grammar("choice", '["a", "z"]')).matcher(), vocabulary.vocab_size) == {ord("a")}


def test_there_is_no_free_whitespace_to_go_on_with_for_ever(vocabulary: Vocabulary) -> None:
    for text in ("", "{", '{"a"', '{"a": ', '{"a": 1'):
        assert not allowed(follow(vocabulary, schema({"type": "object"}), text)) & set(b"\n\t\r")
    assert ord(" ") not in allowed(follow(vocabulary, schema({"type": "object"}), '{"a": '))


@pytest.mark.parametrize("low", [-3, -2, -1, 0, 0.0, 1, 2, 2.5, 7])
@pytest.mark.parametrize("width", [0.25, 0.5, 1, 1.5, 10])
@pytest.mark.parametrize("low_name", ["minimum", "exclusiveMinimum"])
@pytest.mark.parametrize("high_name", ["maximum", "exclusiveMaximum"])
def test_a_number_is_within_its_bounds_and_may_be_one_that_is_not_excluded(
    vocabulary: Vocabulary, low: float, width: float, low_name: str, high_name: str
) -> None:
    """Of numbers with one whole part, such as those above 0 and up to 0.5, the library itself allows that part too."""
    bounds = {low_name: low, high_name: low + width}
    of_number = {"type": "number"} | bounds
    for of in (of_number, {"$ref": "#/$defs/const", "$defs": {"const": {"anyOf": [of_number]}}}):
        compiled = vocabulary.compile(schema(of))
        for name, end in bounds.items():
            may_be_end = not name.startswith("exclusive")
            assert is_accepted(compiled, json.dumps(end)) is may_be_end, end
            assert not is_accepted(compiled, json.dumps(end + (1 if end > low else -1)))
        assert is_accepted(compiled, json.dumps(low + width / 2))


def is_accepted(compiled: Compiled, text: str) -> bool:
    """Whether the text may come, and end there."""
    matcher = compiled.matcher()
    for byte in text.encode():
        if matcher.is_over or byte not in allowed(matcher):
            return False
        matcher.accept(byte)
    return matcher.is_over or EOS in allowed(matcher)


@pytest.mark.parametrize("head", ["", '%llguidance {"no_forcing": false}\n'])
@pytest.mark.parametrize("thought", [None, Thought("<think>", "</think>", is_open=False)])
def test_terminals_that_overlap_force_no_text_without_an_end(
    vocabulary: Vocabulary, head: str, thought: Thought | None
) -> None:
    """Behind `q` nothing but `a` can ever come, as A goes on while it can. Who looks for all of it never returns."""
    source = head + 'start: "p" | "q" A B\nA: /a+/\nB: /a+b/'
    matcher = vocabulary.compile(Grammar("lark", source, thought)).matcher()
    for char in "qaaa":
        assert ord(char) in allowed(matcher)
        matcher.accept(ord(char))
    assert allowed(matcher) == {ord("a")}
    assert matcher.copy().forced() == []


@pytest.mark.parametrize("void", [{"uniqueItems": False}, {"propertyNames": {"type": "string"}}, {"propertyNames": {}}])
def test_a_keyword_that_excludes_nothing_may_stand_anywhere(vocabulary: Vocabulary, void: dict[str, object]) -> None:
    """The library refuses these two whatever they say."""
    inner = {"type": "array", "items": {"type": "object", "additionalProperties": {"type": "integer"}} | void} | void
    named = dict.fromkeys(void, inner)  # names of properties, and not keywords
    text = json.dumps({key: [{"a": 1}] for key in void})
    of = {"type": "object", "properties": named, "required": [*void], "additionalProperties": False} | void
    assert follow(vocabulary, schema(of), text).is_over
    assert follow(vocabulary, schema({"const": void}), json.dumps(void)).is_over


@pytest.mark.parametrize("name", ["password", "binary", "path", "file-path", "directory-path"])
def test_a_format_that_excludes_nothing_is_any_text(vocabulary: Vocabulary, name: str) -> None:
    """The library refuses formats that it does not know; pydantic writes these."""
    of = {"type": "array", "prefixItems": [{"type": "string", "format": name}], "items": False, "minItems": 1}
    assert follow(vocabulary, schema(of), '["a b"]').is_over
    assert follow(vocabulary, schema({"const": {"format": name}}), json.dumps({"format": name})).is_over


def test_data_in_a_schema_stays_as_it_is(vocabulary: Vocabulary) -> None:
    data = {"exclusiveMinimum": 0, "maximum": 0.5}
    for of in ({"const": data}, {"enum": [data]}):
        assert follow(vocabulary, schema(of), json.dumps(data)).is_over


def test_a_schema_as_deep_as_a_body_is_compiled_or_refused(vocabulary: Vocabulary) -> None:
    part: Any = {"type": "string"}
    lists: Any = []
    for _ in range(490):
        part, lists = {"type": "array", "items": part}, [lists]
    for of in (part, {"anyOf": lists}):
        with suppress(InvalidRequest):
            vocabulary.compile(schema(of))


def test_a_client_cannot_turn_the_options_off(vocabulary: Vocabulary) -> None:
    loose = schema({"type": "object", "x-guidance": {"whitespace_flexible": True}})
    assert ord(" ") not in allowed(follow(vocabulary, loose, "{"))


def test_no_token_is_allowed_that_is_special_or_none(vocabulary: Vocabulary) -> None:
    anything = allowed(vocabulary.compile(Grammar("regex", "(?s:.)*")).matcher())
    assert checkpoint.BOS not in anything
    assert max(anything) < 260  # the model's last forty rows are no tokens


def test_a_token_that_is_not_allowed_fails_the_matcher_and_nothing_else(vocabulary: Vocabulary) -> None:
    compiled = vocabulary.compile(Grammar("regex", "ab"))
    matcher, other = compiled.matcher(), compiled.matcher()
    matcher.accept(ord("x"))
    assert matcher.has_failed
    assert not matcher.is_over
    assert allowed(other) == {ord("a")}


def test_calls_have_their_schemas_each_with_its_own_definitions(vocabulary: Vocabulary) -> None:
    def shape(name: str, kind: str) -> CallShape:
        inner = {"$ref": "#/$defs/v"}
        fields = {"type": "object", "properties": {"v": inner}, "required": ["v"], "additionalProperties": False}
        return CallShape(f"<{name} ", fields | {"$defs": {"v": {"type": kind}}}, ">")

    source = json.dumps(
        {"shapes": [vars_of(shape("f", "integer")), vars_of(shape("g", "boolean"))], "between": "\n", "most": 2}
    )
    grammar = Grammar("calls", source)
    matcher = follow(vocabulary, grammar, '<g {"v": true}>')
    assert allowed(matcher) == {EOS, ord("\n")}
    assert follow(vocabulary, grammar, '<g {"v": true}>\n<f {"v":7}>').is_over
    assert ord("7") not in allowed(follow(vocabulary, grammar, '<g {"v": '))


@pytest.mark.parametrize(
    ("form", "text", "other"),
    [
        (Grammar("json_schema", '{"properties":{"a":{"type":"null"}},"required":["a"]}'), '{"a":null}', "x"),
        (Grammar("regex", "[a-z]+"), "abc", "1"),
        (Grammar("choice", '["yes","no"]'), "yes", "x"),
        (Grammar("lark", 'start: "<call" /[0-9]/'), "<call7", "x"),
    ],
)
@pytest.mark.parametrize("thought", [None, Thought("<think>", "</think>", is_open=True)])
def test_an_answer_is_calls_or_a_text_of_a_form(
    vocabulary: Vocabulary, form: Grammar, text: str, other: str, thought: Thought | None
) -> None:
    use = ToolUse([Function("f")], is_forced=False, is_parallel=True, tool_format=FORMATS["hermes"])
    grammar = use.grammar(form)
    assert grammar is not None
    grammar = msgspec.structs.replace(grammar, thought=thought)
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    for answer in (text, call, f"{call}\n{call}"):
        assert EOS in allowed(follow(vocabulary, grammar, answer))
    assert ord(other) not in allowed(follow(vocabulary, grammar, ""))
    assert allowed(follow(vocabulary, grammar, call)) == {EOS, ord("\n")}
    assert can_grow(grammar) is can_grow(form)


def vars_of(shape: CallShape) -> dict[str, object]:
    return {"before": shape.before, "schema": shape.schema, "after": shape.after}


@pytest.mark.parametrize(
    ("grammar", "told"),
    [
        (Grammar("json_schema", "{"), "no JSON object"),
        (Grammar("json_schema", "3"), "no JSON object"),
        (schema({"type": "nonsense"}), "nonsense"),
        (schema({"type": "integer", "minimum": 5, "maximum": 3}), "Unsatisfiable"),
        (schema({"type": "string", "pattern": "("}), "The schema cannot be used: an expression in it: unclosed group"),
        (schema({"not": {"type": "string"}}), "not"),
        (schema({"$ref": "http://127.0.0.1:1/schema"}), "retrieve"),
        (schema({"$ref": "#"}), "match"),
        (
            Grammar("regex", "(["),
            r"^The regular expression cannot be used: unclosed .* class \(character 2\)\.$",
        ),
        (Grammar("regex", "a\n("), r"^The regular expression cannot be used: unclosed group\.$"),
        (Grammar("lark", "start: a\na: /(/"), "line 2, column 4: an expression in it: unclosed group"),
        (Grammar("regex", "(?=a)b"), "look-around"),
        (
            Grammar("lark", "start: nothing"),
            r"^The grammar cannot be used: line 1, column 8: unknown .*\bnothing.\.$",
        ),
        (Grammar("lark", "start: start"), "match"),
    ],
)
def test_what_cannot_be_used_is_refused_in_one_line(vocabulary: Vocabulary, grammar: Grammar, told: str) -> None:
    with pytest.raises(InvalidRequest, match=told) as caught:
        vocabulary.compile(grammar)
    assert caught.value.message.isprintable()
    assert len(caught.value.message) < 300


@pytest.mark.parametrize("format_name", ["hermes", "qwen3_coder"])
@pytest.mark.parametrize(
    ("misfit", "why"),
    [
        ({"type": "nonsense"}, "Invalid type: nonsense"),
        ({"type": "array", "uniqueItems": True}, r'Unimplemented keys: \["uniqueItems"\]'),
        (
            {"type": "array", "items": {"type": "string", "pattern": "("}},
            "an expression in it: unclosed group",
        ),
    ],
)
def test_an_error_names_the_function_and_quotes_no_grammar(
    vocabulary: Vocabulary, format_name: str, misfit: dict[str, object], why: str
) -> None:
    functions = [
        Function(name, parameters={"type": "object", "properties": {"a": field}})
        for name, field in {"fine": {"type": "integer"}, "broken": misfit, "fine_too": {}}.items()
    ]
    grammar = ToolUse(functions, is_forced=True, is_parallel=True, tool_format=FORMATS[format_name]).grammar()
    assert grammar is not None
    with pytest.raises(InvalidRequest, match=rf"^The schema of a function cannot be used: in `broken`, {why}\.$"):
        vocabulary.compile(grammar)


ENUM: dict[str, object] = {"$defs": {"e": {"type": "string", "enum": ["red"]}}}
SAME: dict[str, object] = {"properties": {"a": {"type": "boolean"}, "b": {"$ref": "#/properties/a"}}}
TREE: dict[str, object] = {"properties": {"a": {"type": "array", "items": {"$ref": "#"}}}}


@pytest.mark.parametrize("format_name", ["qwen3_coder", "glm45"])
@pytest.mark.parametrize(
    ("of", "key", "right", "wrong"),
    [
        ({"$ref": "#/$defs/x", "$defs": {"x": {"properties": {"a": {"type": "integer"}}}}}, "a", "7", "x"),
        ({"allOf": [{"properties": {"b": {}}}, {"properties": {"a": {"type": "integer"}}}]}, "a", "7", "x"),
        ({"properties": {}}, "a", "x", None),
        (SAME, "b", "true", "x"),
        (TREE, "a", '[{"a":[]}]', "[["),
        (ENUM | {"properties": {"a": {"$ref": "#/$defs/e"}}}, "a", "red", "x"),
        (ENUM | {"properties": {"a": {"anyOf": [{"$ref": "#/$defs/e"}, {"type": "null"}]}}}, "a", "null", "x"),
        ({"properties": {"a": {"anyOf": [{"const": "x"}, {"type": "string"}]}}}, "a", "any", None),
    ],
)
def test_parameters_that_are_written_one_by_one_follow_the_whole_schema(
    vocabulary: Vocabulary, format_name: str, of: dict[str, object], key: str, right: str, wrong: str | None
) -> None:
    tool_format = FORMATS[format_name]
    function = Function("f", parameters=of | {"required": [key]})
    grammar = ToolUse([function], is_forced=True, is_parallel=False, tool_format=tool_format).grammar()
    assert grammar is not None
    marks = tool_format.parameters
    assert marks is not None
    before = tool_format.before_call.replace("NAME", "f")
    begun = f"{before}{marks.before_key}{key}{marks.after_key}{marks.before_value}"
    assert follow(vocabulary, grammar, begun + right + marks.after_value + tool_format.after_call).is_over
    if wrong is not None:
        matcher = follow(vocabulary, grammar, begun + wrong[:-1])
        assert ord(wrong[-1]) not in allowed(matcher)


@pytest.mark.parametrize("format_name", ["qwen3_coder", "glm45", "pythonic"])
@pytest.mark.parametrize("rule", [{"anyOf": [{"required": ["a"]}]}, {"$ref": "#/nowhere"}, {"const": {"a": 1}}])
def test_a_rule_about_all_parameters_is_refused_where_they_are_written_one_by_one(
    format_name: str, rule: dict[str, object]
) -> None:
    function = Function("f", parameters={"properties": {"a": {"type": "integer"}}} | rule)
    use = ToolUse([function], is_forced=True, is_parallel=False, tool_format=FORMATS[format_name])
    why = re.escape(f"cannot follow the `{next(iter(rule))}` of the parameters of `f`")
    with pytest.raises(InvalidRequest, match=why) as refusal:
        use.grammar()
    assert refusal.value.param == "tools"


def wide(num_optional: int, *, is_required: bool = False) -> dict[str, object]:
    """An object with so many properties that may all come first, or that come one after the other."""
    properties = {f"p{i}": {"type": "integer"} for i in range(num_optional)}
    return {"type": "object", "properties": properties, "required": list(properties) if is_required else []}


@pytest.mark.parametrize(
    "grammar",
    [
        pytest.param(schema(wide(600)), id="behind the first bracket"),
        pytest.param(
            schema({"type": "object", "properties": {"settings": wide(600)}, "required": ["settings"]}),
            id="behind text that must come and a blank that may",
        ),
        pytest.param(
            Grammar("lark", f'start: ("<" object)?\nobject: %json {json.dumps(wide(600))}'),
            id="where the text may also end at once",
        ),
    ],
)
@pytest.mark.parametrize("is_bytes", [True, False])
def test_what_meets_a_limit_behind_its_first_tokens_is_refused(
    vocabulary: Vocabulary, grammar: Grammar, *, is_bytes: bool
) -> None:
    """The first mask of all of these is well, and whatever the model says, it could not go on."""
    of_demo = Vocabulary.load(DEMO, 2048, [0])  # its first token is the one that ends the text
    with pytest.raises(InvalidRequest, match=r"cannot be used: too much may come next .* not required"):
        (vocabulary if is_bytes else of_demo).compile(grammar)


@pytest.mark.parametrize("of", [wide(480), wide(600, is_required=True)])
def test_many_properties_can_be_used_that_are_fewer_or_required(vocabulary: Vocabulary, of: dict[str, object]) -> None:
    assert ord("p") in allowed(follow(vocabulary, schema(of), '{"'))


@pytest.mark.parametrize("property_name", ["", "a"])
def test_a_text_that_leaves_no_choice_for_too_long_is_refused(vocabulary: Vocabulary, property_name: str) -> None:
    """Each mask in it looks at all that is left, and every stream waits for that."""

    def grammar(num_chars: int) -> Grammar:
        of: dict[str, object] = {"const": "x" * num_chars}
        if property_name:
            of = {"type": "object", "properties": {property_name: of}, "required": [property_name]}
        return schema(of)

    vocabulary.compile(grammar(MAX_FORCED_TOKENS - 20))  # a byte is a token, and brackets and quotes are too
    with pytest.raises(InvalidRequest, match=rf"no choice for \d+ tokens in a row, .* {MAX_FORCED_TOKENS} at most"):
        vocabulary.compile(grammar(MAX_FORCED_TOKENS + 1))


def decoded(of: Sequence[int], tokenizer: Tokenizer) -> bytes:
    return b"".join(map(tokenizer.text_bytes, of))


def test_the_library_reads_the_bytes_of_tokens_as_the_server_does() -> None:
    """With one exception that makes no difference: the byte 0xff, which is in no UTF-8, is never allowed."""
    tokenizer = Tokenizer.load(DEMO)
    text = '{"naïve": "日本", "n": [1, 2.5e3], "t": true}'
    [ids] = [tokenizer._inner.encode(text, add_special_tokens=False).ids]
    assert decoded(ids, tokenizer) == text.encode()
    matcher = Vocabulary.load(DEMO, 2048, [0]).compile(Grammar("choice", json.dumps([text]))).matcher()
    mask = np.zeros(64, np.uint32)
    for token_id in ids:
        matcher.fill(mask)
        assert mask[token_id // 32] >> (token_id % 32) & 1
        matcher.accept(token_id)
    assert matcher.is_over


def test_call_grammars_survive_their_way() -> None:
    import msgspec

    grammar = CallGrammar([CallShape("a", {"type": "object"}, "b")], ",", 3)
    assert msgspec.json.decode(msgspec.json.encode(grammar), type=CallGrammar) == grammar


def test_a_vocabulary_that_the_library_cannot_hold_is_refused(tmp_path: Path) -> None:
    """Its tree panics, or takes minutes: the server says so, and serves without grammars."""
    content = json.loads((DEMO / "tokenizer.json").read_text())
    content["model"]["vocab"]["#" * (MAX_TOKEN_CHARS + 1)] = len(content["model"]["vocab"])
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match="a token has 256 characters"):
        Vocabulary.load(tmp_path, 2048, [0])


def grammar(i: int) -> Grammar:
    return Grammar("regex", f"a{{{i:03}}}")


def test_the_cache_drops_what_was_not_used_for_longest(vocabulary: Vocabulary) -> None:
    cache = GrammarCache[Compiled](3 * entry_bytes(grammar(1)), lambda each, _: entry_bytes(each))
    compiled = {i: vocabulary.compile(grammar(i)) for i in range(1, 6)}
    for i in (1, 2, 3):
        cache.put(grammar(i), compiled[i])
    assert cache.get(grammar(1)) is compiled[1]
    cache.put(grammar(4), compiled[4])
    assert cache.get(grammar(2)) is None
    assert cache.get(grammar(1)) is compiled[1]
    assert len(cache.entries) == 3
    cache.put(Grammar("regex", "b" * 40_000), compiled[5])  # a longer one takes more room
    assert len(cache.entries) < 3
    assert cache.num_bytes <= 3 * entry_bytes(grammar(1))


def test_many_grammars_leave_a_bounded_cache(vocabulary: Vocabulary) -> None:
    compiler = GrammarCompiler(vocabulary, 20 * entry_bytes(grammar(1)))
    for i in range(300):
        compiler.open(grammar(i + 1)).result()
    assert len(compiler._cache.entries) <= 20
    assert compiler._cache.num_bytes == sum(map(entry_bytes, compiler._cache.entries))


def test_a_grammar_that_grew_to_its_limit_is_compiled_anew_for_the_next_one(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Matchers of a cached grammar share its states, whose number is limited; 2**12 would be needed here."""
    limits = llguidance.LLParserLimits(max_lexer_states=60, verbose_errors=False)
    monkeypatch.setattr("roseinfer.text.grammar.compiler._LIMITS", limits)
    compiler, mask = GrammarCompiler(vocabulary, 1 << 20), np.zeros(-(-checkpoint.VOCAB_SIZE // 32), np.uint32)
    exploding, random = Grammar("regex", "(a|b)*a(a|b){12}x"), np.random.default_rng(0)
    matcher = compiler.open(exploding).result()
    while not matcher.has_failed:
        matcher.fill(mask)
        matcher.accept(int(random.choice([*b"ab"])))
    again = compiler.open(exploding).result()
    again.fill(mask)
    assert not again.has_failed
    assert compiler._cache.num_bytes == entry_bytes(exploding)


def test_a_grammar_that_met_its_limit_in_a_token_is_compiled_anew(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a mask before it, or behind one that was made in time."""
    limits = llguidance.LLParserLimits(max_lexer_states=60, verbose_errors=False)
    monkeypatch.setattr("roseinfer.text.grammar.compiler._LIMITS", limits)
    compiled, random = vocabulary.compile(Grammar("regex", "(a|b)*a(a|b){12}x")), np.random.default_rng(0)
    matcher = compiled.matcher()
    assert not compiled.is_worn
    while not matcher.has_failed:
        matcher.accept(int(random.choice([*b"ab"])))
    assert compiled.is_worn


@pytest.mark.parametrize("thought", [None, Thought("<think>", "</think>", is_open=False, max_tokens=3)])
def test_a_grammar_that_was_compiled_before_waits_for_no_other(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch, thought: Thought | None
) -> None:
    """One client's slow grammars would hold up the first token of all others with a form."""
    compiler, known, may_end = (
        GrammarCompiler(vocabulary),
        msgspec.structs.replace(grammar(1), thought=thought),
        threading.Event(),
    )
    compiler.open(known).result()
    compile_one = vocabulary.compile

    def compile_slowly(grammar: Grammar) -> Compiled:
        assert may_end.wait(30)
        return compile_one(grammar)

    monkeypatch.setattr(vocabulary, "compile", compile_slowly)
    slow = compiler.open(grammar(2))
    assert compiler.open(known).done()
    assert not slow.done()
    may_end.set()
    assert not slow.result().has_failed


def test_a_sequence_is_not_ended_by_the_states_that_others_found(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = llguidance.LLParserLimits(max_lexer_states=60, verbose_errors=False)
    monkeypatch.setattr("roseinfer.text.grammar.compiler._LIMITS", limits)
    compiled, random = vocabulary.compile(Grammar("regex", "(a|b)*a(a|b){12}x")), np.random.default_rng(0)
    busy, unread, alone = compiled.matcher(), compiled.matcher(), compiled.compile_anew()
    assert alone is not None
    expected = alone.matcher()
    for byte in b"abbaababbabaa":
        unread.accept(byte)
        expected.accept(byte)
    while not compiled.has_failed:
        busy.accept(int(random.choice([*b"ab"])))
    assert allowed(unread) == allowed(expected) == {*b"abx"}
    unread.accept(ord("x"))
    assert unread.is_over
    assert not busy.has_failed


@pytest.mark.parametrize(
    ("schema", "wears_out"),
    [
        ('{"type": "object", "properties": {"n": {"type": "integer"}}}', False),
        ('{"type": "string", "pattern": "a+"}', True),
        ('{"type": "string", "p\\u0061ttern": "a+"}', True),
        ('{"type": "object", "patternProperties": {"a+": {"type": "null"}}}', True),
        ('{"type": "string", "minLength": 3}', True),
        ('{"type": "integer", "exclusiveMinimum": 3}', True),
    ],
)
def test_only_what_can_grow_wears_out_by_being_followed(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch, schema: str, *, wears_out: bool
) -> None:
    """Many sequences together follow a usual one for long within a second, and would all wait for it to be compiled."""
    compiled = vocabulary.compile(Grammar("json_schema", schema))
    monkeypatch.setattr(compiled, "followed_ns", MAX_FOLLOWED_NS + 10**12)
    assert compiled.is_worn == wears_out


def test_a_grammar_that_was_followed_for_long_is_compiled_anew(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have grown meanwhile, by more than the cache counts."""
    compiler = GrammarCompiler(vocabulary)
    compiler.open(grammar(1)).result().fill(np.zeros(-(-checkpoint.VOCAB_SIZE // 32), np.uint32))
    compiled = compiler._cache.get(grammar(1))
    assert compiled is not None
    assert compiled.followed_ns > 0
    compiler.open(grammar(1)).result()
    assert compiler._cache.get(grammar(1)) is compiled
    monkeypatch.setattr(compiled, "followed_ns", MAX_FOLLOWED_NS + 10**12)
    compiler.open(grammar(1)).result()
    assert compiler._cache.get(grammar(1)) is not compiled
    assert compiler._cache.num_bytes == entry_bytes(grammar(1))


def test_compiling_anew_takes_at_most_half_as_long_as_the_masks_did(vocabulary: Vocabulary) -> None:
    """However slow the machine is, and however many follow a grammar together."""
    compiled, compile_ns = vocabulary.compile(grammar(1)), 10 * MAX_FOLLOWED_NS
    compiled.begin(compile_ns)
    compiled.followed_ns = MAX_FOLLOWED_NS + 2 * compile_ns
    assert not compiled.is_worn
    compiled.followed_ns += 1
    assert compiled.is_worn


def test_unused_matchers_hold_no_copy_of_the_grammar(vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to 512 sequences of a request wait for their turn, and a source may have 256 KiB."""
    copied: list[llguidance.LLMatcher] = []

    class Counting:
        def __init__(self, template: llguidance.LLMatcher) -> None:
            self._template = template

        def deep_copy(self) -> llguidance.LLMatcher:
            copied.append(self._template.deep_copy())
            return copied[-1]

    compiled = vocabulary.compile(grammar(1))
    monkeypatch.setattr(compiled, "template", Counting(compiled.template))
    waiting, running = compiled.matcher(), compiled.matcher()
    running.fill(np.zeros(-(-checkpoint.VOCAB_SIZE // 32), np.uint32))
    running.accept(ord("a"))
    assert running.is_over
    assert len(copied) == 1
    assert not waiting.is_over
    assert len(copied) == 2


def test_matchers_of_one_grammar_go_their_own_ways(vocabulary: Vocabulary) -> None:
    compiler = GrammarCompiler(vocabulary, 1 << 20)
    first, second = (compiler.open(Grammar("choice", '["ab", "cd"]')).result() for _ in range(2))
    for byte in b"ab":
        first.accept(byte)
    assert first.is_over
    assert not second.is_over
    second.accept(ord("c"))
    assert not second.has_failed


def test_what_does_not_compile_is_an_error_of_its_own_future(vocabulary: Vocabulary) -> None:
    compiler = GrammarCompiler(vocabulary, 0)
    with pytest.raises(InvalidRequest):
        compiler.open(Grammar("regex", "(")).result()
    assert not compiler.open(Grammar("regex", "a")).result().is_over


def test_the_sequences_of_one_request_share_a_grammar_that_no_cache_could_hold(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of up to 512 would compile it again, for as long as `structured.compile_timeout_s` allows."""
    compiled: list[Grammar] = []

    def counting(each: Grammar) -> Compiled:
        compiled.append(each)
        return Vocabulary.compile(vocabulary, each)

    monkeypatch.setattr(vocabulary, "compile", counting)
    compiler = GrammarCompiler(vocabulary, 0)
    for i in (1, 1, 1, 2, 2):
        compiler.open(grammar(i)).result()
    assert compiled == [grammar(1), grammar(2)]
    assert len(compiler._cache.entries) == 1
