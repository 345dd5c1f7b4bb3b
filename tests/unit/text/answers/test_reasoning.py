"""Thoughts and the rest of an answer come out whole wherever the text is cut, and tokens are counted one by one."""

import time
from itertools import pairwise
from typing import get_args, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roseinfer.config.options import StructuredConfig
from roseinfer.errors import PromptName
from roseinfer.messages import TokenOutput
from roseinfer.records import RequestTimeline
from roseinfer.text.answers.answer import AnswerParser
from roseinfer.text.answers.functions import Function
from roseinfer.text.answers.parts import Parts
from roseinfer.text.answers.reasoning import FORMATS, Reasoning, find_reasoning, find_reasoning_format
from roseinfer.text.answers.tool_formats import FORMATS as TOOL_FORMATS
from roseinfer.text.answers.tool_use import ToolUse
from roseinfer.text.choice import Choice, EncodedPrompt
from roseinfer.text.tokenizer.tokenizer import Tokenizer
from tests.unit.server.harness import byte_tokenizer, ids, text_model

THINK = FORMATS["think"]
FREE, OPEN = Reasoning(THINK, is_open=False), Reasoning(THINK, is_open=True)
TOOLS = ToolUse([Function("f")], is_forced=False, is_parallel=True, tool_format=TOOL_FORMATS["hermes"])
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'

# How the thoughts come, the answer, its thoughts and its content.
SAMPLES = [
    (FREE, "<think>\nLet me see.\n</think>\n\nFour.", "Let me see.", "Four."),
    (FREE, " \n<think>a < b</ think></think>x</think>y", "a < b</ think>", "x</think>y"),
    (FREE, "<think>\n\n</think>\n\nFour.\n", "", "Four.\n"),
    (FREE, "<think>No end \n", "No end", ""),
    (FREE, "<think>No end </thin", "No end </thin", ""),
    (FREE, "\n Four. <think>late</think>", "", "\n Four. <think>late</think>"),
    (FREE, "\n <thi", "", "\n <thi"),
    (FREE, "<thinking>x</thinking>", "", "<thinking>x</thinking>"),
    (FREE, " \n", "", " \n"),
    (FREE, "", "", ""),
    (FREE, "<think>", "", ""),
    (FREE, "<think> \n a  \n\n b \n </think> \n ", "a  \n\n b", ""),
    (OPEN, "Let me see.\n</think>\n\nFour.", "Let me see.", "Four."),
    (OPEN, "\n<think>\nTwice.</think>Four.", "Twice.", "Four."),
    (OPEN, "No end", "No end", ""),
    (OPEN, " <thi", "<thi", ""),
    (OPEN, " \n", "", ""),
    (OPEN, "</think>Four.", "", "Four."),
    (OPEN, "a<think>b</think>c", "a<think>b", "c"),
    (OPEN, "a <<</</think", "a <<</</think", ""),
    (None, "<think>a</think>b", "", "<think>a</think>b"),
]


def read(reasoning: Reasoning | None, pieces: list[str], tool_use: ToolUse | None = None) -> tuple[Parts, AnswerParser]:
    parser = AnswerParser(reasoning, tool_use)
    parts = Parts()
    for piece in pieces:
        parts.extend(parser.push(piece))
    parts.extend(parser.finish())
    return parts, parser


def cuts(text: str) -> list[list[str]]:
    """The text in pieces of each length from one character to all, and in two pieces wherever they meet."""
    even = [[text[i : i + size] for i in range(0, len(text), size)] for size in range(1, len(text) + 1)]
    return [*even, *([text[:at], text[at:]] for at in range(len(text) + 1))]


def test_every_format_can_be_chosen() -> None:
    assert {"auto", "none", *FORMATS} == set(get_args(get_type_hints(StructuredConfig)["reasoning_format"]))


@pytest.mark.parametrize(("reasoning", "text", "thoughts", "content"), SAMPLES)
@pytest.mark.parametrize("name", FORMATS)
def test_thoughts_come_out_whole_however_the_text_is_cut(
    reasoning: Reasoning | None, text: str, thoughts: str, content: str, name: str
) -> None:
    tags = FORMATS[name]
    if reasoning is not None:
        reasoning = Reasoning(tags, reasoning.is_open)

    def renamed(sample: str) -> str:
        return sample.replace(THINK.opening, tags.opening).replace(THINK.closing, tags.closing)

    for pieces in cuts(renamed(text)):
        parts, _ = read(reasoning, pieces)
        assert (parts.reasoning, parts.content) == (renamed(thoughts), renamed(content))


def split(text: str, *, is_open: bool) -> tuple[str, str]:
    """Thoughts and content of a whole text."""
    begin = text.lstrip()
    if not (is_open or begin.startswith(THINK.opening)):
        return "", text
    thoughts, _, content = begin.removeprefix(THINK.opening).partition(THINK.closing)
    return thoughts.strip(), content.lstrip()


@given(st.lists(st.sampled_from([*THINK, " ", "\n", "<", "/", "</thin", "x", "\u2028"])), st.booleans(), st.data())
def test_no_cut_changes_the_parts(words: list[str], is_open: bool, data: st.DataObject) -> None:
    text = "".join(words)
    at = sorted({0, len(text), *data.draw(st.lists(st.integers(0, len(text))))})
    parts, _ = read(Reasoning(THINK, is_open), [text[start:end] for start, end in pairwise(at)])
    assert (parts.reasoning, parts.content) == split(text, is_open=is_open)


