"""Rules are parsed, and refused with their place; so many events in a window break them."""

import pytest

from roseinfer.errors import ConfigError
from roseinfer.observe.gaps.causes import Cause
from roseinfer.observe.recorder.capture_rules import Rule, Window, parse_rules

MS, S = 1_000_000, 1_000_000_000


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("3 gaps over 60 ms in 10 s",
         Rule(text="3 gaps over 60 ms in 10 s", count=3, subject="gap", over_ns=60 * MS, window_ns=10 * S)),
        ("1 gap over 1.5s in 500ms",
         Rule(text="1 gap over 1.5s in 500ms", count=1, subject="gap", over_ns=1500 * MS, window_ns=500 * MS)),
        ("1 ttft over 2 s in 30 s",
         Rule(text="1 ttft over 2 s in 30 s", count=1, subject="ttft", over_ns=2 * S, window_ns=30 * S)),
        ("2  slow gaps in 60 s",
         Rule(text="2  slow gaps in 60 s", count=2, subject="slow gap", window_ns=60 * S)),
        (" 1 slow gap of graph_capture in 60 s ",
         Rule(text="1 slow gap of graph_capture in 60 s", count=1, subject="slow gap", cause=Cause.GRAPH_CAPTURE,
              window_ns=60 * S)),
        ("1 slow gap of h2d_copy in 60 s",
         Rule(text="1 slow gap of h2d_copy in 60 s", count=1, subject="slow gap", cause=Cause.H2D_COPY,
              window_ns=60 * S)),
    ],
)  # fmt: skip
def test_a_rule_is_read(text: str, rule: Rule) -> None:
    assert parse_rules([text]) == [rule]


@pytest.mark.parametrize(
    ("text", "character", "expected"),
    [
        ("", 1, "a count"),
        ("gaps over 60 ms in 10 s", 1, "a count"),
        ("0 gaps over 60 ms in 10 s", 1, "a count"),
        ("-1 gaps over 60 ms in 10 s", 1, "a count"),
        ("2.5 gaps over 60 ms in 10 s", 1, "a count"),
        ("3 steps over 60 ms in 10 s", 3, "`gap` or `gaps` or `ttft` or `slow`"),
        ("3 gaps under 60 ms in 10 s", 8, "`over`"),
        ("3 gaps over sixty ms in 10 s", 13, "a duration"),
        ("3 gaps over 0 ms in 10 s", 13, "a duration"),
        ("3 gaps over 9999999 s in 10 s", 13, "a duration"),
        ("3 gaps over 60 min in 10 s", 16, "`ms` or `s`"),
        ("3 gaps over 60 in 10 s", 16, "`ms` or `s`"),
        ("3 gaps over 60 ms", 18, "`in`"),
        ("3 gaps over 60 ms in", 21, "a duration"),
        ("3 gaps over 60 ms in 10 s please", 27, "the end of the rule"),
        ("3 gaps over 60 ms in 10 s, 1 ttft", 26, "the end of the rule"),
        ("1 slow ttft in 10 s", 8, "`gap` or `gaps`"),
        ("1 slow gap of lunch in 10 s", 15, "`decode` or"),
        ("1 slow gap over 60 ms in 10 s", 12, "`of` or `in`"),
    ],
)
def test_a_malformed_rule_is_refused_at_its_place(text: str, character: int, expected: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        parse_rules(["1 slow gap in 1 s", text])
    assert refusal.value.param == "observe.capture_rules"
    assert refusal.value.message.startswith(f"rule 2 ({text!r}), character {character}: expected {expected}")


def window(text: str) -> Window:
    return Window(*parse_rules([text]))


def test_a_rule_is_broken_by_so_many_events_in_its_window() -> None:
    three = window("3 gaps over 60 ms in 10 s")
    assert three.add(0, "a", "") is None
    assert three.add(1 * S, "b", "t") is None
    assert three.add(11 * S, "a", "") is None, "the first is out of the window by now"
    assert three.add(11 * S, "c", "") == {"b": "t", "a": "", "c": ""}


def test_a_request_that_breaks_a_rule_twice_is_named_once() -> None:
    two = window("2 gaps over 60 ms in 10 s")
    assert two.add(0, "a", "") is None
    assert two.add(0, "a", "") == {"a": ""}
