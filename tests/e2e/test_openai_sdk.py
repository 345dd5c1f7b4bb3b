"""The `openai` SDK as most clients use it, against a real process with the embedded model."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI
from openai.types import Completion, CompletionChoice
from openai.types.chat import ChatCompletionMessageParam

from tests.e2e.server import Server

pytestmark = pytest.mark.e2e
MODEL = "roseinfer-demo"
PROMPT = "The scheduler decides which sequences"


@pytest.fixture
def client(server: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as sdk:
        yield sdk


def test_models_are_listed(client: OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == MODEL
    assert model.model_dump()["max_model_len"] == 1024


def test_streamed_and_whole_completions_are_the_same_text_and_usage(client: OpenAI) -> None:
    whole = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=30, temperature=0, extra_body={"ignore_eos": True}
    )
    assert whole.usage is not None
    chunks = list(
        client.completions.create(
            model=MODEL,
            prompt=PROMPT,
            max_tokens=30,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
    )
    *chunks, last = chunks
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == whole.choices[0].finish_reason == "length"
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == whole.usage.completion_tokens == 30
    assert last.usage.prompt_tokens == whole.usage.prompt_tokens


def test_chat_streams_and_answers(client: OpenAI) -> None:
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What does os.path.join do?"}]
    whole = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=20, temperature=0)
    stream = client.chat.completions.create(
        model=MODEL,
        messages=messages,
        max_tokens=20,
        temperature=0,
        stream=True,
    )
    deltas = [chunk.choices[0].delta for chunk in stream]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == whole.choices[0].message.content


def test_a_seed_gives_the_same_text_and_choices_differ(client: OpenAI) -> None:
    def ask(seed: int) -> list[str]:
        reply = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=12, temperature=1.0, seed=seed, n=3)
        return [choice.text for choice in reply.choices]

    first = ask(7)
    assert ask(7) == first
    assert len(set(first)) == 3
    assert ask(8) != first


def test_logprobs_in_both_shapes(client: OpenAI) -> None:
    completion = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=5, temperature=0, logprobs=3, extra_body={"ignore_eos": True}
    )
    logprobs = completion.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs is not None
    assert logprobs.top_logprobs is not None
    assert len(logprobs.token_logprobs) == 5
    for own, top in zip(logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert own == pytest.approx(max(top.values()))  # greedy takes the likeliest
    chat = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Hello"}], max_tokens=4, logprobs=True, top_logprobs=2
    )
    scored = chat.choices[0].logprobs
    assert scored is not None
    assert scored.content is not None
    assert all(len(entry.top_logprobs) == 2 for entry in scored.content)


def test_biases_and_penalties_move_what_greedy_says(client: OpenAI) -> None:
    def ask(**fields: Any) -> CompletionChoice:
        reply: Completion = client.completions.create(
            model=MODEL,
            prompt=PROMPT,
            max_tokens=12,
            temperature=0,
            logprobs=0,
            extra_body={"ignore_eos": True},
            **fields,
        )
        return reply.choices[0]

    def tokens(choice: CompletionChoice) -> list[str]:
        assert choice.logprobs is not None
        return choice.logprobs.tokens or []

    forced = tokens(ask(logit_bias={"500": 100}))
    assert len(set(forced)) == 1
    assert forced != tokens(ask())
    held_back = tokens(ask(logit_bias={"500": 90, "501": 89}, frequency_penalty=2.0))
    assert len(set(held_back)) == 2, "the second has its turns as the first is said more often"
    echoed = ask(echo=True)
    assert echoed.text == PROMPT + ask().text
    best = ask(best_of=3, n=1)
    assert best.text == ask().text, "greedy, they are all the same"


def test_a_stop_string_ends_the_text_before_it(client: OpenAI) -> None:
    def ask(stop: str | None) -> CompletionChoice:
        reply = client.completions.create(
            model=MODEL, prompt=PROMPT, max_tokens=40, temperature=0, stop=stop, extra_body={"ignore_eos": True}
        )
        return reply.choices[0]

    text = ask(None).text
    stop = text[12:16]  # in the middle of tokens, most likely
    choice = ask(stop)
    assert choice.text == text[: text.index(stop)]
    assert choice.finish_reason == "stop"


def test_token_ids_and_lists_of_prompts(client: OpenAI) -> None:
    reply = client.completions.create(model=MODEL, prompt=[[5, 6, 7], [5, 6, 7], [9]], max_tokens=4, temperature=0)
    assert [choice.index for choice in reply.choices] == [0, 1, 2]
    assert reply.choices[0].text == reply.choices[1].text
    assert reply.usage is not None
    assert reply.usage.prompt_tokens == 7


@pytest.mark.parametrize(
    ("arguments", "error", "param"),
    [
        ({"prompt": ""}, openai.BadRequestError, "prompt"),
        ({"prompt": [1, 99999]}, openai.BadRequestError, "prompt[1]"),
        ({"prompt": "x", "max_tokens": 5000}, openai.BadRequestError, "max_tokens"),
        ({"prompt": "x", "max_tokens": 0}, openai.BadRequestError, "max_tokens"),
        ({"prompt": "x", "temperature": "warm"}, openai.BadRequestError, "temperature"),
        ({"prompt": "x", "extra_body": {"tempreature": 1}}, openai.BadRequestError, "tempreature"),
        ({"prompt": "x", "suffix": "y"}, openai.BadRequestError, "suffix"),
        ({"prompt": "x", "model": "gpt-5"}, openai.NotFoundError, "model"),
    ],
)
def test_bad_input_is_a_typed_error_that_names_the_field(
    client: OpenAI, arguments: dict[str, object], error: type[openai.APIStatusError], param: str
) -> None:
    with pytest.raises(error) as caught:
        client.completions.create(**{"model": MODEL, **arguments})  # type: ignore[call-overload]
    assert caught.value.param == param
    assert caught.value.type == "invalid_request_error"
    body = json.loads(caught.value.response.text)
    assert set(body["error"]) == {"message", "type", "param", "code"}


def test_bad_bodies(server: Server) -> None:
    assert server.post("/v1/completions", b"{")[0] == 400
    assert server.post("/v1/completions", b"[1]")[0] == 400
    assert server.post("/v1/completions", b"[" * 100_000)[0] == 400
    assert server.post("/v1/completions", b"x=1", **{"Content-Type": "application/x-www-form-urlencoded"})[0] == 415
    assert server.post("/v1/completions", b" " * 3_000_000)[0] == 413
    assert server.post("/v1/nothing", {})[0] == 404
