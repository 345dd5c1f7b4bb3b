"""Tunes malloc and torch's allocator: an engine's process keeps freed memory, a front end's returns it to the system.

glibc keeps freed memory in a heap for each few threads, and keeps larger pieces the larger the pieces are that it has
seen freed. A few texts of two megabytes, encoded by different threads, would leave hundreds of megabytes with the
process. Imports no torch: `prefer_huge_pages` has to run before it is imported.
"""

import ctypes
import mmap
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # mallopt(3)
_NUM_HEAPS = 2  # the event loop's, and one for threads
_OWN_MAPPING_BYTES = 1 << 20  # from this size on a piece is a mapping of its own, which goes when it is freed
_NEVER = 2**31 - 1  # bytes, the largest value that mallopt takes
_KEPT_BYTES = 4 << 20  # of free memory at a heap's end, so that it does not grow and shrink all the time


def prefer_giving_back() -> None:
    """For the front end's process, and not for one with an engine in it, whose steps want their memory again."""
    if (libc := _glibc()) is not None:
        libc.mallopt(_M_ARENA_MAX, _NUM_HEAPS)
        libc.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
    map_large_pieces()


def map_large_pieces() -> None:
    """Have malloc map each piece of 1 MiB or more by itself, and unmap it when it is freed.

    Otherwise glibc takes pieces of up to 32 MiB from its heaps once one of that size was freed, and a heap that holds
    anything behind a hole cannot shrink: loading weights leaves a hundred megabytes of holes.
    """
    if (libc := _glibc()) is not None:
        libc.mallopt(_M_MMAP_THRESHOLD, _OWN_MAPPING_BYTES)


def give_back() -> None:
    """Return every page that is free, in any heap; not on the event loop. An engine in this process gets its own again.

    The GIL is free meanwhile.
    """
    if (libc := _glibc()) is not None:
        libc.malloc_trim(0)


def drop_code() -> None:
    """Unmap the code of libraries. What runs again comes back from the system's cache, 16 pages at a time.

    Loading torch touches 70 MB of its libraries, and steps run few of them. A mapping with a page of its own, which was
    written to, stays.
    """
    with suppress(OSError):
        for start, end in _unwritten_code(Path("/proc/self/smaps").read_text(encoding="utf-8", errors="replace")):
            drop_pages(start, end)


def drop_pages(start: int, end: int) -> None:
    """Unmap pages of a file, from one address to another; what is read again comes back from the system's cache."""
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    madvise(start, end - start, mmap.MADV_DONTNEED)


def _unwritten_code(smaps: str) -> Iterator[tuple[int, int]]:
    """First and last addresses of mapped files' code, all of whose pages are the file's."""
    place: tuple[int, int] | None = None
    for line in smaps.splitlines():
        name, *fields = line.split()
        if not name.endswith(":"):
            first, _, last = name.partition("-")
            is_code = len(fields) > 4 and fields[0] == "r-xp" and fields[4].startswith("/")
            place = (int(first, 16), int(last, 16)) if is_code else None
        elif name == "Anonymous:" and place is not None and fields[0] == "0":
            yield place


def prefer_huge_pages() -> None:
    """Have torch ask for huge pages for each CPU tensor of 2 MiB or more, unless the user has set the variable.

    A step reads all weights and much of the KV cache, and with pages of 4 KiB a good part of it is spent on address
    translation. Torch reads the variable when it first allocates; it is set past Python's copy of the environment.
    """
    ctypes.CDLL(None).setenv(b"THP_MEM_ALLOC_ENABLE", b"1", 0)  # 0: a value that is there stays


def ask_for_huge_pages(mapping: mmap.mmap) -> None:
    """Have the kernel back a mapping with huge pages, if it has any."""
    with suppress(OSError):  # of a kernel without them
        mapping.madvise(mmap.MADV_HUGEPAGE)


def keep_freed_memory() -> None:
    """Have malloc return no freed memory to the system, and map no single allocation of up to 2 GiB.

    Otherwise each large temporary of a step is fresh memory, which the system clears page by page. Call it when
    everything is loaded, and what only loading needed has been given back.
    """
    if (libc := _glibc()) is not None:
        libc.mallopt(_M_MMAP_THRESHOLD, _NEVER)
        libc.mallopt(_M_TRIM_THRESHOLD, _NEVER)


def _glibc() -> ctypes.CDLL | None:
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "malloc_trim") else None  # musl has neither
