"""What a profiler is told of a real engine, heard through NVTX's own injection interface."""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from roseinfer.observe.tracing.nvtx import RANGES
from tests.nvtx_tape import Range, Tape, build_recorder

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


@pytest.fixture(scope="session")
def recorder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_recorder(tmp_path_factory.mktemp("nvtx"))


Run = tuple[Tape, list[dict[str, Any]]]
"""What was marked, and the steps as they were told."""


def run_engine(library: Path | None, tape: Path, depth: int, marked: str = "marked") -> Run:
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    environment = {**os.environ, "PYTHONPATH": path.strip(os.pathsep), "NVTX_RECORDER_FILE": str(tape)}
    if library is not None:
        environment["NVTX_INJECTION64_PATH"] = str(library)
    command = [sys.executable, str(HERE / "nvtx_engine.py"), str(depth), marked]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return Tape(tape.read_text() if tape.exists() else ""), json.loads(done.stdout)


@pytest.fixture(scope="module")
def runs(recorder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Run]:
    """Without a pipeline, and with one."""
    return [run_engine(recorder, tmp_path_factory.mktemp("tape") / "tape", depth) for depth in (0, 1)]


@pytest.fixture(params=[0, 1])
def run(request: pytest.FixtureRequest, runs: list[Run]) -> Run:
    depth: int = request.param
    return runs[depth]


def test_each_recorded_step_is_a_range_with_its_id(run: Run) -> None:
    tape, steps = run
    assert [found.step_id for found in tape.ranges if found.name == "step"] == [step["id"] for step in steps]
    assert {found.name for found in tape.ranges} == {"step", "gc"}


def test_every_phase_is_marked_once_for_its_step(run: Run) -> None:
    tape, steps = run
    for name in ("schedule", "launch", "stage", "forward", "wait", "commit"):
        marked = Counter(found.step_id for top in tape.ranges for found in top.within(name))
        ran = Counter(step["id"] for step in steps if step["kind"] != "idle" or name == "schedule")
        assert marked >= ran, name
        assert set((marked - ran).values()) <= {1}, name  # an attempt that found nothing to run
    prompts = [step["id"] for step in steps if step["kind"] == "prefill"]
    assert {found.step_id for top in tape.ranges for found in top.within("sample")} == set(prompts)


def test_parts_lie_in_the_launch_and_all_in_the_step(run: Run) -> None:
    tape, _ = run
    for top in tape.ranges:
        for launch in top.within("launch"):
            assert {child.name for child in launch.children} <= {"capture", "stage", "forward", "sample"}
            assert [copy for stage in launch.within("stage") for copy in stage.within("h2d")]
            assert {inner.step_id for child in launch.children for inner in child.within("h2d")} <= {launch.step_id}


def test_a_graph_is_captured_in_its_own_range_when_it_is_first_met(run: Run) -> None:
    tape, steps = run
    (captured,) = [found.step_id for top in tape.ranges for found in top.within("capture")]
    assert captured == next(step["id"] for step in steps if step["graph_rows"])


def test_a_collection_is_a_range_with_the_last_steps_id(run: Run) -> None:
    tape, steps = run
    assert [found.step_id for top in tape.ranges for found in top.within("gc")] == [steps[2]["id"]]


def test_texts_are_registered_once(run: Run) -> None:
    tape, _ = run
    assert list(tape.domains.values()).count("roseinfer") == 1
    assert Counter(tape.strings.values()) == Counter(RANGES)
    assert all(found.category == found.name for top in tape.ranges for found in top.within(top.name))


def test_with_a_pipeline_a_step_starts_the_next_one(runs: list[Run]) -> None:
    tape, _ = runs[1]
    second = [found for found in tape.ranges if found.name == "step"][1]
    assert [launch.step_id for launch in second.within("launch")] == [second.step_id + 1]
    assert [commit.step_id for commit in second.within("commit")] == [second.step_id]


def found_by(names: list[str], ranges: list[Range]) -> list[Range]:
    """The ranges that Nsight Compute's filter for these names takes: each lies directly in the last, or behind `*`."""
    found = [inner for top in ranges for inner in top.within(names[0])]
    for before, name in pairwise(names):
        children = [child for each in found for child in each.children]
        if before == "*":
            found = [inner for child in children for inner in child.within(name)]
        elif name != "*":
            found = [child for child in children if child.name == name]
    return found


def test_the_documented_filter_of_nsight_compute_takes_each_forward_pass(run: Run) -> None:
    tape, _ = run
    text = (ROOT / "docs" / "tracing.md").read_text()
    [path] = re.findall(r'--nvtx-include "roseinfer@([^"]+)"', text)
    forward = [found.step_id for top in tape.ranges for found in top.within("forward")]
    assert [found.step_id for found in found_by(path.strip("/").split("/"), tape.ranges)] == forward != []


def test_no_documented_command_of_nsight_systems_ends_the_server_with_a_capture() -> None:
    """As it does after the first capture range, unless it is to repeat."""
    pages = [(ROOT / "docs" / name).read_text() for name in ("capture.md", "tracing.md")]
    commands = [command.partition("`")[0] for page in pages for command in page.split("nsys profile")[1:]]
    found = [("--capture-range=" in command, "--capture-range-end=repeat" in command) for command in commands]
    assert sum(has_range for has_range, _ in found) == 3
    assert all(has_range == repeats for has_range, repeats in found)


def test_what_is_off_marks_nothing(recorder: Path, tmp_path: Path) -> None:
    tape, steps = run_engine(recorder, tmp_path / "tape", 0, "unmarked")
    assert "roseinfer" not in tape.domains.values()
    assert len(steps) > 3
