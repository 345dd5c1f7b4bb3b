"""The residual stream and what is added to it into the norm of their sum. Knows nothing about layers.

One pass over memory for both: in `kernels/norm.cpp` on a CPU, in Triton on a GPU; where neither is at hand the two
steps in torch, which are what the kernels are compared with.
"""

import ctypes
from importlib.util import find_spec

import torch
from torch.nn import functional

from roseinfer.model.placement import Placement


class _Descriptor(ctypes.Structure):
    """`Norm` of kernels/norm.cpp."""

    _fields_ = (
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("width", ctypes.c_int64),
        ("epsilon", ctypes.c_float),
        ("is_output_float32", ctypes.c_int32),
    )


class _AddNorm:
    """Either norm: without a bias it is RMSNorm."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, epsilon: float, placement: Placement) -> None:
        self._weight = weight.to(placement.device, torch.float32, copy=True)
        self._bias = None if bias is None else bias.to(placement.device, torch.float32, copy=True)
        self._epsilon = epsilon
        self._dtype = placement.dtype
        self._has_triton = placement.device.type == "cuda" and find_spec("triton") is not None
        self._compiled = None
        if placement.kernels is not None:
            pointer = ctypes.c_void_p
            self._compiled = placement.kernels.function(
                "roseinfer_add_norm", pointer, pointer, pointer, ctypes.c_int32, ctypes.c_int64, pointer
            )
            self._descriptor = _Descriptor(
                weight=self._weight.data_ptr(),
                bias=None if self._bias is None else self._bias.data_ptr(),
                width=self._weight.numel(),
                epsilon=epsilon,
                is_output_float32=self._dtype == torch.float32,
            )
            self._address = ctypes.addressof(self._descriptor)

    def __call__(self, x: torch.Tensor, delta: torch.Tensor | None = None) -> torch.Tensor:
        """Rows [rows, width] float32, and what is added to them in place, into rows of the placement's dtype."""
        if self._compiled is None:
            return self._by_triton(x, delta) if self._has_triton else self._by_torch(x, delta)
        assert x.is_contiguous()
        out = x.new_empty(x.shape) if self._dtype == x.dtype else torch.empty(x.shape, dtype=self._dtype)
        delta_address, is_delta_float32 = None, False
        if delta is not None:
            assert delta.is_contiguous()
            assert delta.numel() == x.numel()
            delta_address, is_delta_float32 = delta.data_ptr(), delta.dtype == torch.float32
        self._compiled(self._address, x.data_ptr(), delta_address, is_delta_float32, x.shape[0], out.data_ptr())
        return out

    def _by_triton(self, x: torch.Tensor, delta: torch.Tensor | None) -> torch.Tensor:
        from roseinfer.model.triton_kernels.norm import add_layer_norm, add_rms_norm

        add_norm = add_rms_norm if self._bias is None else add_layer_norm
        return add_norm(x, delta, self._weight, self._bias, self._epsilon, self._dtype)

    def _by_torch(self, x: torch.Tensor, delta: torch.Tensor | None) -> torch.Tensor:
        if delta is not None:
            x.add_(delta)
        shape = self._weight.shape
        if self._bias is None:
            normed = functional.rms_norm(x, shape, self._weight, self._epsilon)
        else:
            normed = functional.layer_norm(x, shape, self._weight, self._bias, self._epsilon)
        return normed.to(self._dtype)


class LayerNorm(_AddNorm):
    """x [rows, width] float32, delta of its shape -> (x + delta - mean) / sqrt(var + epsilon) * weight + bias.

    `delta` is added to x in place. The norm is computed in float32 and has the placement's dtype.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor, epsilon: float, placement: Placement) -> None:
        super().__init__(weight, bias, epsilon, placement)


class RMSNorm(_AddNorm):
    """x [rows, width] float32, delta of its shape -> (x + delta) / sqrt(mean of squares + epsilon) * weight.

    `delta` is added to x in place. The norm is computed in float32 and has the placement's dtype.
    """

    def __init__(self, weight: torch.Tensor, epsilon: float, placement: Placement) -> None:
        super().__init__(weight, None, epsilon, placement)
