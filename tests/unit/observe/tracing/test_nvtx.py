"""Ranges: balanced, named after the phases, numbered by step; nothing at all when nobody listens."""

import pytest

from roseinfer.engine.ranges import make_phases
from roseinfer.observe.tracing.nvtx import RANGES, make_marker
from roseinfer.records import PhaseTimes


class Prepared:
    """Attributes that remember nothing but what a range may show."""

    def __init__(self, message: str, category: str) -> None:
        self.message = message
        self.category = category
        self.payload = 0


class Tape:
    """A domain that records what a profiler would see."""

    def __init__(self, is_heard: bool = True) -> None:
        self.is_heard = is_heard
        self.num_prepared = 0
        self.seen: list[tuple[str, int] | str] = []

    def get_event_attributes(self, *, message: str, category: str) -> Prepared | None:
        self.num_prepared += 1
        return Prepared(message, category) if self.is_heard else None

    def push_range(self, attributes: Prepared) -> None:
        self.seen.append((attributes.message, attributes.payload))

    def pop_range(self) -> None:
        self.seen.append("pop")


def test_off_means_no_marker_and_no_domain() -> None:
    tape = Tape()
    assert make_marker(enabled=False, domain=tape) is None
    assert tape.num_prepared == 0


def test_without_a_profiler_there_is_no_marker_and_a_word_about_it(caplog: pytest.LogCaptureFixture) -> None:
    assert make_marker(enabled=True, domain=Tape(is_heard=False)) is None
    assert "no profiler" in caplog.text


def test_the_real_library_without_a_profiler_gives_no_marker() -> None:
    assert make_marker(enabled=True) is None


def test_the_phases_of_a_step_are_balanced_ranges_with_its_number() -> None:
    tape = Tape()
    phases = make_phases(make_marker(enabled=True, domain=tape))
    for step_id in (7, 8):
        watch = phases.begin(step_id)
        for name in PhaseTimes.__struct_fields__:
            with watch(name):
                pass
    expected = [
        event for step_id in (7, 8) for name in PhaseTimes.__struct_fields__ for event in ((name, step_id), "pop")
    ]
    assert tape.seen == expected
    assert tape.num_prepared == len(RANGES)


def test_ranges_nest_and_close_when_a_phase_raises() -> None:
    tape = Tape()
    watch = make_phases(make_marker(enabled=True, domain=tape)).begin(1)
    with pytest.raises(ZeroDivisionError), watch("launch"), watch("wait"):
        raise ZeroDivisionError
    assert tape.seen == [("launch", 1), ("wait", 1), "pop", "pop"]
