"""Attention of rows with one new token each over the paged KV cache.

softmax(q K^T * scale) V over the positions up to the token's own, or the last `window` of them. The cached keys of a
row are cut into tiles, and the tiles into at most `num_splits` runs, one program each (split KV, as in Flash-Decoding,
Dao et al. 2023); each keeps a running softmax (Milakov and Gimelshein 2018), and a second kernel joins them. How a row
is cut follows from its own length and `num_splits` alone.

The token's own key and value come from the step's tensors, rounded as the cache keeps them, and belong to the first
split, which alone writes them. So no program reads what another one writes, and the append costs no launch.
"""

from typing import NamedTuple

import triton.language as tl
from triton import next_power_of_2

from roseinfer.model.attention.base import DeviceTokens
from roseinfer.model.triton_kernels.language import (
    LOWEST,
    SPILLING_SUMS,
    Constant,
    Pointer,
    constant,
    dot_dtype,
    kernel,
)
from roseinfer.model.triton_kernels.paging import (
    Heads,
    Pages,
    Scores,
    Step,
    bend,
    load_tile,
    page_offsets,
    quantized,
    sinks_of,
    table_of,
    with_scales,
)

MAX_SPLITS = 32
MIN_SPLIT_KEYS = 256  # a program with fewer keys costs more to start than it saves

_TILE_ELEMENTS = 4096  # keys of a tile times padded_dim: 32 registers a thread for each of K, V and the sums
_DOT_ROWS = 16  # rows of the smallest product of tensor cores


class Parts(NamedTuple):
    """Results of each split for each row and query head, float32. They are not read if there is one split."""

    mixed: Pointer  # [rows, heads, splits, head_dim] sum of 2^(score - peak) * value; arbitrary where total is 0
    peaks: Pointer  # [rows, heads, splits] greatest score, as a power of two
    totals: Pointer  # [rows, heads, splits] sum of 2^(score - peak)


class Cut(NamedTuple):
    """How a row's keys are divided."""

    tile: Constant  # keys of a tile, a power of two
    num_splits: Constant  # a power of two
    min_tiles: Constant  # of a split, but for the last of a row
    dot_dtype: Constant