def test_a_call_in_thoughts_is_no_call() -> None:
    for pieces in cuts(f"<think>Shall I?\n{CALL}\n</think>\n{CALL}"):
        parts, parser = read(FREE, pieces, TOOLS)
        assert (parts.reasoning, parts.content) == (f"Shall I?\n{CALL}", "")
        assert ([(call.name, call.arguments) for call in parts.calls], parser.ends_with_calls) == (
            [("f", '{"a": 1}')],
            True,
        )
    parts, parser = read(OPEN, [f"{CALL}"], TOOLS)
    assert (parts.reasoning, parts.calls, parser.ends_with_calls, parser.is_cut) == (CALL, [], False, False)
    _, parser = read(OPEN, [f"</think>{CALL[:45]}"], TOOLS)
    assert (parser.ends_with_calls, parser.is_cut) == (False, True)


def test_reading_takes_linear_time() -> None:
    def seconds(unit: str) -> float:
        began = time.process_time()
        parts, _ = read(OPEN, ["x", *(unit * (300_000 // len(unit))), "x"])
        assert len(parts.reasoning) >= 299_000
        return time.process_time() - began

    usual = seconds("x")
    for unit in (" ", "< ", "</think"):
        assert seconds(unit) < 10 * usual, "copying what is held at each character takes hundreds of times as long"


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("<|assistant|>", FREE),
        ("<|assistant|><think>\n", OPEN),
        ("<|assistant|><think>\n\n</think>\n\n", None),
        ("<|user|>What is <think>?<|assistant|>", FREE),
        ("<|user|>What is </think>?<|assistant|>", FREE),
    ],
)
def test_the_end_of_the_prompt_says_whether_thoughts_are_open(prompt: str, expected: Reasoning | None) -> None:
    assert find_reasoning(THINK, prompt, opens_thoughts=False) == expected
    assert find_reasoning(THINK, prompt, opens_thoughts=True) == (expected if expected is OPEN else None)
    assert find_reasoning(None, prompt, opens_thoughts=False) is None


@pytest.mark.parametrize(
    ("begun", "is_thinking"),
    [("", False), ("It is", False), ("<think>\nSo", True), ("<think>So</think>It", False), ("</think><think>", True)],
)
def test_an_answer_that_was_begun_goes_on_in_its_thoughts_or_behind_them(begun: str, is_thinking: bool) -> None:
    template = "{% for m in messages %}{{ m.content }}|{% endfor %}{{ '<think>' if add_generation_prompt }}"
    messages = [{"role": "user", "content": "What is <think>?"}, {"role": "assistant", "content": begun}]
    model = text_model(template=template)
    _, reasoning = model.render(messages, None, {}, continues_last=True)
    assert reasoning == (OPEN if is_thinking else None)


def test_the_template_says_which_tags_a_model_writes() -> None:
    assert find_reasoning_format("auto", "{{ content.split('</think>')[-1] }}") == THINK
    assert find_reasoning_format("auto", "{%- set begin = '<seed:think>' -%}") == FORMATS["seed"]
    assert find_reasoning_format("auto", "{{ '[THINK]' + message.thinking + '[/THINK]' }}") == FORMATS["mistral"]
    assert (
        find_reasoning_format("auto", "{{ content }}")
        is find_reasoning_format("auto", None)
        is find_reasoning_format("none", "<think>")
        is None
    )
    assert find_reasoning_format("granite", None) == FORMATS["granite"]


@pytest.mark.parametrize(("reasoning", "text", "thoughts", "content"), SAMPLES)
def test_tokens_of_thoughts_are_counted_one_by_one(
    reasoning: Reasoning | None, text: str, thoughts: str, content: str
) -> None:
    """Here each byte is a token, so the tokens of the thoughts are the bytes up to behind the closing tag."""
    prompt = EncodedPrompt([1], PromptName("messages"), reasoning=reasoning)
    choice = Choice(0, text_model().tokenizer, RequestTimeline(request_id="a", recv_ns=1), prompt=prompt)
    choice.add_output(TokenOutput("a", ids(text)))
    has_thoughts = reasoning is not None and (reasoning.is_open or text.lstrip().startswith(THINK.opening))
    end = text.find(THINK.closing)
    expected = (len(text) if end < 0 else end + len(THINK.closing)) if has_thoughts else 0
    assert choice.counts.reasoning == expected


def test_tags_that_the_vocabulary_marks_special_are_read_too() -> None:
    """As Magistral's. In an answer that does not reason they have no text, as any special token."""
    inner = byte_tokenizer()
    inner.add_special_tokens([*FORMATS["mistral"]])
    tokenizer = Tokenizer.from_bytes(inner.to_str().encode())
    token_ids = inner.encode("[THINK]Sum.[/THINK]Four.").ids
    for reasoning, expected in (
        (Reasoning(FORMATS["mistral"], False), ("Sum.", "Four.", 6)),
        (None, ("", "Sum.Four.", 0)),
    ):
        prompt = EncodedPrompt([1], PromptName("messages"), reasoning=reasoning)
        choice = Choice(0, tokenizer, RequestTimeline(request_id="a", recv_ns=1), prompt=prompt)
        choice.add_output(TokenOutput("a", token_ids))
        parts, _ = read(reasoning, [choice.pop_delta().text])
        assert (parts.reasoning, parts.content, choice.counts.reasoning) == expected
