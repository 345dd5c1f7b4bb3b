"""Thoughts before a text that follows a grammar: what may come in them, where they end, and the form behind them."""

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
import tokenizers

from roseinfer.config.options import StructuredConfig
from roseinfer.engine.core.constraint import Matcher
from roseinfer.errors import InvalidRequest
from roseinfer.messages import Grammar, Thought
from roseinfer.text.answers.functions import Function
from roseinfer.text.answers.reasoning import FORMATS as FORMATS_OF_THOUGHTS
from roseinfer.text.answers.reasoning import ReasoningFormat
from roseinfer.text.answers.tool_formats import FORMATS as TOOL_FORMATS
from roseinfer.text.answers.tool_use import ToolUse
from roseinfer.text.grammar.checker import GrammarChecker
from roseinfer.text.grammar.compiler import GrammarCompiler, Vocabulary
from roseinfer.text.tokenizer.tokenizer import Tokenizer
from tests.unit.server import harness
from tests.unit.text.grammar import tagged
from tests.unit.text.grammar.tagged import EOS_TEXT, FAMILIES

SCHEMA = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"], "additionalProperties": False}
FORMS = {
    "json_schema": (json.dumps(SCHEMA), '{"a": 1}'),
    "regex": ("<[a-z]+>", "<abc>"),
    "choice": ('["yes", "</think>no"]', "</think>no"),
    "lark": ('start: "{" start "}" | "x"', "{{x}}"),
    "calls": (
        json.dumps(
            {
                "shapes": [{"before": "<tool_call>\n", "schema": SCHEMA, "after": "\n</tool_call>"}],
                "between": "\n",
                "most": 2,
            }
        ),
        '<tool_call>\n{"a": 1}\n</tool_call>',
    ),
}


class Model:
    """A vocabulary whose tags may be tokens, and texts in its tokens."""

    def __init__(self, directory: Path, tokenizer: tokenizers.Tokenizer) -> None:
        tokenizer.save(str(directory / "tokenizer.json"))
        self.info = info = harness.engine_info(
            checkpoint_dir=str(directory),
            vocab_size=tokenizer.get_vocab_size() + 20,  # rows that no token belongs to
            eos_token_ids=[tokenizer.token_to_id(EOS_TEXT)],
        )
        self.vocabulary = Vocabulary.load(directory, info.vocab_size, info.eos_token_ids)
        self.compiler = GrammarCompiler(self.vocabulary)
        self.tokenizer = Tokenizer.load(directory)

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode_here(text, add_special_tokens=False)

    def allowed(self, matcher: Matcher) -> set[int]:
        mask = np.zeros(-(-self.info.vocab_size // 32), np.uint32)
        matcher.fill(mask)
        return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())

    def follow(self, grammar: Grammar, *texts: str) -> Matcher:
        """The matcher behind texts, each token of which was allowed."""
        matcher = self.compiler.open(grammar).result()
        for token_id in (token_id for text in texts for token_id in self.ids(text)):
            ahead, may = matcher.copy(), self.allowed(matcher)
            assert token_id in may, (texts, self.tokenizer.spell(token_id))
            assert may.issuperset(ahead.copy().forced()[:1])
            matcher.accept(token_id)
            assert self.allowed(ahead) == may, "a copy goes its own way"
            ahead.accept(token_id)
            assert self.allowed(ahead) == self.allowed(matcher)
        return matcher


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("checkpoint"), tagged.make_tokenizer(request.param))


def thinking(kind: str, *, is_open: bool, max_tokens: int | None = None) -> Grammar:
    source = FORMS[kind][0] if kind in FORMS else ""
    return Grammar(kind, source, Thought("<think>", "</think>", is_open, max_tokens))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", FORMS)
@pytest.mark.parametrize("blanks", ["", "\n", "\n\n"])
def test_the_form_holds_behind_the_thoughts_however_they_were_opened(model: Model, kind: str, blanks: str) -> None:
    text = FORMS[kind][1]
    thought = f"{blanks}a {{ < </ \U0001f600 </thinking> {text.removeprefix('</think>')}{blanks}"
    for is_open, opening in ((True, ""), (False, "<think>")):
        matcher = model.follow(thinking(kind, is_open=is_open), opening, thought, "</think>", blanks, text)
        assert model.info.eos_token_ids[0] in model.allowed(matcher) or matcher.is_over
        begun = model.follow(thinking(kind, is_open=is_open), opening, thought, "</think>")
        assert not model.allowed(begun) & {model.ids("q")[0], *model.info.eos_token_ids}
    assert model.follow(thinking(kind, is_open=False), text).error == "", "an answer may have no thoughts"


