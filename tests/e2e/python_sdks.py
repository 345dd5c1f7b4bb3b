"""Python's SDKs and agent frameworks against a server with `scripted_model.py`: each function's asserts are a test.

Runs in build/clients-venv. Arguments: the server's URL, that of a LiteLLM proxy in front of it, and the names of
functions. Prints the traceback of each that fails by its name, as JSON.
"""

import asyncio
import json
import os
import sys
import tempfile
import time
import traceback
import urllib.request
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
from pydantic import BaseModel

SERVER, LITELLM, *NAMES = sys.argv[1:]
MODEL = "scripted"
KEY = "sk-unused"
THOUGHTS = "The city is named."
THINK = f"<think>\n{THOUGHTS}\n</think>\n\n"
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
ANSWER = "It is sunny in Paris."
ABOUT = "Gets the weather."
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
CHAT_TOOL: Any = {
    "type": "function",
    "function": {"name": "get_weather", "description": ABOUT, "parameters": SCHEMA, "strict": True},
}


RESPONSES_TOOL: Any = {"type": "function", **CHAT_TOOL["function"]}
MESSAGES_TOOL: Any = {"name": "get_weather", "description": ABOUT, "input_schema": SCHEMA}


class City(BaseModel):
    city: str


def get_weather(city: str) -> str:
    """Gets the weather."""
    return f"sunny in {city}"


def say(*replies: str) -> str:
    """The prompt that has the model say these, one after the other."""
    return f"Say: {json.dumps(replies)}"


TASK = say(THINK + CALL, THINK + ANSWER)


def refused(kind: type[Exception], call: Callable[[], object]) -> Any:
    """The error of this kind that the call raises."""
    try:
        call()
    except kind as error:
        return error
    raise AssertionError("it is served")


def openai_client(url: str = SERVER) -> Any:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)


def check_openai_chat() -> None:
    chat = openai_client().chat.completions
    messages: list[Any] = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": TASK}]
    whole = chat.create(model=MODEL, messages=messages, tools=[CHAT_TOOL]).choices[0].message
    with chat.stream(model=MODEL, messages=messages, tools=[CHAT_TOOL]) as stream:
        streamed = stream.get_final_completion().choices[0].message
    for message in (whole, streamed):
        assert message.reasoning_content == THOUGHTS
        [call] = message.tool_calls
        assert json.loads(call.function.arguments) == {"city": "Paris"}
        result = {"role": "tool", "tool_call_id": call.id, "content": get_weather("Paris")}
        history: list[Any] = [*messages, message, result]
        answer = chat.create(model=MODEL, messages=history, tools=[CHAT_TOOL])
        assert answer.choices[0].message.content == ANSWER
        assert answer.usage.completion_tokens_details.reasoning_tokens
    asked = [{"role": "user", "content": say(THINK + '{"city": "Paris"}')}]
    parsed = chat.parse(model=MODEL, messages=asked, response_format=City)
    assert parsed.choices[0].message.parsed == City(city="Paris")


