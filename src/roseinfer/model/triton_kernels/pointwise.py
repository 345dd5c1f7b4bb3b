"""Embeds tokens, adds to the residual stream and norms it, rotates merged heads, gates SwiGLU: one kernel each.

They compute in float32. A row's bits depend on no other.
"""

from functools import cache
from typing import NamedTuple

import torch
import triton.language as tl
from triton import next_power_of_2

from roseinfer.model.triton_kernels.language import Constant, constant, kept, kernel, launch


@kept
class Width(NamedTuple):
    """The width of a row."""

    size: Constant
    padded: Constant  # the next power of two: Triton's tiles have no other sizes


@cache
def width_of(size: int) -> Width:
    """Equal sizes have one object."""
    return Width(constant(size), constant(max(16, next_power_of_2(size))))


def warps_of(width: Width) -> int:
    """The warps of a program that holds a row of this width."""
    padded: int = width.padded.value
    return max(1, min(16, padded // 256))


def embed(
    ids: torch.Tensor, table: torch.Tensor, positions: torch.Tensor | None, position_table: torch.Tensor | None
) -> torch.Tensor:
    """Rows of a table [any, width], plus those of a second one if there is one -> [rows, width] float32.

    ids and positions [rows] are integers.
    """
    num_rows, width = ids.shape[0], width_of(table.shape[1])
    assert table.stride(1) == 1
    assert position_table is None or position_table.is_contiguous()
    x = torch.empty(num_rows, table.shape[1], dtype=torch.float32, device=table.device)
    arguments = (ids, table, table.stride(0), positions, position_table, x, width)
    launch(_embed_row, (num_rows, 1, 1), *arguments, num_warps=warps_of(width))
    return x


@kernel()
def _embed_row(
    ids: tl.tensor,
    table: tl.tensor,
    stride: tl.tensor,
    positions: tl.tensor,
    position_table: tl.tensor,
    x: tl.tensor,
    width: Width,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, width.padded)
    is_column = columns < width.size
    place = tl.load(ids + row).to(tl.int64) * stride
    values = tl.load(table + place + columns, mask=is_column, other=0.0).to(tl.float32)
    if positions is not None:
        place = tl.load(positions + row).to(tl.int64) * width.size
        values += tl.load(position_table + place + columns, mask=is_column, other=0.0).to(tl.float32)
    tl.store(x + row * width.size + columns, values, mask=is_column)


def add_norm(
    x: torch.Tensor,
    delta: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Add `delta` [rows, width] to `x` [rows, width] float32, in place; return the norms of the sums.

    With a bias LayerNorm: (x - mean) / sqrt(var + eps) * weight + bias, with the row's mean and its variance without
    Bessel's correction (Ba, Kiros and Hinton 2016). Without one RMSNorm: x / sqrt(mean(x^2) + eps) * weight (Zhang and
    Sennrich 2019).
    """
    assert x.dtype == torch.float32
    assert x.is_contiguous()
    num_rows, size = x.shape
    delta = None if delta is None else delta.contiguous()
    width = width_of(size)
    out = torch.empty(x.shape, dtype=out_dtype, device=x.device)
    arguments = (x, delta, weight, bias, out, eps, width, bias is not None)
    launch(_add_norm_row, (num_rows, 1, 1), *arguments, num_warps=warps_of(width))
    return out


@kernel()
def _add_norm_row(
    x: tl.tensor,
    delta: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    eps: tl.tensor,
    width: Width,
    is_centered: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64) * width.size
    columns = tl.arange(0, width.padded)
    is_column = columns < width.size
    values = tl.load(x + row + columns, mask=is_column, other=0.0)
    if delta is not None:
        values += tl.load(delta + row + columns, mask=is_column, other=0.0).to(tl.float32)
        tl.store(x + row + columns, values, mask=is_column)
    if is_centered:
        values = tl.where(is_column, values - tl.sum(values) / width.size, 0.0)
    normed = values * (1.0 / tl.sqrt(tl.sum(values * values) / width.size + eps))
    normed *= tl.load(weight + columns, mask=is_column, other=0.0).to(tl.float32)
    if bias is not None:
        normed += tl.load(bias + columns, mask=is_column, other=0.0).to(tl.float32)
    tl.store(out + row + columns, normed, mask=is_column)


_GATE_TILE = tl.constexpr(1024)


@kept
class TurnedHeads(NamedTuple):
    """The rotated heads of a merged row, of which the first `num_queries` are queries, and their shape."""

    num_queries: Constant
    num_turned: Constant
    padded_turned: Constant  # the next power of two, as `padded_half`: Triton's tiles have no other sizes
    half: Constant  # of a head's dimensions
    padded_half: Constant


class Turns(NamedTuple):
    """Rotations of positions, and the positions of tokens."""

    cos: torch.Tensor  # [positions, head_dim / 2] float32
    sin: torch.Tensor
    positions: torch.Tensor  # [tokens], integers


@cache
def turned_heads(num_heads: int, num_kv_heads: int, head_dim: int) -> TurnedHeads:
    """Equal shapes have one object."""
    num_turned, half = num_heads + num_kv_heads, head_dim // 2
    return TurnedHeads(
        num_queries=constant(num_heads),
        num_turned=constant(num_turned),
        padded_turned=constant(next_power_of_2(num_turned)),
        half=constant(half),
        padded_half=constant(next_power_of_2(half)),
    )


def turn_heads(
    merged: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    turns: Turns,
    norm_weights: tuple[torch.Tensor, torch.Tensor] | None,
    epsilon: float,
) -> None:
    """Rotate the queries and keys of merged rows in place: [tokens, heads + 2 * kv_heads, head_dim].

    x * cos + rotate_half(x) * sin (Su et al. 2021). With weights [head_dim], of queries and of keys, each head is
    x / sqrt(mean(x^2) + epsilon) * weight before.
    """
    num_tokens, _, head_dim = merged.shape
    assert merged.stride()[1:] == (head_dim, 1)
    assert turns.cos.is_contiguous()
    assert turns.sin.is_contiguous()
    shape = turned_heads(num_heads, num_kv_heads, head_dim)
    query_weight, key_weight = norm_weights or (None, None)
    arguments = (merged, merged.stride(0), turns, query_weight, key_weight, epsilon, shape)
    launch(_turn_row, (num_tokens, 1, 1), *arguments, num_warps=4)


def silu_gate(gate_up: torch.Tensor) -> torch.Tensor:
    """Gates, and the numbers they scale, [rows, 2 * inner] -> silu(gate) * up [rows, inner] (Shazeer 2020, SwiGLU)."""
    assert gate_up.is_contiguous()
    num_rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(num_rows, inner)
    launch(_gate_tile, (num_rows, -(-inner // _GATE_TILE.value), 1), gate_up, out, inner, num_warps=4)
    return out


@kernel()
def _turn_row(
    merged: tl.tensor,
    stride: tl.tensor,
    turns: Turns,
    query_weight: tl.tensor,
    key_weight: tl.tensor,
    epsilon: tl.tensor,
    shape: TurnedHeads,
) -> None:
    """One token's queries and keys."""
    token = tl.program_id(0).to(tl.int64)
    heads = tl.arange(0, shape.padded_turned)[:, None]
    dims = tl.arange(0, shape.padded_half)[None, :]
    is_dim = dims < shape.half
    is_there = (heads < shape.num_turned) & is_dim
    place = merged + token * stride + heads * (2 * shape.half) + dims
    first = tl.load(place, mask=is_there, other=0.0).to(tl.float32)
    second = tl.load(place + shape.half, mask=is_there, other=0.0).to(tl.float32)
    if query_weight is not None:
        squares = tl.sum(first * first + second * second, axis=1)
        scale = (1.0 / tl.sqrt(squares / (2 * shape.half) + epsilon))[:, None]
        is_query = heads < shape.num_queries
        for_query = tl.load(query_weight + dims, mask=is_dim, other=0.0).to(tl.float32)
        for_key = tl.load(key_weight + dims, mask=is_dim, other=0.0).to(tl.float32)
        first *= scale * tl.where(is_query, for_query, for_key)
        for_query = tl.load(query_weight + shape.half + dims, mask=is_dim, other=0.0).to(tl.float32)
        for_key = tl.load(key_weight + shape.half + dims, mask=is_dim, other=0.0).to(tl.float32)
        second *= scale * tl.where(is_query, for_query, for_key)
    turn = tl.load(turns.positions + token).to(tl.int64) * shape.half + dims
    cosine = tl.load(turns.cos + turn, mask=is_dim, other=0.0)
    sine = tl.load(turns.sin + turn, mask=is_dim, other=0.0)
    tl.store(place, first * cosine - second * sine, mask=is_there)
    tl.store(place + shape.half, second * cosine + first * sine, mask=is_there)


@kernel()
def _gate_tile(gate_up: tl.tensor, out: tl.tensor, inner: tl.tensor) -> None:
    """Some numbers of one row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * _GATE_TILE + tl.arange(0, _GATE_TILE)
    is_column = columns < inner
    gate = tl.load(gate_up + row * 2 * inner + columns, mask=is_column, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * inner + inner + columns, mask=is_column, other=0.0).to(tl.float32)
    tl.store(out + row * inner + columns, gate / (1.0 + tl.exp(-gate)) * up, mask=is_column)
