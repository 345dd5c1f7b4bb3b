"""A float32 weight into the panels that `kernels/linear.cpp` multiplies in registers, and rows into its products.

Knows nothing of tiles, of other types or of layers.
"""

import ctypes

import torch

from roseinfer.model.activation import ACTIVATIONS, Activation
from roseinfer.model.placement import Placement

_PANEL_OUTPUTS = 48  # at every level a multiple of the panel's width


class _Descriptor(ctypes.Structure):
    """`Linear` of linear.cpp."""

    _fields_ = (
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("num_outputs", ctypes.c_int64),
        ("num_inputs", ctypes.c_int64),
        ("activation", ctypes.c_int32),
    )


class RegisterLinear:
    """x [rows, inputs] float32 -> activation(x Wᵀ + b) [rows, outputs] float32, on AVX2 or AVX-512."""

    def __init__(
        self,
        weight: torch.Tensor,  # [outputs, inputs] float32, of any strides; it is copied
        bias: torch.Tensor | None,
        activation: Activation,
        placement: Placement,
    ) -> None:
        assert placement.kernels is not None
        assert weight.dtype == torch.float32
        self._num_outputs, self._num_inputs = weight.shape
        self._weight = _packed(weight, placement)
        self._bias = None if bias is None else bias.to(torch.float32, copy=True)
        self._descriptor = _Descriptor(
            weight=self._weight.data_ptr(),
            bias=None if self._bias is None else self._bias.data_ptr(),
            num_outputs=self._num_outputs,
            num_inputs=self._num_inputs,
            activation=ACTIVATIONS.index(activation),
        )
        self._address = ctypes.addressof(self._descriptor)
        self._multiply = placement.kernels.function(
            "roseinfer_linear_float32", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        assert x.dtype == torch.float32
        assert x.shape[1] == self._num_inputs
        x = x.contiguous()
        out = x.new_empty(x.shape[0], self._num_outputs)
        self._multiply(self._address, x.data_ptr(), x.shape[0], out.data_ptr())
        return out


def _packed(weight: torch.Tensor, placement: Placement) -> torch.Tensor:
    """The panels, as bytes."""
    assert placement.kernels is not None
    num_outputs, num_inputs = weight.shape
    num_padded = -(-num_outputs // _PANEL_OUTPUTS) * _PANEL_OUTPUTS
    packed = placement.memory.take(num_padded * num_inputs * weight.itemsize)
    pack = placement.kernels.function(
        "roseinfer_linear_pack_float32", ctypes.c_void_p, *(ctypes.c_int64,) * 4, ctypes.c_void_p
    )
    pack(weight.data_ptr(), *weight.stride(), num_outputs, num_inputs, packed.data_ptr())
    return packed
