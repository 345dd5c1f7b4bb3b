"""Makes a conversation for chat templates of a body of the Messages API."""

from collections.abc import Iterator, Sequence
from itertools import groupby

from roseinfer.server.anthropic.schema import (
    Block,
    CountBody,
    MessageParam,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    text_of,
)
from roseinfer.text.conversation import Conversation
from roseinfer.text.tool_calls import Function


def conversation_of(body: CountBody) -> Conversation:
    choice, system = body.tool_choice, text_of(body.system)
    return Conversation(
        messages=turns_of(system, body.messages),
        num_chars=len(system) + sum(message.num_chars + 1 for message in body.messages),
        functions=_functions(body),
        must_call=body.must_call,
        is_parallel=choice is None or not (choice.disable_parallel_tool_use or choice.type == "tool"),
        form=body.form(),
        variables=body.chat_template_kwargs,
        thinking=body.thinks,
        continues_last=body.continues_last,
    )


def _functions(body: CountBody) -> list[Function]:
    """Those that the model may call."""
    choice = body.tool_choice
    if choice is not None and choice.type == "none":
        return []
    name = choice.name if choice is not None and choice.type == "tool" else None
    return [
        Function(tool.name, tool.description or "", tool.input_schema)
        for tool in body.tools
        if name in {None, tool.name}
    ]


def turns_of(system: str, messages: Sequence[MessageParam]) -> Iterator[dict[str, object]]:
    """The conversation as chat templates read it. Messages of one side that follow each other are one turn of it."""
    if system:
        yield {"role": "system", "content": system}
    for is_answer, group in groupby(messages, lambda message: message.is_answer):
        blocks = [block for message in group for block in message.blocks]
        yield from [_answer(blocks)] if is_answer else _questions(blocks)


def _questions(blocks: Sequence[Block]) -> Iterator[dict[str, object]]:
    """What tools gave, and behind it what the user says."""
    for block in blocks:
        if isinstance(block, ToolResultBlock):
            yield {"role": "tool", "content": block.text, "tool_call_id": block.tool_use_id}
    if not blocks or not all(isinstance(block, ToolResultBlock) for block in blocks):
        yield {"role": "user", "content": text_of(blocks)}


def _answer(blocks: Sequence[Block]) -> dict[str, object]:
    turn: dict[str, object] = {"role": "assistant", "content": text_of(blocks)}
    if thoughts := [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]:
        turn["reasoning_content"] = turn["reasoning"] = "\n".join(thoughts)
    if calls := [block.for_template() for block in blocks if isinstance(block, ToolUseBlock)]:
        turn["tool_calls"] = calls
    return turn
