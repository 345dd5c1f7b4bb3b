"""Arguments of the attention kernels, and addresses in the paged KV cache by row, position and block table.

The tuples are arguments of kernels: pointers and strides by name, strides in elements. A constant is known when a
kernel is compiled, so a change of it compiles another kernel. No field can be called `values`, since Triton's own
tuples have an attribute of that name, or be a number that changes from step to step (see `kernel`).
"""

from typing import NamedTuple

import torch
import triton.language as tl
from triton import next_power_of_2

from roseinfer.model.attention.base import AttentionSpec, DeviceTokens
from roseinfer.model.attention.kv_cache import KVCache
from roseinfer.model.triton_kernels.language import LOG2_E, Constant, Pointer, constant, kept, kernel


@kept
class Pages(NamedTuple):
    """Keys and values of one layer, each [blocks, kv_heads, block_size, head_dim], contiguous.

    In int8 they have scales [blocks, kv_heads, block_size] float32.
    """

    k: Pointer
    v: Pointer
    k_scales: Pointer  # of something else where `has_scales` is false
    v_scales: Pointer
    has_scales: Constant
    block_stride: int
    head_stride: int
    token_stride: int
    block_size: Constant


class Step(NamedTuple):
    """Queries and results [tokens, heads, head_dim], keys and values [tokens, kv_heads, head_dim] of the new tokens.

    A head is contiguous and follows the head before it; only the distance of tokens may vary.
    """

    q: Pointer
    k: Pointer
    v: Pointer
    out: Pointer
    q_stride: int
    k_stride: int
    v_stride: int
    out_stride: int


@kept
class Heads(NamedTuple):
    """The shape of a head's work."""

    dim: Constant
    padded_dim: Constant  # the next power of two: Triton's tiles have no other sizes
    group: Constant  # query heads that read one key head


@kept
class Scores(NamedTuple):
    """What becomes of the products of queries and keys. All is multiplied by log2 e: only exp2 is one instruction."""

    scale: float
    window: Constant  # positions that a token sees; 0 for all
    softcap: Constant  # 0 for none
    has_sinks: Constant
    sinks: Pointer  # [heads] float32, if there are some


def scores_of(spec: AttentionSpec, device: torch.device) -> list[Scores]:
    """Of each layer."""
    nothing = torch.zeros(1, device=device)
    softcap, scale = constant(spec.softcap * LOG2_E), spec.scale * LOG2_E
    return [
        Scores(
            scale,
            constant(window or 0),
            softcap,
            constant(sinks is not None),
            nothing if sinks is None else sinks * LOG2_E,
        )
        for window, sinks in zip(spec.windows, spec.sinks_on(device), strict=True)
    ]


@kernel()
def bend(products: tl.tensor, scores: Scores) -> tl.tensor:
    """Softcap * tanh(products / softcap), or the products where there is no soft cap."""
    if scores.softcap > 0:
        products = scores.softcap * (2.0 * tl.sigmoid(products * (2.0 / scores.softcap)) - 1.0)
    return products


@kernel()
def sinks_of(scores: Scores, heads: tl.tensor, is_wanted: tl.tensor) -> tl.tensor:
    """The sinks of the wanted heads, minus infinity elsewhere."""
    sinks = heads * 0.0 + float("-inf")
    if scores.has_sinks:
        sinks = tl.load(scores.sinks + heads, mask=is_wanted, other=float("-inf"))
    return sinks


def pages_of(cache: KVCache, layer: int) -> Pages:
    keys, values = cache.keys[layer], cache.values[layer]
    block, head, token, _ = keys.stride()
    scales = (cache.key_scales[layer], cache.value_scales[layer]) if cache.is_quantized else (keys, values)
    return Pages(keys, values, *scales, constant(cache.is_quantized), block, head, token, constant(cache.block_size))


def step_of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> Step:
    """The tensors as a kernel takes them; those whose heads do not follow each other are copied."""
    q, k, v = (x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous() for x in (q, k, v))
    return Step(q, k, v, out, q.stride(0), k.stride(0), v.stride(0), out.stride(0))


