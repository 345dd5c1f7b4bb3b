"""Keeps packed weights in a file, so that the next start maps them instead of packing them again.

A file holds the weights of one checkpoint in one form. Its name is a digest of what they depend on: the checkpoint's
files (names, sizes, times of change, headers), the form, the compiled kernels, our sources, and the versions of the
libraries that read checkpoints. In it a weight is found by a digest of its shape and of some of its rows, so that
neither the order of loading matters nor a file that was exchanged unnoticed. The file is complete when it gets its
name; its header has a digest, and each block of its data a sum, which are checked before anything of it is used.

Layout: pieces that begin on a cache line; the header in msgpack; a footer with the header's length and digest.
"""

import fcntl
import hashlib
import logging
import mmap
import os
import struct
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

import msgspec
import numpy as np
import torch

from roseinfer import __version__
from roseinfer.errors import ConfigError
from roseinfer.model.device import Parts, Placement, dtype_name
from roseinfer.model.weights.dequantize import CONFIG_FILES
from roseinfer.runtime.memory import ask_for_huge_pages

MAX_FILES = 4  # in the directory; those that were used last stay
LEAST_BYTES = 64 << 20  # of a checkpoint; a smaller one is packed in less than a second
_SUFFIX, _PARTIAL = ".packed", ".partial"
_ANY_KEY = "[0-9a-f]" * 32  # of our files: the directory may hold others, such as downloads under way
_MAGIC = b"roseinfer packed weights 1\n"
_FOOTER = struct.Struct(f"<Q32s{len(_MAGIC)}s")  # bytes of the header, its digest, and what kind of file it is
_CACHE_LINE_BYTES = 64
_BLOCK_BYTES = 8 << 20  # that have a sum
_NUM_SAMPLED_ROWS = 4  # of a weight
_MOST_BUFFERS = 1024  # of one pwritev(2)
_LEAST_PRIORITY = 19  # see setpriority(2)
_SAFETENSORS_LENGTH = struct.Struct("<Q")

_log = logging.getLogger(__name__)


class _Header(msgspec.Struct, frozen=True):
    """What is in a file: the places of pieces by the names of weights, and the sums of all blocks."""

    key: str
    num_data_bytes: int
    places: dict[str, list[tuple[int, int]]]  # offset and bytes of each piece
    sums: list[int]


class _Damaged(ValueError):
    """A file that is not what was written, or that another version wrote."""


