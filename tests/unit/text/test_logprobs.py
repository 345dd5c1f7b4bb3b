"""Scores are one JSON object whatever pieces they came in, and many of them give way to the event loop."""

import asyncio
from collections.abc import Sequence

import msgspec
import pytest

from roseinfer.server.openai.chat import ChatDialect
from roseinfer.server.openai.completions import CompletionDialect
from roseinfer.text.logprobs import PIECE, Columns, EncodedLogprobs, ScoredToken

LIKELY = [(b"a", -0.5), (b"\xff", -1.5)]


def tokens(count: int) -> list[ScoredToken]:
    return [ScoredToken(b"t%d" % index, index, -index / 7, LIKELY) for index in range(count)]


def with_prompt(num_prompt: int, num_generated: int) -> list[ScoredToken]:
    """Of a prompt the first has nothing before it, and so no log-probability."""
    first = [ScoredToken(b"first", 0, None, None)] if num_prompt else []
    return first + tokens(num_prompt - len(first) + num_generated)


async def told(columns: Columns, prompt: Sequence[ScoredToken], generated: Sequence[ScoredToken]) -> object:
    scores = EncodedLogprobs(columns)
    scores.add_prompt(iter(prompt))
    for token in generated:
        scores.add_token(token)
    assert scores.num_tokens == len(generated)
    return msgspec.json.decode(await scores.encode())


@pytest.mark.parametrize("columns", [ChatDialect().columns, CompletionDialect().columns])
@pytest.mark.parametrize("num_prompt", [0, 1, PIECE, PIECE + 1, 3 * PIECE])
@pytest.mark.parametrize("num_generated", [0, 1, PIECE + 1])
async def test_the_object_is_that_of_all_tokens_at_once(columns: Columns, num_prompt: int, num_generated: int) -> None:
    scored = with_prompt(num_prompt, num_generated)
    in_pieces = await told(columns, scored[:num_prompt], scored[num_prompt:])
    assert in_pieces == msgspec.json.decode(msgspec.json.encode(columns(scored)))


async def test_a_piece_without_anything_to_tell_leaves_no_comma() -> None:
    end = ScoredToken(b"", 9, -1.0, LIKELY, is_end=True)  # which the chat's form leaves out
    assert await told(ChatDialect().columns, [], [end]) == {"content": [], "refusal": None}
    object_ = await told(ChatDialect().columns, tokens(1), [end, *tokens(1)])
    assert isinstance(object_, dict)
    assert len(object_["content"]) == 2


@pytest.mark.parametrize(("num_prompt", "num_generated", "least"), [(4 * PIECE, 0, 4), (0, 2 * PIECE, 1), (1, 1, 0)])
async def test_many_scores_let_others_have_their_turn(num_prompt: int, num_generated: int, least: int) -> None:
    num_turns = 0

    async def take_turns() -> None:
        nonlocal num_turns
        while True:
            await asyncio.sleep(0)
            num_turns += 1

    other = asyncio.create_task(take_turns())
    await asyncio.sleep(0)
    num_turns = 0
    await told(CompletionDialect().columns, tokens(num_prompt), tokens(num_generated))
    other.cancel()
    assert num_turns >= least
