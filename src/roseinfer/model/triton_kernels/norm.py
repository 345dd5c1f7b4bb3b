"""Adds to the residual stream and norms the sum, in one kernel, in float32. A row's bits depend on no other."""

from typing import NamedTuple

import torch
import triton.language as tl
from triton import next_power_of_2

from roseinfer.model.triton_kernels.language import Constant, constant, kernel


class Width(NamedTuple):
    """The width of a row."""

    size: Constant
    padded: Constant  # the next power of two: Triton's tiles have no other sizes


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
    width = Width(constant(size), constant(max(16, next_power_of_2(size))))
    out = torch.empty(x.shape, dtype=out_dtype, device=x.device)
    num_warps = max(1, min(16, width.padded.value // 256))
    _add_norm_row[num_rows,](x, delta, weight, bias, out, eps, width, bias is not None, num_warps=num_warps)
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
