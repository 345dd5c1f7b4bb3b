"""Attention over pages in plain torch, for a CPU without compiled kernels.

A query at position p is always row p % 8 of query tile p // 8 of its sequence, and meets the keys in tiles of 64, also
cut at absolute positions. Each (query tile, key tile) pair is a product of the same small shape, and the tiles of a
query are added up in one order, from its own tile down to the first that one of the query tile's positions sees. So a
token's bits do not depend on the batch, on chunking or on what was found in the cache.

Query tiles are sorted by their number of key tiles, most first, and pairs by how far the key tile lies below the
query's own: the tiles that have a j-th pair are then a prefix of all tiles, and their j-th pairs are one contiguous
run. Without a window only the first run needs a mask.
"""

from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from roseinfer.model.attention.base import Attend, AttentionSpec, PackedTokens
from roseinfer.model.attention.kv_cache import KVCache, quantized_heads
from roseinfer.model.device import Scratch

QUERY_TILE = 8
KEY_TILE = 64
_TILES_PER_KEY_TILE = KEY_TILE // QUERY_TILE
_GATHER_BYTES = 4 << 20  # of keys or values gathered at a time: the product still finds them in the cache

IndexArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Consecutive pairs whose keys, or values, are gathered together."""

    products: slice  # the pairs times K
    pair_tiles: torch.Tensor  # [pairs] query tile of each
    blocks: torch.Tensor  # [pairs * K * blocks a key tile] rows of the cache as [blocks * K, block_size * head_dim]


@dataclass(frozen=True, slots=True)
class _Plan:
    """Indices and buffers of one step. H heads share K key heads: R = 8 * H / K rows of a query tile meet each."""

    query_tiles: torch.Tensor  # [tiles, K, R, head_dim] float32, zero where the step has no token
    query_rows: torch.Tensor  # [tokens * H] rows of query_tiles, seen as [tiles * H * 8, head_dim]
    write_rows: torch.Tensor  # [tokens * K] rows of the cache, seen as [blocks * K * block_size, head_dim]
    pair_tiles: torch.Tensor  # [pairs] query tile of each pair
    chunks: list[_Chunk]
    hidden: torch.Tensor  # [pairs to mask, 1, 1, 8, 64] True for a key that the query does not see
    runs: list[tuple[int, slice]]  # of each run but the first: its number of tiles, its pairs
    scores: torch.Tensor  # [pairs * K, R, 64]
    parts: torch.Tensor  # [pairs * K, R, head_dim]


class GatheredAttention:
    """Attention over a head-major cache `[blocks, kv_heads, block_size, head_dim]`; softmax and sums in float32.

    Scales of an int8 cache multiply the scores of their keys, and the weights of their values.
    """

    name = "gathered"
    is_capturable = False

    def __init__(self, cache: KVCache, spec: AttentionSpec) -> None:
        self._cache = cache
        self._spec = spec
        self._num_kv_heads = spec.num_kv_heads
        self._head_dim = spec.head_dim
        self._num_rows = QUERY_TILE * spec.num_heads // spec.num_kv_heads
        self._device = cache.keys[0].device
        self._scratch = Scratch(self._device)
        self._sinks = [  # [K, R] of each layer
            None if sinks is None else sinks.view(spec.num_kv_heads, -1).repeat_interleave(QUERY_TILE, 1)
            for sinks in spec.sinks_on(self._device)
        ]

    def prepare(self, tokens: PackedTokens) -> Attend:
        return partial(self._attend, {window: self._plan(tokens, window) for window in set(self._spec.windows)})

    def _plan(self, tokens: PackedTokens, window: int | None) -> _Plan:
        slots, positions = tokens.slots.astype(np.int64), tokens.positions.astype(np.int64)
        tiles_per_slot = tokens.block_table.shape[1] * self._cache.block_size // QUERY_TILE
        keys = slots * tiles_per_slot + positions // QUERY_TILE
        is_first = np.diff(keys, prepend=-1) != 0
        tile_of_token = np.cumsum(is_first) - 1
        last_of_tile = np.append(np.flatnonzero(is_first)[1:], len(keys)) - 1
        tile_slots, tile_indices = np.divmod(keys[last_of_tile], tiles_per_slot)
        own_key_tiles = tile_indices // _TILES_PER_KEY_TILE
        first_seen = 0 if window is None else np.maximum(0, tile_indices * QUERY_TILE - window + 1)
        num_key_tiles = own_key_tiles - first_seen // KEY_TILE + 1
        num_tiles = len(tile_indices)
        order = np.argsort(-num_key_tiles, kind="stable")
        rank = np.empty_like(order)
        rank[order] = np.arange(len(order))
        tile_slots, tile_indices, num_key_tiles = tile_slots[order], tile_indices[order], num_key_tiles[order]
        own_key_tiles = own_key_tiles[order]
        run_lengths = len(order) - np.searchsorted(num_key_tiles[::-1], np.arange(num_key_tiles[0]), side="right")
        runs = np.repeat(np.arange(len(run_lengths)), run_lengths)
        pair_tiles = np.arange(len(runs)) - np.repeat(np.cumsum(run_lengths) - run_lengths, run_lengths)
        last_positions = positions[last_of_tile][order]
        key_tiles = own_key_tiles[pair_tiles] - runs
        pair_blocks = self._key_tile_blocks(tokens, tile_slots[pair_tiles], key_tiles, last_positions[pair_tiles])
        num_masked = num_tiles if window is None else len(runs)
        query_rows = (
            rank[tile_of_token][:, None] * self._spec.num_heads + np.arange(self._spec.num_heads)
        ) * QUERY_TILE
        num_products = len(runs) * self._num_kv_heads
        tiles_shape = (num_tiles, self._num_kv_heads, self._num_rows, self._head_dim)
        tiles_on_device = self._index(pair_tiles)
        starts = np.cumsum(run_lengths).tolist()
        return _Plan(
            query_tiles=self._scratch.buffer(f"queries {window}", tiles_shape).zero_(),
            query_rows=self._index(query_rows + (positions % QUERY_TILE)[:, None]),
            write_rows=self._index(self._write_rows(tokens.block_table, slots, positions)),
            pair_tiles=tiles_on_device,
            chunks=self._chunks(tiles_on_device, self._index(pair_blocks)),
            hidden=self._hidden(tile_indices[pair_tiles[:num_masked]], key_tiles[:num_masked], window),
            runs=[(stop - start, slice(start, stop)) for start, stop in pairwise(starts)],
            scores=self._scratch.buffer("scores", (num_products, self._num_rows, KEY_TILE)),
            parts=self._scratch.buffer("parts", (num_products, self._num_rows, self._head_dim)),
        )

    def _hidden(self, query_tiles: IndexArray, key_tiles: IndexArray, window: int | None) -> torch.Tensor:
        """[pairs, 1, 1, 8, 64] True where the key lies after the query, or so far before it that its window is past."""
        queries = (query_tiles * QUERY_TILE)[:, None, None] + np.arange(QUERY_TILE)[:, None]
        distance = queries - ((key_tiles * KEY_TILE)[:, None, None] + np.arange(KEY_TILE))
        hidden = (distance < 0) if window is None else (distance < 0) | (distance >= window)
        return torch.from_numpy(hidden[:, None, None]).to(self._device)

    def _index(self, array: IndexArray) -> torch.Tensor:
        return torch.from_numpy(array.reshape(-1)).to(self._device)

    def _write_rows(self, block_table: npt.NDArray[np.int32], slots: IndexArray, positions: IndexArray) -> IndexArray:
        block_size = self._cache.block_size
        blocks = block_table[slots, positions // block_size].astype(np.int64)
        first: IndexArray = (blocks[:, None] * self._num_kv_heads + np.arange(self._num_kv_heads)) * block_size
        first += (positions % block_size)[:, None]
        return first

    def _key_tile_blocks(
        self, tokens: PackedTokens, slots: IndexArray, key_tiles: IndexArray, last_positions: IndexArray
    ) -> IndexArray:
        """[pairs, kv_heads, blocks] rows of the cache of each key tile; a sequence's last block fills up its tile."""
        blocks_per_tile = KEY_TILE // self._cache.block_size
        columns = key_tiles[:, None] * blocks_per_tile + np.arange(blocks_per_tile)
        columns = np.minimum(columns, (last_positions // self._cache.block_size)[:, None])
        blocks: IndexArray = tokens.block_table[slots[:, None], columns].astype(np.int64)
        rows: IndexArray = blocks[:, None, :] * self._num_kv_heads + np.arange(self._num_kv_heads)[:, None]
        return rows

    def _chunks(self, pair_tiles: torch.Tensor, pair_blocks: torch.Tensor) -> list[_Chunk]:
        """The pairs in pieces small enough for the processor's cache."""
        num_heads, blocks_per_tile = self._num_kv_heads, KEY_TILE // self._cache.block_size
        step = max(1, _GATHER_BYTES // (num_heads * KEY_TILE * self._head_dim * 4))
        chunks = []
        for start in range(0, pair_tiles.shape[0], step):
            tiles = pair_tiles[start : start + step]
            products = slice(start * num_heads, (start + tiles.shape[0]) * num_heads)
            blocks = pair_blocks[products.start * blocks_per_tile : products.stop * blocks_per_tile]
            chunks.append(_Chunk(products, tiles, blocks))
        return chunks

    def _attend(
        self, plans: dict[int | None, _Plan], layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        plan, head_dim = plans[self._spec.windows[layer]], self._head_dim
        self._write(plan, layer, k, v)
        scaled = q.float() * self._spec.scale
        plan.query_tiles.view(-1, head_dim).index_copy_(0, plan.query_rows, scaled.reshape(-1, head_dim))
        self._score(plan, layer)
        totals = self._softmax(plan, self._sinks[layer])
        mixed = self._mix(plan, layer).div_(totals.unsqueeze(-1))
        return mixed.view(-1, head_dim).index_select(0, plan.query_rows).to(q.dtype).view(q.shape[0], -1)

    def _write(self, plan: _Plan, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        cache, head_dim = self._cache, self._head_dim
        # A block keeps its former owner's values behind the mask, where their weight is 0: they must be finite.
        v = v.nan_to_num()
        if cache.is_quantized:
            (k, key_scales), (v, value_scales) = quantized_heads(k), quantized_heads(v)
            cache.key_scales[layer].view(-1).index_copy_(0, plan.write_rows, key_scales.view(-1))
            cache.value_scales[layer].view(-1).index_copy_(0, plan.write_rows, value_scales.view(-1))
        cache.keys[layer].view(-1, head_dim).index_copy_(0, plan.write_rows, k.reshape(-1, head_dim))
        cache.values[layer].view(-1, head_dim).index_copy_(0, plan.write_rows, v.reshape(-1, head_dim))

    def _gather_scales(self, scales: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
        """Scales of a layer -> those of the given blocks [pairs * K, 1, 64], in scratch."""
        shape = (blocks.shape[0], self._cache.block_size)
        rows = self._scratch.buffer("scales", shape)
        torch.index_select(scales.view(-1, shape[1]), 0, blocks, out=rows)
        return rows.view(-1, 1, KEY_TILE)

    def _gather(self, pages: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
        """Keys or values of a layer -> those of the given blocks [pairs * K, 64, head_dim] float32, in scratch."""
        shape = (blocks.shape[0], self._cache.block_size * self._head_dim)
        rows = self._scratch.buffer(f"pages {pages.dtype}", shape, pages.dtype)
        torch.index_select(pages.view(-1, shape[1]), 0, blocks, out=rows)
        if rows.dtype != torch.float32:
            rows = self._scratch.buffer("wide pages", shape).copy_(rows)
        return rows.view(-1, KEY_TILE, self._head_dim)

    def _score(self, plan: _Plan, layer: int) -> None:
        """Products of queries and keys into the plan's scores, -inf where the query does not see the key."""
        cache = self._cache
        num_tiles = plan.query_tiles.shape[0]
        tiles = plan.query_tiles.view(num_tiles, -1)
        for chunk in plan.chunks:
            queries = self._scratch.buffer("pair queries", (chunk.pair_tiles.shape[0], tiles.shape[1]))
            torch.index_select(tiles, 0, chunk.pair_tiles, out=queries)
            tile_keys = self._gather(cache.keys[layer], chunk.blocks).transpose(1, 2)
            scores = plan.scores[chunk.products]
            _multiply(queries.view(-1, self._num_rows, self._head_dim), tile_keys, scores)
            if cache.is_quantized:
                scores.mul_(self._gather_scales(cache.key_scales[layer], chunk.blocks))
        if cap := self._spec.softcap:
            plan.scores.div_(cap).tanh_().mul_(cap)
        num_masked = plan.hidden.shape[0]
        masked = plan.scores[: num_masked * self._num_kv_heads]
        masked.view(num_masked, self._num_kv_heads, -1, QUERY_TILE, KEY_TILE).masked_fill_(plan.hidden, -torch.inf)

    def _softmax(self, plan: _Plan, sinks: torch.Tensor | None) -> torch.Tensor:
        """Scores into exp(score - maximum of the query), in place; the sum of them for each query [tiles, K, R].

        A sink counts in the maximum and in the sum.
        """
        shape = (-1, self._num_kv_heads, self._num_rows)
        num_tiles = plan.query_tiles.shape[0]
        pair_maxima = plan.scores.amax(-1).view(shape)
        maxima = pair_maxima[:num_tiles]
        for length, pairs in plan.runs:
            torch.maximum(maxima[:length], pair_maxima[pairs], out=maxima[:length])
        if sinks is not None:
            torch.maximum(maxima, sinks, out=maxima)
        plan.scores.sub_(maxima.index_select(0, plan.pair_tiles).view(-1, self._num_rows, 1)).exp_()
        sums = plan.scores.sum(-1).view(shape)
        totals = sums[:num_tiles]
        for length, pairs in plan.runs:
            totals[:length] += sums[pairs]
        if sinks is not None:
            totals += torch.exp(sinks - maxima)
        return totals

    def _mix(self, plan: _Plan, layer: int) -> torch.Tensor:
        """The values of each query, weighted by its scores and summed [tiles, K, R, head_dim]."""
        cache = self._cache
        for chunk in plan.chunks:
            weights = plan.scores[chunk.products]
            if cache.is_quantized:
                weights.mul_(self._gather_scales(cache.value_scales[layer], chunk.blocks))
            _multiply(weights, self._gather(cache.values[layer], chunk.blocks), plan.parts[chunk.products])
        parts = plan.parts.view(-1, *plan.query_tiles.shape[1:])
        mixed = parts[: plan.query_tiles.shape[0]]
        for length, pairs in plan.runs:
            mixed[:length] += parts[pairs]
        return mixed


def _multiply(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """The products of matrices, to `out`. Of a single pair torch would share out the sums to three threads and more."""
    if len(a) == 1:
        out.copy_(torch.bmm(a.expand(2, -1, -1), b.expand(2, -1, -1))[:1])
    else:
        torch.bmm(a, b, out=out)
