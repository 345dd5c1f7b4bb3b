"""Joins the turns of a conversation, and folds those that a chat template refuses into others.

APIs that send a conversation as items have several system turns, and several turns of a role in a row. Most templates
write such conversations as they are; others raise for a system turn that is not the first, or for two turns of a role.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

Turn = Mapping[str, Any]


def join_turns(turns: Iterable[Turn]) -> list[Turn]:
    """One system turn at the head instead of several, and one of the assistant instead of several in a row."""
    groups: list[list[Turn]] = []
    is_head = True  # all up to here are system turns
    for turn in turns:
        role = turn["role"]
        is_head = is_head and role == "system"
        if groups and groups[-1][0]["role"] == role and (is_head or role == "assistant"):
            groups[-1].append(turn)
        else:
            groups.append([turn])
    return list(map(_join, groups))


def fold_turns(turns: Iterable[Turn], num_kept: int) -> Iterator[Turn]:
    """Of the system turns only those among the first `num_kept` turns; others as the user's, and no role in a row."""
    folded = (
        {**turn, "role": "user"} if turn["role"] == "system" and index >= num_kept else turn
        for index, turn in enumerate(turns)
    )
    for role, group in groupby(folded, lambda turn: turn["role"]):
        of_role = list(group)
        yield from of_role if role == "tool" else [_join(of_role)]


def _join(turns: Sequence[Turn]) -> Turn:
    """One turn of several of a role. Texts are joined with an empty line between them, and calls in order."""
    joined: dict[str, Any] = {}
    for turn in turns:
        joined |= turn
    for name in ("content", "reasoning_content", "reasoning"):
        if name in joined:
            joined[name] = "\n\n".join(str(text) for turn in turns if (text := turn.get(name)))
    if "tool_calls" in joined:
        joined["tool_calls"] = [call for turn in turns for call in turn.get("tool_calls", ())]
    return joined
