"""Attention of packed rows of new tokens over the paged KV cache.

softmax(q K^T * scale) V, each token over the positions up to its own, or the last `window` of them. A tile of queries
is one program for each key head, with a running softmax over tiles of keys (FlashAttention-2, Dao 2023, over pages); a
tile is filled with the query heads of a group and then with tokens, so grouped queries share what is read.

Key tiles are cut at absolute positions and met in ascending order, and one that a query sees nothing of changes no bit
of its sums. So a token's result does not depend on the other rows, on where its row was cut into steps, or on whether
its prefix was computed here. The keys and values of the step are written by a kernel before, since any program may
read them.
"""

from typing import NamedTuple

import torch
import triton.language as tl
from triton import next_power_of_2

from roseinfer.model.attention.base import DeviceTokens
from roseinfer.model.triton_kernels.language import (
    LOWEST,
    SPILLING_SUMS,
    Constant,
    constant,
    dot_dtype,
    has_wide_products,
    kept,
    kernel,
    launch,
)
from roseinfer.model.triton_kernels.paging import (
    Heads,
    Pages,
    Scores,
    Step,
    bend,
    find_tile,
    load_tile,
    num_tiles,
    page_offsets,
    quantized,
    sinks_of,
    table_of,
    with_scales,
)

_APPENDED_TOKENS = tl.constexpr(32)  # by one program, for one head
_TILE_ROWS = 64  # of tensor cores' products, unless a group has more heads


@kept
class Tiles(NamedTuple):
    """How queries and keys are cut."""

    queries: Constant  # tokens of a query tile
    rows: Constant  # rows of its products: tokens times heads of a group, and padding up to a power of two
    keys: Constant  # keys of a key tile, a power of two
    dot_dtype: Constant
    num_warps: Constant


