"""Joins the turns of a conversation, and folds those that a chat template refuses into others.

APIs that send a conversation as items have several system turns, and several turns of a role in a row. Most templates
write such conversations as they are; others raise for a system turn that is not the first, or for two turns of a role.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

Turn = Mapping[str, Any]


def join_turns(turns: Iterable[Turn]) -> list[Turn]:
    """One system turn at the head instead of several, and one of the assistant instead of several in a row."""
    joined: list[Turn] = []
    for turn in turns:
        is_head = all(before["role"] == "system" for before in joined)
        if joined and turn["role"] == joined[-1]["role"] and (turn["role"] == "assistant" or is_head):
            joined[-1] = _both(joined[-1], turn)
        else:
            joined.append(turn)
    return joined


def fold_turns(turns: Iterable[Turn], num_kept: int) -> Iterator[Turn]:
    """Of the system turns only those among the first `num_kept` turns; others as the user's, and no role in a row."""
    last: Turn | None = None
    for index, turn in enumerate(turns):
        role = "user" if turn["role"] == "system" and index >= num_kept else turn["role"]
        if last is not None and last["role"] == role != "tool":
            last = _both(last, turn)
            continue
        if last is not None:
            yield last
        last = {**turn, "role": role}
    if last is not None:
        yield last


def _both(first: Turn, second: Turn) -> Turn:
    """One turn with the role of the first. Texts are joined with an empty line between them, and calls in order."""
    both: dict[str, Any] = {**first, **second, "role": first["role"]}
    for name in ("content", "reasoning_content", "reasoning"):
        if name in both:
            both[name] = "\n\n".join(str(text) for turn in (first, second) if (text := turn.get(name)))
    if "tool_calls" in first and "tool_calls" in second:
        both["tool_calls"] = [*first["tool_calls"], *second["tool_calls"]]
    return both