@pytest.mark.parametrize("tool_format", TOOL_FORMATS)
@pytest.mark.parametrize("is_open", [True, False])
def test_calls_of_every_format_are_forced_behind_the_thoughts(model: Model, tool_format: str, is_open: bool) -> None:
    functions = [Function("f", "", {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]})]
    calls = ToolUse(functions, is_forced=True, is_parallel=True, tool_format=TOOL_FORMATS[tool_format]).grammar()
    assert calls is not None

    def beginnings(matcher: Matcher) -> set[bytes]:
        return {model.tokenizer.spell(token_id)[:1] for token_id in model.allowed(matcher)}

    bare = beginnings(model.follow(calls))
    grammar = msgspec.structs.replace(calls, thought=Thought("<think>", "</think>", is_open))
    behind = model.follow(grammar, "" if is_open else "<think>", "Shall I?</think>")
    assert beginnings(behind) == bare | {b" ", b"\n"}
    if not is_open:
        assert beginnings(model.follow(grammar)) == bare | {b"<"}


def test_thoughts_hold_any_text_and_no_end(model: Model) -> None:
    matcher = model.follow(thinking("regex", is_open=True), "so")
    texts = map(model.tokenizer.tagged_text_bytes, range(model.info.vocab_size))
    assert model.allowed(matcher) == {token_id for token_id, text in enumerate(texts) if text not in {b"", b"\xff"}}
    assert not matcher.is_over


def test_no_token_goes_beyond_the_closing_tag(tmp_path: Path) -> None:
    """Where the tag is no token, one that ends it may hold blanks behind it, and no text that the form has not."""
    tokenizer = tagged.make_tokenizer("qwen2.5")
    tokenizer.add_tokens([">{", "> \n", ">>"])
    model = Model(tmp_path, tokenizer)
    [open_end, twice, blank_end] = [model.ids(text)[0] for text in (">{", ">>", "> \n")]
    beyond = {open_end, twice}
    for is_open, opening in ((True, ""), (False, "<think>")):
        assert model.allowed(model.follow(thinking("json_schema", is_open=is_open), opening, "a")) >= beyond
        matcher = model.follow(thinking("json_schema", is_open=is_open), opening, "a</think")
        assert not model.allowed(matcher) & beyond
        assert blank_end in model.allowed(matcher)
        matcher.accept(blank_end)
        assert model.ids("{")[0] in model.allowed(matcher)


@pytest.mark.parametrize("kind", [*FORMS, "text"])
@pytest.mark.parametrize("is_open", [True, False])
@pytest.mark.parametrize("begun", ["", " </", " </th", "\n"])
def test_a_thought_of_as_many_tokens_as_it_may_have_is_closed(
    model: Model, kind: str, is_open: bool, begun: str
) -> None:
    opening = "" if is_open else "<think>"
    matcher = model.follow(thinking(kind, is_open=is_open, max_tokens=len(model.ids(begun))), opening, begun)
    text = begun.strip()
    while not text.endswith(">"):
        [token_id] = model.allowed(matcher)
        text += model.tokenizer.spell(token_id).decode()
        matcher.accept(token_id)
    assert text == "</think>"
    if kind == "text":
        assert len(model.allowed(matcher)) >= model.info.vocab_size, "any token, also one that ends the text"
    else:
        for token_id in model.ids("\n\n" + FORMS[kind][1]):
            assert token_id in model.allowed(matcher)
            matcher.accept(token_id)


