"""Entrants take turns, are paused in between, and a failure is a row and no end of the benchmark."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.peers.libraries import drive
from benchmarks.protocol import Entrant, PeerFailed
from benchmarks.rotation import Limits, run
from benchmarks.workloads import PlannedRequest, Words
from roseinfer.bench.definitions import Observed
from tests.benchmarks.test_figures import stream_of

DEMO_TOKENIZER = Path(__file__).parents[2] / "src" / "roseinfer" / "demo" / "tokenizer.json"
BOTH = ("W1x32", "W4")


class FakeEntrant(Entrant):
    """Answers at once, and writes down what happens to it."""

    def __init__(self, name: str, told: list[str], workloads: Sequence[str] = BOTH, fails_at: int = 0) -> None:
        self.name = name
        self.workloads = workloads
        self._told = told
        self._fails_at = fails_at
        self._num_drives = 0

    def drive(self, requests: Sequence[PlannedRequest]) -> list[Observed]:
        self._told.append(f"{self.name} {len(requests)}")
        self._num_drives += 1
        if self._num_drives == self._fails_at:
            raise PeerFailed("it fell over")
        return [stream_of(0.0, [1.0, 2.0], request.new_tokens) for request in requests]

    def pause(self) -> None:
        self._told.append(f"{self.name} pauses")

    def resume(self) -> None:
        self._told.append(f"{self.name} resumes")

    def peak_rss_mb(self) -> float:
        return 7.0


def test_turns_alternate_and_only_one_runs() -> None:
    told: list[str] = []
    entrants = [FakeEntrant("a", told), FakeEntrant("b", told, ("W1x32",))]
    rows = run(entrants, Words(DEMO_TOKENIZER), BOTH, Limits(2, 1000.0))
    assert [(row["name"], row["workload"], len(row["repeats"])) for row in rows] == [
        ("a", "W1x32", 4),
        ("b", "W1x32", 4),
        ("a", "W4", 2),
    ], "the shortest workload has two repeats more"
    drives = [line for line in told if line[-1].isdigit()]
    assert drives == [*("a 32", "b 32") * 5, *("a 8",) * 2], "a warm-up, and then the repeats"
    running: set[str] = set()
    for line in told[2:]:  # they are paused when they enter
        name, word = line.split()
        running = running | {name} if word == "resumes" else running - {name} if word == "pauses" else running
        assert len(running) <= 1


def test_a_failure_is_a_row_with_its_reason() -> None:
    told: list[str] = []
    entrants = [FakeEntrant("a", told, fails_at=2), FakeEntrant("b", told)]
    rows = run(entrants, Words(DEMO_TOKENIZER), BOTH, Limits(1, 1000.0))
    assert rows[0] == {"name": "a", "workload": "W1x32", "repeats": [], "error": "it fell over"}
    assert rows[1]["median"]["tokens_per_s"] == 32 * 8 / 2
    assert rows[1]["median"]["prompt_tokens_per_s"] == 32 * 4
    assert "error" not in rows[2], "the next workload is tried again"


@pytest.mark.parametrize(("budget_s", "expected"), [(0.0, [True, False, False]), (1000.0, [True, True, False])])
def test_repeats_end_with_their_number_or_the_budget(budget_s: float, expected: list[bool]) -> None:
    limits = Limits(2, budget_s)
    limits.begin("W2")
    assert [limits.allows(repeat) for repeat in range(3)] == expected


def test_static_batches_take_what_is_due() -> None:
    batches: list[int] = []

    def run_batch(prompts: list[list[int]], new_tokens: int, emit: object) -> None:
        batches.append(len(prompts))
        assert callable(emit)
        for index in range(len(prompts)):
            for _ in range(new_tokens):
                emit(index)

    requests = [{"at": 0.0, "token_ids": [1], "new_tokens": 2}] * 3 + [{"at": 0.05, "token_ids": [2], "new_tokens": 2}]
    answers = drive(run_batch, requests)
    assert batches == [3, 1], "the last one was not due when the first batch began"
    seen = [Observed(**answer) for answer in answers]
    assert [stream.num_tokens for stream in seen] == [2] * 4
    assert seen[3].sent_ns == seen[0].sent_ns + 50_000_000
    assert all(stream.ttft_ns >= 0 for stream in seen)


def test_a_peer_that_gives_too_few_tokens_is_refused() -> None:
    with pytest.raises(AssertionError, match="0 tokens in place of 2"):
        drive(lambda prompts, new_tokens, emit: None, [{"at": 0.0, "token_ids": [1], "new_tokens": 2}])


def test_a_roof_is_measured_around_each_turn_while_all_rest() -> None:
    told: list[str] = []
    roofs = iter(range(100))

    def roof() -> float:
        told.append("roof")
        return float(next(roofs))

    rows = run([FakeEntrant("a", told, ("W4",))], Words(DEMO_TOKENIZER), ("W4",), Limits(2, 1000.0), roof=roof)
    assert [repeat["roof"] for repeat in rows[0]["repeats"]] == [0.5, 2.5]
    turn = ["roof", "a resumes", "a 8", "a pauses", "roof"]
    assert told[-10:] == turn * 2
