"""A weight into int8 with a scale for each output, and rows of activations into int8 with a scale for each.

Both scales are symmetric and exact at the largest number: w is about q * max|w| / 127. The products are sums of
integers, so a row has the same bits in any number of rows, whoever adds them. Knows nothing about models; what it does
to a model's answers is measured in tests/unit/model/test_quantization.py.
"""

import ctypes

import torch

from roseinfer.model.layers.activation import ACTIVATIONS, Activation, activated
from roseinfer.model.layers.amx import TileLinear
from roseinfer.model.layers.packed_linear import RegisterLinear
from roseinfer.model.placement import Placement

_ROWS_AT_ONCE = 4096  # of a weight, so that its float32 copy is small


def quantized_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [rows, width] -> int8 of the same shape, and scales [rows] float32.

    A row so small that 127 / max|x| is no float32, below about 3.7e-37, is a row of zeros, and so is its scale. That of
    a row that is not finite is NaN, as all is that is made of it, and its int8 are 0. The same bits as
    kernels/quantize.h gives.
    """
    x = x.float()
    limits = x.abs().amax(1, keepdim=True)
    factors = torch.full_like(limits, 127.0) / limits
    has_factor = factors.isfinite()
    quantized = (x * torch.where(has_factor, factors, 0.0)).round().nan_to_num(0.0).to(torch.int8)
    not_finite = (x * 0.0).sum(1)
    return quantized, torch.where(has_factor, limits / 127.0, 0.0)[:, 0] + not_finite


def quantized_weight(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[outputs, inputs] of any floating type and strides -> int8, contiguous, and scales [outputs] float32."""
    quantized = torch.empty(weight.shape, dtype=torch.int8)
    scales = torch.empty(weight.shape[0])
    for start in range(0, weight.shape[0], _ROWS_AT_ONCE):
        rows = slice(start, start + _ROWS_AT_ONCE)
        quantized[rows], scales[rows] = quantized_rows(weight[rows])
    return quantized, scales


def int8_linear(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: Activation,
    dtype: torch.dtype,
    placement: Placement,
) -> "TileLinear | RegisterLinear | IntegerLinear":
    """The fastest form that the placement's kernels have."""
    quantized, scales = quantized_weight(weight)
    if placement.has_tiles:
        return TileLinear(quantized, scales, bias, activation, dtype, placement)
    if placement.has_fours:
        return RegisterLinear(quantized, scales, bias, activation, dtype, placement)
    return IntegerLinear(quantized, scales, bias, activation, dtype, placement)


class IntegerLinear:
    """x [rows, inputs] of the placement's dtype -> activation(x Wᵀ + b) [rows, outputs] of `dtype`.

    By torch's product of int8 matrices; before and after it come two kernels, or the same in torch.
    """

    def __init__(
        self,
        weight: torch.Tensor,  # [outputs, inputs] int8
        scales: torch.Tensor,  # [outputs] float32
        bias: torch.Tensor | None,
        activation: Activation,
        dtype: torch.dtype,
        placement: Placement,
    ) -> None:
        self._weight = weight.t()
        self._scales = scales
        self._bias = None if bias is None else bias.to(torch.float32, copy=True)
        self._activation = activation
        self._dtype = dtype
        self._compiled = None if placement.kernels is None else _Compiled(placement, dtype)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._compiled is None:
            quantized, row_scales = quantized_rows(x)
            y = torch._int_mm(quantized, self._weight).float() * self._scales * row_scales[:, None]  # noqa: SLF001
            if self._bias is not None:
                y += self._bias
            return activated(y, self._activation).to(self._dtype)
        quantized, row_scales = self._compiled.quantize(x.contiguous())
        sums = torch._int_mm(quantized, self._weight)  # noqa: SLF001
        return self._compiled.finish(sums, row_scales, self._scales, self._bias, self._activation)


class _Compiled:
    """The functions of kernels/quantize.cpp for one pair of types."""

    def __init__(self, placement: Placement, dtype: torch.dtype) -> None:
        assert placement.kernels is not None
        source, target = (str(name).removeprefix("torch.") for name in (placement.dtype, dtype))
        pointer, count = ctypes.c_void_p, ctypes.c_int64
        self._dtype = dtype
        self._quantize = placement.kernels.function(
            f"roseinfer_quantize_{source}", pointer, count, count, pointer, pointer
        )
        self._finish = placement.kernels.function(
            f"roseinfer_dequantize_to_{target}", *(pointer,) * 4, ctypes.c_int32, count, count, pointer
        )

    def quantize(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        quantized, scales = torch.empty(x.shape, dtype=torch.int8), torch.empty(x.shape[0])
        self._quantize(x.data_ptr(), *x.shape, quantized.data_ptr(), scales.data_ptr())
        return quantized, scales

    def finish(
        self,
        sums: torch.Tensor,  # [rows, outputs] int32
        row_scales: torch.Tensor,
        scales: torch.Tensor,
        bias: torch.Tensor | None,
        activation: Activation,
    ) -> torch.Tensor:
        out = torch.empty(sums.shape, dtype=self._dtype)
        bias_address = None if bias is None else bias.data_ptr()
        addresses = (sums.data_ptr(), row_scales.data_ptr(), scales.data_ptr(), bias_address)
        self._finish(*addresses, ACTIVATIONS.index(activation), *sums.shape, out.data_ptr())
        return out
