"""Calls in a text: whatever the arguments hold and wherever it is cut, each comes out whole, and no more of it."""

import json
import re
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, get_args, get_type_hints

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from roseinfer.config.options import StructuredConfig
from roseinfer.errors import InvalidRequest
from roseinfer.messages import Grammar
from roseinfer.text.answers.functions import Function, parameter_types
from roseinfer.text.answers.parts import Parts
from roseinfer.text.answers.tool_calls import MAX_RESCANNED_CHARS, ToolCallParser
from roseinfer.text.answers.tool_formats import FORMATS, find_tool_format
from roseinfer.text.answers.tool_use import ToolUse

OPENING, CLOSING = "<tool_call>", "</tool_call>"
NAMES = ["f", "get_weather"]
PARAMETERS = {
    "type": "object",
    "properties": {
        "i": {"type": "integer"},
        "s": {"type": "string"},
        "o": {"$ref": "#/$defs/o"},
        "l": {"type": "array"},
        "b": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
        "u": {"type": ["string", "integer", "null"]},
        "e": {"enum": ["1", "2"]},
        "any": {},
    },
    "$defs": {"o": {"type": "object"}},
}
# Inside strings: all that could be taken for structure, for an escape or for a tag.
TEXTS = st.text(st.sampled_from('{}[]",:\\/ \n\t\x01aé\u2028\U0001f600')) | st.sampled_from(
    [OPENING, CLOSING, '"}', '\\"}', "\\", "\\u0022", '{"name": "f"}', "null"]
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=12,
)
OBJECTS = st.dictionaries(TEXTS, VALUES, max_size=5)
LAYOUTS = st.fixed_dictionaries(
    {
        "ensure_ascii": st.booleans(),
        "indent": st.sampled_from([None, 1, "\t"]),
        "separators": st.sampled_from([(",", ":"), (", ", ": "), (" ,\n", " :\r\n")]),
    }
)
CUTS = st.lists(st.integers(0, 2000), max_size=12) | st.just(range(4000))  # at some places, or at all


def cut(text: str, at: Iterable[int]) -> list[str]:
    places = sorted({0, len(text), *(place for place in at if place < len(text))})
    return [text[start:end] for start, end in pairwise(places)]


def in_runs(parts: Iterable[str | int]) -> list[str | int]:
    """Texts side by side as one, and a call that goes on as one."""
    runs = list[str | int]()
    for part in parts:
        if runs and isinstance(part, str) and isinstance(runs[-1], str):
            runs[-1] += part
        elif not runs or part != runs[-1]:
            runs.append(part)
    return runs


def read(
    pieces: Iterable[str],
    tool_format: str = "hermes",
    *,
    names: Sequence[str] = NAMES,
    is_parallel: bool = True,
    is_forced: bool = False,
) -> tuple[str, list[tuple[str | None, str]], int, bool]:
    """Text, names and arguments of the calls, their number, and whether the last one was cut."""
    functions = [Function(name, parameters=PARAMETERS) for name in names]
    parser = ToolCallParser(FORMATS[tool_format], functions, is_parallel=is_parallel, is_forced=is_forced)
    parts, streamed = Parts(), list[str | int]()  # the places of texts and calls, as the events of a stream have them
    for more in (*map(parser.push, pieces), parser.finish()):
        streamed += [part if isinstance(part, str) else part.index for part in more.in_order()]
        parts.extend(more)
    whole = [part if isinstance(part, str) else part.index for part in parts.in_order()]
    assert in_runs(streamed) == in_runs(whole)
    return parts.content, [(call.name, call.arguments) for call in parts.calls], parser.num_calls, parser.is_cut


def test_every_format_can_be_chosen() -> None:
    assert {"auto", *FORMATS} == set(get_args(get_type_hints(StructuredConfig)["tool_format"]))


def js(**arguments: Any) -> str:
    return json.dumps(arguments, ensure_ascii=False)


def xml(name: str = "f", **values: str) -> str:
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


def glm(name: str = "f", **values: str) -> str:
    inner = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in values.items())
    return f"<tool_call>{name}\n{inner}</tool_call>"


