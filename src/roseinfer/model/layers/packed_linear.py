"""Linears whose weights are packed for our CPU kernels: AMX tiles, or panels multiplied in registers."""

import ctypes
from typing import ClassVar

import torch
from torch.nn import functional

from roseinfer.model.device import Placement, dtype_name
from roseinfer.model.layers.activation import ACTIVATIONS, Activation

_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_int64
_ROWS_AT_ONCE = 4096  # of a weight
_UNSIGNED = 128  # what the instruction for int8 wants rows to have added


class _TileDescriptor(ctypes.Structure):
    """`Linear` of kernels/cpp/gemm.cpp."""

    _fields_ = (
        ("weight", _POINTER),
        ("scales", _POINTER),
        ("bias", _POINTER),
        ("num_outputs", _SIZE),
        ("num_inputs", _SIZE),
        ("activation", ctypes.c_int32),
        ("is_output_float32", ctypes.c_int32),
    )


class _RegisterDescriptor(ctypes.Structure):
    """`Linear` of kernels/cpp/linear.cpp."""

    _fields_ = (
        ("weight", _POINTER),
        ("scales", _POINTER),
        ("surplus", _POINTER),
        ("bias", _POINTER),
        ("num_outputs", _SIZE),
        ("num_inputs", _SIZE),
        ("num_words", _SIZE),
        ("activation", ctypes.c_int32),
        ("is_output_float32", ctypes.c_int32),
    )


class PackedLinear:
    """x [rows, inputs] of the placement's dtype -> activation(x Wᵀ + b) [rows, outputs] of `dtype`.

    W is of the placement's dtype, or int8 with a scale for each output, which makes each row of x int8 too, on the way.
    """

    descriptor_type: ClassVar[type[ctypes.Structure]]
    outputs_multiple: ClassVar[int]  # the number of outputs is packed up to a multiple of it
    bytes_multiple: ClassVar[int]  # and the bytes of each output's weights
    type_names: ClassVar[dict[torch.dtype, str]]  # of weights, in the names of the kernels' functions

    def __init__(
        self,
        weight: torch.Tensor,  # [outputs, inputs] of any strides; it is copied
        scales: torch.Tensor | None,  # [outputs] float32, of int8
        bias: torch.Tensor | None,
        activation: Activation,
        dtype: torch.dtype,  # of the result: float32, or the placement's
        placement: Placement,
    ) -> None:
        assert placement.kernels is not None
        assert weight.dtype == (placement.dtype if scales is None else torch.int8)
        self._num_outputs, self._num_inputs = weight.shape
        self._input_dtype, self._dtype = placement.dtype, dtype
        self._num_padding = 0  # numbers that rows of x lack
        self._weight = self._packed(weight, placement)
        self._scales = scales
        self._bias = None if bias is None else bias.to(torch.float32, copy=True)
        self._descriptor = self.descriptor_type(
            weight=self._weight.data_ptr(),
            scales=None if scales is None else scales.data_ptr(),
            bias=None if self._bias is None else self._bias.data_ptr(),
            num_outputs=self._num_outputs,
            num_inputs=self._num_inputs,
            activation=ACTIVATIONS.index(activation),
            is_output_float32=dtype == torch.float32,
            **self._further_fields(weight),
        )
        self._address = ctypes.addressof(self._descriptor)
        source = "" if scales is None else f"_of_{dtype_name(placement.dtype)}"
        name = f"roseinfer_linear_{self.type_names[weight.dtype]}{source}"
        self._multiply = placement.kernels.function(name, _POINTER, _POINTER, _SIZE, _POINTER)

    def _packed(self, weight: torch.Tensor, placement: Placement) -> torch.Tensor:
        """The weight in the kernels' order, as bytes."""
        assert placement.kernels is not None
        num_outputs = -(-weight.shape[0] // self.outputs_multiple) * self.outputs_multiple
        packed = placement.memory.allocate(num_outputs * self._num_row_bytes(weight))
        name = f"roseinfer_linear_pack_{self.type_names[weight.dtype]}"
        pack = placement.kernels.function(name, _POINTER, *(_SIZE,) * 4, _POINTER)
        pack(weight.data_ptr(), *weight.stride(), *weight.shape, packed.data_ptr())
        return packed

    def _further_fields(self, weight: torch.Tensor) -> dict[str, int]:  # noqa: ARG002 - of the subclasses
        """Fields of the descriptor that only this kind has."""
        return {}

    def _num_row_bytes(self, weight: torch.Tensor) -> int:
        return -(-weight.shape[1] * weight.itemsize // self.bytes_multiple) * self.bytes_multiple

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        assert x.dtype == self._input_dtype
        assert x.shape[1] == self._num_inputs
        x = functional.pad(x, (0, self._num_padding)) if self._num_padding else x.contiguous()
        out = x.new_empty(x.shape[0], self._num_outputs, dtype=self._dtype)
        self._multiply(self._address, x.data_ptr(), x.shape[0], out.data_ptr())
        return out


class TileLinear(PackedLinear):
    """bfloat16 or int8 on AMX tiles."""

    descriptor_type = _TileDescriptor
    outputs_multiple = 16
    bytes_multiple = 64  # a tile's line
    type_names: ClassVar = {torch.bfloat16: "bfloat16", torch.int8: "int8"}


class RegisterLinear(PackedLinear):
    """float32 on AVX2 or AVX-512, which gives float32; pairs of bfloat16 and fours of int8 where AVX-512 has them."""

    descriptor_type = _RegisterDescriptor
    outputs_multiple = 48  # at every level a multiple of the panel's width
    bytes_multiple = 4  # a word
    type_names: ClassVar = {torch.float32: "float32", torch.bfloat16: "bfloat16_pairs", torch.int8: "int8_fours"}

    def _further_fields(self, weight: torch.Tensor) -> dict[str, int]:
        num_words = self._num_row_bytes(weight) // self.bytes_multiple
        if weight.dtype == torch.int8:
            self._surplus = _surplus(weight)
            return {"num_words": num_words, "surplus": self._surplus.data_ptr()}
        # Rows are read where they lie, so they need whole words there; those that become int8 are written elsewhere.
        self._num_padding = num_words * self.bytes_multiple // weight.itemsize - self._num_inputs
        return {"num_words": num_words}


def _surplus(weight: torch.Tensor) -> torch.Tensor:
    """[outputs] int32: what sums have too much when rows have `_UNSIGNED` added. It may wrap around, as sums do."""
    sums = torch.empty(weight.shape[0], dtype=torch.int32)
    for start in range(0, len(sums), _ROWS_AT_ONCE):  # torch makes a copy in int32 of what it sums
        rows = slice(start, start + _ROWS_AT_ONCE)
        sums[rows] = weight[rows].sum(1, dtype=torch.int32)
    return sums * _UNSIGNED
