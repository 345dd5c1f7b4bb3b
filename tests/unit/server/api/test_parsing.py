"""What an error says of a body: what would do, and where it is at fault."""

import json
from typing import Any

import pytest

from roseinfer.errors import InvalidRequest
from roseinfer.server.api.fields import StructuredOutputs
from roseinfer.server.api.parsing import parse_body
from roseinfer.server.openai.chat_schema import ChatBody
from roseinfer.server.openai.schema import CompletionBody
from roseinfer.server.openai.tokenize import DetokenizeBody, TokenizeBody

MESSAGES = [{"role": "user", "content": "a"}]
NO_JSON = "NaN, Infinity and half of a surrogate pair are none."
IMAGE = {"type": "image_url", "image_url": {"url": "a"}}


def refused(body: dict[str, Any] | bytes) -> InvalidRequest:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    with pytest.raises(InvalidRequest) as caught:
        parse_body(raw, ChatBody if b'"messages"' in raw else CompletionBody)
    return caught.value


@pytest.mark.parametrize(
    ("field", "param", "message"),
    [
        ({"messages": [{"role": "boss", "content": "a"}]}, "messages[0].role",
         "Expected one of 'assistant', 'developer', 'function', 'system', 'tool', 'user'; got 'boss'."),
        ({"tool_choice": "boss"}, "tool_choice", "Expected one of 'auto', 'none', 'required'; got 'boss'."),
        ({"tool_choice": {"type": "boss"}}, "tool_choice.type",
         "Expected one of 'allowed_tools', 'function'; got 'boss'."),
        ({"response_format": {"type": "yaml"}}, "response_format.type",
         "Expected one of 'json', 'json_object', 'json_schema', 'regex', 'text'; got 'yaml'."),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "a", "type": "b", "function": {}}]}]},
         "messages[0].tool_calls[0].type", "Expected 'function'; got 'b'."),
    ],
)  # fmt: skip
def test_a_closed_set_is_listed(field: dict[str, Any], param: str, message: str) -> None:
    error = refused({"messages": MESSAGES, **field})
    assert (error.param, error.message) == (param, f"`{param}`: {message}")


@pytest.mark.parametrize("least", [{"messages": MESSAGES}, {"prompt": "a"}], ids=str)
@pytest.mark.parametrize(
    ("field", "path", "instead"),
    [
        ({"add_special_tokens": 0}, "add_special_tokens", "token ids are taken as they are"),
        ({"guided_json": {}}, "guided_json", "use `structured_outputs` with `json`"),
        ({"prompt_logprobs": 1}, "prompt_logprobs", "use `echo` with `logprobs`, of /v1/completions"),
        ({"skip_special_tokens": False}, "skip_special_tokens", "always left out"),
        ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens", "a prompt is never cut"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "nothing is stored here"),
        ({"mcp_servers": [{}]}, "mcp_servers", "give the tools in `tools`"),
    ],
    ids=str,
)
def test_a_field_of_another_server_is_named_with_what_there_is_instead(
    field: dict[str, Any], path: str, instead: str, least: dict[str, Any]
) -> None:
    error = refused(least | field)
    assert error.param == path
    assert error.message.startswith(f"`{path}` is not supported: ")
    assert instead in error.message


@pytest.mark.parametrize(
    ("body_type", "field", "path"),
    [
        (ChatBody, "input", "/v1/responses"),
        (ChatBody, "prompt", "/v1/completions"),
        (CompletionBody, "input", "/v1/responses"),
        (CompletionBody, "messages", "/v1/chat/completions"),
    ],
)
def test_a_body_of_another_endpoint_hears_where_it_belongs(body_type: Any, field: str, path: str) -> None:
    with pytest.raises(InvalidRequest, match=f"`{field}` is not supported: .*{path} takes `{field}`\\.") as caught:
        parse_body(f'{{"model": "a", "{field}": "Hi"}}'.encode(), body_type)
    assert caught.value.param == field


@pytest.mark.parametrize(
    ("body_type", "field", "name"), [(TokenizeBody, "content", "prompt"), (DetokenizeBody, "ids", "tokens")]
)
def test_a_field_of_another_tokenizing_server_hears_its_name_here(body_type: Any, field: str, name: str) -> None:
    with pytest.raises(InvalidRequest, match=f"`{field}` is not supported: `{name}` is its name here") as caught:
        parse_body(f'{{"{field}": "Hi"}}'.encode(), body_type)
    assert caught.value.param == field


