"""Echo, scored prompts, best_of and stop strings that stay, over a scripted engine: what is asked, and what is told."""

from array import array
from collections.abc import Iterable
from typing import Any

import pytest

from roseinfer.messages import PromptLogprobs, Request, TokenLogprobs, TokenOutput
from roseinfer.records import FinishReason
from tests.unit.server.harness import (
    BOS,
    EOS,
    ScriptedEngine,
    Server,
    engine_info,
    ids,
    logprobs_of,
    serving,
    text_model,
    times,
)


def scores_of(token_ids: list[int], num_likeliest: int) -> PromptLogprobs:
    """Token i of a prompt has -i; in its place the likeliest are the letters a, b, … with -0.5, -1.5, …."""
    top = [ord("a") + k for k in range(num_likeliest)]
    return PromptLogprobs(
        num_likeliest,
        array("d", [-float(i) for i in range(1, len(token_ids))]).tobytes(),
        array("i", top * (len(token_ids) - 1)).tobytes(),
        array("d", [-0.5 - k for k in range(num_likeliest)] * (len(token_ids) - 1)).tobytes(),
    )


def answers(text: str) -> Any:
    """One byte a step with its log-probabilities, the prompt's scores with the first: all as asked."""

    def reply(request: Request) -> Iterable[TokenOutput]:
        params, told = request.params, ids(text)[: request.params.max_tokens]
        for i, token_id in enumerate(told):
            is_last = i + 1 == len(told)
            scored = params.num_prompt_logprobs if i == 0 else None
            yield TokenOutput(
                request.request_id,
                [token_id],
                None if params.num_logprobs is None else [logprobs_of(token_id, params.num_logprobs)],
                FinishReason.LENGTH if is_last else None,
                None,
                times() if is_last else None,
                prompt_logprobs=None if scored is None else scores_of(request.prompt_token_ids, scored),
            )

    return reply


def joined(events: list[Any], index: int = 0) -> dict[str, Any]:
    """The choice that the chunks of a stream make, as an unstreamed reply has it."""
    *chunks, done = events
    assert done == "[DONE]"
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    assert [choice["finish_reason"] for choice in choices[:-1]] == [None] * (len(choices) - 1)
    pieces = [choice["logprobs"] for choice in choices if choice["logprobs"] is not None]
    return {
        "index": index,
        "text": "".join(choice["text"] for choice in choices),
        "logprobs": {name: [x for piece in pieces for x in piece[name]] for name in pieces[0]} if pieces else None,
        "finish_reason": choices[-1]["finish_reason"],
    }


async def both(server: Server, **body: Any) -> dict[str, Any]:
    """The one choice, the same streamed or not."""
    whole = await server.complete(**body)
    assert whole.status == 200, whole.body
    [choice] = whole.json["choices"]
    assert joined((await server.complete(stream=True, **body)).events) == choice
    assert isinstance(choice, dict)
    return choice


async def test_echo_returns_the_prompt_first() -> None:
    async with serving(ScriptedEngine(answers("xyz"))) as server:
        assert (await both(server, prompt="Hé ", echo=True))["text"] == "Hé xyz"
        assert (await both(server, prompt=ids("Hé "), echo=True))["text"] == "Hé xyz"
        several = await server.complete(prompt=["a", "b"], echo=True, n=2)
    assert [choice["text"] for choice in several.json["choices"]] == ["axyz", "axyz", "bxyz", "bxyz"]
    assert {request.params.num_prompt_logprobs for request in server.engine.requests} == {None}


async def test_every_token_of_the_prompt_is_scored_but_the_first() -> None:
    async with serving(ScriptedEngine(answers("xy"))) as server:
        choice = await both(server, prompt="cab", echo=True, logprobs=2, max_tokens=2)
    assert server.engine.requests[0].params.num_prompt_logprobs == 2
    assert choice["logprobs"] == {
        "tokens": ["c", "a", "b", "x", "y"],
        "token_logprobs": [None, -1.0, -2.0, -0.5, -0.5],
        "top_logprobs": [
            None,
            {"a": -1.0, "b": -1.5},
            {"a": -0.5, "b": -2.0},
            {"x": -0.5, "y": -1.5},
            {"y": -0.5, "z": -1.5},
        ],
        "text_offset": [0, 1, 2, 3, 4],
    }


