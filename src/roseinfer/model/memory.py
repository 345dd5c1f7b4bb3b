"""How this process gets memory from the system: huge pages for what lasts, and what a step frees stays with us.

Knows nothing of tensors, and imports no torch: the first of its functions has to run before that.
"""

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # mallopt(3)
_NEVER = 2**31 - 1  # bytes, the most that mallopt can be told


def prefer_huge_pages() -> None:
    """Have torch ask for huge pages for each tensor of 2 MiB or more on a CPU, unless the user has said otherwise.

    A step reads all weights and much of the KV cache, and with pages of 4 KiB a good part of it is spent looking up
    where they lie. Torch reads the variable when it first allocates; it is set past Python's copy of the environment.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).setenv(b"THP_MEM_ALLOC_ENABLE", b"1", 0)  # 0: a value that is there stays


def keep_freed_memory() -> None:
    """Have malloc give no freed memory back to the system, and take none of up to 2 GiB from it for one use.

    Otherwise each large temporary of a step is fresh memory, which the system clears page by page. To be called when
    everything is loaded: what was only needed for that has gone back by then.
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        if hasattr(libc, "mallopt"):  # glibc has it, musl has not
            libc.mallopt(_M_MMAP_THRESHOLD, _NEVER)
            libc.mallopt(_M_TRIM_THRESHOLD, _NEVER)
