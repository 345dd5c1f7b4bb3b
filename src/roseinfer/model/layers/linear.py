"""Linear layers: x Wᵀ + b and an activation, by our kernels, int8, oneDNN or plain torch.

Our kernels, int8 and oneDNN give a row the same bits whatever the other rows and their number: the first two by
construction, oneDNN when it is called in a way that was measured (docs/log.md). Plain torch does not, neither on a GPU
nor on a CPU that has nothing else.

Int8 weights have a scale for each output, and rows of activations a scale for each row. Both are symmetric and exact
at the largest number: w is about q * max|w| / 127. Int4 weights, of layers/int4.py, have a scale and a zero for each 32
inputs of an output; activations are as with int8. The products are sums of integers. What it does to a model's answers
is measured in tests/unit/model/test_quantization.py.
"""

import dataclasses
from collections.abc import Callable

import torch
from torch.nn import functional

from roseinfer.model.device import FOURS, TILES, GroupCount, Parts, Placement
from roseinfer.model.layers.activation import Activation, activated
from roseinfer.model.layers.grouped_linear import GroupedLinear, TorchGroupedLinear
from roseinfer.model.layers.int4 import KERNEL
from roseinfer.model.layers.int8 import IntegerLinear
from roseinfer.model.layers.packed_linear import PackedLinear, RegisterLinear, TileLinear
from roseinfer.model.layers.pieces import whole

_PACKED_BATCH_HINT = 64  # packings for 16 to 512 rows run within a tenth of each other at any number of rows
_PACKED_ATTRIBUTES = {
    "none": ("none", ""),
    "gelu": ("gelu", "none"),
    "gelu_tanh": ("gelu", "tanh"),
    "silu": ("swish", ""),
}
_PIECE_ROWS = 32
_HEAD_MULTIPLE = 64
_HAS_RESULT_TYPES = hasattr(torch.ops.aten.mm, "dtype")  # torch 2.8 on


