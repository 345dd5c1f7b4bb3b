"""Which KV blocks are used, which are kept for the prefix cache, and which are free. Knows ids and counts, no contents.

A block is in exactly one of three states, so used + cached + free = total:

    used    some sequence holds it (reference count > 0)
    cached  nobody holds it, but the prefix cache knows what it contains; it may be taken, least recently used first
    free    nobody holds it and nobody knows it
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable

import numpy as np


class BlockPool:
    """Reference counts and eviction order of `num_blocks` blocks.

    `on_evict(block_id)` is called when a cached block is taken for new contents. Asking for more than
    `num_available` blocks is a mistake of the caller.
    """

    def __init__(self, num_blocks: int, on_evict: Callable[[int], None]) -> None:
        self.num_blocks = num_blocks
        self._on_evict = on_evict
        self._reference_counts = [0] * num_blocks  # lists: a step touches a few of them, one at a time
        self._is_cached = [False] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: what was just used is warm
        self._evictable: OrderedDict[int, None] = OrderedDict()  # cached blocks, the next to be evicted first

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can hand out: free ones and, by eviction, cached ones."""
        return len(self._free) + len(self._evictable)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_available

    @property
    def num_cached(self) -> int:
        return len(self._evictable)

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks, free ones before cached ones, each with one reference."""
        assert count <= self.num_available, f"{count} blocks wanted, {self.num_available} available"
        block_ids = [self._free.pop() if self._free else self._evict() for _ in range(count)]
        for block_id in block_ids:
            self._reference_counts[block_id] = 1
        return block_ids

    def _evict(self) -> int:
        block_id, _ = self._evictable.popitem(last=False)
        self._is_cached[block_id] = False
        self._on_evict(block_id)
        return block_id

    def share(self, block_ids: Iterable[int]) -> None:
        """Add a reference to each block; a cached one comes back into use."""
        for block_id in block_ids:
            if self._reference_counts[block_id] == 0:
                del self._evictable[block_id]
            self._reference_counts[block_id] += 1

    def release(self, block_ids: Iterable[int]) -> None:
        """Drop a reference to each block of one sequence, given first to last.

        The last blocks become the first to be evicted: a prefix without its tail is of use, a tail without its prefix
        is not.
        """
        for block_id in reversed(list(block_ids)):
            self._reference_counts[block_id] -= 1
            assert self._reference_counts[block_id] >= 0, f"block {block_id} released more often than taken"
            if self._reference_counts[block_id] == 0:
                if self._is_cached[block_id]:
                    self._evictable[block_id] = None
                else:
                    self._free.append(block_id)

    def mark_cached(self, block_id: int) -> None:
        """The prefix cache knows this block's contents from now on, until it is evicted."""
        assert self._reference_counts[block_id] > 0, "only a block in use can be published"
        self._is_cached[block_id] = True

    def is_evictable(self, block_id: int) -> bool:
        return block_id in self._evictable

    def check_integrity(self, held: Iterable[int]) -> None:
        """Assert every invariant, given the block ids that sequences hold (one entry for each reference)."""
        expected = np.bincount(np.fromiter(held, np.int64), minlength=self.num_blocks)
        assert np.array_equal(self._reference_counts, expected), "reference counts differ from what sequences hold"
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        assert not free & self._evictable.keys(), "a block is free and cached"
        unused = set(np.flatnonzero(np.array(self._reference_counts) == 0).tolist())
        assert unused == free | self._evictable.keys(), "used + cached + free differs from the total"
        assert all(self._is_cached[block_id] for block_id in self._evictable), "an evictable block is not cached"
        assert not any(self._is_cached[block_id] for block_id in free), "a free block is still marked as cached"
