"""LayerNorm and RMSNorm of the residual stream, which add the last sublayer's result to it in the same pass.

The pass is `kernels/cpp/norm.cpp` on a CPU and Triton on a GPU; without either it is two steps in torch, with which the
tests compare the kernels.
"""

import ctypes

import torch
from torch.nn import functional

from roseinfer.model.device import Placement


class _Descriptor(ctypes.Structure):
    """`Norm` of kernels/cpp/norm.cpp."""

    _fields_ = (
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("width", ctypes.c_int64),
        ("epsilon", ctypes.c_float),
        ("is_output_float32", ctypes.c_int32),
    )


class Norm:
    """Adds to the residual stream and norms the sum, in float32.

    With a bias LayerNorm: (x + delta - mean) / sqrt(var + epsilon) * weight + bias (Ba, Kiros and Hinton 2016). Without
    one RMSNorm: (x + delta) / sqrt(mean of squares + epsilon) * weight (Zhang and Sennrich 2019).
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, epsilon: float, placement: Placement) -> None:
        self._weight = weight.to(placement.device, torch.float32, copy=True)
        self._bias = None if bias is None else bias.to(placement.device, torch.float32, copy=True)
        self._epsilon = epsilon
        self._dtype = placement.dtype
        self._has_triton = placement.has_triton
        self._compiled = None
        if placement.kernels is not None:
            pointer = ctypes.c_void_p
            self._compiled = placement.kernels.function(
                "roseinfer_add_norm",
                *(ctypes.POINTER(_Descriptor), pointer, pointer, ctypes.c_int32, ctypes.c_int64, pointer),
            )
            self._descriptor = _Descriptor(
                weight=self._weight.data_ptr(),
                bias=None if self._bias is None else self._bias.data_ptr(),
                width=self._weight.numel(),
                epsilon=epsilon,
                is_output_float32=self._dtype == torch.float32,
            )
            self._reference = ctypes.byref(self._descriptor)

    def __call__(self, x: torch.Tensor, delta: torch.Tensor | None = None) -> torch.Tensor:
        """Add `delta` to x [rows, width] float32, in place -> norms of the sums, in the placement's dtype."""
        if self._compiled is None:
            if not self._has_triton:
                return self._by_torch(x, delta)
            from roseinfer.model.triton_kernels.pointwise import add_norm

            return add_norm(x, delta, self._weight, self._bias, self._epsilon, self._dtype)
        assert x.is_contiguous()
        out = x.new_empty(x.shape) if self._dtype == x.dtype else torch.empty(x.shape, dtype=self._dtype)
        delta_address, is_delta_float32 = None, False
        if delta is not None:
            assert delta.is_contiguous()
            assert delta.numel() == x.numel()
            delta_address, is_delta_float32 = delta.data_ptr(), delta.dtype == torch.float32
        self._compiled(self._reference, x.data_ptr(), delta_address, is_delta_float32, x.shape[0], out.data_ptr())
        return out

    def _by_torch(self, x: torch.Tensor, delta: torch.Tensor | None) -> torch.Tensor:
        if delta is not None:
            x.add_(delta)
        shape = self._weight.shape
        if self._bias is None:
            normed = functional.rms_norm(x, shape, self._weight, self._epsilon)
        else:
            normed = functional.layer_norm(x, shape, self._weight, self._bias, self._epsilon)
        return normed.to(self._dtype)
