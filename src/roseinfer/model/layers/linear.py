"""Linear layers: x Wᵀ + b and an activation, by our kernels, int8, oneDNN or plain torch.

Our kernels, int8 and oneDNN give a row the same bits whatever the other rows and their number: the first two by
construction, oneDNN when it is called in a way that was measured (docs/log.md). Plain torch does not, neither on a GPU
nor on a CPU that has nothing else.

Int8 weights have a scale for each output, and rows of activations a scale for each row. Both are symmetric and exact
at the largest number: w is about q * max|w| / 127. The products are sums of integers. What it does to a model's
answers is measured in tests/unit/model/test_quantization.py.
"""

import ctypes
from collections.abc import Callable
from typing import ClassVar

import torch
from torch.nn import functional

from roseinfer.model.device import FOURS, TILES, Placement, dtype_name
from roseinfer.model.layers.activation import ACTIVATIONS, Activation, activated

_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_int64
_ROWS_AT_ONCE = 4096  # of a weight, so that its float32 copy is small
_UNSIGNED = 128  # what the instruction for int8 wants rows to have added
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
                quantized, scales = quantized_weight(weight)
                has_tiles, has_fours = placement.has_kernel(TILES), placement.has_kernel(FOURS)
                fast = TileLinear if has_tiles else RegisterLinear if has_fours else IntegerLinear
                self._multiply = fast(quantized, scales, bias, activation, dtype, placement)
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
    type_names: ClassVar[dict[torch.dtype, str]]  # of weights, in the names of the kernels' functions

    def __init__(
        self,
        weight: torch.Tensor,  # [outputs, inputs] of any strides; it is copied
        scales: torch.Tensor | None,  # [outputs] float32, of int8
        bias: torch.Tensor | None,
        activation: Activation,
        dtype: torch.dtype,  # of the result: float32, or the placement's
        placement: Placement,
    ) -> None:
        assert placement.kernels is not None
        assert weight.dtype == (placement.dtype if scales is None else torch.int8)
        self._num_outputs, self._num_inputs = weight.shape
        self._input_dtype, self._dtype = placement.dtype, dtype
        self._num_padding = 0  # numbers that rows of x lack
        self._weight = self._packed(weight, placement)
        self._scales = scales
        self._bias = None if bias is None else bias.to(torch.float32, copy=True)
        self._descriptor = self.descriptor_type(
            weight=self._weight.data_ptr(),
            scales=None if scales is None else scales.data_ptr(),
            bias=None if self._bias is None else self._bias.data_ptr(),
            num_outputs=self._num_outputs,
            num_inputs=self._num_inputs,
            activation=ACTIVATIONS.index(activation),
            is_output_float32=dtype == torch.float32,
            **self._further_fields(weight),
        )
        self._address = ctypes.addressof(self._descriptor)
        source = "" if scales is None else f"_of_{dtype_name(placement.dtype)}"
        name = f"roseinfer_linear_{self.type_names[weight.dtype]}{source}"
        self._multiply = placement.kernels.function(name, _POINTER, _POINTER, _SIZE, _POINTER)

    def _packed(self, weight: torch.Tensor, placement: Placement) -> torch.Tensor:
        """The weight in the kernels' order, as bytes."""
        assert placement.kernels is not None
        num_outputs = -(-weight.shape[0] // self.outputs_multiple) * self.outputs_multiple
        packed = placement.memory.allocate(num_outputs * self._num_row_bytes(weight))
        name = f"roseinfer_linear_pack_{self.type_names[weight.dtype]}"
        pack = placement.kernels.function(name, _POINTER, *(_SIZE,) * 4, _POINTER)
        pack(weight.data_ptr(), *weight.stride(), *weight.shape, packed.data_ptr())
        return packed

    def _further_fields(self, weight: torch.Tensor) -> dict[str, int]:  # noqa: ARG002 - of the subclasses
        """Fields of the descriptor that only this kind has."""
        return {}

    def _num_row_bytes(self, weight: torch.Tensor) -> int:
        return -(-weight.shape[1] * weight.itemsize // self.bytes_multiple) * self.bytes_multiple

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        assert x.dtype == self._input_dtype
        assert x.shape[1] == self._num_inputs
        x = functional.pad(x, (0, self._num_padding)) if self._num_padding else x.contiguous()
        out = x.new_empty(x.shape[0], self._num_outputs, dtype=self._dtype)
        self._multiply(self._address, x.data_ptr(), x.shape[0], out.data_ptr())
        return out


class TileLinear(PackedLinear):
    """bfloat16 or int8 on AMX tiles."""

    descriptor_type = _TileDescriptor
    outputs_multiple = 16
    bytes_multiple = 64  # a tile's line
    type_names: ClassVar = {torch.bfloat16: "bfloat16", torch.int8: "int8"}


class RegisterLinear(PackedLinear):
    """float32 on AVX2 or AVX-512, which gives float32; pairs of bfloat16 and fours of int8 where AVX-512 has them."""

    descriptor_type = _RegisterDescriptor
    outputs_multiple = 48  # at every level a multiple of the panel's width
    bytes_multiple = 4  # a word
    type_names: ClassVar = {torch.float32: "float32", torch.bfloat16: "bfloat16_pairs", torch.int8: "int8_fours"}

    def _further_fields(self, weight: torch.Tensor) -> dict[str, int]:
        num_words = self._num_row_bytes(weight) // self.bytes_multiple
        if weight.dtype == torch.int8:
            self._surplus = _surplus(weight)
            return {"num_words": num_words, "surplus": self._surplus.data_ptr()}
        # Rows are read where they lie, so they need whole words there; those that become int8 are written elsewhere.
        self._num_padding = num_words * self.bytes_multiple // weight.itemsize - self._num_inputs
        return {"num_words": num_words}


def _surplus(weight: torch.Tensor) -> torch.Tensor:
    """[outputs] int32: what sums have too much when rows have `_UNSIGNED` added. It may wrap around, as sums do."""
    sums = torch.empty(weight.shape[0], dtype=torch.int32)
    for start in range(0, len(sums), _ROWS_AT_ONCE):  # torch makes a copy in int32 of what it sums
        rows = slice(start, start + _ROWS_AT_ONCE)
        sums[rows] = weight[rows].sum(1, dtype=torch.int32)
    return sums * _UNSIGNED


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


def quantized_weight(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[outputs, inputs] of any floating type and strides -> int8, contiguous, and scales [outputs] float32."""
    quantized = torch.empty(weight.shape, dtype=torch.int8)
    scales = torch.empty(weight.shape[0])
    for start in range(0, weight.shape[0], _ROWS_AT_ONCE):
        rows = slice(start, start + _ROWS_AT_ONCE)
        quantized[rows], scales[rows] = quantized_rows(weight[rows])
    return quantized, scales


class IntegerLinear:
    """x [rows, inputs] of the placement's dtype -> activation(x Wᵀ + b) [rows, outputs] of `dtype`.

    Torch multiplies the int8 matrices; before and after it run two of our kernels, or the same in torch.
    """

    def __init__(
        self,
        weight: torch.Tensor,  # [outputs, inputs] int8
        scales: torch.Tensor,  # [outputs] float32
        bias: torch.Tensor | None,
        activation: Activation,
        dtype: torch.dtype,
        placement: Placement,
    ) -> None:
        self._weight = weight.t()
        self._scales = scales
        self._bias = None if bias is None else bias.to(torch.float32, copy=True)
        self._activation = activation
        self._dtype = dtype
        self._quantize = placement.compiled("quantize", _POINTER, _SIZE, _SIZE, _POINTER, _POINTER)
        if placement.kernels is not None:
            name, argtypes = f"roseinfer_dequantize_to_{dtype_name(dtype)}", (_POINTER,) * 4
            self._dequantize = placement.kernels.function(name, *argtypes, ctypes.c_int32, _SIZE, _SIZE, _POINTER)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        quantized, row_scales = self._quantized(x)
        sums = torch._int_mm(quantized, self._weight)  # noqa: SLF001
        if self._quantize is None:
            y = sums.float() * self._scales * row_scales[:, None]
            if self._bias is not None:
                y += self._bias
            return activated(y, self._activation).to(self._dtype)
        out = torch.empty(sums.shape, dtype=self._dtype)
        bias = None if self._bias is None else self._bias.data_ptr()
        addresses = (sums.data_ptr(), row_scales.data_ptr(), self._scales.data_ptr(), bias)
        self._dequantize(*addresses, ACTIVATIONS.index(self._activation), *sums.shape, out.data_ptr())
        return out

    def _quantized(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self._quantize is None:
            return quantized_rows(x)
        x = x.contiguous()
        quantized, scales = torch.empty(x.shape, dtype=torch.int8), torch.empty(x.shape[0])
        self._quantize(x.data_ptr(), *x.shape, quantized.data_ptr(), scales.data_ptr())
        return quantized, scales


class Embedding:
    """ids [rows] -> vectors [rows, width] float32; the table is held in the placement's dtype."""

    def __init__(self, table: torch.Tensor, placement: Placement) -> None:
        self.table = table.to(placement.device, placement.dtype, copy=True)

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        return functional.embedding(ids, self.table).float()

    def add_to(self, x: torch.Tensor, ids: torch.Tensor) -> None:
        """Add the vectors of ids [rows] to x [rows, width] float32."""
        x.add_(functional.embedding(ids, self.table))
