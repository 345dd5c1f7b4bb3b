"""Attention of rows with one new token each over the paged KV cache.

softmax(q K^T * scale) V over the positions up to the token's own, or the last `window` of them. The cached keys of a
row are cut into tiles, and the tiles into at most `num_splits` runs, one program each (split KV, as in Flash-Decoding,
Dao et al. 2023); each keeps a running softmax (Milakov and Gimelshein 2018). How a row is cut follows from its own
length and the plan alone. A row that fills one split is done with it; else the program that finishes last joins what
they all left in memory, in the order of the splits, so that its bits do not depend on which one that was.

The token's own key and value come from the step's tensors, rounded as the cache keeps them, and belong to the first
split, which alone writes them. So no program reads what another one writes before all have arrived, and neither the
append nor the join costs a launch.
"""

from functools import cache
from typing import NamedTuple

import torch
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
    load_tile,
    page_offsets,
    quantized,
    sinks_of,
    table_of,
    with_scales,
)
from roseinfer.model.triton_kernels.tunings import DecodeTuning

MAX_SPLITS = 32

_DOT_ROWS = 16  # rows of the smallest product of tensor cores


class Parts(NamedTuple):
    """Results of each split for each row and query head, float32. None is used if there is one split."""

    mixed: Pointer  # [rows, heads, splits, head_dim] sum of 2^(score - peak) * value; arbitrary where total is 0
    peaks: Pointer  # [rows, heads, splits] greatest score, as a power of two
    totals: Pointer  # [rows, heads, splits] sum of 2^(score - peak)
    arrivals: Pointer  # [rows, kv_heads] int32: splits that are done; zeros before and after


@kept
class Cut(NamedTuple):
    """How a row's keys are divided."""

    tile: Constant  # keys of a tile, a power of two
    num_splits: Constant  # a power of two
    min_tiles: Constant  # of a split, but for the last of a row
    dot_dtype: Constant
    dot_rows: Constant  # rows of products: the query heads of a group, and padding up to a power of two


