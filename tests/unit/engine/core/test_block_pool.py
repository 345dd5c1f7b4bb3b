"""Reference counts, eviction order, and the one law: used + cached + free = total."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from roseinfer.engine.core.block_pool import BlockPool


def make_pool(num_blocks: int = 4) -> tuple[BlockPool, list[int]]:
    evicted: list[int] = []
    return BlockPool(num_blocks, evicted.append), evicted


def test_a_cached_block_outlives_its_owner_and_comes_back_into_use() -> None:
    pool, evicted = make_pool()
    (block_id,) = pool.allocate(1)
    pool.mark_cached(block_id, b"")
    pool.release([block_id])
    assert (pool.num_used, pool.num_cached, pool.num_available) == (0, 1, 4)
    pool.share([block_id])
    assert (pool.num_used, pool.num_cached) == (1, 0)
    assert evicted == []


def test_free_blocks_are_taken_before_cached_ones_and_the_least_recently_used_goes_first() -> None:
    pool, evicted = make_pool()
    blocks = pool.allocate(4)
    for block_id in blocks[:3]:
        pool.mark_cached(block_id, b"")
    pool.release([blocks[1]])
    pool.release([blocks[0]])
    pool.release([blocks[3]])  # never published: free
    assert pool.allocate(1) == [blocks[3]]
    assert evicted == []
    assert pool.allocate(2) == [blocks[1], blocks[0]]
    assert evicted == [blocks[1], blocks[0]]


def test_the_tail_of_a_sequence_is_evicted_before_its_head() -> None:
    pool, evicted = make_pool()
    blocks = pool.allocate(4)
    for block_id in blocks:
        pool.mark_cached(block_id, b"")
    pool.release(blocks)
    pool.allocate(2)
    assert evicted == [blocks[3], blocks[2]]


def test_a_shared_block_is_released_once_for_each_owner() -> None:
    pool, _ = make_pool()
    blocks = pool.allocate(1)
    pool.share(blocks)
    pool.release(blocks)
    assert pool.num_used == 1
    pool.release(blocks)
    assert pool.num_used == 0
    with pytest.raises(AssertionError, match="released more often"):
        pool.release(blocks)


class PoolMachine(RuleBasedStateMachine):
    """Random owners allocating, sharing, publishing and releasing."""

    held = Bundle("held")

    def __init__(self) -> None:
        super().__init__()
        self.cached: set[int] = set()
        self.pool = BlockPool(7, self.cached.remove)
        self.owners: list[list[int]] = []

    @rule(target=held, count=st.integers(1, 4))
    def allocate(self, count: int) -> list[int]:
        owned = self.pool.allocate(min(count, self.pool.num_available))
        self.owners.append(owned)
        return owned

    @rule(target=held, owned=held)
    def share(self, owned: list[int]) -> list[int]:
        self.pool.share(owned)
        shared = list(owned)
        self.owners.append(shared)
        return shared

    @rule(owned=held)
    def publish(self, owned: list[int]) -> None:
        for block_id in owned:
            self.pool.mark_cached(block_id, b"")
            self.cached.add(block_id)

    @rule(owned=consumes(held))
    def release(self, owned: list[int]) -> None:
        self.pool.release(owned)
        self.owners = [other for other in self.owners if other is not owned]

    @invariant()
    def holds(self) -> None:
        pool = self.pool
        assert not list(pool.find_faults(block_id for owned in self.owners for block_id in owned))
        num_free = pool.num_available - pool.num_cached
        assert pool.num_used + pool.num_cached + num_free == pool.num_blocks
        assert pool.num_used == len({block_id for owned in self.owners for block_id in owned})


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestPool = PoolMachine.TestCase
