"""A recording survives its file, and a file that is none is refused in words."""

import io
import os
import random
import resource
import zipfile
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from roseinfer.errors import InvalidRequest
from roseinfer.observe.gaps.request_gaps import gaps_of
from roseinfer.observe.recorder.recording import (
    INTERRUPTION_DTYPE,
    STEP_DTYPE,
    WRITE_DTYPE,
    ClockPair,
    Recording,
    RecordingMeta,
    RequestRecord,
    step_of,
    step_row,
)
from tests.background import in_background
from tests.unit.observe.facts import ENGINE, make_step, make_timeline
from tests.unit.observe.gaps.test_request_gaps import Bench


def make_recording(**meta: object) -> Recording:
    step = make_step(step_id=7)
    return Recording(
        meta=RecordingMeta(
            **({"version": "1.2.3", "model_name": "m", "clock": ClockPair(1, 2), "engine": ENGINE} | meta)  # type: ignore[arg-type]
        ),
        requests=[RequestRecord.of(make_timeline(prefix_digests=np.array([5, -6]).tobytes()))],
        steps=np.array([step_row(step)], STEP_DTYPE),
        writes=np.array([(0, 1, 2, 3, 4, 5, 6, True)], WRITE_DTYPE),
        interruptions=np.array([(1, 2, 11)], INTERRUPTION_DTYPE),
    )


def test_a_recording_survives_its_file(tmp_path: Path) -> None:
    recording, path = make_recording(), tmp_path / "a.npz"
    recording.save(path)
    loaded = Recording.load(path)
    assert loaded.meta == recording.meta
    assert loaded.requests == recording.requests
    assert loaded.requests[0].prefix_digests == [5, -6]
    for name in ("steps", "writes", "interruptions"):
        assert getattr(loaded, name).tolist() == getattr(recording, name).tolist()
    assert [file.name for file in tmp_path.iterdir()] == ["a.npz"]


def test_a_step_survives_its_row() -> None:
    step = make_step(step_id=9, num_decode_seqs=3)
    row = np.array([step_row(step)], STEP_DTYPE)[0]
    assert step_of(row) == step


@pytest.mark.parametrize("content", [b"", b"hello", b"PK\x03\x04 no archive"])
def test_a_file_that_is_no_recording_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.npz"
    path.write_bytes(content)
    with pytest.raises(InvalidRequest, match="no recording") as refusal:
        Recording.load(path)
    assert refusal.value.param == "recording"


def test_another_version_is_refused_by_its_number(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    make_recording(format_version=99).save(path)
    with pytest.raises(InvalidRequest, match="format 99"):
        Recording.load(path)


LATE = ("late_throttled", "late_wait")
SINCE_3 = ("cpu_", *LATE)


@pytest.mark.parametrize(("found", "lacking"), [(1, ("draft", "accepted", *SINCE_3)), (2, SINCE_3), (3, LATE)])
def test_a_recording_of_an_earlier_format_counts_nothing_of_what_came_later(
    found: int, lacking: tuple[str, ...], tmp_path: Path
) -> None:
    recording, path = make_recording(format_version=found), tmp_path / "a.npz"
    names = [name for name in recording.steps.dtype.names or () if not any(word in name for word in lacking)]
    today = recording.steps
    steps = np.array(today[names].tolist(), [(name, STEP_DTYPE[name]) for name in names])
    replace(recording, steps=steps).save(path)
    assert Recording.load(path).steps.tolist() == today.tolist()


def test_a_link_stays_one(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "file")
    make_recording().save(link)
    assert link.is_symlink()
    assert Recording.load(tmp_path / "file") is not None


def test_a_pipe_stays_one(tmp_path: Path) -> None:
    """As of `--recording >(program)`; a root's /dev/null would become a file likewise."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    content = in_background(pipe.read_bytes)
    make_recording().save(pipe)
    assert Recording.read(io.BytesIO(content.result(10))).meta == make_recording().meta
    assert pipe.is_fifo()


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="No such file"):
        Recording.load(tmp_path / "none.npz")


def test_a_changed_byte_is_refused_or_harmless(tmp_path: Path) -> None:
    """Whatever a file holds, reading it raises nothing but InvalidRequest."""
    make_recording().save(tmp_path / "a.npz")
    with zipfile.ZipFile(tmp_path / "a.npz") as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    chance, num_refused = random.Random(7), 0
    for _ in range(400):
        name = chance.choice(list(members))
        content = bytearray(members[name])
        for _ in range(chance.randint(1, 4)):
            content[chance.randrange(len(content))] = chance.choice([chance.randrange(256), ord("9"), ord("-"), 255])
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w") as archive:
            for member, good in members.items():
                archive.writestr(member, bytes(content) if member == name else good)
        file.seek(0)
        try:
            Recording.read(file)
        except InvalidRequest:
            num_refused += 1
    assert num_refused > 100


def test_a_bomb_is_not_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roseinfer.observe.recorder.recording.MAX_BYTES", 1_000_000)
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("steps.npy", bytes(1_000_001))
    assert file.tell() < 10_000
    file.seek(0)
    with pytest.raises(InvalidRequest, match="1000000 bytes of memory"):
        Recording.read(file)


def test_a_write_of_a_token_that_its_request_has_not_got_is_left_out() -> None:
    """A recording that is damaged."""
    bench = Bench()
    bench.warm_up()
    recording = bench.recording()
    cut = [msgspec.structs.replace(request, token_ns=request.token_ns[:-1]) for request in recording.requests]
    assert len(gaps_of(replace(recording, requests=cut))) == len(gaps_of(recording)) - len(cut)


def test_what_a_full_disk_cut_short_is_removed(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (512, before[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            make_recording().save(tmp_path / "a.npz")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []
