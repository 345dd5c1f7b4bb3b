"""A weight into the panels that `kernels/linear.cpp` multiplies in registers, and rows into its products.

Knows nothing of tiles, of layers, or of how an int8 weight was made.
"""

import ctypes

import torch
from torch.nn import functional

from roseinfer.model.layers.activation import ACTIVATIONS, Activation
from roseinfer.model.placement import Placement

_PANEL_OUTPUTS = 48  # at every level a multiple of the panel's width
_WORD_BYTES = 4
_TYPES = {  # of weights, as the functions name them
    torch.float32: "float32",
    torch.bfloat16: "bfloat16_pairs",
    torch.int8: "int8_fours",
}
_ROWS_AT_ONCE = 4096  # of a weight
_UNSIGNED = 128  # what the instruction for int8 wants rows to have added


class _Descriptor(ctypes.Structure):
    """`Linear` of linear.cpp."""

    _fields_ = (
        ("weight", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("surplus", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("num_outputs", ctypes.c_int64),
        ("num_inputs", ctypes.c_int64),
        ("num_words", ctypes.c_int64),
        ("activation", ctypes.c_int32),
        ("is_output_float32", ctypes.c_int32),
    )


class RegisterLinear:
    """x [rows, inputs] of the placement's dtype -> activation(x Wᵀ + b) [rows, outputs] of `dtype`.

    W is of the placement's dtype, or int8 with a scale for each output, which makes each row of x int8 too, on the way.
    float32 on AVX2 or AVX-512, which gives float32; the others where AVX-512 multiplies pairs or fours of them.
    """

    def __init__(
        self,
        weight: torch.Tensor,  # [outputs, inputs] float32, bfloat16 or int8, of any strides; it is copied
        scales: torch.Tensor | None,  # [outputs] float32, of int8
        bias: torch.Tensor | None,
        activation: Activation,
        dtype: torch.dtype,
        placement: Placement,
    ) -> None:
        assert placement.kernels is not None
        assert (scales is None) == (weight.dtype == placement.dtype)
        assert dtype in (torch.float32, placement.dtype)
        self._num_outputs, self._num_inputs = weight.shape
        self._input_dtype, self._dtype = placement.dtype, dtype
        num_words = -(-self._num_inputs * weight.itemsize // _WORD_BYTES)
        # What is quantised is written elsewhere; other rows are read where they lie, so they have whole words there.
        self._num_padding = 0 if scales is not None else num_words * _WORD_BYTES // weight.itemsize - self._num_inputs
        self._weight = _packed(weight, num_words, placement)
        self._scales = scales
        self._surplus = None if scales is None else _surplus(weight)
        self._bias = None if bias is None else bias.to(torch.float32, copy=True)
        self._descriptor = _Descriptor(
            weight=self._weight.data_ptr(),
            scales=None if self._scales is None else self._scales.data_ptr(),
            surplus=None if self._surplus is None else self._surplus.data_ptr(),
            bias=None if self._bias is None else self._bias.data_ptr(),
            num_outputs=self._num_outputs,
            num_inputs=self._num_inputs,
            num_words=num_words,
            activation=ACTIVATIONS.index(activation),
            is_output_float32=dtype == torch.float32,
        )
        self._address = ctypes.addressof(self._descriptor)
        source = "" if scales is None else f"_of_{str(placement.dtype).removeprefix('torch.')}"
        self._multiply = placement.kernels.function(
            f"roseinfer_linear_{_TYPES[weight.dtype]}{source}",
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.c_int64,
            ctypes.c_void_p,
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        assert x.dtype == self._input_dtype
        assert x.shape[1] == self._num_inputs
        x = functional.pad(x, (0, self._num_padding)) if self._num_padding else x.contiguous()
        out = x.new_empty(x.shape[0], self._num_outputs, dtype=self._dtype)
        self._multiply(self._address, x.data_ptr(), x.shape[0], out.data_ptr())
        return out


def _surplus(weight: torch.Tensor) -> torch.Tensor:
    """[outputs] int32: what sums have too much when rows have `_UNSIGNED` added. It may wrap around, as sums do."""
    sums = torch.empty(weight.shape[0], dtype=torch.int32)
    for start in range(0, len(sums), _ROWS_AT_ONCE):  # torch makes a copy in int32 of what it sums
        rows = slice(start, start + _ROWS_AT_ONCE)
        sums[rows] = weight[rows].sum(1, dtype=torch.int32)
    return sums * _UNSIGNED


def _packed(weight: torch.Tensor, num_words: int, placement: Placement) -> torch.Tensor:
    """The panels, as bytes."""
    assert placement.kernels is not None
    num_outputs, num_inputs = weight.shape
    num_padded = -(-num_outputs // _PANEL_OUTPUTS) * _PANEL_OUTPUTS
    packed = placement.memory.take(num_padded * num_words * _WORD_BYTES)
    pack = placement.kernels.function(
        f"roseinfer_linear_pack_{_TYPES[weight.dtype]}", ctypes.c_void_p, *(ctypes.c_int64,) * 4, ctypes.c_void_p
    )
    pack(weight.data_ptr(), *weight.stride(), num_outputs, num_inputs, packed.data_ptr())
    return packed
