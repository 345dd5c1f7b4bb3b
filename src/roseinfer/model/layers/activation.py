"""Activations of linears, and the SwiGLU gate, with the same bits for a row whatever other rows there are."""

import ctypes
from typing import Literal, get_args

import torch
from torch.nn import functional

from roseinfer.model.device import Placement

Activation = Literal["none", "gelu", "gelu_tanh", "silu"]
ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)  # in the order of kernels/cpp/activation.h


def activated(x: torch.Tensor, activation: Activation) -> torch.Tensor:
    """gelu: x Φ(x); gelu_tanh: its approximation of Hendrycks and Gimpel 2016; silu: x sigmoid(x). May change x."""
    if activation == "none":
        return x
    if x.device.type == "cpu":
        return _activated_in_steps(x.float(), activation).to(x.dtype)
    if activation == "silu":
        return functional.silu(x)
    return functional.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    if x.device.type != "cpu":
        return x.sigmoid()
    return (-x.float()).exp_().add_(1.0).reciprocal_().to(x.dtype)


def _activated_in_steps(x: torch.Tensor, activation: Activation) -> torch.Tensor:
    # Torch's gelu, silu and sigmoid compute the last few numbers of a thread's work with other instructions than those
    # before, so that a row's bits would depend on where it lies. Its erf, tanh and exp use the same for all.
    if activation == "silu":
        return x / (-x).exp_().add_(1.0)
    if activation == "gelu":
        share = torch.mul(x, 0.5**0.5).erf_()
    else:
        share = (x * x * x).mul_(0.044715).add_(x).mul_((2.0 / torch.pi) ** 0.5).tanh_()
    return share.add_(1.0).mul_(x).mul_(0.5)


class SiluGate:
    """silu(gate) * up: the activation of SwiGLU (Shazeer 2020, "GLU Variants Improve Transformer")."""

    def __init__(self, placement: Placement) -> None:
        pointer, size = ctypes.c_void_p, ctypes.c_int64
        self._has_triton = placement.has_triton
        self._compiled = placement.compiled("gate", pointer, pointer, size, size)

    def __call__(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Gates, and the numbers they scale, [rows, 2 * inner] -> [rows, inner], in the same type."""
        if self._compiled is not None:
            num_rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
            out = gate_up.new_empty(num_rows, inner)
            self._compiled(gate_up.data_ptr(), out.data_ptr(), num_rows, inner)
            return out
        if self._has_triton:
            from roseinfer.model.triton_kernels.pointwise import silu_gate

            return silu_gate(gate_up)
        gates, up = gate_up.chunk(2, -1)
        return _activated_in_steps(gates.float(), "silu").mul_(up).to(gate_up.dtype)
