"""A template is the model's, compiled once, sandboxed and bounded; its refusals are the caller's mistakes."""

import json
from pathlib import Path
from typing import Any

import pytest

from roseinfer.errors import ConfigError, InvalidRequest
from roseinfer.text.templates import MAX_PROMPT_CHARS, ChatTemplate, read_chosen_template
from tests.unit.server.harness import TEMPLATE, write_checkpoint

MESSAGES = [{"role": "user", "content": "Hi\n"}]


def render(source: str, messages: list[dict[str, str]] = MESSAGES) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(messages)


def test_blocks_are_trimmed_as_authors_of_templates_expect() -> None:
    assert render(TEMPLATE) == "<user>Hi\n\n<assistant>"


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


def test_of_several_templates_the_default(tmp_path: Path) -> None:
    several = [{"name": "tools", "template": "a"}, {"name": "default", "template": "b"}]
    loaded = ChatTemplate.load(write_config(tmp_path, {"chat_template": several}))
    assert loaded is not None
    assert loaded.render(MESSAGES) == "b"


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


def test_a_chosen_template_that_is_not_there_is_told_in_words(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none cannot be read: No such file or directory\.$"):
        read_chosen_template(str(tmp_path / "none"))
    (tmp_path / "odd").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"odd cannot be read: it is not UTF-8\.$"):
        read_chosen_template(str(tmp_path / "odd"))
