"""Python's SDKs and agent frameworks against a server with `scripted_model.py`: each function's asserts are a test.

Runs in build/clients-venv. Arguments: the server's URL and the names of functions. Prints the traceback of each that
fails by its name, as JSON.
"""

import asyncio
import json
import os
import sys
import traceback
import warnings
from typing import Any

import openai
from pydantic import BaseModel

SERVER, *NAMES = sys.argv[1:]
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


class City(BaseModel):
    city: str


def get_weather(city: str) -> str:
    """Gets the weather."""
    return f"sunny in {city}"


def say(*replies: str) -> str:
    """The prompt that has the model say these, one after the other."""
    return f"Say: {json.dumps(replies)}"


TASK = say(THINK + CALL, THINK + ANSWER)


def openai_client(url: str = SERVER) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)


def check_openai_chat() -> None:
    chat = openai_client().chat.completions
    messages: list[Any] = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": TASK}]
    whole = chat.create(model=MODEL, messages=messages, tools=[CHAT_TOOL]).choices[0].message
    with chat.stream(model=MODEL, messages=messages, tools=[CHAT_TOOL]) as stream:
        streamed = stream.get_final_completion().choices[0].message
    for message in (whole, streamed):
        assert message.model_extra is not None
        assert message.model_extra["reasoning_content"] == THOUGHTS
        [call] = message.tool_calls or []
        assert call.type == "function"
        assert json.loads(call.function.arguments) == {"city": "Paris"}
        result = {"role": "tool", "tool_call_id": call.id, "content": get_weather("Paris")}
        history: list[Any] = [*messages, message, result]
        answer = chat.create(model=MODEL, messages=history, tools=[CHAT_TOOL])
        assert answer.choices[0].message.content == ANSWER
        assert answer.usage is not None
        assert answer.usage.completion_tokens_details is not None
        assert answer.usage.completion_tokens_details.reasoning_tokens
    asked = [{"role": "user", "content": say(THINK + '{"city": "Paris"}')}]
    parsed = chat.parse(model=MODEL, messages=asked, response_format=City)  # type: ignore[arg-type]
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


def check_guidellm() -> None:
    from guidellm.backends.openai.http import OpenAIHTTPBackend
    from guidellm.schemas import GenerationRequest, RequestInfo
    from guidellm.schemas.backends.openai_http import OpenAIHTTPBackendArgs

    async def measure(request_format: str) -> None:
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

    for request_format in ("/v1/completions", "/v1/chat/completions"):
        asyncio.run(measure(request_format))


def main() -> None:
    warnings.simplefilter("ignore")  # those of the frameworks about each other
    os.environ |= {"OPENAI_API_KEY": KEY, "ANTHROPIC_API_KEY": KEY, "OPENAI_AGENTS_DISABLE_TRACING": "1"}
    os.environ |= {"OPENAI_BASE_URL": f"{SERVER}/v1", "ANTHROPIC_BASE_URL": SERVER}
    failures = {}
    for name in NAMES:
        try:
            globals()[name]()
        except BaseException:
            failures[name] = traceback.format_exc()
    print(json.dumps(failures))


main()