def heads_of(spec: AttentionSpec) -> Heads:
    padded_dim = max(16, next_power_of_2(spec.head_dim))
    return Heads(constant(spec.head_dim), constant(padded_dim), constant(spec.num_heads // spec.num_kv_heads))


@kernel()
def table_of(rows: DeviceTokens, row: tl.tensor) -> tl.tensor:
    """The address of the row's block ids."""
    return rows.block_table + tl.load(rows.slots + row).to(tl.int64) * rows.table_stride


@kernel()
def page_offsets(
    pages: Pages, table: tl.tensor, head: tl.tensor, positions: tl.tensor, is_there: tl.tensor
) -> tl.tensor:
    """Offsets of the head's keys, and values, at these positions: elements from the start of the layer's tensor."""
    blocks = tl.load(table + positions // pages.block_size, mask=is_there, other=0).to(tl.int64)
    return blocks * pages.block_stride + head * pages.head_stride + (positions % pages.block_size) * pages.token_stride


@kernel()
def load_tile(
    pages: Pages, places: tl.tensor, is_there: tl.tensor, heads: Heads, dtype: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Keys and values at the offsets `places` [keys], each [keys, padded_dim]; zeros where there are none."""
    dims = tl.arange(0, heads.padded_dim)
    is_number = is_there[:, None] & (dims < heads.dim)[None, :]
    numbers = places[:, None] + dims[None, :]
    keys = tl.load(pages.k + numbers, mask=is_number, other=0).to(dtype)
    values = tl.load(pages.v + numbers, mask=is_number, other=0).to(dtype)
    return keys, values


@kernel()
def with_scales(
    numbers: tl.tensor, scales: tl.tensor, places: tl.tensor, is_there: tl.tensor, pages: Pages, heads: Heads
) -> tl.tensor:
    """Scores, or weights, times the scales of the keys, or values, at these offsets; as they are if there are none.

    The last axis of `numbers` is that of `places`.
    """
    if pages.has_scales:
        found = tl.load(scales + places // heads.dim, mask=is_there, other=0.0)
        numbers = numbers * found
    return numbers


@kernel()
def quantized(rows: tl.tensor) -> tl.tensor:
    """Rows [rows, padded_dim] as an int8 cache has them: whole numbers float32, and scales [rows].

    The bits of layers/linear.py:quantized_rows: divisions are rounded to nearest, and whole numbers to even, since the
    sum with 3 * 2**22 has no place for fractions. `fma` keeps the compiler from fusing the product with that sum, which
    would round once instead of twice.
    """
    rows = rows.to(tl.float32)
    limits = tl.max(tl.abs(rows), axis=1)
    not_finite = tl.sum(rows * 0.0, axis=1)
    factors = tl.div_rn(limits * 0.0 + 127.0, limits)
    has_factor = (factors < float("inf")) & (not_finite == 0.0)
    factors = tl.where(has_factor, factors, 0.0)[:, None]
    rows = tl.where(has_factor[:, None], rows, 0.0)
    zeros = tl.zeros(rows.shape, tl.float32)
    numbers = (tl.fma(rows, factors + zeros, zeros) + 12582912.0) - 12582912.0
    scales = tl.where(has_factor, tl.div_rn(limits, limits * 0.0 + 127.0), 0.0) + not_finite
    return numbers, scales


@kernel()
def find_tile(rows: DeviceTokens, num_rows: tl.tensor, tile: tl.tensor, tile_queries: tl.constexpr) -> tl.tensor:
    """The row that owns a tile of queries, and the index in that row of the tile's first query.

    Row r owns the tiles from query_starts[r] // tile_queries + r on, at least one and as many as it needs; the last
    tiles of a row may lie past its end. So tiles need not be counted before the launch.
    """
    low = 0
    high = num_rows
    while high - low > 1:
        middle = (low + high) // 2
        is_before = tl.load(rows.query_starts + middle) // tile_queries + middle <= tile
        low = tl.where(is_before, middle, low)
        high = tl.where(is_before, high, middle)
    first_tile = tl.load(rows.query_starts + low) // tile_queries + low
    return low, (tile - first_tile) * tile_queries


def num_tiles(num_tokens: int, num_rows: int, tile_queries: int) -> int:
    """The most tiles that the rows of a step own together."""
    return num_tokens // tile_queries + num_rows