def deepseek(*calls: str) -> str:
    inner = "\n".join(f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{call}\n```<｜tool▁call▁end｜>" for call in calls)
    return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"


CALL = '{"name": "f", "arguments": {"i": 1}}'
OTHER = '{"name": "nobody", "arguments": {"s": "]}"}}'
TAGGED = f"{OPENING}\n{CALL}\n{CLOSING}"
F = ("f", '{"i": 1}')
EMPTY = ("f", "{}")
# A text, its content (... for all of it) and its calls.
SAMPLES: dict[str, list[tuple[str, Any, list[tuple[str, str]]]]] = {
    "hermes": [
        ("", "", []),
        (" \n", ..., []),
        ("Hello <b> a < b \n", ..., []),
        (f"{TAGGED}\n{TAGGED}\n", "", [F, F]),
        (f" Wait.\n\n{TAGGED} \n bye \n", " Wait.\n\n \n bye \n", [F]),
        (f"{OPENING}{CALL}{OPENING}{CALL}", "", [F, F]),
        (f"{OPENING}[{CALL}, {CALL}]{CLOSING}.", ".", [F, F]),
        (f"{OPENING}\n[\n{CALL},\n{OTHER},\n{CALL}\n]\n{CLOSING}", f",\n{OTHER}", [F, F]),
        (f"{OPENING}[{OTHER}]{CLOSING} ", ..., []),
        (f"{OPENING}[{CALL}, 5]{CLOSING}", f", 5]{CLOSING}", [F]),
        (f"{OPENING}[]{CLOSING}", ..., []),
        (f'{OPENING}{{"name": "f", "arguments": "{{\\"i\\": \\"}}\\\\u00e9\\"}}"}}{CLOSING}',"",
            [("f", '{"i": "}\\u00e9"}')]),
        *((f'{OPENING}{{"name": "f"{more}}}{CLOSING}', "", [EMPTY]) for more in (
            "", ', "arguments": null', ', "arguments": {}', ', "parameters": "{}"', ', "id": [{}]')),
        (f'{OPENING}{{"parameters": {{"i": 1}}, "name": "f", "arguments": {{}}}}{CLOSING}', "", [F]),
        (f'{OPENING}{{"name": "f", "arguments": {{"i": 1}}{CLOSING} bye', " bye", [F]),  # a brace is missing
        (f'{OPENING}{{"name": "f", "arguments": {{"s": "{OPENING}"}}}}{CLOSING}', "", [("f", js(s=OPENING))]),
        *((f' \n{OPENING}{{"name": "f", "arguments": {value}}}{CLOSING} ', ..., []) for value in (
            "1", "[]", '"x"', '""', '"[1]"', '"{"', "nil", "")),
        *((f"\n {OPENING}{inner}{CLOSING}\n", ..., []) for inner in (
            OTHER, "[1, 2]", "{}", "{", "x", '{"name": 1}', '{"function": {"name": "f"}}', '{"name": "f" "a"}')),
        (f"{OPENING}{OPENING}{CALL}{CLOSING}", OPENING, [F]),
        (f"{OPENING}{OTHER}{CLOSING}{TAGGED}", f"{OPENING}{OTHER}{CLOSING}", [F]),
        *((TAGGED[:end], ..., []) for end in (3, 11, 14, 30)),
        (f"{TAGGED}\n{TAGGED[:20]}", f"\n{TAGGED[:20]}", [F]),
        (f"{TAGGED[:-3]}", "", [F]),
    ],
    "llama3_json": [
        ('{"name": "f", "parameters": {"i": 1}}', "", [F]),
        (f"<|python_tag|>{CALL}", "", [F]),
        (f"<|python_tag|>{CALL}; {CALL}", "", [F, F]),
        ("<|python_tag|>print(1) ", ..., []),
        (f"Sure: {CALL} Done {{f}}.", "Sure:  Done {f}.", [F]),
        *((f"{CALL}{between}{CALL}", "", [F, F]) for between in ("; ", ";", ";\n", "\n", "", " ; ")),
        (f"{CALL};\n", "", [F]),
        *((text, ..., []) for text in (
            '{"a": 1} is it', '{"a": {"name": "f"}}', "if (x) { return; }", "{ {", "{", ' {"name": "', OTHER,
            '{"name": "f", "par', '{"name": "f", "parameters": 1}', f"{{{CALL[:-1]}"[:12], f"[{OTHER}]")),
        (f"{{ {CALL}", "{ ", [F]),
    ],
    "pythonic": [
        ("[f()]", "", [EMPTY]),
        ("[f(i=1), f( i = 1 , )] ", "", [F, F]),
        ("Now: [f(i=1)] ok", "Now:  ok", [F]),
        ("<|python_start|>[f(i=1)]<|python_end|>", "", [F]),
        (
            "[f(s='a\\'b\"', o={'k': [1, -2.5e3, {}, []], \"n\": None,}, b=True, l=[true, null])]",
            "",
            [("f", '{"s": "a\'b\\"", "o": {"k": [1, -2.5e3, {}, []], "n": null}, "b": true, "l": [true, null]}')],
        ),
        ("[f(s='(é]\\n\\x41\\u00e9\\/\\q\n')]", "", [("f", '{"s": "(é]\\n\\u0041\\u00e9\\/\\\\q\\n"}')]),
        ("[nobody(x=')]', y=(1)), f(i=1)]", "[nobody(x=')]', y=(1))", [F]),
        ("[f(i=1), 5]", ", 5]", [F]),
        *((text, ..., []) for text in (
            "[1, 2] [a](b) [f] [f (i=1)] f(i=1)", "[f(1)]", "[f(i=a.b)]", "[f(i=(1))]", "[f(i=1", "[f(i=[1}])]",
            "[f(=1)]", "[nobody()]", "[]", "[", "[[f", "[f(i=01)]", "[f(s='a' 'b')]", "[f(s='\\xg')]", "[f(o={1: 2})]",
            "[f(i=)]", "[f(l=[1,,2])]", "[f(i=__import__('os'))]", "[f(i=1)"[:-1])),
    ],
    "mistral": [
        (f"[TOOL_CALLS] [{CALL}]", "", [F]),
        (f'Hello[TOOL_CALLS][{CALL[:-1]}, "id": "abcdefghi"}}, {CALL}]\nmore', "Hello\nmore", [F, F]),
        ('[TOOL_CALLS]f[ARGS]{"i": 1}[TOOL_CALLS]f[CALL_ID]abc123xyz[ARGS]{}', "", [F, EMPTY]),
        ('[TOOL_CALLS]f{"i": 1} x', " x", [F]),
        (f"[TOOL_CALLS]{CALL}", "", [F]),
        *((text, ..., []) for text in (
            "[TOOL_CALLS] none", "[TOOL_CALLS]nobody[ARGS]{}", "[TOOL_CALLS]f", "[TOOL_CALLS]f[ARGS]", "[TOOL_CALLS]f(",
            f"[TOOL_CALLS][{OTHER}]", "[TOOL_C", "[1]", "[TOOL_CALLS][1]")),
    ],
    "qwen3_coder": [
        (xml(), "", [EMPTY]),
        (f"Hm.\n{xml(i='1')}\n{xml(i='1')}", "Hm.\n", [F, F]),
        (
            xml(s='a "b"\n</parameter\n', i="2", o="{'k': True}", l="[1,\n 2]", b="null", u="x", e="1", any="{}",
                new="1"),
            "",
            [("f", ('{"s": "a \\"b\\"\\n</parameter\\n", "i": 2, "o": {"k": true}, "l": [1,\n 2], "b": null, "u": "x", '
                   '"e": "1", "any": "{}", "new": "1"}'))],
        ),
        (xml(u="5", b="False", i="five"), "", [("f", '{"u": 5, "b": false, "i": "five"}')]),
        (xml(u='"q"', s="", o="é", l=""), "", [("f", '{"u": "q", "s": "", "o": "é", "l": ""}')]),
        ("<function=f><parameter=i>1</parameter><parameter=s> a </parameter></function>", "",
            [("f", '{"i": 1, "s": " a "}')]),
        ("<tool_call><function=f><parameter=i>1</parameter></tool_call>.", ".", [F]),  # no end of the function
        (TAGGED, "", [F]),
        (f"<function=f>{js(i=1)}</function>", "", [F]),
        *((text, ..., []) for text in (
            xml("nobody", i="1"), "<tool_call>\n<function=", "<tool_call>\nf", "<function=f>x", "<functions>",
            "<tool_call>\n<p")),
    ],
    "glm45": [
        (glm(), "", [EMPTY]),
        (f"Hm.\n{glm(i='1')}\n{glm(i='1')} ", "Hm.\n", [F, F]),
        (glm(s='a\n"b" ', o='{"k": 1}', any="1"), "", [("f", '{"s": "a\\n\\"b\\" ", "o": {"k": 1}, "any": "1"}')]),
        ("<tool_call>f<arg_key>i</arg_key><arg_value>1</arg_value></tool_call>", "", [F]),
        *((text, ..., []) for text in (glm("nobody"), "<tool_call>f", "<tool_call>f is", "<tool_call>", "<arg_key>")),
    ],
    "granite": [
        (f"<|tool_call|> [{CALL}]", "", [F]),
        (f"A\n<|tool_call|>[\n  {CALL},\n  {CALL}\n]\nB", "A\n\nB", [F, F]),
        (f"<tool_call>[{CALL}]", "", [F]),
        *((text, ..., []) for text in (f"<|tool_call|>[{OTHER}]", "<|tool_call|>x", "<|tool", f"[{CALL}]")),
    ],
    "phi4_mini": [
        (f"<|tool_call|>[{CALL}, {CALL}]<|/tool_call|>", "", [F, F]),
        (f"<|tool_call|>{CALL}<|/tool_call|>", "", [F]),
        (f"functools[{CALL}] bye", " bye", [F]),
        *((text, ..., []) for text in ("import functools", "functools[] x", "functools[ x ]", "<|/tool_call|>")),
    ],
    "deepseek_v3": [
        (deepseek(f"f\n```json\n{js(i=1)}", "f\n```json\n{}"), "", [F, EMPTY]),
        (f"Hm.{deepseek(f'f{chr(10)}```json{chr(10)}{js(i=1)}')}", "Hm.", [F]),
        *((text, ..., []) for text in (deepseek("nobody\n```json\n{}"), deepseek("f\nx"), "<｜tool▁calls▁begin｜>x")),
    ],
    "deepseek_v31": [
        (
            ("Hm.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
            "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"),
            "Hm.",
            [EMPTY, EMPTY],
        ),
    ],
    "mistral_v11": [('[TOOL_CALLS]f[ARGS]{"i": 1}', "", [F])],
}  # fmt: skip