async def test_a_token_that_is_no_text_and_one_that_is_half_a_character_have_their_entries() -> None:
    async with serving(ScriptedEngine(answers("x")), text=text_model(with_bos=True)) as server:
        choice = await both(server, prompt="é!", echo=True, logprobs=0, max_tokens=1)
    assert server.engine.requests[0].prompt_token_ids == [BOS, *ids("é!")]
    assert choice["text"] == "é!x"
    assert choice["logprobs"]["tokens"] == ["<|bos|>", "bytes:\\xc3", "bytes:\\xa9", "!", "x"]
    assert choice["logprobs"]["text_offset"] == [0, 0, 0, 1, 2]
    assert choice["logprobs"]["top_logprobs"][1] == {"bytes:\\xc3": -1.0}


async def test_no_token_at_all_reads_the_prompt_alone() -> None:
    async with serving(ScriptedEngine(answers("x"))) as server:
        choice = await both(server, prompt="cab", echo=True, logprobs=1, max_tokens=0)
        usage = (await server.complete(prompt="cab", echo=True, logprobs=1, max_tokens=0)).json["usage"]
        one = await both(server, prompt="c", echo=True, logprobs=1, max_tokens=0)
        unscored = await both(server, prompt="cab", echo=True, max_tokens=0)
    assert (choice["text"], choice["finish_reason"]) == ("cab", "length")
    assert choice["logprobs"]["token_logprobs"] == [None, -1.0, -2.0]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (3, 0, 3)
    assert one["logprobs"]["token_logprobs"] == [None]
    assert (unscored["text"], unscored["logprobs"]) == ("cab", None)


async def test_a_prompt_that_ends_the_text_at_once_is_still_cut_by_length() -> None:
    def reply(request: Request) -> Iterable[TokenOutput]:
        yield TokenOutput(request.request_id, [EOS], None, FinishReason.STOP, EOS, times())

    async with serving(ScriptedEngine(reply)) as server:
        assert (await both(server, prompt="a", echo=True, max_tokens=0))["finish_reason"] == "length"
        assert (await both(server, prompt="a", echo=True, max_tokens=1))["finish_reason"] == "stop"


async def test_the_token_that_ends_the_text_has_an_entry_though_it_is_no_text() -> None:
    """A harness that asks for one token drops the last entry: it must never be one of the prompt's."""

    def reply(request: Request) -> Iterable[TokenOutput]:
        scores = None if request.params.num_prompt_logprobs is None else scores_of(request.prompt_token_ids, 1)
        scored = [logprobs_of(EOS, 1)]
        yield TokenOutput(request.request_id, [EOS], scored, FinishReason.STOP, EOS, times(), prompt_logprobs=scores)

    async with serving(ScriptedEngine(reply)) as server:
        choice = await both(server, prompt="ab", echo=True, logprobs=1, max_tokens=1)
        chat = await server.chat(logprobs=True, top_logprobs=1)
    assert (choice["text"], choice["finish_reason"]) == ("ab", "stop")
    assert choice["logprobs"]["tokens"] == ["a", "b", "<|eos|>"]
    assert choice["logprobs"]["token_logprobs"] == [None, -1.0, -0.5]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2]
    assert chat.json["choices"][0]["logprobs"]["content"] == [], "a conversation lists its text alone"


async def test_a_stop_string_is_looked_for_in_what_is_generated() -> None:
    async with serving(ScriptedEngine(answers("xENDy"))) as server:
        assert (await both(server, prompt="END", echo=True, stop="END"))["text"] == "ENDx"


@pytest.mark.parametrize("stop", ["END", ["D", "ENDING"]], ids=str)
async def test_a_stop_string_can_stay(stop: Any) -> None:
    async with serving(ScriptedEngine(answers("aENbENDc"))) as server:
        choice = await both(server, stop=stop, include_stop_str_in_output=True)
        without = await both(server, stop=stop)
    assert (choice["text"], choice["finish_reason"]) == ("aENbEND", "stop")
    assert without["text"] == "aENbEND".removesuffix("END" if stop == "END" else "D")


