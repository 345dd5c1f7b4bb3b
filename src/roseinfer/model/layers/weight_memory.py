"""Numbers of bytes into memory for packed weights, on huge pages where the system has them. Knows no layout.

A step on few rows reads every weight once and computes little: with pages of 4 KiB it waits for their translations,
one step in ten. Many weights are smaller than a huge page, so they share blocks.
"""

import mmap

import torch

_BLOCK_BYTES = 64 << 20  # of address space; what is not written takes no memory
_HUGE_PAGE_BYTES = 2 << 20
_ALIGNMENT = 64  # a cache line


class WeightMemory:
    """Hands out pieces of large blocks; a block is given back when no tensor is left in it."""

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8)

    def take(self, num_bytes: int) -> torch.Tensor:
        """Zeros, `num_bytes` of uint8 that begin on a cache line."""
        size = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        if size > self._free.numel():
            self._free = _new_block(max(size, _BLOCK_BYTES))
        piece, self._free = self._free[:num_bytes], self._free[size:]
        return piece


def _new_block(num_bytes: int) -> torch.Tensor:
    memory = mmap.mmap(-1, num_bytes + _HUGE_PAGE_BYTES)  # anonymous
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    block = torch.frombuffer(memory, dtype=torch.uint8)
    start = -block.data_ptr() % _HUGE_PAGE_BYTES
    return block[start : start + num_bytes]