def test_there_are_samples_of_every_format() -> None:
    assert SAMPLES.keys() == FORMATS.keys()


@pytest.mark.parametrize(
    ("tool_format", "text", "content", "calls"), [(name, *sample) for name in SAMPLES for sample in SAMPLES[name]]
)
def test_calls_are_found_wherever_the_text_is_cut(
    tool_format: str, text: str, content: Any, calls: list[tuple[str, str]]
) -> None:
    expected = (text if content is ... else content, calls, len(calls), False)
    for size in range(1, len(text) + 1):
        assert read([text[at : at + size] for at in range(0, len(text), size)], tool_format) == expected
        assert read([text[:size], text[size:]], tool_format) == expected


@pytest.mark.parametrize(
    ("tool_format", "text", "content", "calls"), [(name, *sample) for name in SAMPLES for sample in SAMPLES[name]]
)
def test_wherever_a_text_ends_its_arguments_are_whole_or_cut(
    tool_format: str, text: str, content: Any, calls: list[tuple[str, str]]
) -> None:
    """And a text that holds no call loses nothing."""
    for end in range(len(text)):
        said, found, num_calls, is_cut = read([text[:end]], tool_format)
        for name, arguments in found[:-1] if is_cut else found:
            assert name in NAMES
            json.loads(arguments)
        assert num_calls == len(found)
        if not found:
            assert said == text[:end]


