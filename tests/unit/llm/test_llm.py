"""What a program gets of a finished request."""

from dataclasses import replace

from roseinfer.llm.llm import Completion
from roseinfer.records import FinishReason
from tests.unit.observe.facts import make_timeline

DONE = Completion(" it's a token", [5, 6, 7], FinishReason.LENGTH, make_timeline())


def test_it_is_shown_in_one_line_without_its_stamps() -> None:
    timeline = DONE.timeline
    assert repr(DONE) == (
        f"Completion(request_id={timeline.request_id!r}, text=\" it's a token\", finish_reason='length', "
        f"num_prompt_tokens={timeline.num_prompt_tokens}, num_completion_tokens=3)"
    )
    long = repr(replace(DONE, text="It begins so.\n" + "word " * 1000 + "And ends so."))
    assert "It begins so." in long
    assert "And ends so." in long
    assert len(long.splitlines()) == 1
    assert len(long) < 400


def test_what_is_not_shown_is_compared() -> None:
    timeline = DONE.timeline
    assert replace(DONE) == DONE
    assert replace(DONE, token_ids=[5, 6, 8]) != DONE
    assert replace(DONE, timeline=replace(timeline, end_ns=timeline.end_ns + 1)) != DONE
