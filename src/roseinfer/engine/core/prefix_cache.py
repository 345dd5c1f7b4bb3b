"""The prefix cache: finds KV blocks that were already computed for the same tokens.

Each full block has a SHA-256 digest over its parent's digest and its own token ids; the chain starts from the cache
salt, so prompts share blocks only with prompts of the same salt. Token ids are compared on a hit too, so a collision
is a miss. The scheme is the usual hash chain (vLLM calls it automatic prefix caching).
"""

import hashlib
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from roseinfer.engine.core.batch import Int32Array
from roseinfer.engine.core.block_pool import BlockPool
from roseinfer.records import CachedBlock


@dataclass(slots=True, eq=False)
class BlockChain:
    """The digests and contents of one sequence's full blocks, first to last; it only grows."""

    root: bytes
    client_salt: str  # the part of the salt that is in the request's body, for KV events
    digests: list[bytes] = field(default_factory=list)
    contents: list[bytes] = field(default_factory=list)  # the token ids of each block as int32


class PrefixCache:
    """Maps digests of full blocks to the blocks that hold them, and to those being computed now.

    With `is_enabled` false, chains stay empty, so nothing is found, published or waited for.
    """

    def __init__(self, num_blocks: int, block_size: int, *, is_enabled: bool = True, tenant_share: float = 1.0) -> None:
        self.pool = BlockPool(num_blocks, self._forget, tenant_share)
        self.block_size = block_size
        self.is_enabled = is_enabled
        self._blocks: dict[bytes, CachedBlock] = {}
        self._digest_of: dict[int, bytes] = {}
        self._pending: Counter[bytes] = Counter()
        self.changes: deque[CachedBlock] = deque(maxlen=0)  # kept once a reader has set a deque without a limit

    def new_chain(self, salt: str, client_salt: str) -> BlockChain:
        return BlockChain(hashlib.sha256(salt.encode()).digest(), client_salt)

    def extend(self, chain: BlockChain, token_ids: Int32Array) -> None:
        """Extend the chain to all full blocks of `token_ids`, which begin with the tokens it already covers."""
        if not self.is_enabled:
            return
        digests, contents = chain.digests, chain.contents
        tail = token_ids[len(digests) * self.block_size :].tobytes()
        size = self.block_size * token_ids.itemsize
        digest = digests[-1] if digests else chain.root
        for start in range(0, len(tail) - size + 1, size):
            content = tail[start : start + size]
            digest = hashlib.sha256(digest + content).digest()
            digests.append(digest)
            contents.append(content)

    def match(self, chain: BlockChain, max_blocks: int) -> list[int]:
        """The longest run of cached blocks, from the first on, that holds the chain's tokens; at most `max_blocks`."""
        block_ids: list[int] = []
        parent = chain.root
        for digest, content in zip(chain.digests[:max_blocks], chain.contents, strict=False):
            cached = self._blocks.get(digest)
            if cached is None or cached.content != content or cached.parent != parent:
                break
            block_ids.append(cached.block_id)
            parent = digest
        return block_ids

    def publish(self, chain: BlockChain, start: int, block_ids: list[int]) -> None:
        """Make blocks `start`.. of the chain findable in `block_ids`. An equal block published earlier stays."""
        digests = chain.digests
        for index, block_id in enumerate(block_ids, start):
            digest = digests[index]
            self._pending.pop(digest, None)
            if digest not in self._blocks:
                parent = digests[index - 1] if index else chain.root
                salt = "" if index else chain.client_salt
                self._blocks[digest] = CachedBlock(block_id, digest, parent, chain.contents[index], not index, salt)
                self.changes.append(self._blocks[digest])
                self._digest_of[block_id] = digest
                self.pool.mark_cached(block_id, chain.root)

    def _forget(self, block_id: int) -> None:
        del self._blocks[digest := self._digest_of.pop(block_id)]
        self.changes.append(CachedBlock(block_id, digest))

    def forget_chain(self, chain: BlockChain) -> None:
        """Drop all blocks of the chain and all blocks computed after them, by any sequence."""
        children: dict[bytes, list[bytes]] = {}
        for digest, cached in self._blocks.items():
            children.setdefault(cached.parent, []).append(digest)
        lost = list(chain.digests)
        for digest in lost:
            lost += children.pop(digest, [])
        for digest in lost:
            if lost_block := self._blocks.get(digest):
                self._forget(lost_block.block_id)
                self.pool.unmark_cached(lost_block.block_id)

    def announce(self, chain: BlockChain, start: int, end: int) -> None:
        """Mark blocks start..end-1 of the chain as being computed: others with the same prefix may wait for them."""
        self._pending.update(chain.digests[start:end])

    def withdraw(self, chain: BlockChain, start: int, end: int) -> None:
        """Unmark blocks that will not be computed after all (abort, preemption)."""
        for digest in chain.digests[start:end]:
            if self._pending[digest] > 1:
                self._pending[digest] -= 1
            else:
                del self._pending[digest]

    def is_pending(self, chain: BlockChain, index: int) -> bool:
        """Whether some sequence is computing block `index` of this chain."""
        return index < len(chain.digests) and chain.digests[index] in self._pending

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    def find_faults(self) -> Iterator[tuple[str, str]]:
        """Name and detail of each broken invariant."""
        if len(self._blocks) != len(self._digest_of):
            yield "prefix_cache", "a cached block has two digests, or none"
        for block_id, digest in self._digest_of.items():
            cached = self._blocks.get(digest)
            if cached is None or cached.block_id != block_id:
                yield "prefix_cache", f"block {block_id} is not what its digest names"
                return