@pytest.mark.parametrize(
    ("template", "name"),
    [
        (None, "hermes"),
        ("{{ messages }}", "hermes"),
        ('<tool_call>\n{tool_call.name} "parameters"', "hermes"),
        ('{"name": "x", "parameters": ', "llama3_json"),
        ("format [func_name1(params_name1=params_value1), func_name2(params)]", "pythonic"),
        ("{{ tool_call.name + '(' }} \"parameters\"", "pythonic"),
        ('"[TOOL_CALLS] [" "parameters"', "mistral"),
        ('"[TOOL_CALLS]" + name + "[ARGS]"', "mistral_v11"),
        ("<tool_call>\n<function=", "qwen3_coder"),
        ("<tool_call>{name}\n<arg_key>", "glm45"),
        ("respond with <|tool_call|> followed by a JSON list", "granite"),
        ("functools[{", "phi4_mini"),
        ("<|tool_call|> <|/tool_call|>", "phi4_mini"),
        ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>\\n```json", "deepseek_v3"),
        ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>", "deepseek_v31"),
    ],
)
def test_the_template_determines_the_format(template: str | None, name: str) -> None:
    assert find_tool_format("auto", template) is FORMATS[name]
    assert find_tool_format("hermes", template) is FORMATS["hermes"]


def test_types_are_those_of_a_schema_however_it_says_them() -> None:
    looping = {"$defs": {"x": {"anyOf": [{"$ref": "#/$defs/x"}] * 100}}, "properties": {"a": {"$ref": "#/$defs/x"}}}
    assert parameter_types(looping) == {"a": set()}
    odd = {"a": True, "b": {"enum": [1, None, "x"]}, "c": {"$ref": "#/no"}, "d": {"const": True}, "e": {"type": 5}}
    assert parameter_types({"properties": odd}) == {
        "a": set(), "b": {"integer", "null", "string"}, "c": set(), "d": {"boolean"}, "e": set()
    }  # fmt: skip
    for schema in (None, {}, {"properties": 1}):
        assert parameter_types(schema) == {}


def test_types_are_those_of_parameters_behind_a_reference_or_in_a_list() -> None:
    one: dict[str, object] = {"properties": {"a": {"type": "integer"}, "b": {"$ref": "#/$defs/x~1y/properties/a"}}}
    for of in ({"$ref": "#/$defs/x~1y"}, {"allOf": [{"$ref": "#"}, one]}, {"oneOf": [{"$ref": "#/$defs/x%7E1y"}]}):
        assert parameter_types(of | {"$defs": {"x/y": one}}) == {"a": {"integer"}, "b": {"integer"}}
    many = {"allOf": [{"$ref": "#"}] * 100, "anyOf": [{"$ref": "#/allOf/7"}] * 100}
    assert parameter_types(many) == {}
    for index in ("1", "-1", "x", "9" * 5000):  # more digits than Python converts
        assert parameter_types({"allOf": [one], "$ref": f"#/allOf/{index}", "$defs": {"x/y": one}}) == {
            "a": {"integer"},
            "b": {"integer"},
        }


def test_ids_are_as_the_templates_demand() -> None:
    for name, pattern in (("mistral", r"[a-zA-Z0-9]{9}"), ("hermes", r"call_\w{24}")):
        parser = ToolCallParser(FORMATS[name], [Function("f")], is_parallel=True, is_forced=False)
        calls = parser.push({"mistral": f"[TOOL_CALLS][{CALL}, {CALL}]", "hermes": TAGGED * 2}[name]).calls
        assert len({call.call_id for call in calls}) == 2
        assert all(re.fullmatch(pattern, call.call_id or "") for call in calls)


@pytest.mark.parametrize("tool_format", SAMPLES)
def test_one_call_where_several_are_not_wanted(tool_format: str) -> None:
    for text, _, calls in SAMPLES[tool_format]:
        for size in (1, len(text) or 1):
            pieces = [text[at : at + size] for at in range(0, len(text), size)]
            assert read(pieces, tool_format, is_parallel=False)[1] == calls[:1]


@given(
    st.text(st.sampled_from('ab {}"\\\n'), max_size=20),
    st.lists(st.tuples(st.sampled_from(NAMES), OBJECTS), min_size=1, max_size=3),
    LAYOUTS,
    st.sampled_from([CLOSING, f"\n{CLOSING}", ""]),
    st.text(st.sampled_from('ab {}"\\\n'), max_size=20),
    CUTS,
)
def test_any_arguments_come_out_whole_with_the_text_around_them(
    before: str, calls: list[tuple[str, dict[str, Any]]], layout: dict[str, Any], closing: str, after: str, cuts: Any
) -> None:
    written = [(name, json.dumps(arguments, **layout)) for name, arguments in calls]
    text = before + "\n".join(
        f'{OPENING}\n{{"name": "{name}", "arguments": {arguments}}}{closing}' for name, arguments in written
    )
    content = "".join(said for said in (before, after) if said.strip())
    assert read(cut(text + after, cuts)) == (content, written, len(written), False)


@given(OBJECTS, LAYOUTS, st.booleans(), st.text(st.sampled_from('ab {}"\\\n'), max_size=20), CUTS)
def test_a_bare_object_is_a_call_with_any_arguments(
    arguments: dict[str, Any], layout: dict[str, Any], is_name_first: bool, after: str, cuts: Iterable[int]
) -> None:
    raw = json.dumps(arguments, **layout)
    keys = ['"name": "f"', f'"parameters": {raw}']
    text = " {" + ", ".join(keys if is_name_first else keys[::-1]) + "}"
    content = after if after.strip() else ""
    assert read(cut(text + after, cuts), "llama3_json") == (content, [("f", raw)], 1, False)


FRAGMENTS = st.sampled_from(
    [
        *(OPENING, CLOSING, "<tool_", "</tool", "<", ">", "{", "}", "[", "]", '"', ":", ",", "\\", " ", "\n", "a", "1"),
        *('"name"', '"name": "f"', '"name": "nobody"', '"arguments"', '"arguments": {', '"parameters": {"a": 1}', "{}"),
        *('{"name": "f", "arguments": {"a": "}"}}', '{"name": "nobody", "arguments": {}}', "x" * 300, '"\\ud800"'),
        *("[TOOL_CALLS]", "[ARGS]", "f", "f(", "i=", "'", ")", "[f(", "<function=f>", "<parameter=s>", "</parameter>"),
        *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<|tool_call|>", "functools[", "\n```json\n", ";"),
        *(
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>",
            "<｜tool▁sep｜>",
            "\ud800",
            "null",
            "<|python_tag|>",
            "<parameter=i>",
        ),
    ]
)


