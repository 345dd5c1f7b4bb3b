"""Weights as the quantised formats store them, written from the formats' definitions, and the floats that they mean.

Numbers are rounded to the nearest, without calibration.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
Stored = tuple[Tensors, torch.Tensor]  # parts by their names in the module, and the float32 weight [outputs, inputs]


@dataclass(frozen=True)
class Method:
    """One way to store a weight, and the `quantization_config` that says so."""

    name: str
    config: dict[str, Any]
    store: Callable[[torch.Tensor], Stored] = field(compare=False)

    def __str__(self) -> str:
        return self.name


def packed(values: torch.Tensor, num_bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """[rows, n] -> int32 [rows, words]; the lowest bits hold column `order[0]` of a word's, and so on."""
    each = 32 // num_bits
    numbers = values.numpy().astype(np.uint64)
    words = np.zeros((len(numbers), -(-numbers.shape[1] // each)), np.uint64)
    for word in range(words.shape[1]):
        for place, column in enumerate(order or range(each)):
            if word * each + column < numbers.shape[1]:
                words[:, word] |= numbers[:, word * each + column] << np.uint64(num_bits * place)
    return torch.from_numpy(words.astype(np.uint32).view(np.int32))


def rounded(
    weight: torch.Tensor, groups: torch.Tensor, num_bits: int, *, has_zeros: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Numbers [outputs, inputs] from 0, their zeros and float16 scales [outputs, groups]; and the weight they mean."""
    most, num_groups = 2**num_bits - 1, int(groups.max()) + 1
    numbers, meant = torch.zeros(weight.shape, dtype=torch.int64), torch.zeros(weight.shape)
    zeros, scales = torch.zeros(len(weight), num_groups, dtype=torch.int64), torch.ones(len(weight), num_groups).half()
    for group in range(num_groups):
        columns = groups == group
        part = weight[:, columns]
        low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
        scale = ((high - low) / most if has_zeros else part.abs().amax(1) / (most // 2)).half().float()
        zero = (-low / scale).round().clamp(0, most) if has_zeros else torch.full_like(scale, 2 ** (num_bits - 1))
        number = ((part / scale[:, None]).round() + zero[:, None]).clamp(0, most)
        numbers[:, columns], zeros[:, group], scales[:, group] = number.long(), zero.long(), scale.half()
        meant[:, columns] = (number - zero[:, None]) * scale[:, None]
    return numbers, zeros, scales, meant


def in_order(num_inputs: int, group_size: int) -> torch.Tensor:
    return torch.arange(num_inputs) // (group_size if group_size > 0 else num_inputs)


def by_activation(num_inputs: int, group_size: int) -> torch.Tensor:
    """Groups of inputs that do not lie side by side, as with `desc_act`."""
    return in_order(num_inputs, group_size)[torch.randperm(num_inputs, generator=torch.Generator().manual_seed(3))]


def gptq(
    weight: torch.Tensor, num_bits: int, group_size: int, kind: str, *, has_order: bool = False, has_zeros: bool = True
) -> Stored:
    """`kind` is who wrote the zeros: AutoGPTQ less one each, GPTQModel less one each as if on whole words, or v2."""
    groups = (by_activation if has_order else in_order)(weight.shape[1], group_size)
    numbers, zeros, scales, meant = rounded(weight, groups, num_bits, has_zeros=has_zeros)
    words = packed(zeros.t(), num_bits)
    if kind == "autogptq":
        words = packed((zeros.t() - 1) % 2**num_bits, num_bits)
    elif kind == "gptqmodel":
        ones = np.uint32(sum(1 << place for place in range(0, 32, num_bits)))
        words = torch.from_numpy((words.numpy().view(np.uint32) - ones).view(np.int32))
    parts = {"qweight": packed(numbers, num_bits).t(), "qzeros": words, "scales": scales.t()}
    return parts | ({"g_idx": groups.int()} if has_order else {}), meant


def awq(weight: torch.Tensor, group_size: int) -> Stored:
    numbers, zeros, scales, meant = rounded(weight, in_order(weight.shape[1], group_size), 4, has_zeros=True)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    return {
        "qweight": packed(numbers.t(), 4, order),
        "qzeros": packed(zeros.t(), 4, order),
        "scales": scales.t(),
    }, meant


def compressed_packed(
    weight: torch.Tensor, num_bits: int, group_size: int, *, has_zeros: bool = False, has_order: bool = False
) -> Stored:
    groups = (by_activation if has_order else in_order)(weight.shape[1], group_size)
    numbers, zeros, scales, meant = rounded(weight, groups, num_bits, has_zeros=has_zeros)
    parts = {
        "weight_packed": packed(numbers, num_bits),
        "weight_scale": scales,
        "weight_shape": torch.tensor(weight.shape),
    }
    if has_zeros:
        parts["weight_zero_point"] = packed(zeros.t(), num_bits).t()
    return parts | ({"weight_g_idx": groups.int()} if has_order else {}), meant


def compressed_int8(weight: torch.Tensor, group_size: int = -1, *, has_zeros: bool = False) -> Stored:
    numbers, zeros, scales, meant = rounded(weight, in_order(weight.shape[1], group_size), 8, has_zeros=has_zeros)
    parts = {"weight": (numbers - 128).to(torch.int8), "weight_scale": scales}
    return parts | ({"weight_zero_point": (zeros - 128).to(torch.int8)} if has_zeros else {}), meant


def fp8(
    weight: torch.Tensor, block: tuple[int, int], scale_name: str, scale_type: torch.dtype = torch.float32
) -> Stored:
    """A block of -1 is the whole side."""
    rows, columns = (size if size > 0 else side for size, side in zip(block, weight.shape, strict=True))
    scales = torch.zeros(-(-weight.shape[0] // rows), -(-weight.shape[1] // columns))
    numbers, meant = torch.zeros(weight.shape, dtype=torch.float8_e4m3fn), torch.zeros(weight.shape)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            place = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
            scale = (
                (weight[place].abs().max() / 448).log2().ceil().exp2()
                if scale_type.itemsize == 1
                else weight[place].abs().max() / 448
            )
            scales[i, j] = scale.to(scale_type).float()
            numbers[place] = (weight[place] / scales[i, j]).clamp(-448, 448).to(torch.float8_e4m3fn)
            meant[place] = numbers[place].float() * scales[i, j]
    stored = scales.to(scale_type)
    return {"weight": numbers, scale_name: stored[0, 0] if block == (-1, -1) else stored}, meant


def compressed(format_name: str, **weights: object) -> dict[str, Any]:
    scheme = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "int", "symmetric": True} | weights}
    config = {"quant_method": "compressed-tensors", "format": format_name, "config_groups": {"group_0": scheme}}
    return config | {"ignore": ["lm_head"], "sparsity_config": {"format": "dense"}, "kv_cache_scheme": None}


def mxfp4(experts: torch.Tensor) -> Stored:
    """Experts [experts, inputs, outputs], 32 inputs with an exponent: a sign, two bits of exponent, one of mantissa."""
    codes = torch.arange(16)
    exponent, mantissa = codes // 2 % 4, codes % 2
    sizes = torch.where(exponent == 0, mantissa / 2, (1 + mantissa / 2) * 2.0 ** (exponent - 1))
    values = torch.where(codes < 8, sizes, -sizes)
    groups = experts.transpose(1, 2).reshape(len(experts), experts.shape[2], -1, 32)
    scales = (groups.abs().amax(3) / 6).log2().ceil()
    numbers = (groups[..., None] / 2 ** scales[..., None, None] - values).abs().argmin(-1)
    meant = (values[numbers] * 2 ** scales[..., None]).flatten(2).transpose(1, 2)
    blocks = (numbers[..., ::2] + 16 * numbers[..., 1::2]).to(torch.uint8)
    return {"_blocks": blocks, "_scales": (scales + 127).to(torch.uint8)}, meant


MXFP4 = Method("mxfp4", {"quant_method": "mxfp4"}, mxfp4)


def write(directory: Path, tensors: Tensors, quantization: object, **config: object) -> Path:
    """A checkpoint."""
    directory.mkdir(exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    return directory


def of_module(module: str, parts: Tensors) -> Tensors:
    return {f"{module}.{part}": tensor for part, tensor in parts.items()}


def quantise(
    directory: Path, method: Method, endings: tuple[str, ...], *, are_inputs_first: bool = False
) -> tuple[Path, Path]:
    """The checkpoint with its weights of these names in the format, and as floats with the values they then have."""
    tensors = load_file(directory / "model.safetensors")
    stored: Tensors = {}
    names = [name for name in tensors if name.endswith(endings) and tensors[name].dim() > 1]
    assert names
    for name in names:
        parts, meant = method.store(tensors[name].t() if are_inputs_first else tensors[name])
        stored |= {name.removesuffix("weight") + part: tensor for part, tensor in parts.items()}
        tensors[name] = meant.t() if are_inputs_first else meant
    config = json.loads((directory / "config.json").read_text())
    floats = {name: tensor for name, tensor in tensors.items() if name not in names}
    quantised = write(directory.parent / "quantised", floats | stored, method.config, **config)
    return quantised, write(directory.parent / "floats", tensors, None, **config)


def methods(group: int, block: int) -> list[Method]:
    """Every format, with groups of so many inputs and blocks of so many rows and columns."""
    config = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm", "zero_point": True}
    of_awq = Method("awq", config, partial(awq, group_size=group))
    return [*_fp8_methods(block), *_compressed_methods(group), *_gptq_methods(group), of_awq]


def _fp8_methods(block: int) -> list[Method]:
    config: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    in_blocks = config | {"weight_block_size": [block, block]}
    of_rows = compressed("float-quantized", type="float", strategy="channel")
    of_blocks = compressed("float-quantized", type="float", strategy="block", block_structure=[block, block])
    store = partial(fp8, block=(block, block), scale_name="weight_scale_inv")
    exponents, bfloat16 = torch.float8_e8m0fnu, torch.bfloat16
    return [
        Method("fp8, a scale each", config, partial(fp8, block=(-1, -1), scale_name="weight_scale")),
        Method("fp8, blocks", in_blocks, store),
        Method("fp8, blocks, powers of two", in_blocks, partial(store, scale_type=exponents)),
        Method(
            "compressed-tensors, fp8",
            of_rows,
            partial(fp8, block=(1, -1), scale_name="weight_scale", scale_type=bfloat16),
        ),
        Method("compressed-tensors, fp8, blocks", of_blocks, partial(store, scale_name="weight_scale")),
    ]


def _compressed_methods(group: int) -> list[Method]:
    int8: dict[str, Any] = {"symmetric": True}
    int8_zeros, int8_groups = {"symmetric": False}, {"group_size": group}
    int4 = {"num_bits": 4, "group_size": group}
    store = partial(compressed_packed, num_bits=4, group_size=group)
    cases: list[tuple[str, str, dict[str, Any], Callable[..., Stored]]] = [
        ("W8A8", "int-quantized", int8, compressed_int8),
        ("W8A8, zeros", "int-quantized", int8_zeros, partial(compressed_int8, has_zeros=True)),
        ("W8A8, groups", "int-quantized", int8_groups, partial(compressed_int8, group_size=group)),
        ("W8A16", "pack-quantized", int8, partial(compressed_packed, num_bits=8, group_size=-1)),
        ("W4A16", "pack-quantized", int4, store),
        ("W4A16, zeros", "pack-quantized", int4 | {"symmetric": False}, partial(store, has_zeros=True)),
        ("W4A16, order", "pack-quantized", int4 | {"actorder": "group"}, partial(store, has_order=True)),
    ]
    return [
        Method(f"compressed-tensors, {name}", compressed(kind, **weights), store)
        for name, kind, weights, store in cases
    ]


def _gptq_methods(group: int) -> list[Method]:
    config = {"quant_method": "gptq", "bits": 4, "group_size": group, "desc_act": False, "sym": False}
    by_gptqmodel = {"meta": {"quantizer": ["gptqmodel:2.2.0"]}, "checkpoint_format": "gptq"}
    store = partial(gptq, num_bits=4, group_size=group, kind="autogptq")
    cases: list[tuple[str, dict[str, Any], Callable[..., Stored]]] = [
        ("gptq", {"sym": True}, partial(store, has_zeros=False)),
        ("gptq, zeros", {}, store),
        ("gptq, zeros of GPTQModel", by_gptqmodel, partial(store, kind="gptqmodel")),
        ("gptq_v2", {"checkpoint_format": "gptq_v2"}, partial(store, kind="v2")),
        ("gptq, order", {"desc_act": True}, partial(store, has_order=True)),
        ("gptq, 8 bits, one group", {"bits": 8, "group_size": -1}, partial(store, num_bits=8, group_size=-1)),
        ("gptq, 2 bits", {"bits": 2}, partial(store, num_bits=2)),
    ]
    return [Method(name, config | fields, store) for name, fields, store in cases]
