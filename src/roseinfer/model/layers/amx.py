"""A weight into the tiles that `kernels/gemm.cpp` multiplies on AMX, and rows into its products.

Knows nothing of how an int8 weight was made.
"""

import ctypes

import torch

from roseinfer.model.layers.activation import ACTIVATIONS, Activation
from roseinfer.model.placement import Placement

_TILE_OUTPUTS = 16
_LINE_BYTES = 64
_TYPES = {torch.bfloat16: "bfloat16", torch.int8: "int8"}  # of weights, as the functions name them


class _Descriptor(ctypes.Structure):
    """`Linear` of gemm.cpp."""

    _fields_ = (
        ("weight", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("num_outputs", ctypes.c_int64),
        ("num_inputs", ctypes.c_int64),
        ("activation", ctypes.c_int32),
        ("is_output_float32", ctypes.c_int32),
    )


class TileLinear:
    """x [rows, inputs] of the placement's dtype -> activation(x Wᵀ + b) [rows, outputs] of `dtype`.

    W is bfloat16, or int8 with a scale for each output. An int8 weight makes each row of x int8 too, on the way.
    """

    def __init__(
        self,
        weight: torch.Tensor,  # [outputs, inputs] bfloat16 or int8, of any strides
        scales: torch.Tensor | None,  # [outputs] float32
        bias: torch.Tensor | None,
        activation: Activation,
        dtype: torch.dtype,
        placement: Placement,
    ) -> None:
        assert placement.kernels is not None
        assert (scales is None) == (weight.dtype == torch.bfloat16)
        self._num_outputs, self._num_inputs = weight.shape
        self._dtype = dtype
        self._input_dtype = placement.dtype
        self._weight = _packed(weight, placement)
        self._scales = scales
        self._bias = None if bias is None else bias.to(torch.float32, copy=True)
        self._descriptor = _Descriptor(
            weight=self._weight.data_ptr(),
            scales=None if scales is None else scales.data_ptr(),
            bias=None if self._bias is None else self._bias.data_ptr(),
            num_outputs=self._num_outputs,
            num_inputs=self._num_inputs,
            activation=ACTIVATIONS.index(activation),
            is_output_float32=dtype == torch.float32,
        )
        self._address = ctypes.addressof(self._descriptor)
        source = str(placement.dtype).removeprefix("torch.")
        self._multiply = placement.kernels.function(
            "roseinfer_linear_bfloat16" if scales is None else f"roseinfer_linear_int8_of_{source}",
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.c_int64,
            ctypes.c_void_p,
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        assert x.dtype == self._input_dtype
        assert x.shape[1] == self._num_inputs
        x = x.contiguous()
        num_rows = x.shape[0]
        if self._dtype == x.dtype:
            out = x.new_empty(num_rows, self._num_outputs)
        else:
            out = torch.empty(num_rows, self._num_outputs, dtype=self._dtype)
        self._multiply(self._address, x.data_ptr(), num_rows, out.data_ptr())
        return out


def _packed(weight: torch.Tensor, placement: Placement) -> torch.Tensor:
    """The tiles, as bytes."""
    assert placement.kernels is not None
    num_outputs, num_inputs = weight.shape
    row_bytes = -(-num_inputs * weight.itemsize // _LINE_BYTES) * _LINE_BYTES
    packed = placement.memory.take(-(-num_outputs // _TILE_OUTPUTS) * _TILE_OUTPUTS * row_bytes)
    pack = placement.kernels.function(
        f"roseinfer_linear_pack_{_TYPES[weight.dtype]}",
        ctypes.c_void_p,
        *(ctypes.c_int64,) * 4,
        ctypes.c_void_p,
    )
    pack(weight.data_ptr(), *weight.stride(), num_outputs, num_inputs, packed.data_ptr())
    return packed
