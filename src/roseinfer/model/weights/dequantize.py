"""Dequantises the weights of FP8, compressed-tensors, GPTQ and AWQ checkpoints, one module at a time.

A weight is (q - zero) * scale, with a scale and perhaps a zero for each of its blocks; the formats differ in how the
numbers q are packed and in what a block is. They are defined by the projects compressed-tensors, AutoGPTQ, GPTQModel
and AutoAWQ, and for FP8 in blocks by DeepSeek-V3. The result is float32, to be rounded once: to `model.dtype`.
"""

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, Self

import msgspec
import torch
from torch.nn import functional

UNUSED_SUFFIXES = (  # of scales and zeros of quantised activations and KV caches, which are floats here
    *(".input_scale", ".input_scale_ub", ".input_zero_point", ".activation_scale", ".output_scale"),
    *(".q_scale", ".k_scale", ".v_scale", ".kv_scale", ".prob_scale"),
)
CONFIG_FILES = {  # beside config.json, and their method
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "hf_quant_config.json": "modelopt",
}
_PARTS = (  # what a module may have in the place of a float `weight`
    *("weight", "weight_scale", "weight_scale_inv"),
    *("weight_packed", "weight_zero_point", "weight_g_idx", "weight_shape"),
    *("qweight", "qzeros", "scales", "g_idx"),
)
_PACKED = re.compile(r"\bq(?=weight$)|(?<=\bweight)_packed$|_blocks$")  # what a float weight's name lacks
_INPUTS_FIRST = ("gpt2",)  # model types with float weights [inputs, outputs], as GPTQ and AWQ have them in all models
_MXFP4_PARTS = ("_blocks", "_scales")  # of gpt-oss, whose experts are one tensor
_MXFP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_NUM_BITS = (4, 8, 2)
_COMPRESSED_LAYOUTS = (
    *("float-quantized", "int-quantized", "naive-quantized", "pack-quantized", "dense"),
    *(f"{bits} bits" for bits in sorted(_NUM_BITS)),
)
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # in a word, of eight outputs
_ROWS_AT_ONCE = 256  # of floats, which then stay in a processor's caches

Parts = Mapping[str, torch.Tensor]


class _Weights(msgspec.Struct, frozen=True):
    num_bits: int = 8
    symmetric: bool = True
    actorder: str | bool | None = None
    group_size: int | None = None
    block_structure: tuple[int, int] | str | None = None

    @property
    def block(self) -> tuple[int, int] | None:
        """Rows and columns, which the first files have as `128x128`. Raises ValueError for other words."""
        if not isinstance(self.block_structure, str):
            return self.block_structure
        rows, columns = map(int, self.block_structure.split("x"))
        return rows, columns


class _Scheme(msgspec.Struct, frozen=True):
    weights: _Weights | None = None
    format: str | None = None