class PackedCache:
    """The packed weights of one model: those of its file, or, where there is none, those that are packed now.

    `write_soon` keeps the latter for the next start. That no file can be written is logged, and nothing else.
    """

    def __init__(self, directory: Path, key: str) -> None:
        self._path = directory / f"{key}{_SUFFIX}"
        self._key = key
        self._new: dict[str, list[torch.Tensor]] = {}
        self._ambiguous = set[str]()  # names of several weights
        self._kept: dict[str, list[torch.Tensor]] = {}
        self.is_new = True  # there is no file that can be used
        try:
            self._kept = _read(self._path, key)
            self.is_new = False
            os.utime(self._path)  # used now
        except FileNotFoundError:
            pass
        except _Damaged as error:
            _log.warning("%s: %s; the weights are packed anew", self._path, error)
        except OSError as error:
            _log.info("%s cannot be read or marked as used: %s", self._path, error.strerror)

    def find(self, kind: str, parts: Parts, sizes: Sequence[int]) -> list[torch.Tensor] | None:
        """See `model/device.py:KeptWeights`."""
        return self._kept.get(_name_of(kind, parts, sizes)) if self._kept else None

    def keep(self, kind: str, parts: Parts, pieces: list[torch.Tensor]) -> None:
        """See `model/device.py:KeptWeights`. They are written with the others, by `write_soon`."""
        name = _name_of(kind, parts, list(map(len, pieces)))
        if not self.is_new or name in self._ambiguous:
            return
        other = self._new.setdefault(name, pieces)
        if not all(map(torch.equal, other, pieces)):  # alike in the rows that were looked at, and not the same
            self._ambiguous.add(name)
            del self._new[name]

    def write_soon(self) -> threading.Thread | None:
        """Begin to write what is new, in a thread that takes only processor time that no other wants.

        It ends with the process, and then leaves no file that counts.
        """
        if not self._new:
            return None

        def write() -> None:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LEAST_PRIORITY)  # of this thread alone
            self.write()

        thread = threading.Thread(target=write, name="packed-cache", daemon=True)
        thread.start()
        return thread

    def write(self) -> None:
        """Write what is new to the file, unless another process does; then remove files that were not used lately."""
        began_s = time.monotonic()
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            num_bytes = self._write()
            _remove_old(self._path.parent)
        except OSError as error:
            _log.warning("the packed weights are not kept: %s: %s", error.filename or self._path, error.strerror)
            return
        if num_bytes:
            facts = {"path": str(self._path), "bytes": num_bytes, "seconds": round(time.monotonic() - began_s, 1)}
            _log.info("the packed weights are kept for the next start", extra=facts)

    def _write(self) -> int:
        """Returns the size of the file; 0 where another process writes it. Raises OSError."""
        partial = self._path.with_suffix(_PARTIAL)
        file = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            if not _is_locked_here(file, partial):
                return 0
            try:
                num_bytes = self._fill(file)
                os.fsync(file)
                partial.replace(self._path)
            except OSError:
                partial.unlink()
                raise
        finally:
            os.close(file)
        return num_bytes

    def _fill(self, file: int) -> int:
        places: dict[str, list[tuple[int, int]]] = {}
        size = 0
        for name, pieces in self._new.items():
            places[name] = []
            for piece in pieces:
                places[name].append((size, len(piece)))
                size += -(-len(piece) // _CACHE_LINE_BYTES) * _CACHE_LINE_BYTES
        os.ftruncate(file, 0)  # of a process that was killed
        os.posix_fallocate(file, 0, size)  # a full disk is known before it is full
        buffers = list[memoryview]()
        for piece in (piece for pieces in self._new.values() for piece in pieces):
            buffers += [piece.numpy().data, memoryview(bytes(-len(piece) % _CACHE_LINE_BYTES))]
        _write_all(file, buffers)
        sums = list(_sums_of_file(file, size))
        header = msgspec.msgpack.encode(_Header(self._key, size, places, sums))
        end = header + _FOOTER.pack(len(header), _digest(header), _MAGIC)
        os.pwrite(file, end, size)
        return size + len(end)


def open_packed_cache(configured: str, directory: Path, placement: Placement) -> PackedCache | None:
    """The cache that `model.packed_cache` asks for; None where there is little to keep, or nothing shall be kept.

    Raises ConfigError for a directory in a home that is not there.
    """
    if configured == "off" or placement.linears in {"torch", "onednn"}:
        return None
    try:
        if sum(path.stat().st_size for path in _weights_of(directory)) < LEAST_BYTES:
            return None
        cache = Path.home() / ".cache" / "roseinfer" / "packed" if configured == "auto" else Path(configured)
        return PackedCache(cache.expanduser(), _key(directory, placement))
    except OSError:  # of the checkpoint, which says so when it is read
        return None
    except RuntimeError:  # there is no home directory
        if configured != "auto":
            raise ConfigError(f"There is no home directory for {configured}.", param="model.packed_cache") from None
        return None


def _name_of(kind: str, parts: Parts, sizes: Sequence[int]) -> str:
    """The name of a weight packed in this way into pieces of these sizes: a digest that some of its rows are in."""
    digest = hashlib.blake2b(f"{kind} {list(sizes)}".encode(), digest_size=16)
    for part in parts:
        digest.update(f" {list(part.shape)} {part.dtype}".encode())
        stored = part if part.is_contiguous() else part.t()  # the order of its file: few pages are read
        last = len(stored) - 1
        for place in range(_NUM_SAMPLED_ROWS):
            row = stored[last * place // (_NUM_SAMPLED_ROWS - 1)].contiguous()
            digest.update(row.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _key(directory: Path, placement: Placement) -> str:
    """Raises OSError where a file cannot be read."""
    digest = hashlib.blake2b(_MAGIC, digest_size=16)

    def add(*facts: object) -> None:
        digest.update(msgspec.msgpack.encode(list(map(str, facts))))

    add(__version__, *map(version, ("torch", "transformers", "safetensors")))
    add(dtype_name(placement.dtype), placement.quantization, placement.kernels.name if placement.kernels else "")
    source_dir = Path(__file__).parents[1]  # of `model/`
    for path in sorted(source_dir.rglob("*.py")):
        add(path.relative_to(source_dir), hashlib.sha256(path.read_bytes()).hexdigest())
    for path in _weights_of(directory):
        # A time of change is one that `touch` and `cp -p` do not set.
        stat = path.stat()
        add(path.name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, _safetensors_header(path).hex())
    for path in [directory / name for name in ("config.json", *CONFIG_FILES)] + [*directory.glob("*.index.json")]:
        add(path.name, path.read_bytes().hex() if path.exists() else "")
    return digest.hexdigest()


def _weights_of(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.safetensors"))


def _safetensors_header(path: Path) -> bytes:
    with path.open("rb") as file:
        length = file.read(_SAFETENSORS_LENGTH.size)
        whole = len(length) == _SAFETENSORS_LENGTH.size
        return file.read(min(*_SAFETENSORS_LENGTH.unpack(length), path.stat().st_size)) if whole else b""


def _read(path: Path, key: str) -> dict[str, list[torch.Tensor]]:
    """The pieces of all weights, mapped from the file. Raises OSError, or _Damaged."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size < _FOOTER.size:
            raise _Damaged("it is cut off")
        mapping = mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ)
    num_header_bytes, digest, magic = _FOOTER.unpack(mapping[size - _FOOTER.size :])
    if magic != _MAGIC or num_header_bytes > size - _FOOTER.size:
        raise _Damaged("it is cut off, or of another kind")
    encoded = mapping[size - _FOOTER.size - num_header_bytes : size - _FOOTER.size]
    if _digest(encoded) != digest:
        raise _Damaged("its header is damaged")
    header = msgspec.msgpack.decode(encoded, type=_Header)
    if header.key != key or header.num_data_bytes != size - _FOOTER.size - num_header_bytes:
        raise _Damaged("it is of other weights, or cut off")
    ask_for_huge_pages(mapping)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch's, that it must not be written to
        data = torch.frombuffer(mapping, dtype=torch.uint8, count=header.num_data_bytes)
    if list(map(_sum, torch.split(data, _BLOCK_BYTES))) != header.sums:
        raise _Damaged("its weights are damaged")
    return {
        name: [data[start : start + num_bytes] for start, num_bytes in places] for name, places in header.places.items()
    }


def _sums_of_file(file: int, size: int) -> Iterator[int]:
    """As `_sum` of each block, without OpenMP's threads.

    Read, and not mapped: mapped pages would count as this process's memory beside the weights. What is read into is a
    mapping, which goes at the end: malloc keeps what is freed in an engine that serves.
    """
    block = np.frombuffer(mmap.mmap(-1, _BLOCK_BYTES), np.int64)
    for start in range(0, size, _BLOCK_BYTES):
        num_bytes = min(os.preadv(file, [block.data], start), size - start)
        yield int(block[: num_bytes // 8].sum())


def _sum(block: torch.Tensor) -> int:
    """Of its words, as often around as it takes."""
    return int(block.view(torch.int64).sum())


def _digest(encoded: bytes) -> bytes:
    return hashlib.blake2b(encoded, digest_size=32).digest()


def _write_all(file: int, buffers: list[memoryview]) -> None:
    """Write them one behind the other, in few calls.

    Between two calls the thread takes the interpreter's lock, and at its priority it may wait for a core with it, while
    the engine waits for the lock.
    """
    start = 0
    while buffers:
        num_written = os.pwritev(file, buffers[:_MOST_BUFFERS], start)
        start += num_written
        while buffers and num_written >= len(buffers[0]):
            num_written -= len(buffers.pop(0))
        if buffers:
            buffers[0] = buffers[0][num_written:]


def _is_locked_here(file: int, partial: Path) -> bool:
    """Lock a file that no other process is writing; false if one is, or has just given it its name."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.fstat(file).st_ino == partial.stat().st_ino
    except (BlockingIOError, FileNotFoundError):
        return False


def _remove_old(directory: Path) -> None:
    """Remove all but the files that were used last, and what killed processes left.

    What cannot be removed stays, such as another user's, and what another process removes in this moment is gone.
    """
    for path in sorted(directory.glob(_ANY_KEY + _SUFFIX), key=_last_use_ns, reverse=True)[MAX_FILES:]:
        with suppress(OSError):
            path.unlink()
            _log.info("removed packed weights that were not used lately", extra={"path": str(path)})
    for path in directory.glob(_ANY_KEY + _PARTIAL):
        with suppress(OSError):
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                if _is_locked_here(file, path):
                    path.unlink()
            finally:
                os.close(file)


def _last_use_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
