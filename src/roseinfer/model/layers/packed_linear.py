"""Linears whose weight is packed once for our kernels: float32, bfloat16 and int8, on AMX tiles or in registers."""

import ctypes
from typing import ClassVar

import torch
from torch.nn import functional

from roseinfer.model.device import Parts, Placement, dtype_name
from roseinfer.model.kernels.library import Kernels
from roseinfer.model.layers.activation import ACTIVATIONS, Activation
from roseinfer.model.layers.int8 import quantized_piece
from roseinfer.model.layers.pieces import pieces_of

_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_int64
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


class RegisterDescriptor(ctypes.Structure):
    """`Linear` of kernels/cpp/linear.cpp."""

    _fields_ = (
        ("weight", _POINTER),
        ("scales", _POINTER),
        ("surplus", _POINTER),
        ("zeros", _POINTER),
        ("order", _POINTER),
        ("bias", _POINTER),
        ("num_outputs", _SIZE),
        ("num_inputs", _SIZE),
        ("num_words", _SIZE),
        ("activation", ctypes.c_int32),
        ("is_output_float32", ctypes.c_int32),
    )


class KernelLinear:
    """What linears have in common whose products are calls of our kernels."""

    def __init__(self, weight: Parts, bias: torch.Tensor | None, dtype: torch.dtype, placement: Placement) -> None:
        self._num_outputs, self._num_inputs = sum(map(len, weight)), weight[0].shape[1]
        self._input_dtype, self._dtype = placement.dtype, dtype
        self._num_padding = 0  # numbers that rows of x lack
        self._bias = None if bias is None else bias.to(torch.float32, copy=True)

    def _bind(self, kernels: Kernels, descriptor: ctypes.Structure, multiply: str, unpack: str) -> None:
        """Take the functions of these names, which read the descriptor at each call."""
        self._descriptor, self._reference = descriptor, ctypes.byref(descriptor)
        argtypes = ctypes.POINTER(type(descriptor)), _POINTER, _SIZE, _POINTER
        self._multiply, self._unpack = kernels.function(multiply, *argtypes), kernels.function(unpack, *argtypes)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        ids = ids.contiguous()
        out = torch.empty(len(ids), self._num_inputs)
        self._unpack(self._reference, ids.data_ptr(), len(ids), out.data_ptr())
        return out

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        assert x.dtype == self._input_dtype
        assert x.shape[1] == self._num_inputs
        x = functional.pad(x, (0, self._num_padding)) if self._num_padding else x.contiguous()
        out = x.new_empty(x.shape[0], self._num_outputs, dtype=self._dtype)
        self._multiply(self._reference, x.data_ptr(), x.shape[0], out.data_ptr())
        return out