class Quantization(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of `quantization_config` that say how weights are stored, under their names there.

    The number of bits is by the tensors' shapes where they say it: modules may be exceptions.
    """

    quant_method: str
    model_type: str = ""  # of the model
    bits: int = 4  # of GPTQ and AWQ
    desc_act: bool | None = False  # of GPTQ
    group_size: int | None = None
    q_group_size: int | None = None  # in `quant_config.json`
    weight_block_size: tuple[int, int] | None = None
    weight_scale_semantics: str | None = None  # `inverse` in FP8 of GPTQModel: what weights were multiplied by
    config_groups: dict[str, _Scheme] = {}
    format: str | None = None
    checkpoint_format: str | None = None
    is_marlin_format: bool = False
    rotation: str | None = None  # of activations: by GPTQModel, and in two forms by AutoRound
    rotation_config: dict[str, Any] | None = None
    spinquant_config: dict[str, Any] | None = None
    version: str | None = None  # of AWQ, which is `format` in files of GPTQModel
    quant_algo: str | None = "FP8"  # of ModelOpt; null where only the KV cache was quantised
    sparsity_config: dict[str, Any] | None = None
    transform_config: dict[str, Any] | None = None
    meta: dict[str, Any] | None = None

    @classmethod
    def read(cls, config: object, model_type: object) -> Self:
        """From a `quantization_config`. Raises msgspec.ValidationError for what cannot be read."""
        fields = msgspec.convert(config, dict[str, Any])
        method = str(fields.get("quant_method") or "").lower().replace("_", "-")
        if not method:
            raise msgspec.ValidationError("`quant_method` is missing: it names the format of the weights")
        return msgspec.convert({**fields, "quant_method": method, "model_type": str(model_type)}, cls)

    def __post_init__(self) -> None:
        known = _METHODS[self.quant_method][1] if self.quant_method in _METHODS else ()
        is_rotated = self.rotation or self.rotation_config or self.spinquant_config
        for layout in [*self.layouts, *(["rotated"] if is_rotated else [])]:
            if layout not in known:
                raise ValueError(
                    f"weights in the format {' '.join(dict.fromkeys((self.quant_method, layout)))} are not read; take "
                    "the model without quantisation, or as FP8, compressed-tensors, GPTQ or AWQ (gemm)"
                )

    def names_of(self, stored: Collection[str]) -> frozenset[str]:
        """The names that the tensors have, or would have as floats."""
        names = {_PACKED.sub("", name) for name in stored}
        parts = {part for name in names for part in self.parts_of(name, stored).values()}
        return frozenset(name for name in names if name not in parts or self.parts_of(name, stored))

    def parts_of(self, name: str, names: Collection[str]) -> dict[str, str]:
        """Part -> name of the tensors that are the quantised weight `name`; none if it is a float tensor."""
        module = name.removesuffix("weight")
        candidates = {part: module + part for part in _PARTS} if name != module else {}
        candidates |= {part: name + part for part in _MXFP4_PARTS}
        parts = {part: stored for part, stored in candidates.items() if stored in names}
        return parts if set(parts) != {"weight"} else {}

    def weight(self, parts: Parts) -> torch.Tensor:
        """The weight as floats. Raises ValueError, with the reason, where the parts do not make one."""
        dequantised, _ = _METHODS[self.quant_method]
        try:
            weight = dequantised(parts, self)
        except KeyError as error:
            raise ValueError(f"there is no {error.args[0]}") from error
        return weight.t() if self.model_type in _INPUTS_FIRST and "qweight" in parts else weight

    def block_of(self, scales: torch.Tensor, shape: tuple[int, ...]) -> tuple[int, int]:
        """Rows and columns that share one of the scales. Raises ValueError if the configuration does not say."""
        rows, columns = shape
        if scales.numel() == 1:
            return rows, columns
        if scales.numel() == scales.shape[0] == rows:
            return 1, columns
        sizes = [self.weight_block_size, *(weights.block for weights in self.schemes)]
        sizes += [(1, weights.group_size) for weights in self.schemes if weights.group_size]
        for size in sizes:
            if size and min(size) > 0 and scales.shape == (-(-rows // size[0]), -(-columns // size[1])):
                return size
        raise ValueError(f"{list(scales.shape)} scales do not fit the blocks of quantization_config")

    @property
    def schemes(self) -> list[_Weights]:
        """Of compressed-tensors."""
        return [scheme.weights for scheme in self.config_groups.values() if scheme.weights]

    def needs(self, part: str) -> bool:
        """Whether compressed-tensors gives each weight this part, without which its numbers mean others."""
        has = {
            "weight_zero_point": [not weights.symmetric for weights in self.schemes],
            "weight_g_idx": [weights.actorder in {"group", "dynamic", True} for weights in self.schemes],
        }[part]
        return bool(has) and all(has)

    @property
    def layouts(self) -> list[str]:
        """How the numbers of weights are arranged, in the words of the method."""
        match self.quant_method:
            case "gptq":
                layout = "marlin" if self.is_marlin_format else self.checkpoint_format or self.format or "gptq"
                return [layout, f"{self.bits} bits"]
            case "awq":
                return [(self.version or self.format or "gemm").lower(), f"{self.bits} bits"]
            case "modelopt":
                return [self.quant_algo or "no algorithm"]
            case "compressed-tensors":
                formats = [scheme.format or self.format or "" for scheme in self.config_groups.values()]
                bits = [f"{weights.num_bits} bits" for weights in self.schemes]
                sparse = (self.sparsity_config or {}).get("format", "dense")
                transforms = ["transforms"] if (self.transform_config or {}).get("config_groups") else []
                return [*formats, *bits, sparse, *transforms]
        return [self.quant_method]


def input_order(parts: Parts) -> torch.Tensor | None:
    """The inputs of a weight, one group after the other; None if they lie so, or if 32 would not be of one group."""
    group_of = parts.get("g_idx", parts.get("weight_g_idx"))
    if group_of is None or -1 in group_of or bool((group_of.diff() >= 0).all()):
        return None
    sizes = torch.unique(group_of, return_counts=True)[1]
    return group_of.argsort(stable=True) if bool((sizes % 32 == 0).all()) else None


def _compressed(parts: Parts, quantization: Quantization) -> torch.Tensor:
    """FP8 or int8 in the place of the float weight, or packed numbers with half their range added."""
    scales = parts["weight_scale_inv" if "weight_scale_inv" in parts else "weight_scale"]
    scales = scales.view(torch.float8_e8m0fnu) if scales.dtype == torch.uint8 else scales  # powers of two
    scales = scales.float().reciprocal() if quantization.weight_scale_semantics == "inverse" else scales
    zeros, order = (
        parts[part] if quantization.needs(part) else parts.get(part) for part in ("weight_zero_point", "weight_g_idx")
    )
    if "weight_packed" in parts:
        words, shape = parts["weight_packed"], parts.get("weight_shape")
        if shape is None and not quantization.schemes:
            raise ValueError("neither a weight_shape nor config_groups says how many numbers a row has")
        num_columns = words.shape[1] * 32 // quantization.schemes[0].num_bits if shape is None else int(shape[1])
        num_bits, values = _unpacked(words, num_columns)
        if zeros is None:
            zeros = torch.full(scales.shape, 1 << (num_bits - 1))
        elif zeros.dtype == torch.int8:  # as the first versions wrote them, each in a byte with its sign
            zeros = zeros.int() + (1 << (num_bits - 1))
        else:
            zeros = _unpacked(zeros.t(), len(words), num_bits)[1].t()
    else:
        values = parts["weight"]
    if values.itemsize != 1:
        raise ValueError(f"it is {values.dtype} and has scales")
    height, width = quantization.block_of(scales, values.shape)
    scales = _rows_of_blocks(scales, height, len(values))
    zeros = None if zeros is None else _rows_of_blocks(zeros, height, len(values))
    groups = torch.arange(values.shape[1]) // width if order is None or -1 in order else order
    return _multiplied(values, scales, zeros, groups)


def _gptq(parts: Parts, quantization: Quantization) -> torch.Tensor:
    """Words of inputs; zeros in words of outputs, in the first format less one."""
    words, scales, zero_words, order = parts["qweight"].t(), parts["scales"].t(), parts["qzeros"], parts.get("g_idx")
    if order is None and quantization.desc_act and scales.shape[1] > 1:
        raise ValueError("there is no g_idx, which desc_act asks for")
    num_inputs = words.shape[1] * 32 // quantization.bits if order is None else len(order)
    num_bits, values = _unpacked(words, num_inputs)
    mask, is_first = (1 << num_bits) - 1, "gptq" in quantization.layouts
    # GPTQModel takes one from the zeros in whole words, where a zero of 0 borrows from the next; AutoGPTQ from each.
    borrows = "gptqmodel" in str((quantization.meta or {}).get("quantizer"))
    if is_first and borrows:
        zero_words = zero_words + 0xFFFFFFFF // mask
    zeros = _unpacked(zero_words, len(values), num_bits)[1].t()
    if is_first and not borrows:
        zeros = zeros + 1 & mask
    groups = _groups(num_inputs, scales.shape[1], quantization.group_size) if order is None else order
    return _multiplied(values, scales, zeros, groups)


def _awq(parts: Parts, quantization: Quantization) -> torch.Tensor:
    """Words of eight outputs, shuffled."""
    shifts = 4 * torch.tensor(_AWQ_PLACES, dtype=torch.int32)[:, None]
    values, zeros = (
        (parts[name].t().contiguous()[:, None] >> shifts & 15).flatten(0, 1) for name in ("qweight", "qzeros")
    )
    scales, size = parts["scales"].t(), quantization.group_size or quantization.q_group_size
    return _multiplied(values, scales, zeros, _groups(values.shape[1], scales.shape[1], size))


def _mxfp4(parts: Parts, _: Quantization) -> torch.Tensor:
    """All experts of a gpt-oss layer [experts, inputs, outputs]: two floats of four bits a byte, and exponents.

    As bfloat16, which holds these numbers exactly.
    """
    of_byte = torch.tensor([(_MXFP4_VALUES[byte & 15], _MXFP4_VALUES[byte >> 4]) for byte in range(256)])
    exponents = parts["_scales"].view(torch.float8_e8m0fnu)
    experts = [
        (functional.embedding(blocks.int(), of_byte).flatten(-2) * scales.float()[..., None]).flatten(1).bfloat16()
        for blocks, scales in zip(parts["_blocks"], exponents, strict=True)
    ]
    return torch.stack(experts).transpose(1, 2)


def _unpacked(words: torch.Tensor, num_values: int, num_bits: int | None = None) -> tuple[int, torch.Tensor]:
    """The number of bits, and the numbers of each row of words, the lowest bits first, as uint8."""
    if words.dtype != torch.int32:
        raise ValueError(f"numbers are packed in {words.dtype}, not int32")
    for bits in [num_bits] if num_bits else _NUM_BITS:
        if words.shape[1] == -(-num_values * bits // 32):
            shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
            of_bytes = words.clone(memory_format=torch.contiguous_format).view(torch.uint8)
            values = of_bytes[..., None] >> shifts & (1 << bits) - 1
            return bits, values.flatten(1)[:, :num_values]
    raise ValueError(f"{words.shape[1]} words for {num_values} numbers are not {num_bits or '2, 4 or 8'} bits each")


def _rows_of_blocks(blocks: torch.Tensor, height: int, num_rows: int) -> torch.Tensor:
    """[rows, blocks in a row], of numbers for blocks of `height` rows."""
    by_row = blocks.float().reshape(-(-num_rows // height), -1).repeat_interleave(height, 0)
    return by_row[:num_rows]


def _groups(num_columns: int, num_groups: int, size: int | None) -> torch.Tensor:
    """The group of each column, in groups of `size`; without it all columns are one."""
    size = size if size and size > 0 else num_columns
    if num_groups != -(-num_columns // size):
        raise ValueError(f"{num_columns} inputs in groups of {size} are not {num_groups} groups")
    return torch.arange(num_columns) // size


def _multiplied(
    values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, groups: torch.Tensor
) -> torch.Tensor:
    """(values - zeros) * scales: values [rows, columns], zeros and scales [rows, groups], the group of each column."""
    rows, columns = values.shape
    if scales.shape[0] != rows or (zeros is not None and zeros.shape != scales.shape) or len(groups) != columns:
        raise ValueError("scales, zeros and numbers are not of one weight")
    if not 0 <= int(groups.min()) <= int(groups.max()) < scales.shape[1]:
        raise ValueError(f"it has columns in other groups than its {scales.shape[1]}")
    out = torch.empty(rows, columns)
    for start in range(0, rows, _ROWS_AT_ONCE):
        piece = slice(start, start + _ROWS_AT_ONCE)
        out[piece] = values[piece]
        if zeros is not None:
            out[piece] -= _of_columns(zeros[piece], groups)
        out[piece] *= _of_columns(scales[piece], groups)
    return out


def _of_columns(by_group: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    return by_group.float() if by_group.shape[1] == 1 else by_group.float().index_select(1, groups)


_METHODS: dict[str, tuple[Callable[[Parts, Quantization], torch.Tensor], tuple[str, ...]]] = {
    "fp8": (_compressed, ("fp8",)),
    "fbgemm-fp8": (_compressed, ("fbgemm-fp8",)),
    "modelopt": (_compressed, ("FP8", "no algorithm")),
    "compressed-tensors": (_compressed, _COMPRESSED_LAYOUTS),
    "gptq": (_gptq, ("gptq", "gptq_v2", *(f"{bits} bits" for bits in _NUM_BITS))),
    "awq": (_awq, ("gemm", "4 bits")),
    "mxfp4": (_mxfp4, ("mxfp4",)),
}
