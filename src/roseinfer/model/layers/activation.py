"""What a linear layer ends with: the names of activations, and what they compute. Knows nothing of weights."""

from typing import Literal, get_args

import torch
from torch.nn import functional

Activation = Literal["none", "gelu", "gelu_tanh", "silu"]
ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)  # in the order of kernels/activation.h


def activated(x: torch.Tensor, activation: Activation) -> torch.Tensor:
    """gelu: x Φ(x); gelu_tanh: its approximation of Hendrycks and Gimpel 2016; silu: x sigmoid(x). May change x."""
    if activation == "none":
        return x
    if x.device.type == "cpu":
        # Not torch's gelu and silu: for the last few numbers of a thread's work they take other instructions than for
        # those before, so that a row's bits would depend on where it lies. Its erf, tanh and exp are each one for all.
        return _activated_in_steps(x.float(), activation).to(x.dtype)
    if activation == "silu":
        return functional.silu(x)
    return functional.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")


def _activated_in_steps(x: torch.Tensor, activation: Activation) -> torch.Tensor:
    if activation == "silu":
        return x / (-x).exp_().add_(1.0)
    if activation == "gelu":
        share = torch.mul(x, 0.5**0.5).erf_()
    else:
        share = (x * x * x).mul_(0.044715).add_(x).mul_((2.0 / torch.pi) ** 0.5).tanh_()
    return share.add_(1.0).mul_(x).mul_(0.5)
