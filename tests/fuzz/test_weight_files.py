"""Whatever a file of weights holds, it is the model or one sentence that names the file: nothing else."""

from functools import partial
from pathlib import Path

import pytest

from roseinfer.errors import ConfigError
from tests.fuzz.mutations import check_each, corpus, mutated
from tests.unit.model.conftest import Shape, write_checkpoint
from tests.unit.model.weights.test_checkpoint import build

NUM_MUTATIONS = 150
KEPT = corpus("weights")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose weights are about to be replaced."""
    return write_checkpoint(tmp_path_factory.mktemp("weights") / "tiny", Shape())


def check(directory: Path, head: bytes) -> None:
    """A kept input is what a file begins with: the good rest follows."""
    path = directory / "model.safetensors"
    good = path.read_bytes()
    length = 8 + int.from_bytes(good[:8], "little")
    path.write_bytes(head + good[length:])
    try:
        build(directory)
    except ConfigError as error:
        param, message = error.param, error.message
        assert param == "model.path"
        assert "\n" not in message
        assert len(message) < 2000
    finally:
        path.write_bytes(good)


@pytest.mark.parametrize(("name", "content"), KEPT, ids=[name for name, _ in KEPT])
def test_the_kept_ones(directory: Path, name: str, content: bytes) -> None:
    check(directory, content)


def test_ones_like_them(directory: Path) -> None:
    good = (directory / "model.safetensors").read_bytes()
    heads = [good[: 8 + int.from_bytes(good[:8], "little")], *(content for _, content in KEPT)]
    check_each(mutated(heads, NUM_MUTATIONS, seed=1), partial(check, directory))
