"""Which sequences hold slots and blocks: entering, growing, publishing what was computed, and leaving.

The memory side of the scheduler. Knows blocks, slots and prefixes; nothing of budgets, turns or steps.
"""

from bisect import insort

from roseinfer.config.tree import CacheConfig
from roseinfer.engine.core.batch import IndexArray
from roseinfer.engine.core.prefix_cache import BlockChain, PrefixCache
from roseinfer.engine.core.sequence import Sequence, SlotTable


class Residency:
    """Owner of the block pool, the prefix cache and the slot table."""

    def __init__(self, cache: CacheConfig, *, num_slots: int, num_blocks: int, max_model_len: int) -> None:
        self.block_size = cache.block_size
        self.prefix_cache = PrefixCache(
            num_blocks, cache.block_size, is_enabled=cache.prefix_caching, tenant_share=cache.salt_share
        )
        self.pool = self.prefix_cache.pool
        self.table = SlotTable(num_slots, max_model_len, cache.block_size)
        self.sequences: list[Sequence] = []  # those with a slot, oldest first
        self._num_entered = 0

    def new_chain(self, cache_salt: str) -> BlockChain:
        return self.prefix_cache.new_chain(cache_salt)

    def num_missing(self, sequence: Sequence) -> int:
        """Known tokens of a resident that are not in its KV cache yet."""
        return int(self.table.num_tokens[sequence.slot] - self.table.num_computed[sequence.slot])

    def match_prefix(self, sequence: Sequence) -> list[int]:
        """Cached blocks to start from. The last known token is always computed, since its logits are needed.

        So are all tokens of a prompt that is scored.
        """
        self.prefix_cache.extend(sequence.chain, sequence.token_ids)
        return self.prefix_cache.match(sequence.chain, self._max_matched(sequence))

    def _max_matched(self, sequence: Sequence) -> int:
        return 0 if sequence.scores is not None else (len(sequence.token_ids) - 1) // self.block_size

    def is_prefix_pending(self, sequence: Sequence, num_matched: int) -> bool:
        """A resident is computing the very block that this sequence needs next."""
        return num_matched < self._max_matched(sequence) and self.prefix_cache.is_pending(sequence.chain, num_matched)

    def fits(self, sequence: Sequence, matched: list[int]) -> bool:
        """All known tokens fit, and every resident could still take one more block.

        The margin keeps a newcomer from being preempted in the step after its admission. Whether a slot is free is for
        the caller to ask, of `table`.
        """
        num_revived = sum(self.pool.is_evictable(block_id) for block_id in matched)
        return self._num_new_blocks(sequence, matched) + num_revived + len(self.sequences) <= self.pool.num_available

    def _num_new_blocks(self, sequence: Sequence, matched: list[int]) -> int:
        return -(-len(sequence.token_ids) // self.block_size) - len(matched)

    def enter(self, sequence: Sequence, matched: list[int]) -> None:
        """Give the sequence a slot and blocks for all known tokens, those of `matched` being filled already."""
        self.pool.share(matched)
        block_ids = matched + self.pool.allocate(self._num_new_blocks(sequence, matched))
        self.table.bind(sequence, block_ids, len(matched) * self.block_size)
        if sequence.scores is not None:
            sequence.scores = []  # what was read before a preemption is read again
        if sequence.age < 0:
            sequence.age = self._num_entered
            self._num_entered += 1
        sequence.num_published_blocks = len(matched)
        sequence.num_announced_blocks = len(sequence.chain.digests)
        self.prefix_cache.announce(sequence.chain, len(matched), len(sequence.chain.digests))
        insort(self.sequences, sequence, key=lambda resident: resident.age)

    def leave(self, sequence: Sequence) -> None:
        """Take slot and blocks back, and what was announced and will not be computed.

        What it generated is published here, all at once: while it ran nobody could ask for it, short of a twin.
        """
        self.publish(sequence, int(self.table.num_computed[sequence.slot]))
        self.prefix_cache.withdraw(sequence.chain, sequence.num_published_blocks, sequence.num_announced_blocks)
        self.sequences.remove(sequence)
        self.pool.release(self.table.unbind(sequence))

    def find_full(self, slots: IndexArray) -> list[int]:
        """Those of the slots whose last block is full, so that the next token needs a new one."""
        full: list[int] = slots[self.table.num_computed[slots] == self.table.blocks.capacities[slots]].tolist()
        return full

    def grow(self, slots: list[int]) -> None:
        """Give each of the slots one more block. The pool must have as many."""
        if len(slots):
            self.table.blocks.append(slots, self.pool.allocate(len(slots)))

    def publish(self, sequence: Sequence, num_computed: int) -> None:
        """The first `num_computed` tokens of a resident are in its KV cache: let others find the blocks they fill."""
        num_full, start = num_computed // self.block_size, sequence.num_published_blocks
        if num_full <= start or not self.prefix_cache.is_enabled or sequence.has_failed:
            return
        table, slot = self.table, sequence.slot
        self.prefix_cache.extend(sequence.chain, table.token_ids[slot, : num_full * self.block_size])
        self.prefix_cache.publish(sequence.chain, start, table.blocks.ids[slot, start:num_full].tolist())
        sequence.num_published_blocks = num_full
        sequence.num_announced_blocks = max(num_full, sequence.num_announced_blocks)

    def disown(self, sequence: Sequence) -> None:
        """What the sequence computed, or started from, may be wrong: nobody finds it any more, nor what follows it.

        Who shares the blocks already keeps them; if they are wrong, its own logits will say so.
        """
        self.prefix_cache.forget_chain(sequence.chain)
