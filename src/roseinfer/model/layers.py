"""Rows of activations into rows of activations: linear, layer norm, embedding. Knows nothing about sequences.

On a CPU a linear layer holds its weight packed for oneDNN. Apart from being the faster form, it gives a row the same
bits whatever the number of rows, from two up; `padded_rows` turns one row into two.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch.nn import functional

Activation = Literal["none", "gelu", "gelu_tanh"]

_PACKED_BATCH_HINT = 64  # packings for 16 to 512 rows run within a tenth of each other at any number of rows
_PACKED_ATTRIBUTES = {"none": ("none", ""), "gelu": ("gelu", "none"), "gelu_tanh": ("gelu", "tanh")}


@dataclass(frozen=True, slots=True)
class Placement:
    """Where weights live and in what type they are multiplied. Norms, residuals and logits are float32 regardless."""

    device: torch.device
    dtype: torch.dtype

    @property
    def packs_linears(self) -> bool:
        """Whether linears are packed for oneDNN: on a CPU, where this build of torch has the operators."""
        return self.device.type == "cpu" and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def padded_rows(num_rows: int) -> int:
    """The next number of rows that linears are run with: even, and with four significant bits at most.

    oneDNN builds a kernel for each number of rows it meets, about a millisecond for each shape of weight; 8 sizes to
    each doubling can all be met before the first request, and cost an eighth more rows at worst.
    """
    step = max(2, 1 << max(0, (num_rows - 1).bit_length() - 4))
    return -(-num_rows // step) * step


class Linear:
    """x [rows, inputs] -> activation(x Wᵀ + b) [rows, outputs], in the placement's dtype."""

    def __init__(
        self,
        weight: torch.Tensor,  # [outputs, inputs], of any dtype, device and strides
        bias: torch.Tensor | None,
        placement: Placement,
        activation: Activation = "none",
        *,
        is_mapped: bool = True,  # the weight is a piece of a mapped file, so it must be copied; else it may be shared
    ) -> None:
        self.num_outputs, self.num_inputs = weight.shape
        self.activation = activation
        self._placement = placement
        self._is_packed = placement.packs_linears
        placed = weight.to(placement.device, placement.dtype, copy=is_mapped and not self._is_packed)
        self._weight = (
            torch.ops.mkldnn._reorder_linear_weight(placed.contiguous(), _PACKED_BATCH_HINT)  # noqa: SLF001
            if self._is_packed
            else placed.contiguous()
        )
        self._bias = None if bias is None else bias.to(placement.device, placement.dtype, copy=True)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._is_packed:
            operator, algorithm = _PACKED_ATTRIBUTES[self.activation]
            packed = torch.ops.mkldnn._linear_pointwise  # noqa: SLF001
            out: torch.Tensor = packed(x, self._weight, self._bias, operator, [], algorithm)
            return out
        y = functional.linear(x, self._weight, self._bias)
        if self.activation == "none":
            return y
        return functional.gelu(y, approximate="tanh" if self.activation == "gelu_tanh" else "none")

    def warm_up(self, num_rows: int) -> None:
        """Have the kernel for `num_rows` rows built."""
        self(torch.zeros(num_rows, self.num_inputs, dtype=self._placement.dtype, device=self._placement.device))


class LayerNorm:
    """x [rows, width] float32 -> its layer norm, computed in float32, in the placement's dtype."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor, epsilon: float, placement: Placement) -> None:
        self._weight = weight.to(placement.device, torch.float32, copy=True)
        self._bias = bias.to(placement.device, torch.float32, copy=True)
        self._epsilon = epsilon
        self._dtype = placement.dtype

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        normed = functional.layer_norm(x, self._weight.shape, self._weight, self._bias, self._epsilon)
        return normed.to(self._dtype)


class Embedding:
    """ids [rows] -> vectors [rows, width] float32; the table is held in the placement's dtype."""

    def __init__(self, table: torch.Tensor, placement: Placement) -> None:
        self.table = table.to(placement.device, placement.dtype, copy=True)

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        return functional.embedding(ids, self.table).float()
