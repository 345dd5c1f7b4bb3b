"""Turns of a role are joined, and folded where a chat template refuses system turns or two turns of a role."""

from roseinfer.text.turns import fold_turns, join_turns


def turn(role: str, content: str = "", **more: object) -> dict[str, object]:
    return {"role": role, "content": content, **more}


def test_system_turns_at_the_head_and_turns_of_the_assistant_are_joined() -> None:
    turns = [
        turn("system", "a"),
        turn("system", "b"),
        turn("user", "c"),
        turn("user", "d"),
        turn("assistant", reasoning="e"),
        turn("assistant", "f", tool_calls=["g"]),
        turn("assistant", tool_calls=["h", "i"]),
        turn("system", "j"),
        turn("system", "k"),
    ]
    assert join_turns(turns) == [
        turn("system", "a\n\nb"),
        turn("user", "c"),
        turn("user", "d"),
        turn("assistant", "f", reasoning="e", tool_calls=["g", "h", "i"]),
        turn("system", "j"),
        turn("system", "k"),
    ]


def test_system_turns_behind_those_kept_become_the_user_s_and_results_of_tools_stay_apart() -> None:
    turns = [turn("system", "a"), turn("user", "b"), turn("system", "c"), turn("tool", "d"), turn("tool", "e")]
    assert list(fold_turns(turns, 1)) == [turn("system", "a"), turn("user", "b\n\nc"), *turns[3:]]
    assert list(fold_turns(turns, 0)) == [turn("user", "a\n\nb\n\nc"), *turns[3:]]
    assert turns[0] == turn("system", "a")


def test_many_turns_of_a_role_are_joined_at_once() -> None:
    """Joined one by one, they would be copied a hundred thousand times."""
    turns = [turn("assistant", "x", tool_calls=["c"])] * 200_000
    [joined] = join_turns(turns)
    [folded] = fold_turns(turns, 0)
    assert joined == folded == turn("assistant", "\n\n".join("x" * 200_000), tool_calls=["c"] * 200_000)