def tiles_of(heads: Heads, computed: torch.dtype) -> Tiles:
    """The tiles for queries, or keys and values where these are not int8, of this type: such that no register spills.

    Float32 is multiplied without tensor cores, out of registers, so its tiles are small.
    """
    group, padded_dim = heads.group.value, heads.padded_dim.value
    is_wide, is_float32 = has_wide_products(), computed.itemsize == 4
    num_rows = max(16 if is_float32 else _TILE_ROWS, next_power_of_2(group))
    num_keys = 32 if is_float32 or padded_dim > (128 if is_wide else 64) else 64
    is_large = padded_dim > 128 and (is_float32 or not is_wide)
    is_large = is_large or (num_rows > _TILE_ROWS and num_rows * padded_dim >= SPILLING_SUMS)
    return Tiles(
        queries=constant(num_rows // group),
        rows=constant(num_rows),
        keys=constant(num_keys),
        dot_dtype=constant(dot_dtype(computed)),
        num_warps=constant(8 if is_large else 4),
    )


def varlen(step: Step, pages: Pages, rows: DeviceTokens, heads: Heads, tiles: Tiles, scores: Scores) -> None:
    """Write the keys and values of all rows' tokens into the cache, and their attention into `step.out`.

    Row r has the tokens from query_starts[r] to query_starts[r + 1]. Tokens past the last row are left alone.
    """
    append(step, pages, rows, heads)
    num_tokens, num_kv_heads = step.k.shape[:2]
    num_rows = rows.starts.shape[0]
    grid = (num_tiles(num_tokens, num_rows, tiles.queries.value), num_kv_heads, 1)
    arguments = (step, pages, rows, heads, tiles, scores, num_rows)
    launch(_attend_tile, grid, *arguments, num_warps=tiles.num_warps.value)


def append(step: Step, pages: Pages, rows: DeviceTokens, heads: Heads) -> None:
    """Write the keys and values of all rows' tokens into the cache."""
    num_tokens, num_kv_heads = step.k.shape[:2]
    num_rows = rows.starts.shape[0]
    grid = (num_tiles(num_tokens, num_rows, _APPENDED_TOKENS.value), num_kv_heads, 1)
    launch(_append_tile, grid, step, pages, rows, heads, num_rows, num_warps=4)


@kernel("num_rows")
def _append_tile(step: Step, pages: Pages, rows: DeviceTokens, heads: Heads, num_rows: tl.tensor) -> None:
    """Write one head's keys and values of some tokens of a row into the cache."""
    row, first_query = find_tile(rows, num_rows, tl.program_id(0), _APPENDED_TOKENS)
    head = tl.program_id(1)
    first_token = tl.load(rows.query_starts + row)
    num_queries = tl.load(rows.query_starts + row + 1) - first_token
    queries = first_query + tl.arange(0, _APPENDED_TOKENS)
    is_query = queries < num_queries
    dims = tl.arange(0, heads.padded_dim)
    is_there = is_query[:, None] & (dims < heads.dim)[None, :]
    tokens = (first_token + queries).to(tl.int64)[:, None]  # a long step has more than 2**31 numbers
    keys = tl.load(step.k + tokens * step.k_stride + head * heads.dim + dims[None, :], mask=is_there, other=0.0)
    values = tl.load(step.v + tokens * step.v_stride + head * heads.dim + dims[None, :], mask=is_there, other=0.0)
    positions = tl.load(rows.starts + row) + queries
    first_places = page_offsets(pages, table_of(rows, row), head, positions, is_query)
    places = first_places[:, None] + dims[None, :]
    if pages.has_scales:
        keys, key_scales = quantized(keys)
        values, value_scales = quantized(values)
        keys, values = keys.to(tl.int8), values.to(tl.int8)
        tl.store(pages.k_scales + first_places // heads.dim, key_scales, mask=is_query)
        tl.store(pages.v_scales + first_places // heads.dim, value_scales, mask=is_query)
    tl.store(pages.k + places, keys, mask=is_there)
    tl.store(pages.v + places, values, mask=is_there)


@kernel("num_rows")
def _attend_tile(
    step: Step, pages: Pages, rows: DeviceTokens, heads: Heads, tiles: Tiles, scores: Scores, num_rows: tl.tensor
) -> None:
    """One tile of queries over all keys that any of them sees."""
    row, first_query = find_tile(rows, num_rows, tl.program_id(0), tiles.queries)
    head = tl.program_id(1)
    first_token = tl.load(rows.query_starts + row)
    num_queries = tl.load(rows.query_starts + row + 1) - first_token
    if first_query >= num_queries:
        return
    start = tl.load(rows.starts + row)
    table = table_of(rows, row)
    lanes = tl.arange(0, tiles.rows)
    queries = first_query + lanes // heads.group
    is_query = (queries < num_queries) & (lanes < tiles.queries * heads.group)
    positions = start + queries
    dims = tl.arange(0, heads.padded_dim)
    is_dim = dims < heads.dim
    here = (head * heads.group + lanes % heads.group)[:, None] * heads.dim + dims[None, :]
    tokens = (first_token + queries).to(tl.int64)[:, None]  # a long step has more than 2**31 numbers
    is_here = is_query[:, None] & is_dim[None, :]
    tile_queries = tl.load(step.q + tokens * step.q_stride + here, mask=is_here, other=0.0)
    tile_queries = tile_queries.to(tiles.dot_dtype)
    peaks = tl.full([tiles.rows], LOWEST, tl.float32)
    totals = tl.zeros([tiles.rows], tl.float32)
    mixed = tl.zeros([tiles.rows, heads.padded_dim], tl.float32)
    first = start * 0
    if scores.window > 0:
        first = tl.maximum(start + first_query - scores.window + 1, 0) // tiles.keys * tiles.keys
    end = start + tl.minimum(first_query + tiles.queries, num_queries)
    for tile_start in range(first, end, tiles.keys):
        key_positions = tile_start + tl.arange(0, tiles.keys)
        is_key = key_positions < end
        places = page_offsets(pages, table, head, key_positions, is_key)
        keys, values = load_tile(pages, places, is_key, heads, tiles.dot_dtype)
        is_seen = key_positions[None, :] <= positions[:, None]
        if scores.window > 0:
            is_seen = is_seen & (key_positions[None, :] > positions[:, None] - scores.window)
        products = tl.dot(tile_queries, tl.trans(keys), input_precision="ieee") * scores.scale
        products = with_scales(products, pages.k_scales, places[None, :], is_key[None, :], pages, heads)
        products = tl.where(is_seen, bend(products, scores), float("-inf"))
        new_peaks = tl.maximum(peaks, tl.max(products, axis=1))
        fading = tl.exp2(peaks - new_peaks)
        weights = tl.exp2(products - new_peaks[:, None])
        totals = totals * fading + tl.sum(weights, axis=1)
        weights = with_scales(weights, pages.v_scales, places[None, :], is_key[None, :], pages, heads)
        mixed = tl.dot(weights.to(tiles.dot_dtype), values, mixed * fading[:, None], input_precision="ieee")
        peaks = new_peaks
    if scores.has_sinks:
        sinks = sinks_of(scores, head * heads.group + lanes % heads.group, is_query)
        new_peaks = tl.maximum(peaks, sinks)
        fading = tl.exp2(peaks - new_peaks)
        totals = totals * fading + tl.exp2(sinks - new_peaks)
        mixed = mixed * fading[:, None]
    tl.store(step.out + tokens * step.out_stride + here, mixed / totals[:, None], mask=is_here)
