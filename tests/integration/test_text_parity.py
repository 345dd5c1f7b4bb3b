"""Prompts against `transformers`: what templates render, and which tokens stand around a text."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from roseinfer.errors import ConfigError
from roseinfer.text.grammar.compiler import Vocabulary
from roseinfer.text.templates import ChatTemplate
from roseinfer.text.tokenizer.tokenizer import Tokenizer
from tests.unit.server.harness import write_checkpoint

CONVERSATIONS = [
    [{"role": "user", "content": "  Hi <there> & “you”\n"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "<think>hm</think>\n\nTwo."},
        {"role": "user", "content": "Three?"},
    ],
]
# The constructs that templates of the families are made of: blocks to trim, loops with indices and breaks, slices,
# namespaces, string methods, tests, filters, and special tokens by name.
TEMPLATES = {
    "llama 3": """\
{{- bos_token }}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" + system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
""",
    "mistral": """\
{% for message in messages %}
    {% if message['role'] == 'user' %}
        {{ '[INST] ' + message['content'] + ' [/INST]' }}
    {% elif message['role'] == 'assistant' %}
{{ message['content'] + eos_token }}
    {% else %}
        {% if loop.index0 > 0 %}{{ raise_exception('system first') }}{% endif %}
        {% continue %}
    {% endif %}
{% endfor %}
{{ documents is none }} {{ messages | map(attribute='role') | join(',') }} {{ messages | tojson(indent=2) }}
""",
    "qwen3": """\
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string %}
        {%- set ns.multi_step_tool = false %}{%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "assistant" and '</think>' in message.content and loop.index0 < ns.last_query_index %}
        {%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
""",
}


def both(directory: Path, template: str | None, *, with_bos: bool, **wishes: bool) -> PreTrainedTokenizerFast:
    """Write the files of a vocabulary of bytes, which both of us read; theirs."""
    write_checkpoint(directory, template=template, with_bos=with_bos)
    path = directory / "tokenizer_config.json"
    written = json.loads(path.read_text())
    path.write_text(json.dumps(written | {"eos_token": written["eos_token"]["content"]} | wishes))
    return PreTrainedTokenizerFast.from_pretrained(directory)


@pytest.mark.parametrize("messages", CONVERSATIONS, ids=["one turn", "three turns"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_render_as_there(tmp_path: Path, name: str, messages: list[dict[str, str]]) -> None:
    theirs = both(tmp_path, TEMPLATES[name], with_bos=False)
    ours = ChatTemplate.load(tmp_path)
    assert ours is not None
    assert ours.render(messages) == theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


@pytest.mark.parametrize("value", [True, False, None])
def test_a_variable_means_the_same_there(tmp_path: Path, value: bool | None) -> None:
    theirs = both(tmp_path, TEMPLATES["qwen3"], with_bos=False)
    ours = ChatTemplate.load(tmp_path)
    assert ours is not None
    expected = theirs.apply_chat_template(
        CONVERSATIONS[0], tokenize=False, add_generation_prompt=True, enable_thinking=value
    )
    assert ours.render(CONVERSATIONS[0], variables={"enable_thinking": value}) == expected
    assert (ours.render(CONVERSATIONS[0]) == expected) is (value is not False)


@pytest.mark.parametrize("with_bos", [False, True], ids=["plain file", "file with bos"])
@pytest.mark.parametrize("is_said_twice", [False, True])
async def test_the_same_tokens_stand_around_a_text(tmp_path: Path, with_bos: bool, is_said_twice: bool) -> None:
    """Where tokenizer_config.json says what tokenizer.json does, or nothing: transformers 5 reads the second alone."""
    theirs = both(tmp_path, None, with_bos=with_bos, **({"add_bos_token": with_bos} if is_said_twice else {}))
    ours = await Tokenizer.load(tmp_path).encode(["Hi there"], add_special_tokens=True)
    assert ours == [theirs("Hi there")["input_ids"]]


def token(content: str, **flags: bool) -> dict[str, Any]:
    usual = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"content": content, **usual, "special": True, **flags}


def with_files(directory: Path, added: dict[str, Any], **settings: Any) -> int:
    """A vocabulary of bytes and `</s>`, without added tokens but `Hi`, and the files beside it; its size."""
    write_checkpoint(directory)
    file = json.loads((directory / "tokenizer.json").read_text())
    vocabulary = {**file["model"]["vocab"], "</s>": len(file["model"]["vocab"])}
    file["model"]["vocab"] = vocabulary
    file["added_tokens"] = [{"id": len(vocabulary), **token("Hi", special=False)}]
    (directory / "tokenizer.json").write_text(json.dumps(file))
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    for name, content in added.items():
        (directory / name).write_text(json.dumps(content))
    return len(vocabulary) + 1


@pytest.mark.parametrize(
    "tokens",
    [
        [],
        [token("<|im_start|>"), token("<|im_end|>")],
        [token("<|im_end|>", lstrip=True, rstrip=True)],
        [token("<|im_end|>", special=False), token("Hi", single_word=True)],
        [token("</s>", lstrip=True)],
    ],
    ids=str,
)
@pytest.mark.parametrize("is_old", [False, True])
def test_tokens_that_are_added_beside_the_vocabulary(
    tmp_path: Path, tokens: list[dict[str, Any]], is_old: bool
) -> None:
    """Else the marks of a chat template would be pieces of text."""
    size = with_files(tmp_path, {})
    ids = {"Hi": size - 1, "</s>": size - 2}
    ids |= {each["content"]: size + i for i, each in enumerate(tokens) if each["content"] not in ids}
    names = {each["content"]: ids[each["content"]] for each in tokens}
    entries = {str(ids[each["content"]]): each for each in tokens}
    old, new = ({"added_tokens.json": names}, {}) if is_old else ({}, {"added_tokens_decoder": entries})
    with_files(tmp_path, old, **{"eos_token": "</s>"} | new)
    theirs, ours = PreTrainedTokenizerFast.from_pretrained(tmp_path), Tokenizer.load(tmp_path)
    text = "<|im_start|>user Hi Hill <|im_end|> a</s>"
    expected = theirs(text, add_special_tokens=False)["input_ids"]
    assert ours.encode_here(text, add_special_tokens=False) == expected
    assert ours.text(expected) == theirs.decode(expected, skip_special_tokens=True)
    grammars = Vocabulary.load(tmp_path, size + len(tokens), [])
    spelled = {name: grammars._texts[token_id].decode() for name, token_id in (ids | names).items()}
    assert spelled == {name: "" if ids[name] in ours.special_ids else name for name in ids}


@pytest.mark.parametrize(
    "settings",
    [
        {"pad_token": "<|im_end|>"},
        {"additional_special_tokens": ["<|im_end|>", "of no vocabulary"]},
        {"extra_special_tokens": {"image_token": "<|im_end|>"}},
        {"additional_special_tokens": ["<|im_end|>"], "added_tokens_decoder": {}},
    ],
    ids=str,
)
def test_tokens_of_the_vocabulary_that_are_named_special(tmp_path: Path, settings: dict[str, Any]) -> None:
    """Though tokenizer.json has them among its words alone, whose pieces a template's marks then were."""
    with_files(tmp_path, {}, **settings)
    path = tmp_path / "tokenizer.json"
    file = json.loads(path.read_text())
    vocabulary = file["model"]["vocab"]
    file["added_tokens"] = []
    vocabulary["<|im_end|>"] = len(vocabulary)
    path.write_text(json.dumps(file))
    theirs, ours = PreTrainedTokenizerFast.from_pretrained(tmp_path), Tokenizer.load(tmp_path)
    text = "Hi<|im_end|> there"
    expected = theirs(text, add_special_tokens=False)["input_ids"]
    assert vocabulary["<|im_end|>"] in expected
    assert ours.encode_here(text, add_special_tokens=False) == expected
    assert ours.text(expected) == theirs.decode(expected, skip_special_tokens=True) == "Hi there"


def test_an_added_token_with_an_id_that_it_cannot_have(tmp_path: Path) -> None:
    size = with_files(tmp_path, {})
    with_files(tmp_path, {}, added_tokens_decoder={str(size + 1): token("<|im_end|>")})
    with pytest.raises(ConfigError, match=f"'<|im_end|>' has the id {size + 1} beside tokenizer.json, .* be {size}"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("entry", ["<|im_end|>", {"content": {"text": "<|im_end|>"}}], ids=str)
def test_added_tokens_that_are_none(tmp_path: Path, entry: object) -> None:
    with_files(tmp_path, {}, added_tokens_decoder={"5": entry})
    with pytest.raises(ConfigError, match=r"The tokens that are added to tokenizer\.json cannot be read"):
        Tokenizer.load(tmp_path)
