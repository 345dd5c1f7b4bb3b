"""Linear layers: x Wᵀ + b and an activation, by our kernels, int8, oneDNN or plain torch.

Our kernels, int8 and oneDNN give a row the same bits whatever the other rows and their number: the first two by
construction, oneDNN when it is called in a way that was measured (docs/log.md). Plain torch does not, neither on a GPU
nor on a CPU that has nothing else.

Int8 weights have a scale for each output, and rows of activations a scale for each row. Both are symmetric and exact
at the largest number: w is about q * max|w| / 127. Int4 weights, of layers/int4.py, have a scale and a zero for each 32
inputs of an output; activations are as with int8. The products are sums of integers. What it does to a model's answers
is measured in tests/unit/model/test_quantization.py.
"""

import ctypes
import dataclasses
from collections.abc import Callable, Iterator
from typing import ClassVar

import torch
from torch.nn import functional

from roseinfer.model.device import DTYPES, FOURS, TILES, GroupCount, Parts, Placement, dtype_name
from roseinfer.model.layers.activation import ACTIVATIONS, Activation, activated
from roseinfer.model.layers.int4 import GROUP, KERNEL, MIDDLE, grouped_rows

_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_int64
_PIECE_NUMBERS = 1 << 20  # of a weight, so that what it is on the way to its packed form stays in a processor's caches
_PIECE_MULTIPLE = 48  # of which a piece's rows are a multiple: every packed form begins anew there
_QUANTIZE = (_POINTER, _SIZE, _SIZE, _POINTER, _POINTER)  # arguments of the kernel
_UNSIGNED = 128  # what the instruction for int8 wants rows to have added
_PACKED_BATCH_HINT = 64  # packings for 16 to 512 rows run within a tenth of each other at any number of rows
_PACKED_ATTRIBUTES = {
    "none": ("none", ""),
    "gelu": ("gelu", "none"),
    "gelu_tanh": ("gelu", "tanh"),
    "silu": ("swish", ""),
}
_PIECE_ROWS = 32
_COUNT_BYTES = 24  # of the numbers of a GroupCount, and of zeros that are not in the middle