class PackedLinear(KernelLinear):
    """x [rows, inputs] of the placement's dtype -> activation(x Wᵀ + b) [rows, outputs] of `dtype`.

    W is of the placement's dtype, or int8 with a scale for each output, which makes each row of x int8 too, on the way.
    """

    descriptor_type: ClassVar[type[ctypes.Structure]]
    outputs_multiple: ClassVar[int]  # the number of outputs is packed up to a multiple of it
    bytes_multiple: ClassVar[int]  # and the bytes of each output's weights
    further_bytes: ClassVar[tuple[int, ...]] = ()  # of what int8 needs beside weights and scales, for each output
    type_names: ClassVar[dict[torch.dtype, str]]  # of weights, in the names of the kernels' functions

    def __init__(
        self,
        weight: Parts,  # of floats, which are copied
        bias: torch.Tensor | None,
        activation: Activation,
        dtype: torch.dtype,  # of the result: float32, or the placement's
        placement: Placement,
    ) -> None:
        assert placement.kernels is not None
        super().__init__(weight, bias, dtype, placement)
        is_quantized = placement.quantization == "int8"
        stored = torch.int8 if is_quantized else placement.dtype
        self._weight, *further = self._packed(weight, stored, placement)
        self._scales = further[0].view(torch.float32) if is_quantized else None
        descriptor = self.descriptor_type(
            weight=self._weight.data_ptr(),
            scales=None if self._scales is None else self._scales.data_ptr(),
            bias=None if self._bias is None else self._bias.data_ptr(),
            num_outputs=self._num_outputs,
            num_inputs=self._num_inputs,
            activation=ACTIVATIONS.index(activation),
            is_output_float32=dtype == torch.float32,
            **self._further_fields(stored, further),
        )
        source = f"_of_{dtype_name(placement.dtype)}" if is_quantized else ""
        name = self.type_names[stored]
        self._bind(placement.kernels, descriptor, f"roseinfer_linear_{name}{source}", f"roseinfer_linear_rows_{name}")

    def _packed(self, weight: Parts, stored: torch.dtype, placement: Placement) -> list[torch.Tensor]:
        """The weight in the kernels' order, as bytes; of int8 also the scales, and what the subclass needs beside."""
        assert placement.kernels is not None
        num_row_bytes = self._num_row_bytes(stored)
        num_rows = -(-self._num_outputs // self.outputs_multiple) * self.outputs_multiple
        of_each = (4, *self.further_bytes) if stored == torch.int8 else ()
        sizes = (num_rows * num_row_bytes, *(num_bytes * self._num_outputs for num_bytes in of_each))
        name = f"roseinfer_linear_pack_{self.type_names[stored]}"
        pack = placement.kernels.function(name, _POINTER, *(_SIZE,) * 4, _POINTER)

        def pack_all(pieces: list[torch.Tensor]) -> None:
            packed, *further = pieces
            for rows, floats in pieces_of(weight):
                piece = floats.to(stored) if not further else self._quantized(floats, rows, further, placement)
                pack(piece.data_ptr(), *piece.stride(), *piece.shape, packed.data_ptr() + rows.start * num_row_bytes)

        return placement.memory.packed(name, weight, sizes, pack_all)

    def _quantized(
        self, floats: torch.Tensor, rows: slice, further: list[torch.Tensor], placement: Placement
    ) -> torch.Tensor:
        """Some rows in int8; what else is known of them is written to its places in `further`."""
        piece, further[0].view(torch.float32)[rows] = quantized_piece(floats, placement)
        return piece

    def _further_fields(self, stored: torch.dtype, further: list[torch.Tensor]) -> dict[str, int]:  # noqa: ARG002
        """Fields of the descriptor that only this kind has."""
        return {}

    def _num_row_bytes(self, stored: torch.dtype) -> int:
        return -(-self._num_inputs * stored.itemsize // self.bytes_multiple) * self.bytes_multiple


class TileLinear(PackedLinear):
    """bfloat16 or int8 on AMX tiles."""

    descriptor_type = _TileDescriptor
    outputs_multiple = 16
    bytes_multiple = 64  # a tile's line
    type_names: ClassVar = {torch.bfloat16: "bfloat16", torch.int8: "int8"}


class RegisterLinear(PackedLinear):
    """float32 and fours of int8 at every level of the kernels; pairs of bfloat16 where AVX-512 has them, and on Arm."""

    descriptor_type = RegisterDescriptor
    outputs_multiple = 48  # at every level a multiple of the panel's width
    bytes_multiple = 4  # a word
    further_bytes = (4,)  # the surplus of its outputs
    type_names: ClassVar = {torch.float32: "float32", torch.bfloat16: "bfloat16_pairs", torch.int8: "int8_fours"}

    def _quantized(
        self, floats: torch.Tensor, rows: slice, further: list[torch.Tensor], placement: Placement
    ) -> torch.Tensor:
        piece = super()._quantized(floats, rows, further, placement)
        # Sums in float32 are exact up to 2**24, the sum of 132,104 inputs. The product may wrap around, as sums do.
        sums = torch.mv(piece.float(), torch.ones(self._num_inputs))
        further[1].view(torch.int32)[rows] = sums.int() * _UNSIGNED
        return piece

    def _further_fields(self, stored: torch.dtype, further: list[torch.Tensor]) -> dict[str, int]:
        num_words = self._num_row_bytes(stored) // self.bytes_multiple
        if stored == torch.int8:
            self._surplus = further[1]
            return {"num_words": num_words, "surplus": self._surplus.data_ptr()}
        # Rows are read where they lie, so they need whole words there; those that become int8 are written elsewhere.
        self._num_padding = num_words * self.bytes_multiple // stored.itemsize - self._num_inputs
        return {"num_words": num_words}
