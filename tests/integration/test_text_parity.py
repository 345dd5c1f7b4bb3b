"""Prompts against `transformers`: what templates render, and which tokens stand around a text."""

import json
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

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