def _pieces(parts: Parts) -> Iterator[tuple[slice, torch.Tensor]]:
    """Some rows of a weight after the other: where they are, and their numbers. Little is copied."""
    size = max(1, _PIECE_NUMBERS // parts[0].shape[1] // _PIECE_MULTIPLE) * _PIECE_MULTIPLE
    start, num_rows = 0, sum(map(len, parts))
    while start < num_rows:
        rows = slice(start, min(start + size, num_rows))
        yield rows, _rows(parts, rows)
        start = rows.stop


def _rows(parts: Parts, rows: slice) -> torch.Tensor:
    found, first = [], 0
    for part in parts:
        found.append(part[max(0, rows.start - first) : max(0, rows.stop - first)])
        first += len(part)
    found = [piece for piece in found if len(piece)]
    return found[0] if len(found) == 1 else torch.cat(found)


def _whole(parts: Parts) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


class Linear:
    """x [rows, inputs] of the placement's dtype -> activation(x Wᵀ + b) [rows, outputs]."""

    def __init__(
        self,
        weight: torch.Tensor | Parts,  # [outputs, inputs], on any device
        bias: torch.Tensor | None,
        placement: Placement,
        activation: Activation = "none",
        *,
        is_mapped: bool = True,  # the weight is a piece of a mapped file and must be copied; else it may be shared
        dtype: torch.dtype | None = None,  # of the result, where the kind has a choice; else the placement's
        order: torch.Tensor | None = None,  # of the inputs, so that those with one scale in the file lie together
    ) -> None:
        parts = [weight] if isinstance(weight, torch.Tensor) else weight
        self.num_outputs, self.num_inputs = sum(map(len, parts)), parts[0].shape[1]
        self.activation = activation
        self._placement = placement
        if (
            dtype is not None
        ):  # the head, which quantised files seldom have in four bits: it is not what they are asked for
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
                self._multiply = TorchLinear(parts, bias, activation, placement, is_mapped and len(parts) == 1)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._multiply(x)

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
    """The plain form: on a GPU, and where torch was built without oneDNN. The library chooses by the number of rows."""

    def __init__(
        self,
        weight: Parts,
        bias: torch.Tensor | None,
        activation: Activation,
        placement: Placement,
        is_mapped: bool,
    ) -> None:
        self._weight = self._placed(weight, placement, is_mapped)
        self._bias = None if bias is None else bias.to(placement.device, placement.dtype, copy=True)
        self._activation = activation

    @staticmethod
    def _placed(weight: Parts, placement: Placement, is_mapped: bool) -> torch.Tensor:
        if len(weight) == 1:
            return weight[0].to(placement.device, placement.dtype, copy=is_mapped).contiguous()
        shape = sum(map(len, weight)), weight[0].shape[1]
        placed = torch.empty(shape, dtype=placement.dtype, device=placement.device)
        for to, part in zip(torch.split(placed, list(map(len, weight))), weight, strict=True):
            to.copy_(part)
        return placed

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return activated(functional.linear(x, self._weight, self._bias), self._activation)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        return functional.embedding(ids, self._weight).float()


class OneDnnLinear:
    """A weight packed for oneDNN, which is the faster form of its products too.

    A row's bits depend on the number of rows in two ways. One row is multiplied in another way than several
    (`Placement.padded_rows`). And on AMX tiles the sum over k is cut by the number of rows, so rows are multiplied in
    pieces of one size: at most 2 times slower, on a processor with AMX without compiled kernels.
    """

    def __init__(self, weight: Parts, bias: torch.Tensor | None, activation: Activation, dtype: torch.dtype) -> None:
        placed = _whole(weight).to("cpu", dtype).contiguous()
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


class _TileDescriptor(ctypes.Structure):
    """`Linear` of kernels/cpp/gemm.cpp."""

    _fields_ = (
        ("weight", _POINTER),
        ("scales", _POINTER),
        ("bias", _POINTER),
        ("num_outputs", _SIZE),
        ("num_inputs", _SIZE),
        ("activation", ctypes.c_int32),
        ("is_output_float32", ctypes.c_int32),
    )


class _RegisterDescriptor(ctypes.Structure):
    """`Linear` of kernels/cpp/linear.cpp."""

    _fields_ = (
        ("weight", _POINTER),
        ("scales", _POINTER),
        ("surplus", _POINTER),
        ("zeros", _POINTER),
        ("order", _POINTER),
        ("bias", _POINTER),
        ("num_outputs", _SIZE),
        ("num_inputs", _SIZE),
        ("num_words", _SIZE),
        ("activation", ctypes.c_int32),
        ("is_output_float32", ctypes.c_int32),
    )


class PackedLinear:
    """x [rows, inputs] of the placement's dtype -> activation(x Wᵀ + b) [rows, outputs] of `dtype`.

    W is of the placement's dtype, or int8 with a scale for each output, which makes each row of x int8 too, on the way.
    """

    descriptor_type: ClassVar[type[ctypes.Structure]]
    outputs_multiple: ClassVar[int]  # the number of outputs is packed up to a multiple of it
    bytes_multiple: ClassVar[int]  # and the bytes of each output's weights
    further_bytes: ClassVar[tuple[int, ...]] = ()  # of what int8 needs beside weights and scales, for each output
    type_names: ClassVar[dict[torch.dtype, str]]  # of weights, in the names of the kernels' functions

    def __init__(
        self,
        weight: Parts,  # of floats, which are copied
        bias: torch.Tensor | None,
        activation: Activation,
        dtype: torch.dtype,  # of the result: float32, or the placement's
        placement: Placement,
    ) -> None:
        assert placement.kernels is not None
        self._num_outputs, self._num_inputs = sum(map(len, weight)), weight[0].shape[1]
        self._input_dtype, self._dtype = placement.dtype, dtype
        self._num_padding = 0  # numbers that rows of x lack
        is_quantized = placement.quantization == "int8"
        stored = torch.int8 if is_quantized else placement.dtype
        self._weight, *further = self._packed(weight, stored, placement)
        self._scales = further[0].view(torch.float32) if is_quantized else None
        self._bias = None if bias is None else bias.to(torch.float32, copy=True)
        self._descriptor = self.descriptor_type(
            weight=self._weight.data_ptr(),
            scales=None if self._scales is None else self._scales.data_ptr(),
            bias=None if self._bias is None else self._bias.data_ptr(),
            num_outputs=self._num_outputs,
            num_inputs=self._num_inputs,
            activation=ACTIVATIONS.index(activation),
            is_output_float32=dtype == torch.float32,
            **self._further_fields(stored, further),
        )
        self._reference = ctypes.byref(self._descriptor)
        source = f"_of_{dtype_name(placement.dtype)}" if is_quantized else ""
        name = self.type_names[stored]
        argtypes = ctypes.POINTER(self.descriptor_type), _POINTER, _SIZE, _POINTER
        self._multiply = placement.kernels.function(f"roseinfer_linear_{name}{source}", *argtypes)
        self._unpack = placement.kernels.function(f"roseinfer_linear_rows_{name}", *argtypes)

    def _packed(self, weight: Parts, stored: torch.dtype, placement: Placement) -> list[torch.Tensor]:
        """The weight in the kernels' order, as bytes; of int8 also the scales, and what the subclass needs beside."""
        assert placement.kernels is not None
        num_row_bytes = self._num_row_bytes(stored)
        num_rows = -(-self._num_outputs // self.outputs_multiple) * self.outputs_multiple
        of_each = (4, *self.further_bytes) if stored == torch.int8 else ()
        sizes = (num_rows * num_row_bytes, *(num_bytes * self._num_outputs for num_bytes in of_each))
        name = f"roseinfer_linear_pack_{self.type_names[stored]}"
        pack = placement.kernels.function(name, _POINTER, *(_SIZE,) * 4, _POINTER)

        def pack_all(pieces: list[torch.Tensor]) -> None:
            packed, *further = pieces
            for rows, floats in _pieces(weight):
                piece = floats.to(stored) if not further else self._quantized(floats, rows, further, placement)
                pack(piece.data_ptr(), *piece.stride(), *piece.shape, packed.data_ptr() + rows.start * num_row_bytes)

        return placement.memory.packed(name, weight, sizes, pack_all)

    def _quantized(
        self, floats: torch.Tensor, rows: slice, further: list[torch.Tensor], placement: Placement
    ) -> torch.Tensor:
        """Some rows in int8; what else is known of them is written to its places in `further`."""
        piece, further[0].view(torch.float32)[rows] = quantized_piece(floats, placement)
        return piece

    def _further_fields(self, stored: torch.dtype, further: list[torch.Tensor]) -> dict[str, int]:  # noqa: ARG002
        """Fields of the descriptor that only this kind has."""
        return {}

    def _num_row_bytes(self, stored: torch.dtype) -> int:
        return -(-self._num_inputs * stored.itemsize // self.bytes_multiple) * self.bytes_multiple

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        ids = ids.contiguous()
        out = torch.empty(len(ids), self._num_inputs)
        self._unpack(self._reference, ids.data_ptr(), len(ids), out.data_ptr())
        return out

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        assert x.dtype == self._input_dtype
        assert x.shape[1] == self._num_inputs
        x = functional.pad(x, (0, self._num_padding)) if self._num_padding else x.contiguous()
        out = x.new_empty(x.shape[0], self._num_outputs, dtype=self._dtype)
        self._multiply(self._reference, x.data_ptr(), x.shape[0], out.data_ptr())
        return out


class TileLinear(PackedLinear):
    """bfloat16 or int8 on AMX tiles."""

    descriptor_type = _TileDescriptor
    outputs_multiple = 16
    bytes_multiple = 64  # a tile's line
    type_names: ClassVar = {torch.bfloat16: "bfloat16", torch.int8: "int8"}


class RegisterLinear(PackedLinear):
    """float32 and fours of int8 at every level of the kernels; pairs of bfloat16 where AVX-512 has them, and on Arm."""

    descriptor_type = _RegisterDescriptor
    outputs_multiple = 48  # at every level a multiple of the panel's width
    bytes_multiple = 4  # a word
    further_bytes = (4,)  # the surplus of its outputs
    type_names: ClassVar = {torch.float32: "float32", torch.bfloat16: "bfloat16_pairs", torch.int8: "int8_fours"}

    def _quantized(
        self, floats: torch.Tensor, rows: slice, further: list[torch.Tensor], placement: Placement
    ) -> torch.Tensor:
        piece = super()._quantized(floats, rows, further, placement)
        # Sums in float32 are exact up to 2**24, the sum of 132,104 inputs. The product may wrap around, as sums do.
        sums = torch.mv(piece.float(), torch.ones(self._num_inputs))
        further[1].view(torch.int32)[rows] = sums.int() * _UNSIGNED
        return piece

    def _further_fields(self, stored: torch.dtype, further: list[torch.Tensor]) -> dict[str, int]:
        num_words = self._num_row_bytes(stored) // self.bytes_multiple
        if stored == torch.int8:
            self._surplus = further[1]
            return {"num_words": num_words, "surplus": self._surplus.data_ptr()}
        # Rows are read where they lie, so they need whole words there; those that become int8 are written elsewhere.
        self._num_padding = num_words * self.bytes_multiple // stored.itemsize - self._num_inputs
        return {"num_words": num_words}


def quantized_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [rows, width] -> int8 of the same shape, and scales [rows] float32; the same bits as kernels/cpp/quantize.h.

    Rows below about 3.7e-37 become zeros with a scale of 0, those that are not finite zeros with a scale of NaN.
    """
    x = x.float()
    limits = x.abs().amax(1, keepdim=True)
    factors = torch.full_like(limits, 127.0) / limits
    has_factor = factors.isfinite()
    quantized = (x * torch.where(has_factor, factors, 0.0)).round().nan_to_num(0.0).to(torch.int8)
    not_finite = (x * 0.0).sum(1)
    return quantized, torch.where(has_factor, limits / 127.0, 0.0)[:, 0] + not_finite


def quantized_piece(piece: torch.Tensor, placement: Placement) -> tuple[torch.Tensor, torch.Tensor]:
    """`quantized_rows`, by a kernel where there is one: the same bits, in one pass."""
    if placement.kernels is None:
        return quantized_rows(piece)
    piece = (piece if piece.dtype in DTYPES.values() else piece.float()).contiguous()
    quantize = placement.kernels.function(f"roseinfer_quantize_{dtype_name(piece.dtype)}", *_QUANTIZE)
    quantized, scales = torch.empty(piece.shape, dtype=torch.int8), torch.empty(len(piece))
    quantize(piece.data_ptr(), *piece.shape, quantized.data_ptr(), scales.data_ptr())
    return quantized, scales


class IntegerLinear:
    """x [rows, inputs] of the placement's dtype -> activation(x Wᵀ + b) [rows, outputs] of `dtype`.

    Torch multiplies the int8 matrices; before and after it run two of our kernels, or the same in torch.
    """

    def __init__(
        self,
        weight: Parts,  # of floats
        bias: torch.Tensor | None,
        activation: Activation,
        dtype: torch.dtype,
        placement: Placement,
    ) -> None:
        num_outputs, num_inputs = sum(map(len, weight)), weight[0].shape[1]

        def pack(pieces: list[torch.Tensor]) -> None:
            quantized, scales = pieces[0].view(torch.int8).view(num_outputs, -1), pieces[1].view(torch.float32)
            for rows, piece in _pieces(weight):
                quantized[rows], scales[rows] = quantized_piece(piece, placement)

        numbers, scales = placement.memory.packed("int8", weight, (num_outputs * num_inputs, 4 * num_outputs), pack)
        self._weight = numbers.view(torch.int8).view(num_outputs, num_inputs).t()
        self._scales = scales.view(torch.float32)
        self._bias = None if bias is None else bias.to(torch.float32, copy=True)
        self._activation = activation
        self._dtype = dtype
        self._placement = placement
        if placement.kernels is not None:
            name, argtypes = f"roseinfer_dequantize_to_{dtype_name(dtype)}", (_POINTER,) * 4
            self._dequantize = placement.kernels.function(name, *argtypes, ctypes.c_int32, _SIZE, _SIZE, _POINTER)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        quantized, row_scales = quantized_piece(x, self._placement)
        sums = torch._int_mm(quantized, self._weight)  # noqa: SLF001
        if self._placement.kernels is None:
            y = sums.float() * self._scales * row_scales[:, None]
            if self._bias is not None:
                y += self._bias
            return activated(y, self._activation).to(self._dtype)
        out = torch.empty(sums.shape, dtype=self._dtype)
        bias = None if self._bias is None else self._bias.data_ptr()
        addresses = (sums.data_ptr(), row_scales.data_ptr(), self._scales.data_ptr(), bias)
        self._dequantize(*addresses, ACTIVATIONS.index(self._activation), *sums.shape, out.data_ptr())
        return out

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        return self._weight.t()[ids].float() * self._scales[ids][:, None]


class GroupedLinear:
    """x [rows, inputs] of the placement's dtype -> activation(x Wᵀ + b) [rows, outputs] of `dtype`, W in int4.

    On registers, at every level of the kernels; processors with tiles use them too.
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
        self._num_outputs, self._num_inputs = sum(map(len, weight)), weight[0].shape[1]
        self._input_dtype, self._dtype = placement.dtype, dtype
        self._order = None if order is None else order.to(torch.int32, copy=True)
        self._pack(weight, placement)
        self._bias = None if bias is None else bias.to(torch.float32, copy=True)
        self._descriptor = _RegisterDescriptor(
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
        self._reference = ctypes.byref(self._descriptor)
        name, argtypes = dtype_name(placement.dtype), (ctypes.POINTER(_RegisterDescriptor), _POINTER, _SIZE, _POINTER)
        self._multiply = placement.kernels.function(f"roseinfer_linear_int4_of_{name}", *argtypes)
        self._unpack = placement.kernels.function("roseinfer_linear_rows_int4", *argtypes)

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
            for rows, piece in _pieces(weight):
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

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        assert x.dtype == self._input_dtype
        assert x.shape[1] == self._num_inputs
        x = x.contiguous()
        out = x.new_empty(x.shape[0], self._num_outputs, dtype=self._dtype)
        self._multiply(self._reference, x.data_ptr(), x.shape[0], out.data_ptr())
        return out

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        ids = ids.contiguous()
        out = torch.empty(len(ids), self._num_inputs)
        self._unpack(self._reference, ids.data_ptr(), len(ids), out.data_ptr())
        return out


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
            for rows, piece in _pieces(weight):
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


class Embedding:
    """ids [rows] -> vectors [rows, width] float32.

    The table is held in the narrower of its own type and the placement's; one that is the head's weight too is held
    once, as the head holds it.
    """

    def __init__(self, table: torch.Tensor, placement: Placement, head: Linear | None = None) -> None:
        """`head` has the table as its weight."""
        self._rows: Callable[[torch.Tensor], torch.Tensor] | None = None
        if head is not None and head.has_rows:
            self._rows = head.rows
        else:
            dtype = table.dtype if table.itemsize < placement.dtype.itemsize else placement.dtype
            self.table = table.to(placement.device, dtype, copy=True)

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        return functional.embedding(ids, self.table).float() if self._rows is None else self._rows(ids)

    def add_to(self, x: torch.Tensor, ids: torch.Tensor) -> None:
        """Add the vectors of ids [rows] to x [rows, width] float32."""
        x.add_(functional.embedding(ids, self.table) if self._rows is None else self._rows(ids))
