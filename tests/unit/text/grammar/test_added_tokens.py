"""Added tokens written as tags: a text that holds one can be said with it, whatever the kind of the grammar."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from roseinfer.engine.core.constraint import Matcher
from roseinfer.errors import InvalidRequest
from roseinfer.messages import Grammar
from roseinfer.text.answers.functions import Function
from roseinfer.text.answers.tool_formats import CALL_TAGS, FORMATS
from roseinfer.text.answers.tool_use import MAX_FORCED_CALLS, ToolUse
from roseinfer.text.grammar.compiler import Vocabulary
from roseinfer.text.grammar.tokenizer_file import TokenizerFile
from roseinfer.text.tokenizer.tokenizer import Tokenizer
from tests.unit.text.grammar import tagged
from tests.unit.text.grammar.tagged import CONTROL, EOS_TEXT, FAMILIES, TEXT

TEXTS = [
    "<tool_call>",
    "</tool_call>",
    "<think></think><tool_call>",
    "say <tool_call>s or <tool_call> now</think>",
    "<|fim|>_pad<|fim|><|fim|>_pa",
    "<tool_cal</tool_call><tool_",
    "[b] and <think> \n</think>\n\n",
    EOS_TEXT,
    "a<|im_start|>user\n<think>b<|endoftext|>",
    "e\u0301 is no normal form of é<tool_call>",
]


@dataclass(frozen=True)
class Loaded:
    """One checkpoint, as the server and the grammars read it."""

    vocabulary: Vocabulary
    tokenizer: Tokenizer
    control: frozenset[int]

    def token_id(self, text: str) -> int:
        found = self.tokenizer._inner.token_to_id(text)
        assert found is not None
        return found

    def own_tokens(self, text: str) -> list[int]:
        """As the model's own tokenizer has it, with the names of control tokens written out."""
        inner = self.tokenizer._inner
        tags = [tag for tag in (*CALL_TAGS, *TEXT) if inner.token_to_id(tag) is not None]
        inner.encode_special_tokens = True
        token_ids: list[int] = []
        for part in re.split("(" + "|".join(map(re.escape, sorted(tags, key=len, reverse=True))) + ")", text):
            token_ids += [self.token_id(part)] if part in tags else inner.encode(part, add_special_tokens=False).ids
        inner.encode_special_tokens = False
        return token_ids

    def allowed(self, matcher: Matcher) -> set[int]:
        mask = np.zeros(-(-self.vocabulary.vocab_size // 32), np.uint32)
        matcher.fill(mask)
        return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())

    def says(self, token_ids: Sequence[int]) -> str:
        return b"".join(map(self.tokenizer.tagged_text_bytes, token_ids)).decode()


@pytest.fixture(scope="module", params=FAMILIES)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    directory = tagged.write_checkpoint(tmp_path_factory.mktemp("checkpoint"), request.param)
    info = tagged.engine_info(directory, request.param)
    tokenizer = Tokenizer.load(directory)
    control = frozenset(filter(None, map(tokenizer._inner.token_to_id, CONTROL)))
    return Loaded(Vocabulary.load(directory, info.vocab_size, info.eos_token_ids), tokenizer, control)


def calls(text: str) -> tuple[Grammar, str]:
    shape = {"before": text, "schema": {"const": 1}, "after": text}
    source = {"shapes": [shape], "between": text, "most": 2}
    return Grammar("calls", json.dumps(source)), f"{text}1{text}{text}{text}1{text}"


def grammars(text: str) -> list[tuple[Grammar, str]]:
    """Of every kind, and a text that each is about."""
    quoted = json.dumps(text, ensure_ascii=False)
    return [
        (Grammar("regex", re.escape(text).replace(r"\ ", " ")), text),
        (Grammar("regex", "(?s:.)*"), text),
        (Grammar("json_schema", json.dumps({"const": text})), quoted),
        (Grammar("json_schema", json.dumps({"enum": ["<", text, text + "."]})), quoted),
        (Grammar("json_schema", json.dumps({"type": "string"})), quoted),
        (Grammar("json_schema", json.dumps({"type": "object", "required": [text]})), f"{{{quoted}: 1}}"),
        (Grammar("lark", f"start: {quoted}"), text),
        (Grammar("lark", f'start: ("a" | {quoted})* "."'), f"a{text}{text}a."),
        (Grammar("choice", json.dumps([text])), text),
        (Grammar("choice", json.dumps([text[:-1], text, text * 2, "x"])), text * 2),
        calls(text),
    ]


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_may_be_said_with_the_tokens_that_the_models_tokenizer_makes_of_it(loaded: Loaded, text: str) -> None:
    for grammar, wanted in grammars(text):
        if "e\u0301" in wanted:  # the tokenizer would say another text
            continue
        token_ids, matcher = loaded.own_tokens(wanted), loaded.vocabulary.compile(grammar).matcher()
        assert loaded.says(token_ids) == wanted
        for token_id in token_ids:
            assert token_id in loaded.allowed(matcher), (grammar, wanted, loaded.tokenizer.spell(token_id))
            matcher.accept(token_id)
        assert not matcher.has_failed, grammar
        assert matcher.is_over or loaded.token_id(EOS_TEXT) in loaded.allowed(matcher), grammar


@pytest.mark.parametrize("text", TEXTS)
def test_whatever_is_sampled_is_the_text_and_no_control_token(loaded: Loaded, text: str) -> None:
    random = np.random.default_rng(0)
    for grammar, wanted in (grammars(text)[i] for i in (0, 2, 6, 8, 10)):
        wanted_texts = {wanted, text + "1" + text}  # one call is enough
        compiled = loaded.vocabulary.compile(grammar)
        for _ in range(5):
            matcher, token_ids, eos = compiled.matcher(), list[int](), loaded.token_id(EOS_TEXT)
            while not matcher.is_over:
                token_id = int(random.choice(sorted(loaded.allowed(matcher))))
                if token_id == eos:
                    break
                assert token_id not in loaded.control
                token_ids.append(token_id)
                matcher.accept(token_id)
                assert not matcher.has_failed, (grammar, loaded.says(token_ids))
            said = loaded.says(token_ids)
            if grammar.kind == "json_schema":  # which may say a line's end in several ways
                assert json.loads(said) == json.loads(wanted)
            else:
                assert said in wanted_texts, grammar


PARAMETERS = {
    "type": "object",
    "properties": {
        "e": {"enum": ["x", "y z"]},
        "i": {"type": "integer"},
        "s": {"type": "string"},
        "o": {"$ref": "#/$defs/o"},
        "u": {"type": ["boolean", "null"]},
    },
    "required": ["i", "o"],
    "additionalProperties": False,
    "$defs": {"o": {"properties": {"q": {"enum": [None, '"]']}}, "required": ["q"], "additionalProperties": False}},
}


@pytest.mark.parametrize("tool_format", FORMATS)
@pytest.mark.parametrize("is_parallel", [True, False])
def test_whatever_is_said_where_calls_are_forced_is_read_as_calls(
    loaded: Loaded, tool_format: str, *, is_parallel: bool
) -> None:
    functions = [Function("f", parameters=PARAMETERS), Function("g")]
    use = ToolUse(functions, is_forced=True, is_parallel=is_parallel, tool_format=FORMATS[tool_format])
    grammar = use.grammar()
    assert grammar is not None
    compiled, eos = loaded.vocabulary.compile(grammar), loaded.token_id(EOS_TEXT)
    random = np.random.default_rng(0)
    found: list[str | None] = []
    for _ in range(8):
        matcher, token_ids = compiled.matcher(), list[int]()
        while not matcher.is_over:
            allowed = loaded.allowed(matcher)
            if eos in allowed and random.random() < 0.5:
                break
            ends = {token_id for token_id in allowed if loaded.tokenizer.spell(token_id) in {b'"', b"<", b"}"}}
            # Strings would go on for long.
            chosen = ends if ends and random.random() < 0.5 else allowed - {eos}
            token_ids.append(int(random.choice(sorted(chosen))))
            matcher.accept(token_ids[-1])
            assert not matcher.has_failed
        parser = use.parser()
        parts = parser.push(loaded.says(token_ids))
        parts.extend(parser.finish())
        assert (parts.content, parser.is_cut) == ("", False), loaded.says(token_ids)
        assert 1 <= len(parts.calls) <= (MAX_FORCED_CALLS if is_parallel else 1)
        for call in parts.calls:
            arguments = json.loads(call.arguments)
            assert call.name == "g" or arguments.keys() >= {"i", "o"}
            assert all(type(arguments[key]) is kind for key, kind in (("i", int), ("s", str)) if key in arguments)
        found += [call.name for call in parts.calls]
    assert {*found} == {"f", "g"}


def test_a_tag_is_forced_as_its_token(loaded: Loaded) -> None:
    """So the model is where its training has it, not behind a tag in pieces."""
    for tag in CALL_TAGS:
        matcher = loaded.vocabulary.compile(Grammar("choice", json.dumps([f"{tag}\n{{}}"]))).matcher()
        assert loaded.allowed(matcher) == {loaded.token_id(tag)}


def test_control_tokens_are_in_no_free_text(loaded: Loaded) -> None:
    matcher = loaded.vocabulary.compile(Grammar("regex", "(?s:.)*")).matcher()
    assert loaded.allowed(matcher) & loaded.control == {loaded.token_id(EOS_TEXT)}, "which may end it"


@pytest.mark.parametrize("name", ["<tool_call>", "</tool_call>", "<|im_start|>"])
@pytest.mark.parametrize("is_number", [False, True])
def test_a_lark_grammar_may_name_tokens(loaded: Loaded, name: str, *, is_number: bool) -> None:
    token_id = loaded.token_id(name)
    term = f"<[{token_id}]>" if is_number else name
    source = f'start: "a" {term} TEXT {term}+ // {term}\nTEXT: /[a-z<]*/ "{name}"? # {name}'
    matcher = loaded.vocabulary.compile(Grammar("lark", source)).matcher()
    for text in ("a", name, "b", "<", name):
        assert loaded.token_id(text) in loaded.allowed(matcher)
        matcher.accept(loaded.token_id(text))
        assert not matcher.has_failed
    assert loaded.token_id(EOS_TEXT) in loaded.allowed(matcher)


def test_a_lark_grammar_names_a_token_where_thoughts_end(loaded: Loaded) -> None:
    if loaded.tokenizer._inner.token_to_id("</think>") is None:
        return  # Qwen2.5 has no thoughts
    source = 'start: <think> /(.|\\n)*/ </think> "yes"'
    matcher = loaded.vocabulary.compile(Grammar("lark", source)).matcher()
    for token_id in map(loaded.token_id, ("<think>", "a", "<", "</think>")):
        assert token_id in loaded.allowed(matcher)
        matcher.accept(token_id)
    assert loaded.token_id("y") in loaded.allowed(matcher)


def test_a_name_that_no_token_has_is_refused_at_its_place(loaded: Loaded) -> None:
    with pytest.raises(InvalidRequest, match=r"line 1, column 8: unknown special token"):
        loaded.vocabulary.compile(Grammar("lark", "start: <tool_call> <nothing>"))


def test_names_are_replaced_in_a_lark_grammar_and_nowhere_inside_its_texts() -> None:
    file = TokenizerFile({}, {"<a>": 7, "<bcd>": 12345}, 0, str.encode, b"{}")
    for source, replaced in (
        ("start: <a> <bcd>+", "start: <[7]> <[12345]>+"),
        ('start: "<a>" <a>', 'start: "<a>" <[7]>'),
        (r'start: "\"<a>" /\/<a>/ <a>', r'start: "\"<a>" /\/<a>/ <[7]>'),
        ("# <a>\n// <a>\nstart: <a>", "# <a>\n// <a>\nstart: <[7]>"),
        ('start: %json {"const": "<a>"}', 'start: %json {"const": "<a>"}'),
        ("start: <b> ~<a>", "start: <b> ~<[7]>"),
    ):
        assert file.with_ids(source) == replaced


def spelled(of: bytes) -> bytes:
    """The byte 0xff is in no text, and the library has it for its own marks."""
    return b"\xff" if of.startswith(b"<[") else of


def test_every_token_spells_what_the_server_makes_of_it(loaded: Loaded) -> None:
    inner = loaded.vocabulary._tokenizer
    for token_id in range(loaded.tokenizer._inner.get_vocab_size()):
        assert inner.is_special_token(token_id) == (token_id in loaded.control)
        assert spelled(inner.decode_bytes([token_id])) == loaded.tokenizer.spell(token_id)


def test_a_control_token_of_the_model_itself_keeps_the_ids_of_the_others(tmp_path: Path) -> None:
    """GPT-2's and Llama 2's have their ids from the model; what is added behind them counts on."""
    tokenizer = tagged.make_tokenizer("qwen3")
    content = json.loads(tokenizer.to_str())
    content["model"]["vocab"]["<s>"] = len(content["model"]["vocab"])
    first = len(content["model"]["vocab"]) - 1
    for token in content["added_tokens"]:
        token["id"] += 1
    beginning = content["added_tokens"][0] | {"id": first, "content": "<s>"}
    content["added_tokens"].insert(0, beginning)
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    server = Tokenizer.load(tmp_path)
    eos = server._inner.token_to_id(EOS_TEXT)
    assert eos is not None
    vocabulary = Vocabulary.load(tmp_path, server._inner.get_vocab_size(), [eos])
    for token_id in range(vocabulary.vocab_size):
        assert spelled(vocabulary._tokenizer.decode_bytes([token_id])) == server.spell(token_id)
    vocabulary.compile(Grammar("choice", json.dumps(["<s><think>" + EOS_TEXT])))


@pytest.mark.parametrize("form", ["normalizer", "metaspace"])
def test_a_forced_text_gets_no_blank_that_sentencepiece_puts_before_one(form: str, tmp_path: Path) -> None:
    """And its tokens are the model's: `a` and `bcd` by the order of merges, where the longest are `ab`, `c` and `d`."""
    words = ["\u2581", *"abcd", "bc", "ab", "bcd", *(f"<0x{byte:02X}>" for byte in range(256))]
    merges = [("b", "c"), ("bc", "d"), ("a", "b")]
    vocab = {word: i for i, word in enumerate(["<unk>", "</s>", *words])}
    inner = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))  # noqa: S106 - of text
    blanks = [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    if form == "normalizer":
        inner.normalizer = normalizers.Sequence(blanks)
    else:
        inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    inner.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    inner.add_special_tokens(["<unk>", "</s>"])
    inner.save(str(tmp_path / "tokenizer.json"))
    vocabulary = Vocabulary.load(tmp_path, len(vocab), [vocab["</s>"]])
    assert vocabulary._tokenizer.tokenize_str("abcd") == [vocab["a"], vocab["bcd"]]
    assert vocabulary._tokenizer.tokenize_str(" a\n") == [vocab["\u2581"], vocab["a"], vocab["<0x0A>"]]
    forced = vocabulary.compile(Grammar("choice", json.dumps(["abcd abcd"]))).matcher().forced()
    assert forced[:2] == [vocab["a"], vocab["bcd"]]
