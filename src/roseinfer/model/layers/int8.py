"""Int8 quantization: weights with a scale for each output, rows of activations with a scale for each row.

Both scales are symmetric and exact at the largest number: w is about q * max|w| / 127. The products are sums of
integers, so a row has the same bits in any number of rows, in whatever order they are added. What it does to a model's
answers is measured in tests/unit/model/test_quantization.py.
"""

import ctypes
from collections.abc import Callable

import torch

from roseinfer.model.device import Placement, dtype_name
from roseinfer.model.layers.activation import ACTIVATIONS, Activation, activated
from roseinfer.model.layers.packed_linear import RegisterLinear, TileLinear

_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_int64
_ROWS_AT_ONCE = 4096  # of a weight, so that its float32 copy is small


def quantized_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [rows, width] -> int8 of the same shape, and scales [rows] float32; the same bits as kernels/cpp/quantize.h.

    A row so small that 127 / max|x| is no float32, below about 3.7e-37, becomes zeros with a scale of 0. A row that is
    not finite becomes zeros with a scale of NaN, and so do all products with it.
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
    weight: torch.Tensor, bias: torch.Tensor | None, activation: Activation, dtype: torch.dtype, placement: Placement
) -> Callable[[torch.Tensor], torch.Tensor]:
    """The fastest int8 linear that the placement's kernels have."""
    quantized, scales = quantized_weight(weight)
    kind = TileLinear if placement.has_tiles else RegisterLinear if placement.has_fours else IntegerLinear
    return kind(quantized, scales, bias, activation, dtype, placement)


class IntegerLinear:
    """x [rows, inputs] of the placement's dtype -> activation(x Wᵀ + b) [rows, outputs] of `dtype`.

    Torch multiplies the int8 matrices; before and after it run two of our kernels, or the same in torch.
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
        self._quantize = placement.compiled("quantize", _POINTER, _SIZE, _SIZE, _POINTER, _POINTER)
        if placement.kernels is not None:
            name, argtypes = f"roseinfer_dequantize_to_{dtype_name(dtype)}", (_POINTER,) * 4
            self._dequantize = placement.kernels.function(name, *argtypes, ctypes.c_int32, _SIZE, _SIZE, _POINTER)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        quantized, row_scales = self._quantized(x)
        sums = torch._int_mm(quantized, self._weight)  # noqa: SLF001
        if self._quantize is None:
            y = sums.float() * self._scales * row_scales[:, None]
            if self._bias is not None:
                y += self._bias
            return activated(y, self._activation).to(self._dtype)
        out = torch.empty(sums.shape, dtype=self._dtype)
        bias = None if self._bias is None else self._bias.data_ptr()
        addresses = (sums.data_ptr(), row_scales.data_ptr(), self._scales.data_ptr(), bias)
        self._dequantize(*addresses, ACTIVATIONS.index(self._activation), *sums.shape, out.data_ptr())
        return out

    def _quantized(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self._quantize is None:
            return quantized_rows(x)
        x = x.contiguous()
        quantized, scales = torch.empty(x.shape, dtype=torch.int8), torch.empty(x.shape[0])
        self._quantize(x.data_ptr(), *x.shape, quantized.data_ptr(), scales.data_ptr())
        return quantized, scales
