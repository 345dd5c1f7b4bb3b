"""Makes a conversation for chat templates of a body of the Messages API."""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby

from roseinfer.server.anthropic.schema import Block, CountBody, ThinkingBlock, ToolResultBlock, ToolUseBlock, text_of
from roseinfer.text.conversation import Conversation
from roseinfer.text.turns import Turn


def conversation_of(body: CountBody) -> Conversation:
    choice = body.function_choice
    return Conversation(
        turns=partial(_turns, body),
        num_chars=len(text_of(body.system)) + sum(message.num_chars + 1 for message in body.messages),
        functions=choice.functions,
        must_call=choice.mode == "required",
        is_parallel=body.tool_choice is None or body.tool_choice.is_parallel,
        form=body.form(),
        variables=body.chat_template_kwargs,
        thinking=body.wanted_thinking,
        continues_last=body.continues_last,
        folds=True,
    )


def _turns(body: CountBody) -> Iterator[Turn]:
    """The conversation as chat templates read it. Messages of one side that follow each other are one turn of it."""
    if system := text_of(body.system):
        yield {"role": "system", "content": system}
    for role, group in groupby(body.messages, lambda message: message.role):
        blocks = [block for message in group for block in message.blocks]
        if role == "user":
            yield from _questions(blocks)
        elif role == "assistant":
            yield _answer(blocks)
        else:
            yield {"role": "system", "content": text_of(blocks)}


def _questions(blocks: Sequence[Block]) -> Iterator[Turn]:
    """What tools gave, and behind it what the user says."""
    for block in blocks:
        if isinstance(block, ToolResultBlock):
            yield {"role": "tool", "content": block.text, "tool_call_id": block.tool_use_id}
    if not blocks or not all(isinstance(block, ToolResultBlock) for block in blocks):
        yield {"role": "user", "content": text_of(blocks)}


def _answer(blocks: Sequence[Block]) -> Turn:
    turn: dict[str, object] = {"role": "assistant", "content": text_of(blocks)}
    if thoughts := [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]:
        turn["reasoning_content"] = turn["reasoning"] = "\n".join(thoughts)
    if calls := [block.for_template() for block in blocks if isinstance(block, ToolUseBlock)]:
        turn["tool_calls"] = calls
    return turn