@given(
    st.lists(FRAGMENTS, max_size=16).map("".join),
    CUTS,
    st.sampled_from(sorted(FORMATS)),
    st.booleans(),
    st.booleans(),
)
@example(f"{OPENING}{'x' * 600} {OPENING}" + '{"name": "f"}', [], "hermes", True, False)
@example(f'{OPENING}{{"name": "nobody"}} {"x" * 600} {OPENING}{{"name": "f"}}', [], "hermes", True, False)
@example(f'{OPENING}{{"arguments": "{"x" * 600}{OPENING}{{"name": "f"}}', [], "hermes", True, False)
def test_what_comes_out_does_not_depend_on_how_the_text_was_cut(
    text: str, cuts: Iterable[int], tool_format: str, is_parallel: bool, is_forced: bool
) -> None:
    """And nothing raises, not even half of a character."""
    by_character = read(text, tool_format, is_parallel=is_parallel, is_forced=is_forced)
    assert read(cut(text, cuts), tool_format, is_parallel=is_parallel, is_forced=is_forced) == by_character
    assert read([text], tool_format, is_parallel=is_parallel, is_forced=is_forced) == by_character


@pytest.mark.parametrize("num_chars", [10, MAX_RESCANNED_CHARS + 10])
@pytest.mark.parametrize("start", ['{"name": "nobody", "a": ', '{"arguments": ', '{"a": ', '{"a": 1] ', "[", ""])
def test_what_is_no_call_is_text_once_and_a_call_behind_it_is_found(start: str, num_chars: int) -> None:
    text = f'{OPENING}{start}"{"x" * num_chars}", "name": "nobody"}}'
    assert read([text + " bye"]) == (f"{text} bye", [], 0, False)
    assert read([f'{text} {OPENING}{{"name": "f"}}']) == (f"{text} ", [("f", "{}")], 1, False)


@pytest.mark.parametrize(
    ("tool_format", "fine", "odd"),
    [
        ("pythonic", ["a", "a-b", "a.b", "é", "_1"], ["first name", "", " a", "a=b", "a\n", '"a"', "a)"]),
        ("qwen3_coder", ["first name", "a=b", "a<b"], [" a", "a\n", "x>y"]),
        ("glm45", ["first name", "x>y"], ["a ", "a</arg_key>b"]),
        ("hermes", ["first name", "", " a\n", '"a"'], []),
    ],
)
def test_a_call_is_forced_only_with_parameters_that_its_format_can_hold(
    tool_format: str, fine: list[str], odd: list[str]
) -> None:
    def grammar(key: str) -> Grammar | None:
        functions = [Function("f", parameters={"properties": {"a": {}, key: {"type": "string"}}})]
        return ToolUse(functions, is_forced=True, is_parallel=True, tool_format=FORMATS[tool_format]).grammar()

    for key in fine:
        assert grammar(key) is not None
    for key in odd:
        with pytest.raises(InvalidRequest, match=r"`tools`: .* `f`") as refusal:
            grammar(key)
        assert refusal.value.param == "tools"
