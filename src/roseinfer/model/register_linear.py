"""A weight into the panels that `kernels/linear.cpp` multiplies in registers, and rows into its products.

Knows nothing of tiles, of int8 or of layers.
"""

import ctypes

import torch
from torch.nn import functional

from roseinfer.model.activation import ACTIVATIONS, Activation
from roseinfer.model.placement import Placement

_PANEL_OUTPUTS = 48  # at every level a multiple of the panel's width
_WORD_BYTES = 4
_TYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16_pairs"}  # of inputs, as the functions name them


class _Descriptor(ctypes.Structure):
    """`Linear` of linear.cpp."""

    _fields_ = (
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("num_outputs", ctypes.c_int64),
        ("num_words", ctypes.c_int64),
        ("activation", ctypes.c_int32),
        ("is_output_float32", ctypes.c_int32),
    )


class RegisterLinear:
    """x [rows, inputs] of the weight's type -> activation(x Wᵀ + b) [rows, outputs] of `dtype`.

    float32 on AVX2 or AVX-512, which gives float32; bfloat16 where AVX-512 multiplies pairs of them.
    """

    def __init__(
        self,
        weight: torch.Tensor,  # [outputs, inputs] float32 or bfloat16, of any strides; it is copied
        bias: torch.Tensor | None,
        activation: Activation,
        dtype: torch.dtype,
        placement: Placement,
    ) -> None:
        assert placement.kernels is not None
        assert dtype in (torch.float32, weight.dtype)
        self._num_outputs, self._num_inputs = weight.shape
        self._input_dtype, self._dtype = weight.dtype, dtype
        self._num_padding = -self._num_inputs % (_WORD_BYTES // weight.itemsize)  # of an odd row in bfloat16
        num_words = (self._num_inputs + self._num_padding) * weight.itemsize // _WORD_BYTES
        self._weight = _packed(weight, num_words, placement)
        self._bias = None if bias is None else bias.to(torch.float32, copy=True)
        self._descriptor = _Descriptor(
            weight=self._weight.data_ptr(),
            bias=None if self._bias is None else self._bias.data_ptr(),
            num_outputs=self._num_outputs,
            num_words=num_words,
            activation=ACTIVATIONS.index(activation),
            is_output_float32=dtype == torch.float32,
        )
        self._address = ctypes.addressof(self._descriptor)
        self._multiply = placement.kernels.function(
            f"roseinfer_linear_{_TYPES[weight.dtype]}",
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
