"""Which sequences hold slots and blocks: entering, growing, publishing what was computed, and leaving.

The memory side of the scheduler. Knows blocks, slots and prefixes; nothing of budgets, turns or steps.
"""

from roseinfer.config import CacheConfig
from roseinfer.engine.batch import Int32Array
from roseinfer.engine.prefix_cache import BlockChain, PrefixCache
from roseinfer.engine.sequence import Sequence, SequenceStatus, SlotTable


class Residency:
    """Owner of the block pool, the prefix cache and the slot table."""

    def __init__(self, cache: CacheConfig, *, num_slots: int, num_blocks: int, max_model_len: int) -> None:
        self.block_size = cache.block_size
        self.prefix_cache = PrefixCache(num_blocks, cache.block_size, is_enabled=cache.prefix_caching)
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
        """Cached blocks to start from. The last known token is always computed, since its logits are needed."""
        self.prefix_cache.extend(sequence.chain, sequence.token_ids)
        return self.prefix_cache.match(sequence.chain, self._max_matched(sequence))

    def _max_matched(self, sequence: Sequence) -> int:
        return (len(sequence.token_ids) - 1) // self.block_size

    def is_prefix_pending(self, sequence: Sequence, num_matched: int) -> bool:
        """A resident is computing the very block that this sequence needs next."""
        return num_matched < self._max_matched(sequence) and self.prefix_cache.is_pending(sequence.chain, num_matched)

    def fits(self, sequence: Sequence, matched: list[int]) -> bool:
        """A slot is free, all known tokens fit, and every resident could still take one more block.

        The margin keeps a newcomer from being preempted in the step after its admission.
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
        if sequence.age < 0:
            sequence.age = self._num_entered
            self._num_entered += 1
        sequence.num_published_blocks = len(matched)
        sequence.num_announced_blocks = len(sequence.chain.digests)
        self.prefix_cache.announce(sequence.chain, len(matched), len(sequence.chain.digests))
        self.sequences.append(sequence)
        self.sequences.sort(key=lambda resident: resident.age)

    def leave(self, sequence: Sequence) -> None:
        """Take slot and blocks back, and what was announced and will not be computed."""
        self.prefix_cache.withdraw(sequence.chain, sequence.num_published_blocks, sequence.num_announced_blocks)
        self.sequences.remove(sequence)
        self.pool.release(self.table.unbind(sequence))

    def find_full(self, slots: Int32Array) -> Int32Array:
        """Those of the slots whose last block is full, so that the next token needs a new one."""
        full: Int32Array = slots[self.table.num_computed[slots] == self.table.blocks.lengths[slots] * self.block_size]
        return full

    def grow(self, slots: Int32Array) -> None:
        """Give each of the slots one more block. The pool must have as many."""
        if len(slots):
            self.table.blocks.append(slots, self.pool.allocate(len(slots)))

    def advance(self, slots: Int32Array, starts: Int32Array, num_new_tokens: Int32Array) -> None:
        """The tokens are in the KV cache now: count them, and publish every block that became full."""
        table = self.table
        ends = starts + num_new_tokens
        table.num_computed[slots] = ends
        if not self.prefix_cache.is_enabled:
            return
        for slot in slots[ends // self.block_size > starts // self.block_size].tolist():
            sequence = table.owner(slot)
            num_full = int(table.num_computed[slot]) // self.block_size
            self.prefix_cache.extend(sequence.chain, table.known_tokens(slot)[: num_full * self.block_size])
            for index in range(sequence.num_published_blocks, num_full):
                self.prefix_cache.publish(sequence.chain, index, int(table.blocks.ids[slot, index]))
            sequence.num_published_blocks = num_full
            sequence.num_announced_blocks = max(num_full, sequence.num_announced_blocks)

    def check_integrity(self) -> None:
        """Assert that sequences, slots and blocks agree."""
        table = self.table
        self.pool.check_integrity(block for s in self.sequences for block in table.blocks.of(s.slot))
        self.prefix_cache.check_integrity()
        assert len(self.sequences) + table.num_free == len(table.owners), "a slot is lost"
        for sequence in self.sequences:
            slot = sequence.slot
            assert sequence.status in {SequenceStatus.PREFILLING, SequenceStatus.DECODING}
            assert table.owners[slot] is sequence, f"slot {slot} has another owner"
            assert table.num_computed[slot] < table.num_tokens[slot] <= table.max_tokens[slot]
            assert table.num_computed[slot] <= table.blocks.lengths[slot] * self.block_size
        if not self.sequences:
            assert not self.prefix_cache.num_pending, "blocks are announced that nobody computes"
