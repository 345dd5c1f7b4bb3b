"""How the front end gives memory back to the system: large pieces when they are freed, the rest when it is told to.

glibc keeps what was freed for whoever asks next, in a heap for each few threads, and the larger the pieces are that it
has seen freed, the larger those are that it keeps. A few texts of two megabytes, encoded by different threads, would so
leave hundreds of megabytes with the process. Knows nothing of what is in the memory.
"""

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # mallopt(3)
_NUM_HEAPS = 2  # the event loop's, and one for threads
_OWN_MAPPING_BYTES = 1 << 20  # from this size on a piece is a mapping of its own, which goes when it is freed
_KEPT_BYTES = 4 << 20  # of free memory at a heap's end, so that it does not grow and shrink all the time


def prefer_giving_back() -> None:
    """For the front end's process, and not for one with an engine in it, whose steps want their memory again."""
    if (libc := _glibc()) is not None:
        libc.mallopt(_M_ARENA_MAX, _NUM_HEAPS)
        libc.mallopt(_M_MMAP_THRESHOLD, _OWN_MAPPING_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def give_back() -> None:
    """Return every page that is free, in any heap; not on the event loop. An engine in this process gets its own again.

    The GIL is free meanwhile.
    """
    if (libc := _glibc()) is not None:
        libc.malloc_trim(0)


def _glibc() -> ctypes.CDLL | None:
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "malloc_trim") else None  # musl has neither
