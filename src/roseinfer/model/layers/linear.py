"""Linear layers: x Wᵀ + b and an activation, by our kernels, int8, oneDNN or plain torch.

Our kernels, int8 and oneDNN give a row the same bits whatever the other rows and their number: the first two by
construction, oneDNN when it is called in a way that was measured (docs/log.md). Plain torch does not, neither on a GPU
nor on a CPU that has nothing else.
"""

from collections.abc import Callable

import torch
from torch.nn import functional

from roseinfer.model.device import Placement
from roseinfer.model.layers.activation import Activation, activated
from roseinfer.model.layers.int8 import int8_linear
from roseinfer.model.layers.packed_linear import RegisterLinear, TileLinear

_PACKED_BATCH_HINT = 64  # packings for 16 to 512 rows run within a tenth of each other at any number of rows
_PACKED_ATTRIBUTES = {
    "none": ("none", ""),
    "gelu": ("gelu", "none"),
    "gelu_tanh": ("gelu", "tanh"),
    "silu": ("swish", ""),
}
_PIECE_ROWS = 32


class Linear:
    """x [rows, inputs] of the placement's dtype -> activation(x Wᵀ + b) [rows, outputs]."""

    def __init__(
        self,
        weight: torch.Tensor,  # [outputs, inputs], of any dtype, device and strides
        bias: torch.Tensor | None,
        placement: Placement,
        activation: Activation = "none",
        *,
        is_mapped: bool = True,  # the weight is a piece of a mapped file and must be copied; else it may be shared
        dtype: torch.dtype | None = None,  # of the result, where the kind has a choice; else the placement's
    ) -> None:
        self.num_outputs, self.num_inputs = weight.shape
        self.activation = activation
        self._placement = placement
        dtype = dtype or placement.dtype
        self._multiply: Callable[[torch.Tensor], torch.Tensor]
        match placement.linears:
            case "int8":
                self._multiply = int8_linear(weight, bias, activation, dtype, placement)
            case "amx":
                self._multiply = TileLinear(weight.to(placement.dtype), None, bias, activation, dtype, placement)
            case "registers":
                self._multiply = RegisterLinear(weight.to(placement.dtype), None, bias, activation, dtype, placement)
            case "onednn":
                self._multiply = OneDnnLinear(weight, bias, activation, placement.dtype)
            case "torch":
                self._multiply = TorchLinear(weight, bias, activation, placement, is_mapped)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._multiply(x)

    def warm_up(self, num_rows: int) -> None:
        """Have the kernel for `num_rows` rows built."""
        self(torch.zeros(num_rows, self.num_inputs, dtype=self._placement.dtype, device=self._placement.device))


class TorchLinear:
    """The plain form: on a GPU, and where torch was built without oneDNN. The library chooses by the number of rows."""

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        activation: Activation,
        placement: Placement,
        is_mapped: bool,
    ) -> None:
        self._weight = weight.to(placement.device, placement.dtype, copy=is_mapped).contiguous()
        self._bias = None if bias is None else bias.to(placement.device, placement.dtype, copy=True)
        self._activation = activation

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return activated(functional.linear(x, self._weight, self._bias), self._activation)


class OneDnnLinear:
    """A weight packed for oneDNN, which is the faster form of its products too.

    A row's bits depend on the number of rows in two ways. One row is multiplied in another way than several
    (`Placement.padded_rows`). And on AMX tiles the sum over k is cut by the number of rows, so rows are multiplied in
    pieces of one size: at most 2 times slower, on a processor with AMX without compiled kernels.
    """

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, activation: Activation, dtype: torch.dtype
    ) -> None:
        placed = weight.to("cpu", dtype).contiguous()
        self._weight = torch.ops.mkldnn._reorder_linear_weight(placed, _PACKED_BATCH_HINT)  # noqa: SLF001
        self._bias = None if bias is None else bias.to(dtype, copy=True)
        self._num_outputs = weight.shape[0]
        self._attributes = _PACKED_ATTRIBUTES[activation]
        self._is_cut = dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported()  # noqa: SLF001

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if not self._is_cut:
            return self._multiply(x)
        num_rows = x.shape[0]
        padded = functional.pad(x, (0, 0, 0, -num_rows % _PIECE_ROWS))
        out = x.new_empty(len(padded), self._num_outputs)
        for start in range(0, num_rows, _PIECE_ROWS):
            piece = slice(start, start + _PIECE_ROWS)
            out[piece] = self._multiply(padded[piece])
        return out[:num_rows]

    def _multiply(self, x: torch.Tensor) -> torch.Tensor:
        operator, algorithm = self._attributes
        packed = torch.ops.mkldnn._linear_pointwise  # noqa: SLF001
        out: torch.Tensor = packed(x, self._weight, self._bias, operator, [], algorithm)
        return out
