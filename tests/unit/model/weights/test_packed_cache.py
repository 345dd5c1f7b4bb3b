"""A later start finds the same weights without packing them, and whatever happened to the file, the right ones."""

import errno
import fcntl
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save, save_file

from roseinfer.errors import ConfigError
from roseinfer.model.device import Placement, Quantization, WeightMemory
from roseinfer.model.families.registry import build_model
from roseinfer.model.kernels.library import Kernels, find_built
from roseinfer.model.weights import packed_cache
from roseinfer.model.weights.checkpoint import Checkpoint
from roseinfer.model.weights.packed_cache import MAX_FILES, PackedCache, open_packed_cache
from tests.unit.model.conftest import Shape, write_checkpoint
from tests.unit.model.setups import LEVELS_HERE

pytestmark = pytest.mark.usefixtures("any_size")


@pytest.fixture
def any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_cache, "LEAST_BYTES", 0)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "model", Shape(num_layers=1))


@pytest.fixture
def cache_dir(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def placed(quantization: Quantization = "int8", kernels: Kernels | None = None) -> Placement:
    return Placement(torch.device("cpu"), torch.float32, quantization, kernels)


class Start:
    """One start of a server, as far as its weights: how many were packed, and what the model computes."""

    def __init__(self, directory: Path, cache_dir: Path, placement: Placement | None = None) -> None:
        placement = placement or placed()
        self.cache = open_packed_cache(str(cache_dir), directory, placement)
        assert self.cache is not None
        self.num_packed = 0
        memory = WeightMemory(self.cache)
        pack_anew = memory.packed

        def packed(kind: str, parts: list[torch.Tensor], sizes: list[int], pack: Callable[..., None]) -> object:
            def counted(pieces: list[torch.Tensor]) -> None:
                self.num_packed += 1
                pack(pieces)

            return pack_anew(kind, parts, sizes, counted)

        memory.packed = packed  # type: ignore[method-assign, assignment]
        self.placement = Placement(
            torch.device("cpu"), torch.float32, placement.quantization, placement.kernels, memory
        )
        with Checkpoint(directory) as checkpoint:
            self.model = build_model(checkpoint, self.placement)
        if self.cache.is_new:
            self.cache.write()
        generator = torch.Generator().manual_seed(1)
        self.outputs = [
            linear(torch.randn(3, linear.num_inputs, generator=generator))
            for linear in (*self.model.layer_linears, self.model.head)
        ]
        self.outputs.append(self.model.head.rows(torch.arange(self.model.vocab_size)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Start) and all(map(torch.equal, self.outputs, other.outputs))

    __hash__ = None  # type: ignore[assignment]


@pytest.fixture
def file(directory: Path, cache_dir: Path) -> Path:
    """That a first start wrote."""
    Start(directory, cache_dir)
    return next(cache_dir.iterdir())


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_the_second_start_packs_nothing_and_computes_the_same(
    directory: Path, cache_dir: Path, quantization: Quantization
) -> None:
    first, second = (Start(directory, cache_dir, placed(quantization)) for _ in range(2))

    assert first.num_packed == 5
    assert second.num_packed == 0
    assert second == first
    assert second.placement.groups == first.placement.groups
    assert [file.suffix for file in cache_dir.iterdir()] == [".packed"]


@pytest.mark.parametrize("level", sorted({*LEVELS_HERE[:1], *LEVELS_HERE[-1:]}))
@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_the_same_with_compiled_kernels(
    directory: Path, cache_dir: Path, quantization: Quantization, level: str, built_kernels: Callable[[str], Path]
) -> None:
    from roseinfer.model.kernels.library import LEVELS

    path = find_built(LEVELS[level], built_kernels(level))
    assert path is not None
    placement = placed(quantization, Kernels(level, path))

    first, second = (Start(directory, cache_dir, placement) for _ in range(2))

    assert first.num_packed == 5
    assert second.num_packed == 0
    assert second == first


def cut_off(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def empty(file: Path) -> None:
    file.write_bytes(b"")


def change_at(place: int) -> Callable[[Path], None]:
    def change(file: Path) -> None:
        content = bytearray(file.read_bytes())
        content[place] ^= 1
        file.write_bytes(content)

    return change


def grow(file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(bytes(64) + content)


@pytest.mark.parametrize("damage", [cut_off, empty, change_at(100), change_at(-100), change_at(-1), grow])
def test_a_damaged_file_is_made_anew(
    directory: Path,
    cache_dir: Path,
    file: Path,
    damage: Callable[[Path], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    whole = file.read_bytes()
    damage(file)

    start = Start(directory, cache_dir)

    assert start.num_packed == 5
    assert "the weights are packed anew" in caplog.text
    assert file.read_bytes() == whole
    assert Start(directory, cache_dir).num_packed == 0


def test_a_checkpoint_written_over_in_place_is_another(directory: Path, cache_dir: Path, file: Path) -> None:
    weights = directory / "model.safetensors"
    before = weights.stat()
    tensors = {name: tensor.clone() for name, tensor in load_file(weights).items()}
    tensors["h.0.mlp.c_fc.weight"][3, 5] += 1.0  # in a row that no name has looked at
    weights.write_bytes(save(tensors))
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (weights.stat().st_size, weights.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)

    assert Start(directory, cache_dir).num_packed == 5


def test_a_file_of_other_weights_under_the_same_key_gives_none_of_them(
    directory: Path, tmp_path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = write_checkpoint(tmp_path / "other", Shape(num_layers=1))
    tensors = {name: tensor + 0.125 for name, tensor in load_file(other / "model.safetensors").items()}
    save_file(tensors, other / "model.safetensors")
    monkeypatch.setattr(packed_cache, "_key", lambda *_: "0" * 32)
    Start(other, cache_dir)

    assert Start(directory, cache_dir).num_packed == 5
    assert Start(directory, cache_dir) == Start(directory, tmp_path / "another cache")


def test_a_form_of_another_type_or_configuration_is_another(directory: Path, cache_dir: Path) -> None:
    Start(directory, cache_dir)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"layer_norm_epsilon": 1e-6}))
    assert Start(directory, cache_dir).num_packed == 5
    Start(directory, cache_dir, placed("int4"))

    assert len(list(cache_dir.iterdir())) == 3


def test_weights_that_only_look_alike_are_not_kept(cache_dir: Path) -> None:
    like = torch.zeros(64, 8)
    other = like.clone()
    other[1] = 1.0
    cache = PackedCache(cache_dir, "key")
    memory = WeightMemory(cache)

    def pack(weight: torch.Tensor, pieces: list[torch.Tensor]) -> None:
        pieces[0].copy_(weight.view(torch.uint8).view(-1))

    for weight in (like, other, like.clone(), torch.ones(64, 8), torch.ones(64, 8)):
        memory.packed("kind", [weight], [2048], partial(pack, weight))
    cache.write()

    again = PackedCache(cache_dir, "key")

    assert again.find("kind", [like], [2048]) is None
    assert again.find("kind", [other], [2048]) is None
    ones = again.find("kind", [torch.ones(64, 8)], [2048])
    assert ones is not None
    assert torch.equal(ones[0].view(torch.float32), torch.ones(512))
    assert again.find("another kind", [torch.ones(64, 8)], [2048]) is None


def test_all_weights_are_written_in_few_calls_and_the_rest_of_one_that_was_cut_short(
    directory: Path, cache_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each call takes the interpreter's lock once more, at the least priority."""
    calls = list[int]()
    write = os.pwritev

    def noted(file: int, buffers: list[memoryview], start: int) -> int:
        calls.append(len(buffers))
        return write(file, buffers, start)

    def cut_short(file: int, buffers: list[memoryview], start: int) -> int:
        return write(file, [next(buffer for buffer in buffers if buffer)[:1000]], start)

    monkeypatch.setattr(os, "pwritev", noted)
    first = Start(directory, cache_dir)
    assert len(calls) == 1
    assert calls[0] > 10
    monkeypatch.setattr(os, "pwritev", cut_short)
    Start(directory, tmp_path / "other")
    monkeypatch.undo()
    monkeypatch.setattr(packed_cache, "LEAST_BYTES", 0)
    assert Start(directory, tmp_path / "other") == first


def test_a_directory_that_cannot_be_written_is_only_logged(
    directory: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")

    Start(directory, tmp_path / "file" / "cache")

    assert "the packed weights are not kept" in caplog.text


def test_a_full_disk_is_only_logged_and_nothing_stays(
    directory: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", refuse)

    Start(directory, cache_dir)

    assert "No space left on device" in caplog.text
    assert not list(cache_dir.iterdir())


def test_only_those_used_last_stay_and_what_killed_processes_left_goes(directory: Path, cache_dir: Path) -> None:
    cache_dir.mkdir()
    for age in range(1, 10):
        old = cache_dir / f"{age:032x}.packed"
        old.touch()
        os.utime(old, (0, 1e9 - age))
    (cache_dir / f"{10:032x}.partial").touch()
    with (cache_dir / f"{11:032x}.partial").open("w") as alive:
        fcntl.flock(alive, fcntl.LOCK_EX)
        start = Start(directory, cache_dir)
        assert start.cache is not None

    left = {path.name for path in cache_dir.iterdir()}
    used_last = {f"{i:032x}.packed" for i in range(1, MAX_FILES)}
    assert left == {f"{start.cache._key}.packed", f"{11:032x}.partial", *used_last}


def test_files_of_others_in_the_directory_stay(directory: Path, cache_dir: Path) -> None:
    """A directory that was named may be one where downloads lie."""
    cache_dir.mkdir()
    others = {"model.safetensors.partial", *(f"photos-{i}.packed" for i in range(2 * MAX_FILES))}
    for name in others:
        (cache_dir / name).touch()
        os.utime(cache_dir / name, (0, 1e9))

    start = Start(directory, cache_dir)

    assert start.cache is not None
    assert {path.name for path in cache_dir.iterdir()} == {f"{start.cache._key}.packed", *others}


def test_what_cannot_be_removed_keeps_nothing_else(
    directory: Path, cache_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As another user's files: the weights are kept, and old ones removed."""
    cache_dir.mkdir()
    caplog.set_level(logging.INFO)
    for name in (f"{10:032x}.packed", f"{10:032x}.partial"):
        (cache_dir / name).mkdir()
        os.utime(cache_dir / name, (0, 1e8))
    (cache_dir / f"{11:032x}.packed").symlink_to(cache_dir / "nowhere")
    for age in range(1, 10):
        (cache_dir / f"{age:032x}.packed").touch()
        os.utime(cache_dir / f"{age:032x}.packed", (0, 1e9 - age))

    Start(directory, cache_dir)

    assert "the packed weights are kept for the next start" in caplog.text
    assert "not kept" not in caplog.text
    left = {path.name for path in cache_dir.iterdir() if int(path.stem, 16) < 100}
    assert left == {f"{10:032x}.packed", f"{10:032x}.partial", *(f"{i:032x}.packed" for i in range(1, MAX_FILES))}


def test_what_another_process_is_writing_is_left_alone(
    directory: Path, cache_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache_dir.mkdir()
    caplog.set_level(logging.INFO)
    key = packed_cache._key(directory, placed())
    with (cache_dir / f"{key}.partial").open("w") as file:
        file.write("of another process")
        file.flush()
        fcntl.flock(file, fcntl.LOCK_EX)
        Start(directory, cache_dir)
        assert (cache_dir / f"{key}.partial").read_text() == "of another process"

    assert [path.name for path in cache_dir.iterdir()] == [f"{key}.partial"]
    assert "packed weights" not in caplog.text


def test_kept_weights_cannot_be_written_to(directory: Path, cache_dir: Path, file: Path) -> None:
    cache = open_packed_cache(str(cache_dir), directory, placed())
    assert cache is not None
    address = next(iter(cache._kept.values()))[0].data_ptr()
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]

    assert [flags for span, flags, *_ in maps if is_within(address, span)] == ["r--s"]


def is_within(address: int, span: str) -> bool:
    start, end = (int(place, 16) for place in span.split("-"))
    return start <= address < end


def test_a_directory_in_a_home_that_is_not_there_is_refused(directory: Path) -> None:
    with pytest.raises(ConfigError, match="There is no home directory for ~nosuchuser/packed") as refusal:
        open_packed_cache("~nosuchuser/packed", directory, placed())
    assert refusal.value.param == "model.packed_cache"


def test_small_checkpoints_and_off_have_no_cache(
    directory: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert open_packed_cache("off", directory, placed()) is None
    monkeypatch.undo()
    assert open_packed_cache(str(cache_dir), directory, placed()) is None


SUMMING = """
import os, sys
from pathlib import Path
from roseinfer.model.weights.packed_cache import _sums_of_file
from roseinfer.runtime import memory

def resident_mb():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6

memory.keep_freed_memory()
file, size = os.open(sys.argv[1], os.O_RDONLY), os.path.getsize(sys.argv[1])
before = resident_mb()
assert len(list(_sums_of_file(file, size))) == 3
print(resident_mb() - before)
"""


def test_an_engine_that_serves_keeps_no_memory_of_summing_the_file(tmp_path: Path) -> None:
    (tmp_path / "packed").write_bytes(bytes(24 << 20))
    arguments = [sys.executable, "-c", SUMMING, str(tmp_path / "packed")]
    kept_mb = float(subprocess.run(arguments, capture_output=True, text=True, check=True).stdout)
    assert kept_mb < 5