def choose_num_splits(num_programs: int, num_keys: int, num_processors: int, tuning: DecodeTuning) -> int:
    """Splits, a power of two, that give each multiprocessor its programs, if the keys that a head sees suffice."""
    wanted = -(-tuning.programs * num_processors // num_programs)
    useful = -(-num_keys // tuning.min_split_keys)
    num_splits: int = next_power_of_2(max(1, min(wanted, useful, MAX_SPLITS)))
    return num_splits


def decode(
    step: Step, pages: Pages, rows: DeviceTokens, parts: Parts, heads: Heads, scores: Scores, tuning: DecodeTuning
) -> None:
    """Write the keys and values of the rows' tokens into the cache, and their attention into `step.out`.

    Row r has one new token, which is token r. `parts` decides the number of splits, a power of two.
    """
    num_rows, num_heads, num_splits, _ = parts.mixed.shape
    group = heads.group.value
    cut = _cut_of(num_splits, group, step.q.dtype if pages.has_scales.value else pages.k.dtype, tuning)
    num_warps = tuning.num_warps
    if group > 1 and cut.dot_rows.value * heads.padded_dim.value >= SPILLING_SUMS:
        num_warps = 8
    arguments = (step, pages, rows, parts, heads, cut, scores)
    decode_heads = _decode_head if group == 1 else _decode_group
    launch(decode_heads, (num_rows, num_heads // group, num_splits), *arguments, num_warps=num_warps)


@cache
def _cut_of(num_splits: int, group: int, dtype: torch.dtype, tuning: DecodeTuning) -> Cut:
    return Cut(
        tile=constant(tuning.tile),
        num_splits=constant(num_splits),
        min_tiles=constant(max(1, tuning.min_split_keys // tuning.tile)),
        dot_dtype=constant(dot_dtype(dtype)),
        dot_rows=constant(max(_DOT_ROWS, next_power_of_2(group))),
    )


@kernel()
def _share(position: tl.tensor, split: tl.tensor, cut: Cut, window: tl.constexpr) -> tl.tensor:
    """The first position that the row sees, the split's first key tile, the one after its last, and the row's splits.

    A row has at least one split, of no keys if it has none.
    """
    first = position * 0
    if window > 0:
        first = tl.maximum(position - window + 1, 0)
    first_tile = first // cut.tile
    end_tile = (position + cut.tile - 1) // cut.tile
    num_tiles = (end_tile - first_tile + cut.num_splits - 1) // cut.num_splits
    num_tiles = tl.maximum(num_tiles, cut.min_tiles)
    num_used = tl.maximum((end_tile - first_tile + num_tiles - 1) // num_tiles, 1)
    begin = first_tile + split * num_tiles
    return first, begin, tl.minimum(begin + num_tiles, end_tile), num_used


@kernel()
def _seen_places(
    pages: Pages, table: tl.tensor, head: tl.tensor, tile: tl.tensor, bounds: tl.tensor, cut: Cut
) -> tl.tensor:
    """Offsets of a tile's keys, and which of them the row sees: those from bounds[0] to before bounds[1]."""
    positions = tile * cut.tile + tl.arange(0, cut.tile)
    is_seen = (positions >= bounds[0]) & (positions < bounds[1])
    return page_offsets(pages, table, head, positions, is_seen), is_seen


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
    first, begin, end, num_used = _share(position, split, cut, scores.window)
    if split >= num_used:
        return
    table = table_of(rows, row)
    dims = tl.arange(0, heads.padded_dim)
    is_dim = dims < heads.dim
    query = tl.load(step.q + row * step.q_stride + head * heads.dim + dims, mask=is_dim, other=0.0)
    query = query.to(tl.float32) * scores.scale
    peaks = tl.full([cut.tile], LOWEST, tl.float32)
    totals = tl.zeros([cut.tile], tl.float32)
    mixed = tl.zeros([cut.tile, heads.padded_dim], tl.float32)
    next_places, is_next = _seen_places(pages, table, head, begin, (first, position), cut)
    for tile in range(begin, end):
        places, is_seen = next_places, is_next
        next_places, is_next = _seen_places(pages, table, head, tile + 1, (first, position), cut)
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
    place = step.out + row * step.out_stride + head * heads.dim
    if num_used == 1:
        tl.store(place + dims, result / total, mask=is_dim)
    elif cut.num_splits > 1:
        part = (row * tl.num_programs(1) + head) * cut.num_splits + split
        tl.store(parts.peaks + part, peak)
        tl.store(parts.totals + part, total)
        tl.store(parts.mixed + part * heads.dim + dims, result, mask=is_dim)
        if _is_last(parts, row, head, num_used):
            member = tl.arange(0, 1)
            joined = _joined(parts, heads, cut, row * tl.num_programs(1) + head + member, member == 0, num_used)
            tl.store(place + member[:, None] + dims[None, :], joined, mask=is_dim[None, :])


@kernel()
def _decode_group(
    step: Step, pages: Pages, rows: DeviceTokens, parts: Parts, heads: Heads, cut: Cut, scores: Scores
) -> None:
    """Grouped-query attention: the query heads of a group are the rows of a product with the tile's keys."""
    row, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    position = tl.load(rows.starts + row)
    first, begin, end, num_used = _share(position, split, cut, scores.window)
    if split >= num_used:
        return
    table = table_of(rows, row)
    dims = tl.arange(0, heads.padded_dim)
    members = tl.arange(0, cut.dot_rows)
    is_member = members < heads.group
    query_heads = head * heads.group + members
    here = query_heads[:, None] * heads.dim + dims[None, :]  # in a token's queries, and in its results
    is_here = is_member[:, None] & (dims < heads.dim)[None, :]
    queries = tl.load(step.q + row * step.q_stride + here, mask=is_here, other=0.0)
    peaks = tl.full([cut.dot_rows], LOWEST, tl.float32)
    totals = tl.zeros([cut.dot_rows], tl.float32)
    mixed = tl.zeros([cut.dot_rows, heads.padded_dim], tl.float32)
    next_places, is_next = _seen_places(pages, table, head, begin, (first, position), cut)
    for tile in range(begin, end):
        places, is_seen = next_places, is_next
        next_places, is_next = _seen_places(pages, table, head, tile + 1, (first, position), cut)
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
    own_scores = tl.sum(queries.to(tl.float32) * own_key[None, :], axis=1) * scores.scale
    own_scores = tl.where(split == 0, bend(own_scores, scores), float("-inf"))
    sinks = sinks_of(scores, query_heads, is_member & (split == 0))
    new_peaks = tl.maximum(tl.maximum(peaks, own_scores), sinks)
    fading = tl.exp2(peaks - new_peaks)
    own_weights = tl.exp2(own_scores - new_peaks)
    totals = totals * fading + own_weights + tl.exp2(sinks - new_peaks)
    mixed = mixed * fading[:, None] + own_weights[:, None] * own_value[None, :]
    if num_used == 1:
        tl.store(step.out + row * step.out_stride + here, mixed / totals[:, None], mask=is_here)
    elif cut.num_splits > 1:
        row_heads = row * tl.num_programs(1) * heads.group + query_heads
        split_parts = row_heads * cut.num_splits + split
        tl.store(parts.peaks + split_parts, new_peaks, mask=is_member)
        tl.store(parts.totals + split_parts, totals, mask=is_member)
        tl.store(parts.mixed + split_parts[:, None] * heads.dim + dims[None, :], mixed, mask=is_here)
        if _is_last(parts, row, head, num_used):
            joined = _joined(parts, heads, cut, row_heads, is_member, num_used)
            tl.store(step.out + row * step.out_stride + here, joined, mask=is_here)


@kernel()
def _is_last(parts: Parts, row: tl.tensor, head: tl.tensor, num_used: tl.tensor) -> tl.tensor:
    """Whether the row's other splits are done too; what they stored can be read then. True in one program."""
    arrivals = parts.arrivals + row * tl.num_programs(1) + head
    tl.debug_barrier()  # all threads have stored, and the atomic addition publishes what they stored
    is_last = tl.atomic_add(arrivals, 1, sem="acq_rel", scope="gpu") == num_used - 1
    if is_last:
        tl.store(arrivals, 0)
    return is_last


@kernel()
def _joined(
    parts: Parts, heads: Heads, cut: Cut, row_heads: tl.tensor, is_member: tl.tensor, num_used: tl.tensor
) -> tl.tensor:
    """The attention [members, padded_dim] of query heads, numbered through all rows, joined from their splits."""
    dims = tl.arange(0, heads.padded_dim)
    splits = tl.arange(0, cut.num_splits)
    first = row_heads * cut.num_splits
    is_part = is_member[:, None] & (splits < num_used)[None, :]
    places = first[:, None] + splits[None, :]
    peaks = tl.load(parts.peaks + places, mask=is_part, other=LOWEST, cache_modifier=".cg")
    totals = tl.load(parts.totals + places, mask=is_part, other=0.0, cache_modifier=".cg")
    peak = tl.max(peaks, axis=1)
    total = tl.sum(totals * tl.exp2(peaks - peak[:, None]), axis=1)
    total = tl.where(is_member, total, 1.0)
    mixed = tl.zeros([row_heads.shape[0], heads.padded_dim], tl.float32)
    for split in tl.static_range(cut.num_splits):  # no load waits for another one
        is_there = is_member & (split < num_used)
        weights = tl.exp2(
            tl.load(parts.peaks + first + split, mask=is_there, other=LOWEST, cache_modifier=".cg") - peak
        )
        is_number = is_there[:, None] & (dims < heads.dim)[None, :]
        numbers = parts.mixed + (first + split)[:, None] * heads.dim + dims[None, :]
        mixed += weights[:, None] * tl.load(numbers, mask=is_number, other=0.0, cache_modifier=".cg")
    return mixed / total[:, None]