def check_hugging_face() -> None:
    from huggingface_hub import InferenceClient

    client = InferenceClient(base_url=SERVER, api_key=KEY)
    asked = [{"role": "user", "content": say('{"city": "Paris"}')}]
    named = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA, "strict": True}}
    for response_format in (named, {"type": "json", "value": SCHEMA}):
        whole = client.chat_completion(asked, model=MODEL, response_format=response_format, max_tokens=50)
        assert json.loads(whole.choices[0].message.content) == {"city": "Paris"}
    chunks = client.chat_completion(asked, model=MODEL, response_format=named, max_tokens=50, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert json.loads(text) == {"city": "Paris"}
    asked = [{"role": "user", "content": TASK}]
    call = client.chat_completion(asked, model=MODEL, tools=[CHAT_TOOL]).choices[0].message.tool_calls[0]
    assert call.function.name == "get_weather"


async def check_guidellm() -> None:
    from guidellm.backends.openai.http import OpenAIHTTPBackend
    from guidellm.schemas import GenerationRequest, RequestInfo
    from guidellm.schemas.backends.openai_http import OpenAIHTTPBackendArgs

    for request_format in ("/v1/completions", "/v1/chat/completions", "/v1/responses"):
        settings = OpenAIHTTPBackendArgs(target=SERVER, request_format=request_format, max_tokens=50)
        backend, info = OpenAIHTTPBackend(settings), RequestInfo()
        await backend.process_startup()
        await backend.validate()
        asked = GenerationRequest(columns={"text_column": [say(ANSWER)]})
        answers = [response async for response, info in backend.resolve(asked, info) if response is not None]
        assert answers[-1].text == ANSWER
        assert answers[-1].output_metrics.text_tokens > 1
        assert info.timings.token_iterations > 1, "it is streamed"
        await backend.process_shutdown()


def check_openai_responses() -> None:
    responses = openai_client().responses
    asked: dict[str, Any] = {
        "model": MODEL,
        "instructions": "Be brief.",
        "tools": [RESPONSES_TOOL],
        "reasoning": {"effort": "low", "summary": "auto"},
        "include": ["reasoning.encrypted_content"],
        "store": False,
    }
    with responses.stream(input=TASK, **asked) as stream:
        numbers = [event.sequence_number for event in stream]
        streamed = stream.get_final_response()
    assert numbers == list(range(len(numbers)))
    for response in (responses.create(input=TASK, **asked), streamed):
        assert [item.type for item in response.output] == ["reasoning", "function_call"]
        thoughts, call = response.output
        assert thoughts.content[0].text == THOUGHTS
        assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Paris"})
        result = {"type": "function_call_output", "call_id": call.call_id, "output": get_weather("Paris")}
        history: list[Any] = [{"role": "user", "content": TASK}, *response.output, result]
        answer = responses.create(input=history, **asked)
        assert answer.output_text == ANSWER
        assert answer.usage.output_tokens_details.reasoning_tokens
        history += [*answer.output, {"role": "user", "content": [{"type": "input_text", "text": say("Yes.")}]}]
        assert responses.create(input=history, **asked).output_text == "Yes."
    city = say(THINK + '{"city": "Paris"}')
    assert responses.parse(model=MODEL, input=city, text_format=City).output_parsed == City(city="Paris")
    with responses.stream(model=MODEL, input=city, text_format=City) as stream:
        assert stream.get_final_response().output_parsed == City(city="Paris")
    cut = responses.create(model=MODEL, input=say(ANSWER), max_output_tokens=2)
    assert cut.status == "incomplete"
    assert cut.incomplete_details.reason == "max_output_tokens"
    refusal = refused(openai.BadRequestError, lambda: responses.create(model=MODEL, previous_response_id=answer.id))
    assert refusal.param == "previous_response_id"


async def check_openai_agents() -> None:
    """The default model class, and a loop that reads a file, as that of a coding agent does."""
    import agents

    agents.set_tracing_disabled(disabled=True)
    run = agents.Runner.run
    reader = agents.Agent(name="a", instructions="Be brief.", model=MODEL, tools=[agents.function_tool(read_file)])
    with note() as path:
        result = await run(reader, read_task(path))
        streamed = agents.Runner.run_streamed(reader, read_task(path))
        events = [event.data async for event in streamed.stream_events() if event.type == "raw_response_event"]
    kinds = ["ReasoningItem", "ToolCallItem", "ToolCallOutputItem", "ReasoningItem", "MessageOutputItem"]
    assert [type(item).__name__ for item in result.new_items] == kinds
    assert [type(item).__name__ for item in streamed.new_items] == kinds
    assert (result.new_items[2].output, result.final_output, streamed.final_output) == (NOTE, ANSWER, ANSWER)
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == ANSWER
    more = [*result.to_input_list(), {"role": "user", "content": say("Yes.")}]
    assert (await run(reader, more)).final_output == "Yes."
    typed = agents.Agent(name="b", model=MODEL, tools=[agents.function_tool(get_weather)], output_type=City)
    assert (await run(typed, say(THINK + CALL, THINK + '{"city": "Paris"}'))).final_output == City(city="Paris")


async def check_pydantic_ai() -> None:
    """OpenAI's two APIs and Anthropic's."""
    from pydantic_ai import Agent, NativeOutput

    finish = '<tool_call>\n{"name": "final_result", "arguments": {"city": "Paris"}}\n</tool_call>'
    for kind in ("openai", "openai-chat", "anthropic"):
        agent = Agent(f"{kind}:{MODEL}", instructions="Be brief.", tools=[get_weather])
        result = await agent.run(TASK)
        assert result.output == ANSWER
        assert (await agent.run(say("Yes."), message_history=result.all_messages())).output == "Yes."
        parts = [type(part).__name__ for message in result.all_messages() for part in message.parts]
        assert parts.count("ThinkingPart") == 2
        assert parts.count("ToolReturnPart") == 1
        async with agent.run_stream(TASK) as stream:
            pieces = [piece async for piece in stream.stream_text(delta=True, debounce_by=None)]
        assert "".join(pieces) == ANSWER
        assert (await agent.run(say(THINK + CALL, finish), output_type=City)).output == City(city="Paris")
        if kind != "anthropic":  # it believes that of Anthropic's own models alone
            native = await agent.run(say(CALL, THINK + '{"city": "Paris"}'), output_type=NativeOutput(City))
            assert native.output == City(city="Paris")


def check_anthropic() -> None:
    import anthropic

    client = anthropic.Anthropic(base_url=SERVER, api_key=KEY, max_retries=0)
    asked: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": 20_000,
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        "tools": [MESSAGES_TOOL],
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "metadata": {"user_id": "someone"},
    }
    task: dict[str, Any] = {"role": "user", "content": [{"type": "text", "text": TASK}]}
    more = asked | {"max_tokens": 100_000}  # than the context has
    with client.messages.stream(messages=[task], **more) as stream:
        streamed = stream.get_final_message()
    for message in (client.messages.create(messages=[task], **asked), streamed):
        thinking, call = message.content
        assert (thinking.type, thinking.thinking) == ("thinking", THOUGHTS)
        assert (call.type, call.name, call.input) == ("tool_use", "get_weather", {"city": "Paris"})
        assert message.stop_reason == "tool_use"
        result = {"type": "tool_result", "tool_use_id": call.id, "content": get_weather("Paris")}
        turns = [task, {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
        answer = client.messages.create(messages=turns, **asked)
        assert [block.type for block in answer.content] == ["thinking", "text"]
        assert (answer.content[1].text, answer.stop_reason) == (ANSWER, "end_turn")
        with client.messages.stream(messages=turns, **asked) as stream:
            assert "".join(stream.text_stream) == ANSWER
    num_counted = client.messages.count_tokens(
        messages=turns, **{name: asked[name] for name in ("model", "system", "tools", "thinking")}
    ).input_tokens
    usage = answer.usage
    assert num_counted == usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens
    city = [{"role": "user", "content": say('{"city": "Paris"}')}]
    assert client.messages.parse(model=MODEL, max_tokens=50, messages=city, output_format=City).parsed_output.city
    told = [{"role": "user", "content": say("One. Two. Three.")}]
    stopped = client.messages.create(model=MODEL, max_tokens=50, messages=told, stop_sequences=["Three"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "Three")
    assert client.messages.create(model=MODEL, max_tokens=2, messages=told).stop_reason == "max_tokens"
    refusal = refused(
        anthropic.NotFoundError, lambda: client.messages.create(model="another", max_tokens=2, messages=told)
    )
    assert (refusal.type, bool(refusal.request_id)) == ("not_found_error", True)


def check_embeddings() -> None:
    """The SDK asks for base64 where nothing is said, and gives out numbers."""
    client = openai_client()
    both = client.embeddings.create(model=MODEL, input=["one text", "another text"])
    assert [item.index for item in both.data] == [0, 1]
    [plain] = client.embeddings.create(model=MODEL, input="another text", encoding_format="float").data
    assert both.data[1].embedding == plain.embedding
    assert client.embeddings.create(model=MODEL, input="a", dimensions=3).data[0].embedding[3:] == []


def check_anthropic_tool_runner() -> None:
    """The loop of a coding agent, which asks for a thread on the server first."""
    import anthropic

    client = anthropic.Anthropic(base_url=SERVER, api_key=KEY, max_retries=0)
    with note() as path:
        runner = client.beta.messages.tool_runner(
            model=MODEL,
            max_tokens=1000,
            messages=[{"role": "user", "content": read_task(path)}],
            tools=[anthropic.beta_tool(read_file)],
        )
        [*_, answer] = runner.until_done().content
        assert answer.text == ANSWER


def check_streams_that_are_aborted() -> None:
    import anthropic

    endless = say("One more. " * 2000)
    stream = openai_client().responses.create(model=MODEL, input=endless, stream=True)
    abort(next(iter(stream)).response.id)
    assert refused(openai.APIError, lambda: list(stream)).code == "aborted"
    client = anthropic.Anthropic(base_url=SERVER, api_key=KEY, max_retries=0)
    asked = [{"role": "user", "content": endless}]
    events = client.messages.create(model=MODEL, max_tokens=20_000, messages=asked, stream=True)
    abort(next(iter(events)).message.id)
    assert refused(anthropic.APIStatusError, lambda: list(events)).type


def abort(response_id: str) -> None:
    request = urllib.request.Request(f"{SERVER}/v1/requests/{response_id}/abort", b"", method="POST")
    urllib.request.urlopen(request).close()


def check_litellm() -> None:
    """The proxy between a client of either API and either API of the server."""
    import anthropic

    wait_for(f"{LITELLM}/health/liveliness")
    proxied = openai_client(LITELLM)
    messages: list[Any] = [{"role": "user", "content": TASK}]
    for model in ("as-vllm", "as-anthropic"):
        message = proxied.chat.completions.create(model=model, messages=messages, tools=[CHAT_TOOL]).choices[0].message
        assert message.reasoning_content == THOUGHTS
        [call] = message.tool_calls
        history = [*messages, message, {"role": "tool", "tool_call_id": call.id, "content": get_weather("Paris")}]
        chunks = proxied.chat.completions.create(model=model, messages=history, tools=[CHAT_TOOL], stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == ANSWER
        with proxied.responses.stream(model=model, input=TASK, tools=[RESPONSES_TOOL]) as stream:
            assert [item.type for item in stream.get_final_response().output] == ["reasoning", "function_call"]
        client = anthropic.Anthropic(base_url=LITELLM, api_key=KEY, max_retries=0)
        asked: Any = {"model": model, "max_tokens": 1000, "messages": messages, "tools": [MESSAGES_TOOL]}
        with client.messages.stream(**asked) as events:
            streamed = events.get_final_message()
        for answer in (client.messages.create(**asked), streamed):
            assert [block.type for block in answer.content] == ["thinking", "tool_use"]
            assert answer.content[1].input == {"city": "Paris"}


def wait_for(url: str) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            urllib.request.urlopen(url).close()
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        else:
            return


NOTE = "The weather in Paris: sunny."


def read_file(path: str) -> str:
    """Reads a file."""
    return Path(path).read_text()


@contextmanager
def note() -> Iterator[str]:
    with tempfile.NamedTemporaryFile("w") as file:
        file.write(NOTE)
        file.flush()
        yield file.name


def read_task(path: str) -> str:
    call = {"name": "read_file", "arguments": {"path": path}}
    return say(f"{THINK}<tool_call>\n{json.dumps(call)}\n</tool_call>", THINK + ANSWER)


def main() -> None:
    warnings.simplefilter("ignore")  # those of the frameworks about each other
    os.environ |= {"OPENAI_API_KEY": KEY, "ANTHROPIC_API_KEY": KEY, "OPENAI_AGENTS_DISABLE_TRACING": "1"}
    os.environ |= {"OPENAI_BASE_URL": f"{SERVER}/v1", "ANTHROPIC_BASE_URL": SERVER}
    failures = {}
    for name in NAMES:
        try:
            checked = globals()[name]()
            if asyncio.iscoroutine(checked):
                asyncio.run(checked)
        except BaseException:
            failures[name] = traceback.format_exc()
    print(json.dumps(failures))


main()