def choose_num_splits(num_programs: int, num_keys: int, num_processors: int) -> int:
    """Splits, a power of two, that give each multiprocessor two programs, if the keys that a head sees suffice."""
    wanted = -(-2 * num_processors // num_programs)
    useful = -(-num_keys // MIN_SPLIT_KEYS)
    num_splits: int = next_power_of_2(max(1, min(wanted, useful, MAX_SPLITS)))
    return num_splits


def decode(step: Step, pages: Pages, rows: DeviceTokens, parts: Parts, heads: Heads, scores: Scores) -> None:
    """Write the keys and values of the rows' tokens into the cache, and their attention into `step.out`.

    Row r has one new token, which is token r. `parts` decides the number of splits, a power of two.
    """
    num_rows, num_heads, num_splits, _ = parts.mixed.shape
    group, padded_dim = heads.group.value, heads.padded_dim.value
    num_kv_heads = num_heads // group
    tile = max(16, min(64, _TILE_ELEMENTS // padded_dim))
    cut = Cut(
        tile=constant(tile),
        num_splits=constant(num_splits),
        min_tiles=constant(MIN_SPLIT_KEYS // tile),
        dot_dtype=constant(dot_dtype(step.q.dtype if pages.has_scales.value else pages.k.dtype)),
    )
    grid = (num_rows, num_kv_heads, num_splits)
    if group == 1:
        _decode_head[grid](step, pages, rows, parts, heads, cut, scores, num_warps=4)
    else:
        num_dot_rows = max(_DOT_ROWS, next_power_of_2(group))
        num_warps = 8 if num_dot_rows * padded_dim >= SPILLING_SUMS else 4
        _decode_group[grid](step, pages, rows, parts, heads, cut, scores, num_dot_rows, num_warps=num_warps)
    if num_splits > 1:
        _join[num_rows, num_heads](step, parts, heads, num_splits, num_warps=2)


@kernel()
def _share(position: tl.tensor, split: tl.tensor, cut: Cut, window: tl.constexpr) -> tl.tensor:
    """The first position that the row sees, and the split's first key tile and the one after its last."""
    first = position * 0
    if window > 0:
        first = tl.maximum(position - window + 1, 0)
    first_tile = first // cut.tile
    end_tile = (position + cut.tile - 1) // cut.tile
    num_tiles = (end_tile - first_tile + cut.num_splits - 1) // cut.num_splits
    num_tiles = tl.maximum(num_tiles, cut.min_tiles)
    begin = first_tile + split * num_tiles
    return first, begin, tl.minimum(begin + num_tiles, end_tile)


@kernel()
def _append(step: Step, pages: Pages, table: tl.tensor, position: tl.tensor, heads: Heads) -> tl.tensor:
    """The row's new key and value, as the cache keeps them, [padded_dim] float32; the first split writes them there."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    is_first = tl.program_id(2) == 0
    dims = tl.arange(0, heads.padded_dim)
    is_dim = dims < heads.dim
    key = tl.load(step.k + row * step.k_stride + head * heads.dim + dims, mask=is_dim, other=0.0)
    value = tl.load(step.v + row * step.v_stride + head * heads.dim + dims, mask=is_dim, other=0.0)
    place = page_offsets(pages, table, head, position, is_first)
    key_scale = 1.0
    value_scale = 1.0
    if pages.has_scales:
        keys, key_scales = quantized(key[None, :])
        values, value_scales = quantized(value[None, :])
        key, value = tl.sum(keys, axis=0), tl.sum(values, axis=0)
        key_scale, value_scale = tl.sum(key_scales, axis=0), tl.sum(value_scales, axis=0)
        tl.store(pages.k_scales + place // heads.dim, key_scale, mask=is_first)
        tl.store(pages.v_scales + place // heads.dim, value_scale, mask=is_first)
    key = key.to(pages.k.dtype.element_ty)
    value = value.to(pages.v.dtype.element_ty)
    tl.store(pages.k + place + dims, key, mask=is_dim & is_first)
    tl.store(pages.v + place + dims, value, mask=is_dim & is_first)
    return key.to(tl.float32) * key_scale, value.to(tl.float32) * value_scale


@kernel()
def _decode_head(
    step: Step, pages: Pages, rows: DeviceTokens, parts: Parts, heads: Heads, cut: Cut, scores: Scores
) -> None:
    """Multi-head attention: a query head has its key head for itself, so a product of matrices would be mostly padding.

    Each of the tile's lanes keeps a running softmax of its own, and they are joined once, at the end: inside the loop
    no thread waits for another warp.
    """
    row = tl.program_id(0)
    head = tl.program_id(1)
    split = tl.program_id(2)
    position = tl.load(rows.starts + row)
    table = table_of(rows, row)
    dims = tl.arange(0, heads.padded_dim)
    is_dim = dims < heads.dim
    query = tl.load(step.q + row * step.q_stride + head * heads.dim + dims, mask=is_dim, other=0.0)
    query = query.to(tl.float32) * scores.scale
    first, begin, end = _share(position, split, cut, scores.window)
    peaks = tl.full([cut.tile], LOWEST, tl.float32)
    totals = tl.zeros([cut.tile], tl.float32)
    mixed = tl.zeros([cut.tile, heads.padded_dim], tl.float32)
    for tile in range(begin, end):
        positions = tile * cut.tile + tl.arange(0, cut.tile)
        is_seen = (positions >= first) & (positions < position)
        places = page_offsets(pages, table, head, positions, is_seen)
        keys, values = load_tile(pages, places, is_seen, heads, tl.float32)
        products = tl.sum(keys * query[None, :], axis=1)
        products = bend(with_scales(products, pages.k_scales, places, is_seen, pages, heads), scores)
        products = tl.where(is_seen, products, float("-inf"))
        new_peaks = tl.maximum(peaks, products)
        fading = tl.exp2(peaks - new_peaks)
        weights = tl.exp2(products - new_peaks)
        totals = totals * fading + weights
        weights = with_scales(weights, pages.v_scales, places, is_seen, pages, heads)
        mixed = mixed * fading[:, None] + weights[:, None] * values
        peaks = new_peaks
    own_key, own_value = _append(step, pages, table, position, heads)
    own_score = tl.where(split == 0, bend(tl.sum(query * own_key), scores), float("-inf"))
    sink = sinks_of(scores, head, split == 0)
    peak = tl.maximum(tl.maximum(tl.max(peaks), own_score), sink)
    lanes = tl.exp2(peaks - peak)
    own_weight = tl.exp2(own_score - peak)
    total = tl.sum(totals * lanes) + own_weight + tl.exp2(sink - peak)
    result = tl.sum(mixed * lanes[:, None], axis=0) + own_weight * own_value
    if cut.num_splits == 1:
        place = step.out + row * step.out_stride + head * heads.dim
        tl.store(place + dims, result / total, mask=is_dim)
    else:
        part = (row * tl.num_programs(1) + head) * cut.num_splits + split
        tl.store(parts.peaks + part, peak)
        tl.store(parts.totals + part, total)
        if total > 0:
            tl.store(parts.mixed + part * heads.dim + dims, result, mask=is_dim)


@kernel()
def _decode_group(
    step: Step,
    pages: Pages,
    rows: DeviceTokens,
    parts: Parts,
    heads: Heads,
    cut: Cut,
    scores: Scores,
    num_dot_rows: tl.constexpr,
) -> None:
    """Grouped-query attention: the query heads of a group are the rows of a product with the tile's keys."""
    row, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    position = tl.load(rows.starts + row)
    table = table_of(rows, row)
    dims = tl.arange(0, heads.padded_dim)
    is_dim = dims < heads.dim
    members = tl.arange(0, num_dot_rows)
    is_member = members < heads.group
    query_heads = head * heads.group + members
    here = query_heads[:, None] * heads.dim + dims[None, :]  # in a token's queries, and in its results
    is_here = is_member[:, None] & is_dim[None, :]
    queries = tl.load(step.q + row * step.q_stride + here, mask=is_here, other=0.0)
    first, begin, end = _share(position, split, cut, scores.window)
    peaks = tl.full([num_dot_rows], LOWEST, tl.float32)
    totals = tl.zeros([num_dot_rows], tl.float32)
    mixed = tl.zeros([num_dot_rows, heads.padded_dim], tl.float32)
    for tile in range(begin, end):
        positions = tile * cut.tile + tl.arange(0, cut.tile)
        is_seen = (positions >= first) & (positions < position)
        places = page_offsets(pages, table, head, positions, is_seen)
        keys, values = load_tile(pages, places, is_seen, heads, cut.dot_dtype)
        products = tl.dot(queries.to(cut.dot_dtype), tl.trans(keys), input_precision="ieee") * scores.scale
        products = with_scales(products, pages.k_scales, places[None, :], is_seen[None, :], pages, heads)
        products = tl.where(is_seen[None, :], bend(products, scores), float("-inf"))
        new_peaks = tl.maximum(peaks, tl.max(products, axis=1))
        fading = tl.exp2(peaks - new_peaks)
        weights = tl.exp2(products - new_peaks[:, None])
        totals = totals * fading + tl.sum(weights, axis=1)
        weights = with_scales(weights, pages.v_scales, places[None, :], is_seen[None, :], pages, heads)
        mixed = tl.dot(weights.to(cut.dot_dtype), values, mixed * fading[:, None], input_precision="ieee")
        peaks = new_peaks
    own_key, own_value = _append(step, pages, table, position, heads)
    own_scores = bend(tl.sum(queries.to(tl.float32) * own_key[None, :], axis=1) * scores.scale, scores)
    own_scores = tl.where(split == 0, own_scores, float("-inf"))
    sinks = sinks_of(scores, query_heads, is_member & (split == 0))
    new_peaks = tl.maximum(tl.maximum(peaks, own_scores), sinks)
    fading = tl.exp2(peaks - new_peaks)
    own_weights = tl.exp2(own_scores - new_peaks)
    totals = totals * fading + own_weights + tl.exp2(sinks - new_peaks)
    mixed = mixed * fading[:, None] + own_weights[:, None] * own_value[None, :]
    if cut.num_splits == 1:
        tl.store(step.out + row * step.out_stride + here, mixed / totals[:, None], mask=is_here)
    else:
        num_heads = tl.num_programs(1) * heads.group
        split_parts = (row * num_heads + query_heads) * cut.num_splits + split
        tl.store(parts.peaks + split_parts, new_peaks, mask=is_member)
        tl.store(parts.totals + split_parts, totals, mask=is_member)
        places = split_parts[:, None] * heads.dim + dims[None, :]
        tl.store(parts.mixed + places, mixed, mask=is_here & (totals > 0)[:, None])


@kernel()
def _join(step: Step, parts: Parts, heads: Heads, num_splits: tl.constexpr) -> None:
    """Join the splits of one row and query head, in the order of the splits."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    dims = tl.arange(0, heads.padded_dim)
    is_dim = dims < heads.dim
    splits = (row * tl.num_programs(1) + head) * num_splits + tl.arange(0, num_splits)
    peaks = tl.load(parts.peaks + splits)
    totals = tl.load(parts.totals + splits)
    is_there = (totals > 0)[:, None] & is_dim[None, :]
    mixed = tl.load(parts.mixed + splits[:, None] * heads.dim + dims[None, :], mask=is_there, other=0.0)
    weights = tl.exp2(peaks - tl.max(peaks))
    result = tl.sum(mixed * weights[:, None], axis=0) / tl.sum(totals * weights)
    place = step.out + row * step.out_stride + head * heads.dim
    tl.store(place + dims, result, mask=is_dim)