def test_zero_keeps_all_of_the_likeliest() -> None:
    error = refused({"prompt": "a", "top_k": -2})
    assert (error.param, error.message) == ("top_k", "`top_k`: Expected `integer` >= -1.")
    assert refused({"prompt": "a", "top_k": "a"}).message == "`top_k`: Expected `integer or null`, got `string`."


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ({"structured_outputs": {"json_object": False}},
         "`structured_outputs`: exactly one of `json`, `json_object`, `regex`, `choice` and `grammar` is needed."),
        ({"response_format": {"type": "text", "json_schema": {"name": "a"}}},
         "`response_format`: `json_schema` does not belong to the type `text`."),
        ({"logit_bias": {"5": 1, "five": 1}}, "`logit_bias`: Expected `integer`, got `string` as a key, 'five'."),
    ],
)  # fmt: skip
def test_a_key_is_named_where_it_is_the_clients_own(field: dict[str, Any], message: str) -> None:
    assert refused({"prompt": "a", **field}).message == message


def test_flags_that_are_off_ask_for_nothing() -> None:
    flags = {"disable_any_whitespace": False, "disable_additional_properties": False, "disable_fallback": False}
    others = {"json_object": False, "whitespace_pattern": None, "structural_tag": None, "choice": None}
    off = {"structured_outputs": {"regex": "a", **flags, **others}, "logprobs": False, "prompt_logprobs": False}
    body = parse_body(json.dumps({"prompt": "a", **off}).encode(), CompletionBody)
    assert body.structured_outputs == StructuredOutputs(regex="a", json_object=False)
    for name in ("disable_any_whitespace", "disable_additional_properties"):
        error = refused({"prompt": "a", "structured_outputs": {"regex": "a", name: True}})
        assert (error.param, error.message) == (
            f"structured_outputs.{name}",
            f"`structured_outputs.{name}`: not supported; use a `grammar`.",
        )
    assert refused({"prompt": "a", "logprobs": True}).param == "logprobs"
    assert refused({"prompt": "a", "prompt_logprobs": 0}).param == "prompt_logprobs"


@pytest.mark.parametrize("part", [IMAGE, dict(reversed(IMAGE.items())), {"type": "file"}])
def test_content_that_is_no_text_is_named_as_that(part: dict[str, Any]) -> None:
    error = refused({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, part]}]})
    assert error.param == "messages[0].content[1].type"
    assert error.message == f"`messages[0].content[1]`: Only text content is supported, not {part['type']!r}."


@pytest.mark.parametrize("name", ["input_text", "output_text", "tool_text"])
def test_a_text_under_the_name_of_another_api_hears_the_names_here(name: str) -> None:
    error = refused({"messages": [{"role": "user", "content": [{"type": name, "text": "a"}]}]})
    assert error.message == f"`messages[0].content[0].type`: Expected one of 'refusal', 'text'; got {name!r}."


def test_a_bad_refusal_hears_what_is_wrong_and_not_that_it_is_no_text() -> None:
    error = refused({"messages": [{"role": "assistant", "content": [{"type": "refusal", "refusal": 5}]}]})
    assert error.message == "`messages[0].content[0].refusal`: Expected `string`, got `integer`."
    error = refused({"messages": [{"role": "user", "content": [{"type": "refusal", "refusal": "No."}]}]})
    assert error.message == "`messages[0]`: only an assistant's message has a `refusal`."


@pytest.mark.parametrize("kind", [{}, [], 5])
def test_a_part_whose_type_is_no_text_is_named_as_that(kind: object) -> None:
    error = refused({"messages": [{"role": "user", "content": [{"text": "", "type": kind}]}]})
    assert error.param == "messages[0].content[0].type"
    assert "Expected `string`" in error.message


def test_the_schema_that_is_missing_is_named() -> None:
    error = refused({"prompt": "a", "response_format": {"type": "json_schema"}})
    assert (error.param, error.message) == (
        "response_format.json_schema",
        "Missing field `response_format.json_schema`.",
    )


@pytest.mark.parametrize(
    ("bias", "param", "said"),
    [
        ({"1": 1, "five": 1}, "logit_bias", "'five'"),
        ({"1": 1, "-1": 1}, "logit_bias", "'-1'"),
        ({"1": 1, "5": 101}, "logit_bias.5", "Expected `number` <= 100.0."),
    ],
)
def test_a_key_at_fault_is_named(bias: dict[str, Any], param: str, said: str) -> None:
    error = refused({"prompt": "a", "logit_bias": bias})
    assert error.param == param
    assert said in error.message


def test_a_limit_below_zero_hears_the_least_that_makes_sense() -> None:
    error = refused({"prompt": "a", "max_tokens": -2})
    assert (error.param, error.message) == ("max_tokens", "`max_tokens`: Expected `integer` >= -1.")


