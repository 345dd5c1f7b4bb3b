"""Reading the calls in an answer takes as much work as the answer is long, however it is cut and whatever it holds."""

from collections.abc import Iterator
from typing import Any, SupportsIndex

import pytest

from roseinfer.text.answers.functions import Function, parameter_types
from roseinfer.text.answers.parts import Parts
from roseinfer.text.answers.tool_calls import PIECE, ToolCallParser
from roseinfer.text.answers.tool_formats import FORMATS
from roseinfer.text.answers.tool_use import ToolUse

OPENING, CLOSING = "<tool_call>", "</tool_call>"
CALL = f'{OPENING}{{"name": "f", "arguments": '


class Counted(str):
    """A text that counts how often it is taken apart or added to, and how many characters that copies.

    So do the texts that come of it. What an expression goes through is not counted.
    """

    __slots__ = ()
    num_steps = 0
    num_chars = 0

    @staticmethod
    def made(text: str) -> "Counted":
        Counted.num_steps += 1
        Counted.num_chars += len(text)
        return Counted(text)

    def __getitem__(self, key: SupportsIndex | slice) -> "Counted":
        return self.made(super().__getitem__(key))

    def __iter__(self) -> Iterator["Counted"]:
        return map(self.made, super().__iter__())

    def __add__(self, other: str) -> "Counted":
        return self.made(super().__add__(other))

    def __radd__(self, other: str) -> "Counted":
        return self.made(other + str(self))

    def lstrip(self, *chars: Any) -> "Counted":
        return self.made(super().lstrip(*chars))

    def rstrip(self, *chars: Any) -> "Counted":
        return self.made(super().rstrip(*chars))

    def strip(self, *chars: Any) -> "Counted":
        return self.made(super().strip(*chars))


def work(text: str, num_pushed: int, tool_format: str = "hermes") -> tuple[Parts, int, int]:
    """What it amounts to if so many characters come at a time; the steps that took, and the characters copied."""
    functions = [Function("f", parameters={"properties": {"s": {"type": "string"}, "o": {"type": "object"}}})]
    parser = ToolCallParser(FORMATS[tool_format], functions, is_parallel=True, is_forced=False)
    told = Parts()
    pushed = [Counted(text[start : start + num_pushed]) for start in range(0, len(text), num_pushed)]
    Counted.num_steps = Counted.num_chars = 0
    for piece in pushed:
        told.extend(parser.push(piece))
    told.extend(parser.finish())
    return told, Counted.num_steps, Counted.num_chars


def test_a_text_that_counts_does() -> None:
    """Else the rest of this file would hold of anything."""
    Counted.num_steps = Counted.num_chars = 0
    text = "ab" + Counted("cd")
    text += "e"
    assert [*text[1:]] == ["b", "c", "d", "e"]
    assert (Counted.num_steps, Counted.num_chars) == (1 + 1 + 1 + 4, 4 + 5 + 4 + 4)


TEXTS = [  # what stands at the beginning, is repeated, and stands at the end
    (f'{CALL}{{"a": "', "x", f'"}}}}{CLOSING}', "hermes"),
    (f'{CALL}{{"a": "', r"\n\"", f'"}}}}{CLOSING}', "hermes"),
    (f'{CALL}{{"a": [', "[],", f"1]}}}}{CLOSING}", "hermes"),
    (f'{CALL}{{"a": ', "[", "", "hermes"),
    (f'{CALL}{{"a": [', '"a",', f"1]}}}}{CLOSING}", "hermes"),
    (f'{CALL}"{{', "x", f'}}"}}{CLOSING}', "hermes"),
    (f'{OPENING}{{"arguments": {{"a": "', "x", f'"}}, "name": "f"}}{CLOSING}', "hermes"),  # kept until it is named
    (f'{OPENING}{{"a": "', "x", f'"}}{CLOSING}', "hermes"),
    (f'{OPENING}{{"', "x", f'": 1}}{CLOSING}', "hermes"),
    (f'{OPENING}{{"name": "', "x", f'"}}{CLOSING}', "hermes"),
    (f'{OPENING}{{"name": "f", "a": ', "1", f"}}{CLOSING}", "hermes"),
    (f'{OPENING}{{"name": "f"', ', "a": 1', f"}}{CLOSING}", "hermes"),
    ("", "  \n", f"{CALL}{{}}}}", "hermes"),
    ("", f"{CALL}{{}}}}{CLOSING}\n", "", "hermes"),
    (f"{CALL}{{}}}}", " ", "x", "hermes"),
    ("", OPENING, "", "hermes"),
    ("", f'{OPENING}{{"name": "nobody"}} ', "", "hermes"),
    (f"{OPENING}[", '{"name": "f"}, ', "", "hermes"),
    (f"{OPENING}[", '{"name": "nobody"}, ', "", "hermes"),
    ("", " ", '{"name": "f", "parameters": {}}', "llama3_json"),
    ('{"name": "f", "parameters": {"a": "', "x", '"}}', "llama3_json"),
    ("", "{", "", "llama3_json"),
    ("", '{"', "", "llama3_json"),
    ("", '{"name":', "", "llama3_json"),
    ("", '{"name": "f", ', "", "llama3_json"),
    ("", '{"name": "f", "parameters": {}};', "", "llama3_json"),
    ("", "[", "", "pythonic"),
    ("[", "x", "(", "pythonic"),
    ("", "[f(", "", "pythonic"),
    ("[f(a=", "[", "", "pythonic"),
    ("[f(a=", "{'':", "", "pythonic"),
    ("[f(a='", r"\n\u0041'", "')]", "pythonic"),
    ("[", "f(a=1), ", "f()]", "pythonic"),
    ("[", "nobody(a=1), ", "", "pythonic"),
    ("", "[TOOL_CALLS]f", "", "mistral"),
    ("", "[TOOL_CALLS]f[ARGS]{}", "", "mistral"),
    ("<function=f><parameter=s>", "<\n", "</parameter>", "qwen3_coder"),
    ("<function=f><parameter=s>", "</parameter", "</parameter>", "qwen3_coder"),
    ("<function=f><parameter=o>", "[", "</parameter>", "qwen3_coder"),
    ("<function=f><parameter=o>", "{'':", "</parameter>", "qwen3_coder"),
    ("<function=f>", "<parameter=s>x</parameter>", "</function>", "qwen3_coder"),
    ("", "<function=f>", "", "qwen3_coder"),
    ("<tool_call>f", "<arg_key>s</arg_key><arg_value>x</arg_value>", "", "glm45"),
    ("", "<｜tool▁calls▁begin｜>", "", "deepseek_v3"),
    ("", "functools", "", "phi4_mini"),
]