class Linear:
    """x [rows, inputs] of the placement's dtype -> activation(x Wᵀ + b) [rows, outputs]."""

    def __init__(
        self,
        weight: torch.Tensor | Parts,  # [outputs, inputs], on any device
        bias: torch.Tensor | None,
        placement: Placement,
        activation: Activation = "none",
        *,
        dtype: torch.dtype | None = None,  # of the result, where the kind has a choice; else the placement's
        order: torch.Tensor | None = None,  # of the inputs, so that those with one scale in the file lie together
    ) -> None:
        parts = [weight] if isinstance(weight, torch.Tensor) else weight
        self.num_outputs, self.num_inputs = sum(map(len, parts)), parts[0].shape[1]
        self.activation = activation
        self._placement = placement
        of_head = dtype
        if dtype is not None:  # a head, which files in four bits seldom have in them: its groups are not counted
            placement = dataclasses.replace(placement, groups=GroupCount())
        dtype = dtype or placement.dtype
        self._multiply: PackedLinear | IntegerLinear | GroupedLinear | TorchGroupedLinear | OneDnnLinear | TorchLinear
        match placement.linears:
            case "int4":
                grouped = GroupedLinear if placement.has_kernel(KERNEL) else TorchGroupedLinear
                self._multiply = grouped(parts, bias, activation, dtype, placement, order)
            case "int8":
                has_tiles, has_fours = placement.has_kernel(TILES), placement.has_kernel(FOURS)
                fast = TileLinear if has_tiles else RegisterLinear if has_fours else IntegerLinear
                self._multiply = fast(parts, bias, activation, dtype, placement)
            case "amx":
                self._multiply = TileLinear(parts, bias, activation, dtype, placement)
            case "registers":
                self._multiply = RegisterLinear(parts, bias, activation, dtype, placement)
            case "onednn":
                self._multiply = OneDnnLinear(parts, bias, activation, placement.dtype)
            case "torch":
                self._multiply = TorchLinear(parts, bias, activation, placement, of_head)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._multiply(x)

    @property
    def plain(self) -> "TorchLinear | None":
        """The implementation by torch, if this linear has that one."""
        return self._multiply if isinstance(self._multiply, TorchLinear) else None

    @property
    def has_rows(self) -> bool:
        """Whether `rows` finds rows of the weight in the form in which it is kept."""
        return not isinstance(self._multiply, OneDnnLinear)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of the weight: ids [rows] -> [rows, inputs] float32; of int8 what its numbers stand for."""
        assert not isinstance(self._multiply, OneDnnLinear)
        return self._multiply.rows(ids)

    def warm_up(self, num_rows: int) -> None:
        """Have the kernel for `num_rows` rows built."""
        self(torch.zeros(num_rows, self.num_inputs, dtype=self._placement.dtype, device=self._placement.device))


class TorchLinear:
    """The plain form: on a GPU, and where torch was built without oneDNN. The library chooses by the number of rows.

    A GPU's library adds the bias and applies gelu_tanh in the product's own kernel. There the outputs of a head are
    filled up to a multiple of 64, so that rows of logits are aligned, and are not rounded to the weight's type.
    """

    def __init__(
        self,
        weight: Parts,
        bias: torch.Tensor | None,
        activation: Activation,
        placement: Placement,
        head_type: torch.dtype | None = None,  # of a head's results, where a GPU has a choice
    ) -> None:
        self.num_outputs = sum(map(len, weight))
        self.weight = self._placed(weight, placement)
        self.bias = None if bias is None else bias.to(placement.device, placement.dtype, copy=True)
        self._activation = activation
        is_gpu = placement.device.type == "cuda"
        self._has_gelu = is_gpu and activation == "gelu_tanh" and bias is not None
        self._is_head = is_gpu and head_type is not None
        self._result_type = None
        if self._is_head:
            assert activation == "none"
            num_more = -self.num_outputs % _HEAD_MULTIPLE
            self.weight = functional.pad(self.weight, (0, 0, 0, num_more))
            self.bias = None if self.bias is None else functional.pad(self.bias, (0, num_more))
            if placement.dtype != head_type and _HAS_RESULT_TYPES:
                self._result_type = head_type

    @staticmethod
    def _placed(weight: Parts, placement: Placement) -> torch.Tensor:
        """A copy in one piece, since a weight may be a piece of a mapped file."""
        if len(weight) == 1:
            return weight[0].to(placement.device, placement.dtype, copy=True).contiguous()
        shape = sum(map(len, weight)), weight[0].shape[1]
        placed = torch.empty(shape, dtype=placement.dtype, device=placement.device)
        for to, part in zip(torch.split(placed, list(map(len, weight))), weight, strict=True):
            to.copy_(part)
        return placed

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._is_head:
            weight, wide = self.weight.t(), self._result_type
            logits = torch.mm(x, weight) if wide is None else torch.mm(x, weight, out_dtype=wide)
            if self.bias is not None:  # as Phi's head has
                logits += self.bias
            return logits[:, : self.num_outputs]
        if self._has_gelu:
            assert self.bias is not None
            return torch._addmm_activation(self.bias, x, self.weight.t(), use_gelu=True)  # noqa: SLF001
        return activated(functional.linear(x, self.weight, self.bias), self._activation)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        return functional.embedding(ids, self.weight).float()


class OneDnnLinear:
    """A weight packed for oneDNN, which is the faster form of its products too.

    A row's bits depend on the number of rows in two ways. One row is multiplied in another way than several
    (`Placement.padded_rows`). And on AMX tiles the sum over k is cut by the number of rows, so rows are multiplied in
    pieces of one size: at most 2 times slower, on a processor with AMX without compiled kernels.
    """

    def __init__(self, weight: Parts, bias: torch.Tensor | None, activation: Activation, dtype: torch.dtype) -> None:
        placed = whole(weight).to("cpu", dtype).contiguous()
        self._weight = torch.ops.mkldnn._reorder_linear_weight(placed, _PACKED_BATCH_HINT)  # noqa: SLF001
        self._bias = None if bias is None else bias.to(dtype, copy=True)
        self._num_outputs = len(placed)
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


class Embedding:
    """ids [rows] -> vectors [rows, width] float32.

    The table is held in the narrower of its own type and the placement's; one that is the head's weight too is held
    once, as the head holds it.
    """

    def __init__(self, table: torch.Tensor, placement: Placement, head: Linear | None = None) -> None:
        """`head` has the table as its weight."""
        self._has_triton = placement.has_triton
        self._rows: Callable[[torch.Tensor], torch.Tensor] | None = None
        if head is not None and head.plain is not None:
            self.table = head.plain.weight
        elif head is not None and head.has_rows:
            self._rows = head.rows
        else:
            dtype = table.dtype if table.itemsize < placement.dtype.itemsize else placement.dtype
            self.table = table.to(placement.device, dtype, copy=True)

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        if self._has_triton:
            from roseinfer.model.triton_kernels.pointwise import embed

            return embed(ids, self.table, None, None)
        return functional.embedding(ids, self.table).float() if self._rows is None else self._rows(ids)

    def plus(self, ids: torch.Tensor, positions: torch.Tensor, of_positions: "Embedding") -> torch.Tensor:
        """The vectors of ids [rows], plus another table's vectors of positions [rows]."""
        if self._has_triton:
            from roseinfer.model.triton_kernels.pointwise import embed

            return embed(ids, self.table, positions, of_positions.table)
        return self(ids).add_(functional.embedding(positions, of_positions.table))
