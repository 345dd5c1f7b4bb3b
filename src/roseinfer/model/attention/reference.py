"""Packed tokens into attention over pages, in plain torch: the oracle, and the CPU without a compiler.

Knows nothing about models. Its rule is "same shape, same place": a query at position p is always row p % 8 of query
tile p // 8 of its sequence, and meets the keys in tiles of 64, also cut at absolute positions. Each (query tile, key
tile) pair is a product of the same small shape, and the tiles of a query are added up in one order, from its own tile
down to position 0. So a token's bits do not depend on the batch, on chunking or on what was found in the cache.

Query tiles are sorted by their number of key tiles, most first, and pairs by how far the key tile lies below the
query's own: the tiles that have a j-th pair are then a prefix of all tiles, their j-th pairs are one contiguous run,
and only the first run needs a causal mask.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from roseinfer.model.attention.base import Attend, PackedTokens
from roseinfer.model.kv_cache import KVCache
from roseinfer.model.scratch import Scratch

QUERY_TILE = 8
KEY_TILE = 64
_TILES_PER_KEY_TILE = KEY_TILE // QUERY_TILE
_GATHER_BYTES = 4 << 20  # keys or values are gathered so many at a time, so that the product finds them in the cache

IndexArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Plan:
    """The indices of one step, on the device. H heads, K of them with keys; R = 8 * H / K rows of a tile a key head."""

    query_tiles: torch.Tensor  # [tiles, K, R, head_dim] float32, zero where the step has no token
    query_rows: torch.Tensor  # [tokens * H] rows of query_tiles, seen as [tiles * H * 8, head_dim]
    write_rows: torch.Tensor  # [tokens * K] rows of the cache, seen as [blocks * K * block_size, head_dim]
    pair_tiles: torch.Tensor  # [pairs] query tile of each pair
    pair_blocks: torch.Tensor  # [pairs * K * blocks_per_key_tile] rows of the cache as [blocks * K, block_size * dim]
    hidden: torch.Tensor  # [tiles, 1, 1, 8, 64] True where a key of the query's own tile lies after it
    run_lengths: list[int]  # pairs in the j-th run; the first run has one for each tile

    @property
    def runs(self) -> Iterator[tuple[int, slice]]:
        """(number of tiles, their pairs) of each run after the first."""
        start = self.run_lengths[0]
        for length in self.run_lengths[1:]:
            yield length, slice(start, start + length)
            start += length


class ReferenceAttention:
    """Attention over a head-major cache `[blocks, kv_heads, block_size, head_dim]`; softmax and sums in float32."""

    name = "reference"

    def __init__(self, cache: KVCache, num_heads: int) -> None:
        self._cache = cache
        self._num_heads = num_heads
        self._num_kv_heads = cache.shape.num_kv_heads
        self._head_dim = cache.shape.head_dim
        self._scale = self._head_dim**-0.5
        self._device = cache.keys[0].device
        self._scratch = Scratch(self._device)
        query = torch.arange(KEY_TILE, device=self._device).view(_TILES_PER_KEY_TILE, QUERY_TILE, 1)
        self._hidden = torch.arange(KEY_TILE, device=self._device) > query  # [8 tiles, 8 queries, 64 keys]

    def prepare(self, tokens: PackedTokens) -> Attend:
        """See AttentionBackend."""
        return partial(self._attend, self._plan(tokens))

    def _plan(self, tokens: PackedTokens) -> _Plan:
        slots, positions = tokens.slots.astype(np.int64), tokens.positions.astype(np.int64)
        tiles_per_slot = tokens.block_table.shape[1] * self._cache.block_size // QUERY_TILE
        keys, tile_of_token = np.unique(slots * tiles_per_slot + positions // QUERY_TILE, return_inverse=True)
        tile_slots, tile_indices = np.divmod(keys, tiles_per_slot)
        num_key_tiles = tile_indices // _TILES_PER_KEY_TILE + 1
        order = np.argsort(-num_key_tiles, kind="stable")
        rank = np.empty_like(order)
        rank[order] = np.arange(len(order))
        tile_slots, tile_indices, num_key_tiles = tile_slots[order], tile_indices[order], num_key_tiles[order]
        run_lengths = len(order) - np.searchsorted(num_key_tiles[::-1], np.arange(num_key_tiles[0]), side="right")
        runs = np.repeat(np.arange(len(run_lengths)), run_lengths)
        pair_tiles = np.arange(len(runs)) - np.repeat(np.cumsum(run_lengths) - run_lengths, run_lengths)
        last_positions = np.zeros(len(order), np.int64)
        np.maximum.at(last_positions, rank[tile_of_token], positions)
        pair_blocks = self._key_tile_blocks(
            tokens, tile_slots[pair_tiles], (num_key_tiles[pair_tiles] - 1 - runs), last_positions[pair_tiles]
        )
        heads = np.arange(self._num_heads)
        query_rows = (rank[tile_of_token][:, None] * self._num_heads + heads) * QUERY_TILE
        query_tiles = self._scratch.take(
            "queries", (len(order), self._num_kv_heads, self._rows, self._head_dim)
        ).zero_()
        return _Plan(
            query_tiles=query_tiles,
            query_rows=self._index(query_rows + (positions % QUERY_TILE)[:, None]),
            write_rows=self._index(self._write_rows(tokens.block_table, slots, positions)),
            pair_tiles=self._index(pair_tiles),
            pair_blocks=self._index(pair_blocks),
            hidden=self._hidden[self._index(tile_indices % _TILES_PER_KEY_TILE)][:, None, None],
            run_lengths=run_lengths.tolist(),
        )

    @property
    def _rows(self) -> int:
        return QUERY_TILE * self._num_heads // self._num_kv_heads

    def _index(self, array: IndexArray) -> torch.Tensor:
        return torch.from_numpy(array.reshape(-1)).to(self._device)

    def _write_rows(self, block_table: npt.NDArray[np.int32], slots: IndexArray, positions: IndexArray) -> IndexArray:
        block_size = self._cache.block_size
        blocks = block_table[slots, positions // block_size].astype(np.int64)
        heads = np.arange(self._num_kv_heads)
        rows: IndexArray = (blocks[:, None] * self._num_kv_heads + heads) * block_size
        return rows + (positions % block_size)[:, None]

    def _key_tile_blocks(
        self, tokens: PackedTokens, slots: IndexArray, key_tiles: IndexArray, last_positions: IndexArray
    ) -> IndexArray:
        """[pairs, kv_heads, blocks] rows of the cache that make up each key tile.

        Blocks after the last query's are not the sequence's; its last block stands in for them, behind the mask.
        """
        blocks_per_tile = KEY_TILE // self._cache.block_size
        columns = key_tiles[:, None] * blocks_per_tile + np.arange(blocks_per_tile)
        columns = np.minimum(columns, (last_positions // self._cache.block_size)[:, None])
        blocks = tokens.block_table[slots[:, None], columns].astype(np.int64)
        return blocks[:, None, :] * self._num_kv_heads + np.arange(self._num_kv_heads)[:, None]

    def _attend(self, plan: _Plan, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        head_dim = self._head_dim
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        keys.view(-1, head_dim).index_copy_(0, plan.write_rows, k.reshape(-1, head_dim))
        # A block keeps its former owner's values behind the mask, where their weight is 0: they must be finite.
        values.view(-1, head_dim).index_copy_(0, plan.write_rows, v.nan_to_num().reshape(-1, head_dim))
        scaled = q.float() * self._scale
        plan.query_tiles.view(-1, head_dim).index_copy_(0, plan.query_rows, scaled.reshape(-1, head_dim))
        weights, totals = self._softmax(plan, self._scores(plan, keys))
        mixed = self._weighted_values(plan, weights, values).div_(totals.unsqueeze(-1))
        return mixed.view(-1, head_dim).index_select(0, plan.query_rows).to(q.dtype).view(q.shape[0], -1)

    def _gather(self, name: str, pages: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
        """Pages of the given blocks -> [pairs * kv_heads, 64, head_dim] float32, in scratch."""
        shape = (len(blocks), self._cache.block_size * self._head_dim)
        rows = self._scratch.take(f"pages {name}", shape, pages.dtype)
        torch.index_select(pages.view(-1, shape[1]), 0, blocks, out=rows)
        if rows.dtype != torch.float32:
            rows = self._scratch.take(f"wide pages {name}", shape).copy_(rows)
        return rows.view(-1, KEY_TILE, self._head_dim)

    def _chunks(self, plan: _Plan) -> Iterator[tuple[slice, slice, torch.Tensor]]:
        """Consecutive pairs as (pairs, products, their block rows), small enough for the processor's cache."""
        num_heads, blocks_per_tile = self._num_kv_heads, KEY_TILE // self._cache.block_size
        step = max(1, _GATHER_BYTES // (num_heads * KEY_TILE * self._head_dim * 4))
        num_pairs = len(plan.pair_tiles)
        for start in range(0, num_pairs, step):
            stop = min(start + step, num_pairs)
            products = slice(start * num_heads, stop * num_heads)
            blocks = plan.pair_blocks[products.start * blocks_per_tile : products.stop * blocks_per_tile]
            yield slice(start, stop), products, blocks

    def _scores(self, plan: _Plan, keys: torch.Tensor) -> torch.Tensor:
        """[pairs, kv_heads, rows, 64] products of queries and keys, -inf where the key lies after the query."""
        num_pairs, rows, head_dim = len(plan.pair_tiles), self._rows, self._head_dim
        scores = self._scratch.take("scores", (num_pairs * self._num_kv_heads, rows, KEY_TILE))
        tiles = plan.query_tiles.view(len(plan.query_tiles), -1)
        for pairs, products, blocks in self._chunks(plan):
            queries = self._scratch.take("pair queries", (pairs.stop - pairs.start, tiles.shape[1]))
            torch.index_select(tiles, 0, plan.pair_tiles[pairs], out=queries)
            tile_keys = self._gather("keys", keys, blocks).transpose(1, 2)
            torch.bmm(queries.view(-1, rows, head_dim), tile_keys, out=scores[products])
        own = scores[: plan.run_lengths[0] * self._num_kv_heads]
        own.view(plan.run_lengths[0], self._num_kv_heads, -1, QUERY_TILE, KEY_TILE).masked_fill_(
            plan.hidden, -torch.inf
        )
        return scores.view(num_pairs, self._num_kv_heads, rows, KEY_TILE)

    def _softmax(self, plan: _Plan, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores, overwritten by exp(score - row maximum), and each row's sum of them [tiles, kv_heads, rows]."""
        pair_maxima = scores.amax(-1)
        maxima = pair_maxima[: plan.run_lengths[0]]
        for num_tiles, pairs in plan.runs:
            torch.maximum(maxima[:num_tiles], pair_maxima[pairs], out=maxima[:num_tiles])
        weights = scores.sub_(maxima.index_select(0, plan.pair_tiles).unsqueeze(-1)).exp_()
        sums = weights.sum(-1)
        totals = sums[: plan.run_lengths[0]]
        for num_tiles, pairs in plan.runs:
            totals[:num_tiles] += sums[pairs]
        return weights, totals

    def _weighted_values(self, plan: _Plan, weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """[tiles, kv_heads, rows, head_dim] values summed with their weights, not yet divided by the total."""
        num_heads, rows, head_dim = self._num_kv_heads, self._rows, self._head_dim
        parts = self._scratch.take("parts", (len(plan.pair_tiles), num_heads, rows, head_dim))
        for pairs, products, blocks in self._chunks(plan):
            tile_weights = weights.view(-1, rows, KEY_TILE)[products]
            torch.bmm(tile_weights, self._gather("values", values, blocks), out=parts[pairs].view(-1, rows, head_dim))
        mixed = parts[: plan.run_lengths[0]]
        for num_tiles, pairs in plan.runs:
            mixed[:num_tiles] += parts[pairs]
        return mixed
