"""Allocates, shares, frees and evicts KV blocks by their ids.

A block is in exactly one of three states, so used + cached + free = total:

    used    some sequence holds it (reference count > 0)
    cached  no sequence holds it, but the prefix cache can find its contents; it may be evicted, least recently used
            first, and first from a tenant with more than its share of the cached blocks
    free    no sequence holds it, and its contents are unknown
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator

import numpy as np


class BlockPool:
    """Reference counts and eviction order of `num_blocks` blocks.

    `on_evict(block_id)` is called when a cached block is taken for new contents. A tenant is a name under which blocks
    are published. With several tenants, the largest loses its own oldest block while it holds more than `tenant_share`
    of the cached blocks: a tenant that floods the cache evicts itself, and a tenant that is alone may fill it.
    """

    def __init__(self, num_blocks: int, on_evict: Callable[[int], None], tenant_share: float = 1.0) -> None:
        self.num_blocks = num_blocks
        self._on_evict = on_evict
        self._tenant_share = tenant_share
        self._reference_counts = [0] * num_blocks  # lists: a step touches a few of them, one at a time
        self._tenants: list[bytes | None] = [None] * num_blocks  # that published it; None: its contents are unknown
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: what was just used is warm
        self._evictable: OrderedDict[int, None] = OrderedDict()  # cached blocks, the next to be evicted first
        self._evictable_of: dict[bytes, OrderedDict[int, None]] = {}  # the same by tenant, of those that have any

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
        """Take `count` blocks, at most `num_available`: free ones before cached ones, each with one reference."""
        assert count <= self.num_available, f"{count} blocks wanted, {self.num_available} available"
        largest = self._find_largest() if count > len(self._free) else None
        block_ids = [self._free.pop() if self._free else self._evict(largest) for _ in range(count)]
        for block_id in block_ids:
            self._reference_counts[block_id] = 1
        return block_ids

    def _find_largest(self) -> OrderedDict[int, None] | None:
        """The cached blocks of the tenant that has most; None when there is one tenant."""
        return max(self._evictable_of.values(), key=len) if len(self._evictable_of) > 1 else None

    def _evict(self, largest: OrderedDict[int, None] | None) -> int:
        is_flooded = largest is not None and len(largest) > self._tenant_share * len(self._evictable)
        block_id = next(iter(largest if largest is not None and is_flooded else self._evictable))
        self._remove_evictable(block_id)
        self._tenants[block_id] = None
        self._on_evict(block_id)
        return block_id

    def _remove_evictable(self, block_id: int) -> None:
        del self._evictable[block_id]
        tenant = self._tenants[block_id]
        assert tenant is not None, "an evictable block is cached"
        of_tenant = self._evictable_of[tenant]
        del of_tenant[block_id]
        if not of_tenant:
            del self._evictable_of[tenant]

    def share(self, block_ids: Iterable[int]) -> None:
        """Add a reference to each block; a cached one comes back into use."""
        for block_id in block_ids:
            if self._reference_counts[block_id] == 0:
                self._remove_evictable(block_id)
            self._reference_counts[block_id] += 1

    def release(self, block_ids: Iterable[int]) -> None:
        """Drop a reference to each block of one sequence, given first to last.

        The last blocks are evicted first: a prefix without its tail can be used, a tail without its prefix cannot.
        """
        for block_id in reversed(list(block_ids)):
            self._reference_counts[block_id] -= 1
            assert self._reference_counts[block_id] >= 0, f"block {block_id} released more often than taken"
            if self._reference_counts[block_id] == 0:
                tenant = self._tenants[block_id]
                if tenant is None:
                    self._free.append(block_id)
                else:
                    self._evictable[block_id] = None
                    self._evictable_of.setdefault(tenant, OrderedDict())[block_id] = None

    def mark_cached(self, block_id: int, tenant: bytes) -> None:
        """Record that the prefix cache can find this block's contents, until it is evicted."""
        assert self._reference_counts[block_id] > 0, "only a block in use can be published"
        self._tenants[block_id] = tenant

    def unmark_cached(self, block_id: int) -> None:
        """Record that the prefix cache has dropped the block other than by eviction."""
        if self.is_evictable(block_id):
            self._remove_evictable(block_id)
            self._free.append(block_id)
        self._tenants[block_id] = None

    def is_evictable(self, block_id: int) -> bool:
        return block_id in self._evictable

    def find_faults(self, held: Iterable[int]) -> Iterator[tuple[str, str]]:
        """Name and detail of each broken invariant, given the block ids that sequences hold, one for each reference."""
        expected = np.bincount(np.fromiter(held, np.int64), minlength=self.num_blocks)
        counts = np.array(self._reference_counts)
        if not np.array_equal(counts, expected):
            yield "refcounts", f"{int((counts != expected).sum())} blocks are not held as often as they are counted"
        free, unused = set(self._free), set((counts == 0).nonzero()[0].tolist())
        is_split = len(free) == len(self._free) and not free & self._evictable.keys()
        if not is_split or unused != free | self._evictable.keys():
            yield "blocks", "used + cached + free differs from the total"
        if any(self._tenants[block_id] is None for block_id in self._evictable):
            yield "cached_blocks", "an evictable block is not cached"
        if any(self._tenants[block_id] is not None for block_id in free):
            yield "cached_blocks", "a free block is still marked as cached"
        by_tenant = [block_id for blocks in self._evictable_of.values() for block_id in blocks]
        if sorted(by_tenant) != sorted(self._evictable) or not all(self._evictable_of.values()):
            yield "cached_blocks", "the tenants' cached blocks are not all that are cached"
