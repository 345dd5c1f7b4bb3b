"""The soak's verdict on samples that are given, and a real soak of some seconds."""

import dataclasses
import json
import sys
from pathlib import Path

import pytest

from benchmarks.stress import soak
from benchmarks.stress.soak import Sample, problems

IDLE = Sample(
    after_s=0.0,
    front_end_mib=80.0,
    engine_mib=300.0,
    num_descriptors=19,
    num_tasks=10,
    num_requests=0,
    num_used_blocks=0,
    num_missing_blocks=0,
    num_violations=0,
)


def samples(**last: float) -> list[Sample]:
    """Twenty of them, of which the last three differ."""
    return [IDLE] * 17 + [dataclasses.replace(IDLE, **last)] * 3  # type: ignore[arg-type]


def test_what_is_flat_is_flat() -> None:
    assert problems(samples()) == []
    assert problems(samples(front_end_mib=99.0, engine_mib=319.0, num_descriptors=17)) == []


@pytest.mark.parametrize(
    ("last", "told"),
    [
        ({"front_end_mib": 100.0}, "front_end_mib grew by 20.0"),
        ({"engine_mib": 400.0}, "engine_mib grew by 100.0"),
        ({"num_descriptors": 20}, "num_descriptors grew by 1"),
        ({"num_tasks": 12}, "num_tasks grew by 2"),
        ({"num_requests": 1}, "num_requests is 1 at idle"),
        ({"num_used_blocks": 3}, "num_used_blocks is 3 at idle"),
        ({"num_missing_blocks": 1}, "num_missing_blocks is 1 at idle"),
        ({"num_violations": 1}, "num_violations is 1 at idle"),
    ],
)
def test_what_is_not_is_named(last: dict[str, float], told: str) -> None:
    assert problems(samples(**last)) == [told]


def test_the_warm_up_may_grow_but_not_leak() -> None:
    cold = dataclasses.replace(IDLE, front_end_mib=20.0, num_descriptors=5)
    assert problems([cold] * 4 + [IDLE] * 16) == []
    assert problems([dataclasses.replace(cold, num_used_blocks=1)] * 4 + [IDLE] * 16) == [
        "num_used_blocks is 1 at idle"
    ]


@pytest.mark.e2e
def test_a_soak_of_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its clients are what is tested; memory has no time to settle."""
    out = tmp_path / "soak.json"
    monkeypatch.setattr(soak, "MIN_ROUNDS", 1)
    arguments = ["--minutes", "0", "--round-s", "1", "--max-growth-mib", "1000", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["soak", *arguments])
    soak.main()
    told = json.loads(out.read_text())
    assert [problem for problem in told["problems"] if "grew" not in problem] == []
    kinds = {kind.split()[0] for kind in told["answers"]}
    assert {"stream", "whole", "leave", "bad:", "probe", "flood"} <= kinds
