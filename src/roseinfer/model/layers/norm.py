"""LayerNorm and RMSNorm of the residual stream, which add the last sublayer's result to it in the same pass.

A linear in front of a norm is part of that pass too, where a GPU has few rows of a small model.

The pass is `kernels/cpp/norm.cpp` on a CPU and Triton on a GPU; without either it is two steps in torch, with which the
tests compare the kernels.
"""

import ctypes

import torch
from torch.nn import functional

from roseinfer.model.device import Placement
from roseinfer.model.layers.linear import Linear


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
        self.weight = weight.to(placement.device, torch.float32, copy=True)
        self.bias = None if bias is None else bias.to(placement.device, torch.float32, copy=True)
        self.epsilon = epsilon
        self.dtype = placement.dtype
        self._has_triton = placement.has_triton
        self._compiled = None
        if placement.kernels is not None:
            pointer = ctypes.c_void_p
            self._compiled = placement.kernels.function(
                "roseinfer_add_norm",
                *(ctypes.POINTER(_Descriptor), pointer, pointer, ctypes.c_int32, ctypes.c_int64, pointer),
            )
            self._descriptor = _Descriptor(
                weight=self.weight.data_ptr(),
                bias=None if self.bias is None else self.bias.data_ptr(),
                width=self.weight.numel(),
                epsilon=epsilon,
                is_output_float32=self.dtype == torch.float32,
            )
            self._reference = ctypes.byref(self._descriptor)

    def __call__(self, x: torch.Tensor, delta: torch.Tensor | None = None) -> torch.Tensor:
        """Add `delta` to x [rows, width] float32, in place -> norms of the sums, in the placement's dtype."""
        if self._compiled is None:
            if not self._has_triton:
                return self._by_torch(x, delta)
            from roseinfer.model.triton_kernels.pointwise import add_norm

            return add_norm(x, delta, self.weight, self.bias, self.epsilon, self.dtype)
        assert x.is_contiguous()
        out = x.new_empty(x.shape) if self.dtype == x.dtype else torch.empty(x.shape, dtype=self.dtype)
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
        shape = self.weight.shape
        if self.bias is None:
            normed = functional.rms_norm(x, shape, self.weight, self.epsilon)
        else:
            normed = functional.layer_norm(x, shape, self.weight, self.bias, self.epsilon)
        return normed.to(self.dtype)


class LinearNorm:
    """A linear whose result is added to the residual stream, and the norm of the sum."""

    def __init__(self, linear: Linear, norm: Norm, placement: Placement, factor: float = 1.0) -> None:
        """The linear's results count `factor` times."""
        self._linear = linear
        self._norm = norm
        self._factor = factor
        self._max_rows = 0  # of one kernel
        if placement.has_triton and linear.plain is not None:
            from roseinfer.model.triton_kernels.linear import NUM_COUNTERS, Weights
            from roseinfer.model.triton_kernels.tunings import device_name, linear_rows

            name = device_name(placement.device)
            self._max_rows = linear_rows(name, linear.num_outputs, linear.num_inputs, placement.dtype)
            counters = torch.zeros(NUM_COUNTERS, dtype=torch.int32, device=placement.device)
            of_linear = linear.plain.weight, linear.plain.bias
            self._weights = Weights(*of_linear, norm.weight, norm.bias, norm.epsilon, factor, counters)

    def __call__(self, rows: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Add the linear of rows [rows, inputs] to x [rows, width] float32, in place -> norms of the sums."""
        if 0 < len(rows) <= self._max_rows:
            from roseinfer.model.triton_kernels.linear import linear_add_norm

            return linear_add_norm(rows, self._weights, x, self._norm.dtype)
        delta = self._linear(rows)
        return self._norm(x, delta if self._factor == 1.0 else delta.mul_(self._factor))
