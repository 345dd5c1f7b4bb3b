"""A template is the model's, compiled once, sandboxed and bounded; its refusals are the caller's mistakes."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from roseinfer.errors import ConfigError, InvalidRequest
from roseinfer.server.api.fields import ModelBody
from roseinfer.server.api.parsing import parse_body
from roseinfer.server.openai.chat_schema import ChatBody
from roseinfer.server.openai.tokenize import TokenizeBody
from roseinfer.text.answers.reasoning import FORMATS, Thinking
from roseinfer.text.templates import (
    MAX_PROMPT_CHARS,
    MAX_VARIABLE_BYTES,
    MAX_VARIABLE_LEVELS,
    MAX_VARIABLES,
    SWITCHES,
    ChatTemplate,
    read_chosen_template,
)
from tests.unit.server.harness import TEMPLATE, write_checkpoint

MESSAGES = [{"role": "user", "content": "Hi\n"}]


def render(source: str, messages: list[dict[str, str]] = MESSAGES) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(messages)


def test_blocks_are_trimmed_as_authors_of_templates_expect() -> None:
    assert render(TEMPLATE) == "<user>Hi\n\n<assistant>"


@pytest.mark.parametrize(
    ("source", "begun", "prompt"),
    [
        (TEMPLATE, "So ", "<user>Hi\n\n<assistant>So "),
        ("{% for m in messages %}{{ m.content | trim }}|{% endfor %}", "Hi Hi ", "Hi|Hi Hi "),
        ("{% for m in messages %}{{ m.content }}|{% endfor %}{{ messages[-1].content | length }}", "", "Hi\n|"),
    ],
)
def test_a_prompt_ends_with_the_text_that_is_continued(source: str, begun: str, prompt: str) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": begun}]
    assert ChatTemplate(source, {}).render(messages, continues_last=True) == prompt


def test_a_text_that_the_template_does_not_write_cannot_be_continued() -> None:
    with pytest.raises(InvalidRequest, match="does not write the text of the last message") as caught:
        ChatTemplate("{{ messages[0].content }}", {}).render([*MESSAGES, *MESSAGES], continues_last=True)
    assert caught.value.param == "messages"


def test_what_a_template_may_use() -> None:
    source = (
        "{{ bos_token }}{{ messages | tojson }}{{ messages[0].content | trim }}"
        "{% for x in [1, 2] %}{% break %}{% endfor %}{{ tools is none }}{{ strftime_now('%Y')|length }}"
    )
    assert render(source) == '<s>[{"role": "user", "content": "Hi\\n"}]HiTrue4'


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('only one system message') }}",
        "{{ messages[5].content }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ messages[0].content + 1 }}",
        "{{ 1 // 0 }}",
        "{{ messages[0].content.index('?') }}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
    ],
)
def test_a_refusal_is_an_invalid_request(source: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        render(source)
    assert caught.value.param == "messages"


def test_json_is_written_as_templates_ask_for_it() -> None:
    source = "{{ {'b': '<é>', 'a': 1} | tojson(sort_keys=true, separators=(',', ':')) }}"
    assert render(source) == '{"a":1,"b":"<é>"}'


def test_the_arguments_of_a_call_are_an_object_or_text_as_the_template_takes_them() -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": {"é": 1}}}
    messages: list[Any] = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    arguments = "{% set a = messages[0].tool_calls[0].function.arguments %}"
    for source, text in (
        ("{{ a | tojson }}{{ a is mapping }}{{ a is string }}", '{"é": 1}TrueFalse'),
        ("{% for key, value in a | items %}{{ key }}={{ value }}{% endfor %}", "é=1"),
        ("{{ '```json' + a + '```' }}", '```json{"é": 1}```'),
        ("{{ a }}", '{"é": 1}'),
    ):
        assert render(arguments + source, messages) == text


@pytest.mark.parametrize("call_id", ["call_0123456789abcdef", "x", "abcdefgh!"])
def test_mistrals_templates_get_ids_of_nine_letters_and_digits(call_id: str) -> None:
    call = {"id": call_id, "type": "function", "function": {"name": "f", "arguments": {}}}
    messages: list[Any] = [
        {"role": "assistant", "content": "", "tool_calls": [call, call | {"id": "abcDEF123"}]},
        {"role": "tool", "content": "", "tool_call_id": call_id},
    ]
    ids = "{% for call in messages[0].tool_calls %}{{ call.id }} {% endfor %}{{ messages[1].tool_call_id }}"
    first, second, answered = render("{# [TOOL_CALLS] #}" + ids, messages).split()
    assert first == answered
    assert re.fullmatch("[a-zA-Z0-9]{9}", first)
    assert second == "abcDEF123"
    assert render(ids, messages).split() == [call_id, "abcDEF123", call_id]


def test_marks_for_training_leave_what_they_hold() -> None:
    source = "{% for m in messages %}{% generation %}{% set x = m.role %}{{ x }}!{% endgeneration %}{{ x }}{% endfor %}"
    assert render(source) == "user!"


def test_the_output_is_bounded() -> None:
    with pytest.raises(InvalidRequest, match=str(MAX_PROMPT_CHARS)):
        render("{% for _ in range(90000) %}{{ messages[0].content }}{% endfor %}", [{"content": "x" * 1000}])


def test_a_template_that_does_not_compile_is_named() -> None:
    with pytest.raises(ConfigError, match="does not compile") as caught:
        render("{% for %}")
    assert caught.value.param == "model.path"


def write_config(directory: Path, config: dict[str, Any]) -> Path:
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def test_special_tokens_are_strings_or_objects(tmp_path: Path) -> None:
    template = "{{ bos_token }}{{ eos_token }}{{ pad_token is defined }}"
    config = {"chat_template": template, "bos_token": "<s>", "eos_token": {"content": "</s>"}, "pad_token": None}
    loaded = ChatTemplate.load(write_config(tmp_path, config))
    assert loaded is not None
    assert loaded.render(MESSAGES) == "<s></s>False"


def test_a_file_of_its_own_goes_first(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("from the file")
    loaded = ChatTemplate.load(tmp_path)
    assert loaded is not None
    assert loaded.render(MESSAGES) == "from the file"


@pytest.mark.parametrize(
    "several",
    [[{"name": "tools", "template": "a"}, {"name": "default", "template": "b"}], {"tools": "a", "default": "b"}],
    ids=["a list", "an object"],
)
def test_of_several_templates_the_default(several: object, tmp_path: Path) -> None:
    loaded = ChatTemplate.load(write_config(tmp_path, {"chat_template": several}))
    assert loaded is not None
    assert loaded.render(MESSAGES) == "b"


def test_of_several_templates_the_one_for_tools_where_there_are_some(tmp_path: Path) -> None:
    several = [
        {"name": "default", "template": "chat"},
        {"name": "tool_use", "template": "{{ tools|length }} tools {{ x }}"},
    ]
    loaded = ChatTemplate.load(write_config(tmp_path, {"chat_template": several}))
    assert loaded is not None
    assert loaded.knows_tools
    assert (loaded.source, loaded.tool_source) == ("chat", several[1]["template"])
    assert loaded.render(MESSAGES) == "chat"
    assert loaded.render(MESSAGES, [{}, {}], {"x": 1}) == "2 tools 1"


def test_a_file_for_processors_is_read_when_nothing_else_has_a_template(tmp_path: Path) -> None:
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "{{ bos_token }}processor"}))
    loaded = ChatTemplate.load(write_config(tmp_path, {"bos_token": "<s>"}))
    assert loaded is not None
    assert loaded.render(MESSAGES) == "<s>processor"


def test_a_chosen_template_goes_before_the_models_and_has_its_tokens(tmp_path: Path) -> None:
    (tmp_path / "mine.jinja").write_text("{{ bos_token }}mine")
    chosen = read_chosen_template(str(tmp_path / "mine.jinja"))
    loaded = ChatTemplate.load(write_checkpoint(tmp_path), chosen)
    assert loaded is not None
    assert loaded.render(MESSAGES) == "<|bos|>mine"
    assert read_chosen_template(None) is None


@pytest.mark.parametrize("content", [None, b"\xff\xfe", b"{% for %}"])
def test_a_chosen_template_that_cannot_be_used_is_named(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "mine.jinja").write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read_chosen_template(str(tmp_path / "mine.jinja"))
    assert caught.value.param == "server.chat_template"


def test_there_may_be_none(tmp_path: Path) -> None:
    assert ChatTemplate.load(tmp_path) is None
    assert ChatTemplate.load(write_config(tmp_path, {"chat_template": None})) is None


def test_a_broken_configuration_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json"):
        ChatTemplate.load(tmp_path)


@pytest.mark.parametrize("template", [{"a": 1}, [{"template": "x"}], ["x"], 7])
def test_a_template_of_no_known_shape_is_named(tmp_path: Path, template: object) -> None:
    write_checkpoint(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    with pytest.raises(ConfigError, match="chat template cannot be read"):
        ChatTemplate.load(tmp_path)


def test_a_missing_chosen_template_is_named_in_words(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"~no-such-user/x cannot be read: there is no such user\.$"):
        read_chosen_template("~no-such-user/x")
    with pytest.raises(ConfigError, match=r"none cannot be read: No such file or directory\.$"):
        read_chosen_template(str(tmp_path / "none"))
    (tmp_path / "odd").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"odd cannot be read: it is not UTF-8\.$"):
        read_chosen_template(str(tmp_path / "odd"))


HI = [{"role": "user", "content": "Hi"}]
QWEN3 = "{{ messages[0].content }}{% if enable_thinking is false %}<think></think>{% endif %}"


def render_with(source: str, **variables: object) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(HI, variables=variables)


def refused(source: str, **variables: object) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        render_with(source, **variables)
    return caught.value


def nested(levels: int) -> Any:
    value: Any = 1
    for level in range(levels):
        value = [value] if level % 2 else {"a": value}
    return value


def parsed(variables: object, body_type: type[ModelBody] = ChatBody) -> dict[str, Any]:
    body = parse_body(json.dumps({"messages": HI, "chat_template_kwargs": variables}).encode(), body_type)
    assert isinstance(body, ChatBody | TokenizeBody)
    return body.chat_template_kwargs


def test_a_variable_reaches_the_template() -> None:
    assert render_with(QWEN3) == render_with(QWEN3, enable_thinking=True) == "Hi"
    assert render_with(QWEN3, enable_thinking=False) == "Hi<think></think>"
    assert ChatTemplate(QWEN3, {}).render(HI, None, {"enable_thinking": False}, opens_turn=False) == "Hi<think></think>"


@pytest.mark.parametrize(
    "source",
    [
        "{% set budget = budget | default(5) %}{{ budget }}",
        "{% if not budget is defined %}{% set budget = 5 %}{% endif %}{{ budget }}",
        "{% macro told() %}{{ budget }}{% endmacro %}{{ told() }}",
        "{% for m in messages %}{% generation %}{{ budget }}{% endgeneration %}{% endfor %}",
        "{% set n = namespace(budget=budget) %}{{ n.budget }}",
    ],
)
def test_wherever_a_template_reads_it(source: str) -> None:
    assert render_with(source, budget=7) == "7"


@pytest.mark.parametrize(
    "name",
    ["messages", "tools", "documents", "add_generation_prompt", "bos_token", "raise_exception", "range", "lipsum"],
)
def test_what_the_server_gives_is_not_the_clients(name: str) -> None:
    error = refused("{{ messages }}{{ tools }}{{ documents }}{{ bos_token }}", **{name: "mine"})
    assert error.param == f"chat_template_kwargs.{name}"
    assert "The server gives the template this variable itself" in error.message


def test_what_a_template_does_not_read_is_named_with_what_it_does() -> None:
    error = refused(QWEN3 + "{{ budget }}", enable_thinkng=False)
    assert error.param == "chat_template_kwargs.enable_thinkng"
    assert error.message.endswith("no such variable; those to be set: `budget`, `enable_thinking`.")
    assert refused("{{ messages }}", self=1).message.endswith("those to be set: none.")


def test_the_switches_that_clients_send_to_every_model_are_taken_by_every_model() -> None:
    assert sorted(SWITCHES) == ["enable_thinking", "thinking"]
    for name in SWITCHES:
        for value in (True, False, None):
            assert render_with("{{ messages[0].content }}", **{name: value}) == "Hi"


def test_a_value_that_the_template_cannot_use_is_named_beside_the_messages() -> None:
    error = refused("{{ budget + 1 }}", budget="a")
    assert error.param == "messages"
    assert "refused the messages with `chat_template_kwargs`" in error.message


@pytest.mark.parametrize("reason", ["No user query", "No user query."])
def test_the_reason_of_a_template_ends_with_one_full_stop(reason: str) -> None:
    error = refused(f"{{{{ raise_exception({reason!r}) }}}}")
    assert error.message == "The chat template refused the messages: No user query."


def test_a_value_stays_in_the_sandbox() -> None:
    assert "unsafe" in refused("{{ budget.__class__.__mro__ }}", budget="a").message
    assert "unsafe" in refused("{{ budget.append(1) }}", budget=[]).message


@pytest.mark.parametrize("body_type", [ChatBody, TokenizeBody])
def test_what_is_within_the_bounds_is_taken_as_it_stands(body_type: type[ModelBody]) -> None:
    variables = {"_a1": None, "B": [None, {"c d": 1.5}], "x" * 64: "\u00e9", "deep": nested(MAX_VARIABLE_LEVELS)}
    assert parsed(variables, body_type) == variables
    assert parsed(None, body_type) == {}
    many = {f"a{i}": i for i in range(MAX_VARIABLES)}
    assert parsed(many, body_type) == many
    assert parsed({"a": "x" * (MAX_VARIABLE_BYTES - len('{"a":""}'))}, body_type)


@pytest.mark.parametrize("body_type", [ChatBody, TokenizeBody])
@pytest.mark.parametrize(
    ("variables", "param", "told"),
    [
        (1, "chat_template_kwargs", "Expected `object`, got `integer`"),
        ({"a b": 1}, "chat_template_kwargs", "as a key, 'a b'"),
        ({"é": 1}, "chat_template_kwargs", "as a key, 'é'"),
        ({"": 1}, "chat_template_kwargs", "as a key, ''"),
        ({"a\n": 1}, "chat_template_kwargs", "as a key, 'a\\n'"),
        ({"x" * 65: 1}, "chat_template_kwargs", "as a key, 'xxx"),
        ({f"a{i}": i for i in range(MAX_VARIABLES + 1)}, "chat_template_kwargs", f"length <= {MAX_VARIABLES}"),
        (
            {"a": 1, "b": nested(MAX_VARIABLE_LEVELS + 1)},
            "chat_template_kwargs.b",
            f"deeper than {MAX_VARIABLE_LEVELS} levels",
        ),
        ({"b": nested(400)}, "chat_template_kwargs.b", f"deeper than {MAX_VARIABLE_LEVELS} levels"),
        ({"a": "x" * MAX_VARIABLE_BYTES}, "chat_template_kwargs", f"at most {MAX_VARIABLE_BYTES} are taken"),
        ({"a": list(range(9000))}, "chat_template_kwargs", f"at most {MAX_VARIABLE_BYTES} are taken"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_is_not_is_named(variables: object, param: str, told: str, body_type: type[ModelBody]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parsed(variables, body_type)
    assert caught.value.param == param
    assert told in caught.value.message


def test_whatever_the_depth_it_is_an_error_that_names_it() -> None:
    """Also where it is nearly too deep to be decoded."""
    before, after = b'{"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"a": ', b"}}"
    for levels in range(800, 1000):
        with pytest.raises(InvalidRequest, match=r"too deeply|deeper than"):
            parse_body(before + b"[" * levels + b"]" * levels + after, ChatBody)


@pytest.mark.parametrize(
    ("source", "thinking", "expected"),
    [
        ("{{ enable_thinking }}", Thinking("none"), {"enable_thinking": False}),
        ("{{ thinking }}", Thinking("low"), {"thinking": True}),
        ("{{ enable_thinking }}", Thinking(max_tokens=5), {}),
        ("{{ reasoning_effort }}", Thinking("none"), {"reasoning_effort": "low"}),
        ("{{ reasoning_effort }}", Thinking("xhigh"), {"reasoning_effort": "high"}),
        ("{{ reasoning_effort == 'xhigh' }}", Thinking("xhigh"), {"reasoning_effort": "xhigh"}),
        ("{{ reasoning_effort }}", Thinking("medium"), {"reasoning_effort": "medium"}),
        ("{{ thinking_budget }}", Thinking("high", 512), {"thinking_budget": 512}),
        ("{{ thinking_budget }}", Thinking("none"), {"thinking_budget": 0}),
        ("{{ messages }}", Thinking("none", 5), {}),
    ],
)
def test_an_effort_becomes_the_variables_that_the_template_reads(
    source: str, thinking: Thinking, expected: dict[str, object]
) -> None:
    assert ChatTemplate(source, {}).thinking_variables(thinking) == expected


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ messages[0].content }}<assistant>{% if enable_thinking %}<think>\n{% endif %}", True),
        ("<assistant>{{ '<think>' if thinking else '</think>' }}", True),
        ("<assistant>{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}", False),
        ("{{ raise_exception('system first') if messages[0].role != 'system' }}<think>", False),
    ],
)
def test_a_template_shows_whether_it_opens_thoughts_itself(source: str, expected: bool) -> None:
    assert ChatTemplate(source, {}).opens_thoughts(FORMATS["think"]) == expected
