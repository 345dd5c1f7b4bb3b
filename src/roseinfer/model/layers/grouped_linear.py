"""Linears with a weight in int4, of layers/int4.py: by our kernels, and the same in torch.

Rows of activations are int8 with a scale each, as those of int8 weights are.
"""

import ctypes

import torch
from torch.nn import functional

from roseinfer.model.device import DTYPES, Parts, Placement, dtype_name
from roseinfer.model.layers.activation import ACTIVATIONS, Activation, activated
from roseinfer.model.layers.int4 import GROUP, MIDDLE, grouped_rows
from roseinfer.model.layers.int8 import quantized_rows
from roseinfer.model.layers.packed_linear import KernelLinear, RegisterDescriptor, RegisterLinear
from roseinfer.model.layers.pieces import pieces_of

_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_int64
_COUNT_BYTES = 24  # of the numbers of a GroupCount, and of zeros that are not in the middle


class GroupedLinear(KernelLinear):
    """x [rows, inputs] of the placement's dtype -> activation(x Wᵀ + b) [rows, outputs] of `dtype`, W in int4.

    In registers, at every level of the kernels, and on AMX tiles where there are many rows.
    """

    def __init__(
        self,
        weight: Parts,  # of floats
        bias: torch.Tensor | None,
        activation: Activation,
        dtype: torch.dtype,
        placement: Placement,
        order: torch.Tensor | None = None,
    ) -> None:
        assert placement.kernels is not None
        super().__init__(weight, bias, dtype, placement)
        self._order = None if order is None else order.to(torch.int32, copy=True)
        self._pack(weight, placement)
        descriptor = RegisterDescriptor(
            weight=self._weight.data_ptr(),
            scales=self._scales.data_ptr(),
            zeros=_address(self._zeros),
            order=_address(self._order),
            bias=_address(self._bias),
            num_outputs=self._num_outputs,
            num_inputs=self._num_inputs,
            num_words=-(-self._num_inputs // GROUP) * GROUP // 8,
            activation=ACTIVATIONS.index(activation),
            is_output_float32=dtype == torch.float32,
        )
        multiply = f"roseinfer_linear_int4_of_{dtype_name(placement.dtype)}"
        self._bind(placement.kernels, descriptor, multiply, "roseinfer_linear_rows_int4")

    def _pack(self, weight: Parts, placement: Placement) -> None:
        multiple, num_groups = RegisterLinear.outputs_multiple, -(-self._num_inputs // GROUP)
        num_rows = -(-self._num_outputs // multiple) * multiple
        zeros = torch.full((num_rows * num_groups,), MIDDLE, dtype=torch.uint8)
        kind, sizes = "roseinfer_linear_pack_int4", (len(zeros) * GROUP // 2, len(zeros) * 2, _COUNT_BYTES)
        is_packed = False

        def pack_all(pieces: list[torch.Tensor]) -> None:
            nonlocal is_packed
            is_packed = True
            words, scales, counts = pieces
            for rows, piece in pieces_of(weight):
                to = [each.data_ptr() + rows.start * len(each) // num_rows for each in (words, scales, zeros)]
                counts.view(torch.int64).add_(
                    torch.tensor([len(piece) * num_groups, *self._packed(piece, to, placement)])
                )

        def pack_zeros(pieces: list[torch.Tensor]) -> None:
            if not is_packed:
                pack_all([torch.zeros(size, dtype=torch.uint8) for size in sizes])
            pieces[0].copy_(zeros)

        self._weight, self._scales, counts = placement.memory.packed(kind, weight, sizes, pack_all)
        *of_groups, num_moved = counts.view(torch.int64).tolist()
        placement.groups.count(*of_groups)
        self._zeros: torch.Tensor | None = None  # of which most weights need none
        if num_moved:
            [self._zeros] = placement.memory.packed(f"{kind} zeros", weight, [len(zeros)], pack_zeros)

    def _packed(self, piece: torch.Tensor, to: list[int], placement: Placement) -> list[int]:
        """How many groups of some rows are exact, and how many of their zeros are not in the middle."""
        assert placement.kernels is not None
        piece = (piece if piece.dtype in DTYPES.values() else piece.float()).contiguous()
        name = f"roseinfer_linear_pack_int4_of_{dtype_name(piece.dtype)}"
        pack = placement.kernels.function(name, *(_POINTER,) * 2, *(_SIZE,) * 2, *(_POINTER,) * 4)
        counts = torch.zeros(2, dtype=torch.int64)
        pack(piece.data_ptr(), _address(self._order), *piece.shape, *to, counts.data_ptr())
        found: list[int] = counts.tolist()
        return found


class TorchGroupedLinear:
    """The same in torch, for processors without kernels, and for tests. Its numbers take a byte each."""

    def __init__(
        self,
        weight: Parts,  # of floats
        bias: torch.Tensor | None,
        activation: Activation,
        dtype: torch.dtype,
        placement: Placement,
        order: torch.Tensor | None = None,
    ) -> None:
        num_outputs, num_inputs = sum(map(len, weight)), weight[0].shape[1]
        self._order = torch.arange(num_inputs) if order is None else order

        def pack(pieces: list[torch.Tensor]) -> None:
            numbers, scales = pieces[0].view(torch.int8), pieces[1].view(torch.float16)
            numbers, scales, counts = numbers.view(num_outputs, -1), scales.view(num_outputs, -1), pieces[2]
            for rows, piece in pieces_of(weight):
                found = grouped_rows(piece[:, self._order])
                numbers[rows] = found.numbers.to(torch.int8) - _of_inputs(found.zeros, num_inputs).to(torch.int8)
                scales[rows] = found.scales
                counts.view(torch.int64).add_(torch.tensor([found.scales.numel(), found.num_exact, 0]))

        sizes = (num_outputs * num_inputs, 2 * num_outputs * -(-num_inputs // GROUP), _COUNT_BYTES)
        numbers, scales, counts = placement.memory.packed("int4", weight, sizes, pack)
        self._numbers = numbers.view(torch.int8).view(num_outputs, -1)  # less their zeros
        self._scales = scales.view(torch.float16).view(num_outputs, -1)
        placement.groups.count(*counts.view(torch.int64).tolist()[:2])
        self._bias = None if bias is None else bias.to(torch.float32, copy=True)
        self._activation = activation
        self._dtype = dtype

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        quantized, row_scales = quantized_rows(x[:, self._order])
        y = torch.zeros(len(x), len(self._numbers))
        # Sums of a group are whole numbers below 2^24: exact in float32 in any order.
        of_groups = (torch.split(each, GROUP, 1) for each in (quantized.float(), self._numbers))
        parts = zip(*of_groups, self._scales.t(), strict=True)
        for rows, numbers, scales in parts:
            # Exact in float64, whose sum is then rounded as the kernels' fused multiply-add rounds it.
            y = (y + functional.linear(rows, numbers.float()).double() * scales).float()
        y *= row_scales[:, None]
        if self._bias is not None:
            y += self._bias
        return activated(y, self._activation).to(self._dtype)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        out = torch.empty(len(ids), len(self._order))
        out[:, self._order] = self._numbers[ids].float() * _of_inputs(self._scales[ids].float(), len(self._order))
        return out


def _of_inputs(of_groups: torch.Tensor, num_inputs: int) -> torch.Tensor:
    return of_groups.repeat_interleave(GROUP, 1)[:, :num_inputs]


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
