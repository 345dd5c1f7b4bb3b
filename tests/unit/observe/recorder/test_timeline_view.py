"""What a page is told adds up to what there is, whenever it asks and however late a write comes."""

import io
import json
from typing import Any

import pytest

from roseinfer.config.options import Config, ObserveConfig
from roseinfer.observe.gaps.request_gaps import gaps_of
from roseinfer.observe.recorder import flight as flight_module
from roseinfer.observe.recorder.flight import Flight
from roseinfer.observe.recorder.recording import Recording
from roseinfer.records import Arrival, Delivery
from tests.unit.observe.facts import writes_of
from tests.unit.observe.flights import US, Story, make_flight


def ask(flight: Flight, limit: int = 500, since: int = 0, since_ns: int = 0) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(flight.timeline(limit, since, since_ns)())
    return told


def keys(told: dict[str, Any]) -> list[tuple[int, int]]:
    """Serial and end of each gap: what names it for the page."""
    return [(row[0], row[3]) for row in told["gaps"]]


@pytest.mark.parametrize("every", [1, 7, 40])
def test_asking_often_tells_the_same_as_asking_once(every: int) -> None:
    flight = Flight(Config(), "1.2.3")
    story = Story(flight)
    gaps: list[tuple[int, int]] = []
    tokens: dict[int, list[int]] = {}
    steps: list[int] = []
    cursor: dict[str, int] = {}
    for number in range(80):
        story.step([story.arrive(f"r-{number}")] if number % 10 == 0 else None)
        if number % every == every - 1 or number == 79:
            told = ask(flight, **cursor)
            cursor = told["next"]
            gaps += keys(told)
            steps += [row[0] for row in told["steps"]]
            for request in told["requests"]:
                known = tokens.setdefault(request["serial"], [])
                assert request["tokens_from"] == len(known)
                known += request["token_ns"]
    whole = ask(flight)
    assert len(gaps) == len(set(gaps))
    assert set(gaps) == set(keys(whole))
    assert steps == [row[0] for row in whole["steps"]]
    assert tokens == {request["serial"]: request["token_ns"] for request in whole["requests"]}


def test_a_write_that_comes_late_is_shown_when_it_has_come() -> None:
    flight = make_flight(num_streams=2, num_steps=20)
    cursor = ask(flight)["next"]
    timeline = flight.in_flight[0]
    tokens_ns = timeline.token_ns[-5]
    late_ns = flight.clock_pair.monotonic_ns + 50 * US
    arrival = Arrival(tokens_ns, tokens_ns + US, tokens_ns + 2 * US)
    delivery = Delivery(arrival, tokens_ns + 3 * US, tokens_ns + 4 * US, late_ns, was_paused=True, index=0)
    flight.on_writes(writes_of((timeline, delivery)))
    told = ask(flight, **cursor)
    assert told["steps"] == []
    [gap] = told["gaps"]
    assert told["meta"]["causes"][gap[5]] == "client_backpressure"


def test_fewer_writes_are_lessons_for_a_poll_than_for_everything() -> None:
    """And the gaps that are told are the same, with the same causes."""
    flight = make_flight(num_streams=8, num_steps=300)
    whole = {(row[0], row[3]): row[4:] for row in ask(flight)["gaps"]}
    newest = {(row[0], row[3]): row[4:] for row in ask(flight, limit=20)["gaps"]}
    assert len(newest) == 20 * 9, "eight streams and the request with the long prompt"
    assert all(whole[key] == row for key, row in newest.items())


def test_the_first_write_of_a_long_stream_is_its_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the steps before those that are shown, and their writes, are not read any more, or are forgotten."""
    whole = {request["serial"]: request["first_write_ns"] for request in ask(make_flight())["requests"]}
    monkeypatch.setattr(flight_module, "CONTEXT_STEPS", 4)
    for flight in (make_flight(), make_flight(config=Config(observe=ObserveConfig(recorder_steps=16)))):
        found = {request["serial"]: request["first_write_ns"] for request in ask(flight, limit=8)["requests"]}
        assert found == {serial: pytest.approx(whole[serial], abs=US) for serial in found}
        assert len(found) > 5
        request = flight.request("stream-3")
        assert request is not None
        assert request["time_to_first_token_ms"] == pytest.approx(2.5)
        assert request["times_ms"]["first_write"] == pytest.approx(0.1)


def test_which_gaps_are_slow_is_as_the_recorded_server_had_it() -> None:
    """On its page, in what it saves for others, and there."""
    config = Config(observe=ObserveConfig(slow_gap_min_ms=60.0))
    for flight, num_slow in ((make_flight(), 6), (make_flight(config=config), 0)):
        file = io.BytesIO()
        flight.snapshot().recording().write(file)
        elsewhere = json.loads(make_flight().view(file.getvalue()))
        file.seek(0)
        assert [sum(row[6] for row in told["gaps"]) for told in (ask(flight), elsewhere)] == [num_slow, num_slow]
        assert sum(gap.is_slow for gap in gaps_of(Recording.read(file))) == num_slow


def test_a_recording_of_nothing_is_a_page_of_nothing() -> None:
    told = ask(Flight(Config(), "1.2.3"))
    assert (told["steps"], told["gaps"], told["requests"]) == ([], [], [])
    assert told["next"]["since"] == 0
