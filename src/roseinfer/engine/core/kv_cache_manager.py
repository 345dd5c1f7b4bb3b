"""Gives slots and KV blocks to sequences and frees them; finds cached prefixes and publishes computed blocks."""

from bisect import insort

from roseinfer.config.options import CacheConfig
from roseinfer.engine.core.prefix_cache import PrefixCache
from roseinfer.engine.core.sequence import Sequence, SlotTable

# Of the cached blocks, the share that one cache salt may hold while others hold some. Half: one tenant cannot flood the
# cache, and two can share it.
_SALT_SHARE = 0.5


class KVCacheManager:
    """Owner of the block pool, the prefix cache and the slot table. A resident is a sequence that holds a slot."""

    def __init__(self, cache: CacheConfig, *, num_slots: int, num_blocks: int, max_model_len: int) -> None:
        self.block_size = cache.block_size
        self.prefix_cache = PrefixCache(
            num_blocks, cache.block_size, is_enabled=cache.prefix_caching, tenant_share=_SALT_SHARE
        )
        self.pool = self.prefix_cache.pool
        self.table = SlotTable(num_slots, max_model_len, cache.block_size)
        self.residents: list[Sequence] = []  # oldest first
        self._num_entered = 0

    def num_missing(self, sequence: Sequence) -> int:
        """Known tokens of a resident that are not in its KV cache yet."""
        return self.table.num_tokens(sequence.slot) - self.table.num_computed.item(sequence.slot)

    def match_prefix(self, sequence: Sequence) -> list[int]:
        """The cached blocks to start from.

        The last known token is always computed, since its logits are needed; so are all of a prompt that is scored, or
        whose mean is asked for.
        """
        self.prefix_cache.extend(sequence.chain, sequence.token_ids)
        return self.prefix_cache.match(sequence.chain, self._max_matched(sequence))

    def _max_matched(self, sequence: Sequence) -> int:
        return (len(sequence.token_ids) - 1) // self.block_size if sequence.may_match else 0

    def is_prefix_pending(self, sequence: Sequence, num_matched: int) -> bool:
        """Whether a resident is computing the very block that this sequence needs next."""
        return num_matched < self._max_matched(sequence) and self.prefix_cache.is_pending(sequence.chain, num_matched)

    def fits(self, sequence: Sequence, matched: list[int]) -> bool:
        """Whether all known tokens fit, and every resident could still get one more block.

        The margin keeps a newcomer from being preempted in the step after its admission. That a slot is free is checked
        by the caller.
        """
        num_revived = sum(self.pool.is_evictable(block_id) for block_id in matched)
        return self._num_new_blocks(sequence, matched) + num_revived + len(self.residents) <= self.pool.num_available

    def _num_new_blocks(self, sequence: Sequence, matched: list[int]) -> int:
        return -(-len(sequence.token_ids) // self.block_size) - len(matched)

    def allocate(self, sequence: Sequence, matched: list[int]) -> None:
        """Give the sequence a slot and blocks for all known tokens; those of `matched` are filled already."""
        self.pool.share(matched)
        block_ids = matched + self.pool.allocate(self._num_new_blocks(sequence, matched))
        self.table.bind(sequence, block_ids, len(matched) * self.block_size)
        if sequence.scores is not None:
            sequence.scores = []  # what was scored before a preemption is scored again
        sequence.pooled = None
        if sequence.age < 0:
            sequence.age = self._num_entered
            self._num_entered += 1
        sequence.num_published_blocks = len(matched)
        sequence.num_announced_blocks = len(sequence.chain.digests)
        self.prefix_cache.announce(sequence.chain, len(matched), len(sequence.chain.digests))
        insort(self.residents, sequence, key=lambda resident: resident.age)

    def free(self, sequence: Sequence) -> None:
        """Free a resident's slot and blocks, and withdraw the announced blocks that it will not compute.

        Its generated tokens are published here, all at once; while it ran, only an identical sequence could have used
        them.
        """
        self.publish(sequence, int(self.table.num_computed[sequence.slot]))
        self.prefix_cache.withdraw(sequence.chain, sequence.num_published_blocks, sequence.num_announced_blocks)
        self.residents.remove(sequence)
        self.pool.release(self.table.unbind(sequence))

    def grow(self, slots: list[int]) -> None:
        """Give each of the slots one more block. The pool must have as many available."""
        if slots:
            self.table.append_blocks(slots, self.pool.allocate(len(slots)))

    def reserve(self, slot: int, num_more: int) -> int:
        """Take blocks for drafted tokens behind the next one, if every resident could still get one more after it.

        Returns for how many of them there is room. The slot keeps the blocks, and what did not hold is overwritten.
        """
        needed = int(self.table.num_computed[slot]) + 1 + num_more
        while self.table.capacities[slot] < needed and self.pool.num_available > len(self.residents):
            self.grow([slot])
        return min(num_more, int(self.table.capacities[slot]) - (needed - num_more))

    def publish(self, sequence: Sequence, num_computed: int) -> None:
        """Let others find the blocks that a resident's first `num_computed` tokens fill: they are in its KV cache."""
        num_full, start = num_computed // self.block_size, sequence.num_published_blocks
        if num_full <= start or not self.prefix_cache.is_enabled or sequence.has_failed:
            return
        table, slot = self.table, sequence.slot
        self.prefix_cache.extend(sequence.chain, table.token_ids[slot, : num_full * self.block_size])
        self.prefix_cache.publish(sequence.chain, start, table.block_ids[slot, start:num_full].tolist())
        sequence.num_published_blocks = num_full

    def unpublish(self, sequence: Sequence) -> None:
        """Hide what a failed sequence computed or started from, and what follows it, since it may be wrong.

        Sequences that share these blocks keep them; if the blocks are wrong, their own logits will show it.
        """
        sequence.has_failed = True
        self.prefix_cache.forget_chain(sequence.chain)