def test_a_number_that_nothing_holds_is_named_with_its_field() -> None:
    error = refused(b'{"prompt": "a", "temperature": 1e999}')
    assert (error.param, error.message) == ("temperature", "`temperature`: Number out of range.")
    nested = b'{"metadata": ' + b'{"a": ' * 400 + b"1e999" + b"}" * 401
    error = refused(nested)
    assert error.param == "metadata" + ".a" * 6  # finding all of its path would take a second of a long body


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "The body is empty; it must be a JSON object."),
        (b" \n", "The body is empty; it must be a JSON object."),
        (b'{"prompt" "a"}', "The body is not valid JSON: Expecting ':' delimiter (character 10)."),
        (b'{"prompt": "a"', "The body is not valid JSON: Expecting ',' delimiter (character 14)."),
        (b'{"prompt": "a\xff"}', "The body is not valid JSON: it is not UTF-8 (byte 13)."),
        (b'{"prompt": "\\ud800"}', f"The body is not valid JSON: {NO_JSON}"),
        (b'{"prompt": NaN}', f"The body is not valid JSON: {NO_JSON}"),
        (b'{"seed": ' + b"9" * 5000 + b",}", f"The body is not valid JSON: {NO_JSON}"),
        (b'{"a":' * 5000, "The body is nested too deeply: more than 512 levels."),
    ],
)  # fmt: skip
def test_what_is_no_json_is_named_with_the_place(raw: bytes, message: str) -> None:
    for content in (raw, bytearray(raw)):
        error = refused(bytes(content))
        assert (error.param, error.message) == (None, message)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": [{"role": None, "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": MESSAGES, "tools": [{"type": "function", "function": None}]}, "tools[0].function"),
        ({"prompt": None}, "prompt"),
    ],
    ids=str,
)
def test_a_null_is_not_called_missing(body: dict[str, Any], param: str) -> None:
    error = refused(body)
    assert (error.param, error.message) == (param, f"`{param}` must not be null.")


def test_what_is_missing_is_called_that() -> None:
    assert refused({"messages": [{"role": "user"}]}).message == "Missing field `messages[0].content`."


def test_a_whole_number_may_be_written_with_a_point() -> None:
    body = parse_body(b'{"prompt": [1.0, 2], "max_tokens": 3.0, "seed": -0.0, "top_k": 1e1}', CompletionBody)
    assert (body.prompt, body.max_tokens, body.seed, body.top_k) == ([1, 2], 3, 0, 10)
    assert refused({"prompt": "a", "max_tokens": 1e300}).param == "max_tokens"
    assert refused({"prompt": "a", "stop": 1.0}).message.endswith("got `integer`.")
    nested = {"type": "function", "function": {"name": 1.0, "parameters": {"multipleOf": 2.0}}}
    assert refused({"messages": MESSAGES, "tools": [nested]}).param == "tools[0].function.name"


def test_unknown_fields_are_kept_and_those_that_would_change_the_answer_refused() -> None:
    unknown: list[str] = []
    fields = {"prompt": "a", "temprature": 1, "mood": None, "store": True, "suffix": "", "é": {}}
    body = parse_body(json.dumps(fields).encode(), CompletionBody, unknown)
    assert (body.prompt, sorted(unknown)) == ("a", ["temprature", "é"])
    with pytest.raises(InvalidRequest, match="`bad_words` is not supported"):
        parse_body(b'{"prompt": "a", "bad_words": ["b"], "mood": 1}', CompletionBody, unknown)
    assert refused({"prompt": "a", "temprature": 1}).message == "Unknown field `temprature`; did you mean temperature?"


def test_what_a_conversation_holds_beside_what_is_read_has_no_effect() -> None:
    call = {"id": "c", "index": 0, "type": "function", "function": {"name": "f", "arguments": "{}", "parsed": {}}}
    part = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}, "annotations": [1]}
    messages = [
        {"role": "user", "content": [part], "id": "m", "name": 5, "timestamp": 1.5},
        {"role": "assistant", "content": None, "tool_calls": [call], "audio": None, "provider_fields": {"a": None}},
        {"role": "tool", "tool_call_id": "c", "content": "b", "status": "done"},
    ]
    tool = {"type": "function", "defer_loading": True, "function": {"name": "f", "strict": "no", "returns": {}}}
    body = parse_body(json.dumps({"messages": messages, "tools": [tool]}).encode(), ChatBody)
    assert [message.text for message in body.messages] == ["a", "", "b"]
