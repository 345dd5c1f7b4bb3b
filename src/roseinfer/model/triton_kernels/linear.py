"""Computes a linear of few rows, adds it to the residual stream, and norms the sum, in one kernel.

Each program multiplies a tile of rows with a tile of the weight and adds it to the stream. The one that finishes the
last tile of some rows norms them: they are complete then. The sums over the inputs do not depend on the other rows.
"""

from functools import cache
from typing import NamedTuple

import torch
import triton.language as tl

from roseinfer.model.triton_kernels.language import (
    Constant,
    Pointer,
    constant,
    dot_dtype,
    kept,
    kernel,
    launch,
)
from roseinfer.model.triton_kernels.pointwise import Width, width_of
from roseinfer.model.triton_kernels.tunings import MAX_LINEAR_ROWS

_TILE_ROWS = 16  # the fewest of a product of tensor cores
_TILE_COLUMNS = 16  # few, so that a small weight keeps many multiprocessors busy
_TILE_INPUTS = 256
_NORMED_NUMBERS = 16 * 1024  # at a time: 64 registers of each of 256 threads
_NUM_WARPS = 8

NUM_COUNTERS = MAX_LINEAR_ROWS // _TILE_ROWS


@kept
class Weights(NamedTuple):
    """Of a linear and of the norm behind it."""

    linear: Pointer  # [outputs, inputs], contiguous
    linear_bias: Pointer | None
    norm: Pointer
    norm_bias: Pointer | None  # then it is a LayerNorm, else an RMSNorm
    epsilon: float
    factor: float  # of the linear's results
    counters: Pointer  # int32 [NUM_COUNTERS]: tiles of columns that are done; zeros before and after


@kept
class Shape(NamedTuple):
    """How the product is cut."""

    num_inputs: Constant
    tile_rows: Constant
    tile_columns: Constant
    tile_inputs: Constant
    dot_dtype: Constant
    normed_rows: Constant  # of a row tile, at a time


def linear_add_norm(rows: torch.Tensor, weights: Weights, x: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """Add the linear of `rows` [rows, inputs] to x [rows, width] float32, in place; return the norms of the sums.

    At most `MAX_LINEAR_ROWS`. See `pointwise.add_norm`.
    """
    assert x.dtype == torch.float32
    assert x.is_contiguous()
    assert rows.stride(1) == 1
    num_rows, size = x.shape
    assert num_rows <= MAX_LINEAR_ROWS
    width, shape = width_of(size), _shape_of(rows.shape[1], size, rows.dtype)
    out = torch.empty(x.shape, dtype=out_dtype, device=x.device)
    grid = (-(-num_rows // _TILE_ROWS), -(-size // _TILE_COLUMNS), 1)
    launch(_linear_tile, grid, rows, rows.stride(0), weights, x, out, width, shape, num_rows, num_warps=_NUM_WARPS)
    return out


@cache
def _shape_of(num_inputs: int, size: int, dtype: torch.dtype) -> Shape:
    return Shape(
        num_inputs=constant(num_inputs),
        tile_rows=constant(_TILE_ROWS),
        tile_columns=constant(_TILE_COLUMNS),
        tile_inputs=constant(_TILE_INPUTS),
        dot_dtype=constant(dot_dtype(dtype)),
        normed_rows=constant(max(1, min(_TILE_ROWS, _NORMED_NUMBERS // width_of(size).padded.value))),
    )


@kernel("num_rows")
def _linear_tile(
    rows: tl.tensor,
    row_stride: tl.tensor,
    weights: Weights,
    x: tl.tensor,
    out: tl.tensor,
    width: Width,
    shape: Shape,
    num_rows: tl.tensor,
) -> None:
    """Some columns of some rows, and the norms of the rows for the program that is their last."""
    first_row = tl.program_id(0) * shape.tile_rows
    lanes = first_row + tl.arange(0, shape.tile_rows)
    columns = tl.program_id(1) * shape.tile_columns + tl.arange(0, shape.tile_columns)
    is_row, is_column = lanes < num_rows, columns < width.size
    sums = tl.zeros([shape.tile_rows, shape.tile_columns], tl.float32)
    for start in range(0, shape.num_inputs, shape.tile_inputs):
        inputs = start + tl.arange(0, shape.tile_inputs)
        is_input = inputs < shape.num_inputs
        left = tl.load(
            rows + lanes[:, None] * row_stride + inputs[None, :], mask=is_row[:, None] & is_input[None, :], other=0.0
        )
        right = tl.load(
            weights.linear + columns[:, None] * shape.num_inputs + inputs[None, :],
            mask=is_column[:, None] & is_input[None, :],
            other=0.0,
        )
        right = tl.trans(right.to(shape.dot_dtype))
        sums = tl.dot(left.to(shape.dot_dtype), right, sums, input_precision="ieee")
    if weights.linear_bias is not None:
        sums += tl.load(weights.linear_bias + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
    places = x + lanes[:, None] * width.size + columns[None, :]
    is_here = is_row[:, None] & is_column[None, :]
    tl.store(places, tl.load(places, mask=is_here, other=0.0) + sums * weights.factor, mask=is_here)
    counter = weights.counters + tl.program_id(0)
    tl.debug_barrier()  # all threads have stored, and the atomic addition publishes what they stored
    if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == tl.num_programs(1) - 1:
        tl.store(counter, 0)
        for start in range(0, shape.tile_rows, shape.normed_rows):
            _norm_rows(weights, x, out, width, shape, first_row + start, num_rows)


@kernel()
def _norm_rows(
    weights: Weights,
    x: tl.tensor,
    out: tl.tensor,
    width: Width,
    shape: Shape,
    first_row: tl.tensor,
    num_rows: tl.tensor,
) -> None:
    lanes = first_row + tl.arange(0, shape.normed_rows)
    columns = tl.arange(0, width.padded)
    is_column = columns < width.size
    places = lanes[:, None] * width.size + columns[None, :]
    is_here = (lanes < num_rows)[:, None] & is_column[None, :]
    values = tl.load(x + places, mask=is_here, other=0.0, cache_modifier=".cg")
    if weights.norm_bias is not None:
        means = tl.sum(values, axis=1) / width.size
        values = tl.where(is_column[None, :], values - means[:, None], 0.0)
    scales = 1.0 / tl.sqrt(tl.sum(values * values, axis=1) / width.size + weights.epsilon)
    normed = values * scales[:, None] * tl.load(weights.norm + columns, mask=is_column, other=0.0)[None, :]
    if weights.norm_bias is not None:
        normed += tl.load(weights.norm_bias + columns, mask=is_column, other=0.0)[None, :]
    tl.store(out + places, normed, mask=is_here)
