"""Whatever a file holds that is dropped on the timeline page, it is drawn or refused with a sentence: nothing else."""

import io
import warnings
import zipfile
from collections.abc import Iterator
from random import Random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roseinfer.config.options import Config, ObserveConfig
from roseinfer.errors import InvalidRequest
from roseinfer.observe.recorder.flight import Flight
from tests.fuzz.mutations import check_each, corpus, mutated

NUM_MUTATIONS = 400
KEPT = corpus("recording")
FLIGHT = Flight(Config(observe=ObserveConfig(slow_gap_factor=2.0, slow_gap_min_ms=0.001)), "1.2.3")


def check(content: bytes) -> bool:
    """The property; whether it was drawn."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of NumPy, about sums of numbers that were not measured
            drawn = FLIGHT.view(content)
    except InvalidRequest as error:
        param, message = error.param, error.message
        assert param == "recording"
        assert 0 < len(message) < 2000
        return False
    msgspec.json.decode(drawn)
    return True


@pytest.mark.parametrize(("name", "content"), KEPT, ids=[name for name, _ in KEPT])
def test_the_kept_ones(name: str, content: bytes) -> None:
    assert check(content) == name.startswith("good")


def test_archives_like_them() -> None:
    check_each(mutated([content for _, content in KEPT], NUM_MUTATIONS, seed=1), check)


def test_members_like_theirs() -> None:
    """Behind the archive's checksums: whole archives whose members were changed."""
    assert check_each(archives(), check) > NUM_MUTATIONS / 20, "hardly any of them gets as far as the drawing"


def archives() -> Iterator[bytes]:
    random = Random(1)
    goods = [content for name, content in KEPT if name.startswith("good")]
    members = [members_of(content) for content in goods]
    for number in range(NUM_MUTATIONS):
        chosen = dict(random.choice(members))
        name = random.choice(list(chosen))
        seeds = [one[name] for one in members]
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w") as archive:
            for member, content in (chosen | {name: changed(chosen[name], seeds, number, random)}).items():
                archive.writestr(member, content)
        yield file.getvalue()


def changed(content: bytes, seeds: list[bytes], number: int, random: Random) -> bytes:
    """Another length, as all mutations are; or of the same length, so that NumPy still reads it."""
    if number % 2:
        return next(mutated(seeds, 1, seed=number))
    same = bytearray(content)
    for _ in range(random.randint(1, 6)):
        same[random.randrange(min(len(same), 128), len(same) + 1) - 1] = random.choice([0, 1, 57, 127, 128, 255])
    return bytes(same)


def members_of(content: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@given(st.binary(max_size=200))
def test_any_bytes(content: bytes) -> None:
    check(content)