async def test_a_stop_token_can_stay() -> None:
    def reply(request: Request) -> Iterable[TokenOutput]:
        scored = [logprobs_of(token_id, 0) for token_id in ids("ab.")]
        yield TokenOutput(request.request_id, ids("ab."), scored, FinishReason.STOP, ord("."), times())

    async with serving(ScriptedEngine(reply)) as server:
        choice = await both(server, stop_token_ids=[ord(".")], logprobs=0, include_stop_str_in_output=True)
    assert (choice["text"], choice["logprobs"]["tokens"]) == ("ab.", ["a", "b", "."])


async def test_the_best_choices_come_first() -> None:
    """The mean decides, not the sum: the likeliest by the token is the longest here."""
    told = {0: [-1.0], 1: [-0.5, -0.5, -0.2], 2: [-3.0], 3: [-0.9, -0.9]}

    def reply(request: Request) -> Iterable[TokenOutput]:
        which = (request.params.seed or 0) % 4
        scored = [TokenLogprobs(logprob, 1, [], []) for logprob in told[which]]
        tokens = ids("0123"[which] * len(scored))
        yield TokenOutput(request.request_id, tokens, scored, FinishReason.LENGTH, None, times())

    async with serving(ScriptedEngine(reply)) as server:
        answer = await server.complete(prompt=["a", "b"], best_of=4, n=2, seed=0)
        scored = await server.complete(best_of=4, n=1, seed=0, logprobs=0)
        all_of_them = await server.complete(best_of=4, n=4, seed=0)
    assert [(c["index"], c["text"], c["logprobs"]) for c in answer.json["choices"]] == [
        (0, "111", None),
        (1, "33", None),
        (2, "111", None),
        (3, "33", None),
    ]
    assert answer.json["usage"]["completion_tokens"] == 14, "all that was generated"
    assert answer.json["usage"]["prompt_tokens"] == 2
    assert scored.json["choices"][0]["logprobs"]["token_logprobs"] == told[1]
    assert [choice["text"] for choice in all_of_them.json["choices"]] == ["0", "111", "2", "33"]
    assert [request.params.num_logprobs for request in server.engine.requests] == [0] * 12 + [None] * 4


async def test_more_scores_than_an_answer_holds_are_refused_before_the_engine_hears_of_them() -> None:
    async with serving(ScriptedEngine(answers("x"), engine_info(max_model_len=20_000))) as server:
        body: dict[str, Any] = {"prompt": [[1] * 6500, [2] * 6500], "echo": True, "max_tokens": 1}
        refused = await server.complete(logprobs=20, **body)
        assert (await server.complete(logprobs=19, **body)).status == 200
        assert (await server.complete(**body)).status == 200
    assert (refused.status, refused.error["param"]) == (400, "logprobs")
    assert len(server.engine.requests) == 4


async def test_what_an_answer_keeps_until_its_end_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roseinfer.text.logprobs.MAX_KEPT_LOGPROBS", 2 * 10 * 3)
    engine = ScriptedEngine(answers("a"))
    async with serving(engine) as server:
        fits = await server.complete(n=2, max_tokens=10, logprobs=2)
        refused = await server.complete(n=2, max_tokens=11, logprobs=2)
        chat = await server.chat(max_completion_tokens=21, logprobs=True, top_logprobs=2)
        open_end = await server.chat(logprobs=True, top_logprobs=2)
        streamed = await server.complete(n=2, max_tokens=11, logprobs=2, stream=True)
        unscored = await server.complete(n=2, max_tokens=100)
    assert [answer.status for answer in (fits, open_end, streamed, unscored)] == [200] * 4
    for answer, name, most in ((refused, "max_tokens", 10), (chat, "max_completion_tokens", 20)):
        assert (answer.status, answer.error["code"], answer.error["param"]) == (400, "invalid_value", name)
        assert f"at most {most} tokens of each of" in answer.error["message"]
    assert [request.params.max_tokens for request in engine.requests] == [10, 10, 20, 11, 11, 100, 100]
