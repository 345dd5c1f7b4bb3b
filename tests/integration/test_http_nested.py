"""Values about as deep as the interpreter bears: a body is decoded on a shorter stack than it is encoded on."""

import pytest

from roseinfer.errors import InvalidRequest
from roseinfer.server.api.fields import StructuredOutputs
from roseinfer.server.openai.schema import CompletionBody, JsonSchemaFormat, ResponseFormat
from roseinfer.text.answers.functions import Function
from roseinfer.text.answers.tool_formats import FORMATS
from roseinfer.text.answers.tool_use import ToolUse
from tests.unit.server.harness import ScriptedEngine, says, serving, text_model

LONG = "a" * 70_000  # what makes a body so long that a thread decodes it
TEMPLATE = "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}{{ messages[0].content }}"
PLACES = {  # by field: path, and the rest of a body around a schema, which no encoder of ours could write
    "response_format": (
        "completions",
        '"prompt":"LONG","response_format":{"type":"json_schema","json_schema":{"name":"a","schema":SCHEMA}}',
    ),
    "structured_outputs": ("completions", '"prompt":"LONG","structured_outputs":{"json":SCHEMA}'),
    "metadata": ("responses", '"input":"LONG","metadata":SCHEMA'),
    "functions": ("responses", '"input":"LONG","tools":[{"type":"function","name":"f","parameters":SCHEMA}]'),
    "chat_template_kwargs": ("responses", '"input":"LONG","chat_template_kwargs":{"x":SCHEMA}'),
    "tool_use": (
        "messages",
        (
            '"max_tokens":1,"messages":[{"role":"user","content":"LONG"},'
            '{"role":"assistant","content":[{"type":"tool_use","id":"a","name":"f","input":SCHEMA}]},'
            '{"role":"user","content":[{"type":"tool_result","tool_use_id":"a"}]}]'
        ),
    ),
    "tools": (
        "chat/completions",
        (
            '"messages":[{"role":"user","content":"LONG"}],"tool_choice":"required",'
            '"tools":[{"type":"function","function":{"name":"f","parameters":SCHEMA}}]'
        ),
    ),
}


@pytest.mark.parametrize("text", ["a", LONG], ids=["short", "long"])
@pytest.mark.parametrize("field", PLACES)
async def test_what_is_as_deep_as_the_stack_bears_is_the_fault_of_its_client(field: str, text: str) -> None:
    path, rest = PLACES[field]
    async with serving(ScriptedEngine(says("a")), text=text_model(template=TEMPLATE)) as server:
        for depth in (*range(500, 520), *range(920, 1010, 2), 50_000):
            schema = '{"x":' * depth + "1" + "}" * depth
            body = "{" + rest.replace("LONG", text).replace("SCHEMA", schema) + "}"
            headers = {"Content-Type": "application/json"}
            answer = await server.request("POST", f"/v1/{path}", data=body.encode(), headers=headers)
            assert answer.status in ({200, 400} if depth < 512 else {400}), (depth, answer.body)


async def test_a_number_that_must_be_whole_is_named_beside_what_is_as_deep() -> None:
    async with serving(ScriptedEngine(says("a")), text=text_model(template=TEMPLATE)) as server:
        for opening, closing in (('{"x":', "}"), ("[", "]")):
            deep = opening * 508 + "1.0" + closing * 508
            body = f'{{"messages":[{{"role":"user","content":1.0,"x":{deep}}}]}}'
            headers = {"Content-Type": "application/json"}
            answer = await server.request("POST", "/v1/chat/completions", data=body.encode(), headers=headers)
            assert (answer.status, answer.error["param"]) == (400, "messages[0].content")


async def test_what_a_response_gives_back_may_be_nested_in_512_levels() -> None:
    metadata = '{"x":' * 511 + "1" + "}" * 511
    async with serving(ScriptedEngine(says("a")), text=text_model(template=TEMPLATE)) as server:
        for is_streamed in ("true", "false"):
            body = f'{{"input":"a","stream":{is_streamed},"metadata":{metadata}}}'
            headers = {"Content-Type": "application/json"}
            answer = await server.request("POST", "/v1/responses", data=body.encode(), headers=headers)
            assert (answer.status, metadata in answer.body.decode()) == (200, True)


def endless() -> dict[str, object]:
    made: dict[str, object] = {}
    for _ in range(50_000):
        made = {"x": made}
    return made


def completion(**body: object) -> CompletionBody:
    return CompletionBody(prompt="Hi", **body)  # type: ignore[arg-type]


def test_what_cannot_be_encoded_is_refused_by_its_field() -> None:
    with pytest.raises(InvalidRequest, match="nested too deeply") as caught:
        completion(structured_outputs=StructuredOutputs(json=endless())).form()
    assert caught.value.param == "structured_outputs.json"
    wanted = ResponseFormat(type="json_schema", json_schema=JsonSchemaFormat(name="a", schema=endless()))
    with pytest.raises(InvalidRequest, match="nested too deeply") as caught:
        completion(response_format=wanted).form()
    assert caught.value.param == "response_format.json_schema.schema"
    use = ToolUse(
        [Function("f", parameters=endless())], is_forced=True, is_parallel=True, tool_format=FORMATS["hermes"]
    )
    with pytest.raises(InvalidRequest, match="nested too deeply") as caught:
        use.grammar()
    assert caught.value.param == "tools"