@pytest.mark.parametrize("tags", FORMATS_OF_THOUGHTS.values(), ids=FORMATS_OF_THOUGHTS)
@pytest.mark.parametrize("begun", ["", "x", "{:.1}", "{:.3}"])
def test_every_closing_tag_can_be_forced_also_where_tokens_end_amid_its_characters(
    model: Model, tags: ReasoningFormat, begun: str
) -> None:
    thought = begun.format(tags.closing)
    matcher = model.follow(
        Grammar("regex", "ok", Thought(*tags, is_open=True, max_tokens=len(model.ids(thought)))), thought
    )
    text = thought.encode()
    while not text.endswith(tags.closing.encode()) and len(text) < 100:
        [token_id] = model.allowed(matcher)
        assert matcher.copy().forced()[0] == token_id
        text += model.tokenizer.tagged_text_bytes(token_id)
        matcher.accept(token_id)
    assert text.decode() == thought.removesuffix(tags.closing[: len(thought)]) + tags.closing
    assert model.ids("o")[0] in model.allowed(matcher)


def test_a_text_without_a_form_is_free_but_for_the_length_of_its_thoughts(model: Model) -> None:
    everything = set(range(-(-model.info.vocab_size // 32) * 32))
    for texts in ([], ["hello"], ["<think>", "a"], ["<think>", "abc", "</think>", "<tool_call>"]):
        assert model.allowed(model.follow(thinking("text", is_open=False, max_tokens=9), *texts)) == everything


def test_the_form_behind_the_thoughts_ends_or_fails_the_text(model: Model) -> None:
    def state(matcher: Matcher) -> tuple[bool, bool, bool]:
        return matcher.is_over, matcher.has_failed, matcher.error != ""

    form, thought, goes_on = Grammar("regex", "ok", Thought("<think>", "</think>", is_open=True)), "ok", (False,) * 3
    assert state(model.follow(form, thought)) == goes_on
    assert state(model.follow(form, thought, "</think>")) == goes_on
    assert state(model.follow(form, thought, "</think>", "ok")) == (True, False, False)
    failed = model.follow(form, thought, "</think>")
    failed.accept(model.ids("q")[0])
    assert state(failed) == (False, True, True)
    assert state(model.follow(thinking("text", is_open=True), thought, "</think>", "ok")) == goes_on


def test_a_copy_goes_on_behind_the_thoughts_without_the_original(model: Model) -> None:
    form = Grammar("regex", "ok", Thought("<think>", "</think>", is_open=True))
    matcher = model.follow(form, "so")
    ahead = matcher.copy()
    assert ahead.forced() == [], "thoughts may go on"
    for token_id in model.ids("</think>o"):
        ahead.accept(token_id)
    assert ahead.forced() == model.ids("k")
    for token_id in model.ids("</think>o"):
        assert token_id in model.allowed(matcher)
        matcher.accept(token_id)
    assert model.allowed(matcher) == model.allowed(ahead)


def test_control_tags_are_tokens(tmp_path: Path) -> None:
    """As Magistral's, which the vocabulary marks special."""
    tokenizer = tagged.make_tokenizer("qwen2.5")
    tokenizer.add_special_tokens(["[THINK]", "[/THINK]"])
    model = Model(tmp_path, tokenizer)
    [opening, closing, x] = model.ids("[THINK][/THINK]x")
    matcher = model.follow(Grammar("regex", "xyz", Thought("[THINK]", "[/THINK]", is_open=False, max_tokens=2)))
    assert model.allowed(matcher) == {opening, x}
    matcher.accept(opening)
    for _ in range(2):
        assert closing in model.allowed(matcher)
        assert model.info.eos_token_ids[0] not in model.allowed(matcher)
        matcher.accept(x)
    assert model.allowed(matcher) == {closing}
    matcher.accept(closing)
    assert model.allowed(matcher) == {x, *model.ids(" \n")}


def test_a_form_is_checked_without_its_thoughts(model: Model) -> None:
    checker = GrammarChecker(StructuredConfig(), lambda: model.info)
    try:
        checker.check(thinking("regex", is_open=True, max_tokens=3), "x").result()
        checker.check(thinking("text", is_open=True, max_tokens=3), "x").result()
        for wrong in (Grammar("text", ""), Grammar("text", "a", Thought("<think>", "</think>", True))):
            with pytest.raises(InvalidRequest):
                checker.check(wrong, "x").result()
        with pytest.raises(InvalidRequest, match="regular expression cannot be used"):
            checker.check(msgspec.structs.replace(thinking("regex", is_open=True), source="(["), "x").result()
        with pytest.raises(InvalidRequest, match=r"x\.thought\.max_tokens"):
            checker.check(thinking("text", is_open=True, max_tokens=-1), "x").result()
    finally:
        checker.close()
