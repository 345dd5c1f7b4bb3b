"""Rows in int8 with a scale each, exact at the largest number; and linears whose integers torch multiplies."""

import ctypes

import torch

from roseinfer.model.device import DTYPES, Parts, Placement, dtype_name
from roseinfer.model.layers.activation import ACTIVATIONS, Activation, activated
from roseinfer.model.layers.pieces import pieces_of

_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_int64
_QUANTIZE = (_POINTER, _SIZE, _SIZE, _POINTER, _POINTER)  # arguments of the kernel


def quantized_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [rows, width] -> int8 of the same shape, and scales [rows] float32; the same bits as kernels/cpp/quantize.h.

    Rows below about 3.7e-37 become zeros with a scale of 0, those that are not finite zeros with a scale of NaN.
    """
    x = x.float()
    limits = x.abs().amax(1, keepdim=True)
    factors = torch.full_like(limits, 127.0) / limits
    has_factor = factors.isfinite()
    quantized = (x * torch.where(has_factor, factors, 0.0)).round().nan_to_num(0.0).to(torch.int8)
    not_finite = (x * 0.0).sum(1)
    return quantized, torch.where(has_factor, limits / 127.0, 0.0)[:, 0] + not_finite


def quantized_piece(piece: torch.Tensor, placement: Placement) -> tuple[torch.Tensor, torch.Tensor]:
    """`quantized_rows`, by a kernel where there is one: the same bits, in one pass."""
    if placement.kernels is None:
        return quantized_rows(piece)
    piece = (piece if piece.dtype in DTYPES.values() else piece.float()).contiguous()
    quantize = placement.kernels.function(f"roseinfer_quantize_{dtype_name(piece.dtype)}", *_QUANTIZE)
    quantized, scales = torch.empty(piece.shape, dtype=torch.int8), torch.empty(len(piece))
    quantize(piece.data_ptr(), *piece.shape, quantized.data_ptr(), scales.data_ptr())
    return quantized, scales


class IntegerLinear:
    """x [rows, inputs] of the placement's dtype -> activation(x Wᵀ + b) [rows, outputs] of `dtype`.

    Torch multiplies the int8 matrices; before and after it run two of our kernels, or the same in torch.
    """

    def __init__(
        self,
        weight: Parts,  # of floats
        bias: torch.Tensor | None,
        activation: Activation,
        dtype: torch.dtype,
        placement: Placement,
    ) -> None:
        num_outputs, num_inputs = sum(map(len, weight)), weight[0].shape[1]

        def pack(pieces: list[torch.Tensor]) -> None:
            quantized, scales = pieces[0].view(torch.int8).view(num_outputs, -1), pieces[1].view(torch.float32)
            for rows, piece in pieces_of(weight):
                quantized[rows], scales[rows] = quantized_piece(piece, placement)

        numbers, scales = placement.memory.packed("int8", weight, (num_outputs * num_inputs, 4 * num_outputs), pack)
        self._weight = numbers.view(torch.int8).view(num_outputs, num_inputs).t()
        self._scales = scales.view(torch.float32)
        self._bias = None if bias is None else bias.to(torch.float32, copy=True)
        self._activation = activation
        self._dtype = dtype
        self._placement = placement
        if placement.kernels is not None:
            name, argtypes = f"roseinfer_dequantize_to_{dtype_name(dtype)}", (_POINTER,) * 4
            self._dequantize = placement.kernels.function(name, *argtypes, ctypes.c_int32, _SIZE, _SIZE, _POINTER)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        quantized, row_scales = quantized_piece(x, self._placement)
        sums = torch._int_mm(quantized, self._weight)  # noqa: SLF001
        if self._placement.kernels is None:
            y = sums.float() * self._scales * row_scales[:, None]
            if self._bias is not None:
                y += self._bias
            return activated(y, self._activation).to(self._dtype)
        out = torch.empty(sums.shape, dtype=self._dtype)
        bias = None if self._bias is None else self._bias.data_ptr()
        addresses = (sums.data_ptr(), row_scales.data_ptr(), self._scales.data_ptr(), bias)
        self._dequantize(*addresses, ACTIVATIONS.index(self._activation), *sums.shape, out.data_ptr())
        return out

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        return self._weight.t()[ids].float() * self._scales[ids][:, None]