def of_length(num_chars: int, text: tuple[str, str, str, str]) -> str:
    before, repeated, after, _ = text
    return before + repeated * (num_chars // len(repeated)) + after


@pytest.mark.parametrize("num_pushed", [3, 1 << 20])
@pytest.mark.parametrize("text", TEXTS)
def test_a_text_that_is_four_times_as_long_is_four_times_the_work(
    text: tuple[str, str, str, str], num_pushed: int
) -> None:
    one, four = (work(of_length(num_chars, text), num_pushed, text[3]) for num_chars in (2 * PIECE, 8 * PIECE))
    for of_one, of_four in zip(one[1:], four[1:], strict=True):
        assert of_four <= 5 * of_one


@pytest.mark.parametrize("text", TEXTS[::3])  # each takes a second or several
def test_a_million_characters_are_a_bounded_number_of_steps_each(text: tuple[str, str, str, str]) -> None:
    told, num_steps, num_chars = work(of_length(1_000_000, text), 1 << 20, text[3])
    assert num_steps < 4_000_000
    assert num_chars < PIECE * 1_000_000, "the rest of a piece is copied where a call may begin"
    assert told.texts or told.calls


@pytest.mark.parametrize("repeated", ["x", r"\n\"", " {}[], "])
def test_a_string_is_gone_through_at_once_and_copied_few_times(repeated: str) -> None:
    inner = repeated * (10 * PIECE // len(repeated))
    told, num_steps, num_chars = work(f'{CALL}{{"a": "{inner}"}}}}{CLOSING}', 1 << 20)
    assert [call.arguments for call in told.calls] == [f'{{"a": "{inner}"}}']
    assert num_steps < 200
    assert num_chars < 10 * len(inner)


class CountedSchema(dict[str, Any]):
    """A schema that counts how often it is asked."""

    num_asked = 0

    def get(self, key: str, default: Any = None) -> Any:
        CountedSchema.num_asked += 1
        return super().get(key, default)


def test_what_many_parameters_refer_to_is_read_and_sent_once() -> None:
    num = 100
    either = CountedSchema(anyOf=[CountedSchema({"$ref": f"#/$defs/{i}"}) for i in range(num)])
    schema = {
        "type": "object",
        "properties": {f"p{i}": CountedSchema({"$ref": "#/$defs/either", "title": "y" * num}) for i in range(num)},
        "$defs": {"either": either} | {str(i): CountedSchema(type="integer", title="x" * num) for i in range(num)},
    }
    CountedSchema.num_asked = 0
    assert parameter_types(schema) == {f"p{i}": {"integer"} for i in range(num)}
    assert CountedSchema.num_asked < 30 * num
    use = ToolUse([Function("f", "", schema)], is_forced=True, is_parallel=False, tool_format=FORMATS["glm45"])
    grammar = use.grammar()
    assert grammar is not None
    assert grammar.source.count("x" * num) == grammar.source.count("y" * num) == num


def test_references_in_a_circle_end() -> None:
    defined = {"a": {"anyOf": [{"$ref": "#/$defs/b"}, {"type": "string"}]}, "b": {"$ref": "#/$defs/a"}}
    assert parameter_types({"properties": {"p": {"$ref": "#/$defs/a"}}, "$defs": defined}) == {"p": {"string"}}
