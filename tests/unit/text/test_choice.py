"""Outputs into text and text into deltas: when one is due, what it carries, and that nothing is told twice or lost."""

import pytest

from roseinfer.errors import EngineFailed, RequestTimeout, SequenceFailed
from roseinfer.messages import TokenOutput
from roseinfer.records import EngineTimes, FinishReason, RequestTimeline
from roseinfer.text.choice import Choice, OutputOptions
from tests.unit.server.harness import EOS, ids, text_model, times


def make_choice(*stop: str, is_prompt_only: bool = False) -> Choice:
    options = OutputOptions(stop=stop, is_prompt_only=is_prompt_only)
    return Choice(0, text_model().tokenizer, RequestTimeline(request_id="a", recv_ns=1), options)


def told(choice: Choice, steps: list[TokenOutput], interval: int) -> list[tuple[str, list[int]]]:
    """The deltas that the steps make due, each as its text and its tokens."""
    deltas: list[tuple[str, list[int]]] = []
    for output in steps:
        choice.add_output(output)
        if choice.is_due(interval):
            delta = choice.pop_delta()
            assert delta.is_first == (not deltas)
            deltas.append((delta.text, delta.token_ids))
    return deltas


def steps_of(
    token_ids: list[int], reason: FinishReason = FinishReason.LENGTH, stop_token_id: int | None = None
) -> list[TokenOutput]:
    """One token a step, and the finish with the last."""
    *most, end = token_ids
    return [*(TokenOutput("a", [i]) for i in most), TokenOutput("a", [end], None, reason, stop_token_id, times())]


@pytest.mark.parametrize(
    ("interval", "expected"), [(1, ["a", "b", "c", "d", "e"]), (2, ["a", "bc", "de"]), (9, ["a", "bcde"])]
)
def test_the_first_token_goes_at_once_and_later_ones_in_groups(interval: int, expected: list[str]) -> None:
    choice = make_choice()
    assert told(choice, steps_of(ids("abcde")), interval) == [(text, ids(text)) for text in expected]
    assert (choice.num_tokens, choice.finish_reason) == (5, FinishReason.LENGTH)
    assert not choice.is_due(1)


def test_a_token_that_makes_no_text_yet_goes_with_the_one_that_does() -> None:
    euro = ids("€")
    assert told(make_choice(), steps_of([*ids("a"), *euro, *ids("b")]), 1) == [
        ("a", ids("a")),
        ("€", euro),
        ("b", ids("b")),
    ]


def test_the_token_that_ends_the_text_is_delivered_without_text() -> None:
    steps = steps_of([*ids("ab"), EOS], FinishReason.STOP, stop_token_id=EOS)
    choice = make_choice()
    assert told(choice, steps, 1) == [("a", ids("a")), ("b", ids("b")), ("", [EOS])]
    assert choice.timeline.finish_reason is FinishReason.STOP


def test_a_stop_string_ends_the_text_before_it_whatever_the_engine_goes_on_to_do() -> None:
    choice = make_choice("cd")
    steps = steps_of(ids("abcdef"))
    assert told(choice, steps[:4], 9) == [("a", ids("a")), ("b", ids("bcd"))]
    assert choice.finish_reason is FinishReason.STOP
    choice.add_output(TokenOutput("a", ids("e")))
    choice.add_output(TokenOutput("a", [], None, FinishReason.ABORT, None, times()))
    assert (choice.num_tokens, choice.finish_reason) == (4, FinishReason.STOP)
    assert not choice.is_due(1)


@pytest.mark.parametrize("is_prompt_only", [False, True])
@pytest.mark.parametrize(
    ("reason", "error"),
    [
        (FinishReason.ERROR, SequenceFailed),
        (FinishReason.TIMEOUT, RequestTimeout),
        (FinishReason.ABORT, EngineFailed),
    ],
)
def test_what_the_engine_did_not_bring_to_its_end_is_an_error(
    reason: FinishReason, error: type[Exception], is_prompt_only: bool
) -> None:
    choice = make_choice(is_prompt_only=is_prompt_only)
    choice.add_output(TokenOutput("a", ids("ab")))
    with pytest.raises(error, match=r"\.$"):
        choice.add_output(TokenOutput("a", [], None, reason, None, times()))


@pytest.mark.parametrize("scheduled_ns", [0, 2])
def test_a_grammar_that_failed_is_not_the_models_error_and_its_words_are_for_the_log(scheduled_ns: int) -> None:
    choice, when = make_choice(), EngineTimes(1, scheduled_ns, 0, 0)
    with pytest.raises(SequenceFailed, match=r"^The grammar could not be followed any further\.$"):
        choice.add_output(TokenOutput("a", [], None, FinishReason.ERROR, times=when, grammar_error="2003 items"))
    assert choice.timeline.grammar_error == "2003 items"
