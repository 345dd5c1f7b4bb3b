"""A residual and what is added to it into the sum and its norm, in one kernel. Knows nothing about models.

Row by row, in float32: a row's bits depend on no other row.
"""

from typing import NamedTuple

import torch
import triton.language as tl

from roseinfer.model.triton_kernels.language import Constant, constant, kernel


class Width(NamedTuple):
    """Of a row."""

    size: Constant
    padded: Constant  # the next power of two: Triton's tiles have no other sizes


def add_layer_norm(
    x: torch.Tensor,
    delta: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Add `delta` [rows, width] to `x` [rows, width] float32, in place; (x - mean) / sqrt(var + eps) * weight + bias.

    Mean and variance are those of the row, the latter without Bessel's correction (Ba, Kiros and Hinton 2016).
    """
    return _add_norm(x, delta, weight, bias, eps, out_dtype, is_centered=True)


def add_rms_norm(
    x: torch.Tensor,
    delta: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Add `delta` [rows, width] to `x` [rows, width] float32, in place; x / sqrt(mean(x^2) + eps) * weight + bias.

    The mean is over the row (Zhang and Sennrich 2019).
    """
    return _add_norm(x, delta, weight, bias, eps, out_dtype, is_centered=False)


def _add_norm(
    x: torch.Tensor,
    delta: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    out_dtype: torch.dtype,
    *,
    is_centered: bool,
) -> torch.Tensor:
    assert x.dtype == torch.float32
    assert x.is_contiguous()
    num_rows, size = x.shape
    delta = None if delta is None else delta.contiguous()
    width = Width(constant(size), constant(max(16, 1 << (size - 1).bit_length())))
    out = torch.empty(x.shape, dtype=out_dtype, device=x.device)
    num_warps = max(1, min(16, width.padded.value // 256))
    _add_norm_row[num_rows,](x, delta, weight, bias, out, eps, width, is_centered, num_warps=num_warps)
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
