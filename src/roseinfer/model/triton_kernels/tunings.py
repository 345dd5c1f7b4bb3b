"""Tiles, splits and warps of the kernels on a GPU: from `tunings.json`, else by rule.

`python -m benchmarks.gpu.search` measures on a GPU, and writes what was fastest under the GPU's name into that file.
"""

from functools import cache
from importlib.resources import files

import msgspec
import torch

from roseinfer.model.device import dtype_name

FILE_NAME = "tunings.json"
MAX_LINEAR_ROWS = 64  # of one call of `triton_kernels/linear.py`

_TILE_NUMBERS = 4096  # keys of a tile times padded_dim: 32 registers a thread for each of K, V and the sums
_MAX_WIDTH, _MAX_INPUTS = 1024, 2048  # a larger weight takes much longer to read than a kernel to start


class DecodeTuning(msgspec.Struct, frozen=True, kw_only=True):
    """How the keys of rows with one new token are divided: see `triton_kernels/decode.py`."""

    tile: int  # keys, a power of two
    min_split_keys: int  # fewer are not worth a program
    programs: int  # for each multiprocessor, at least, if there are keys for them
    num_warps: int  # a power of two


class Tunings(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured on one GPU."""

    decode: dict[str, DecodeTuning] = {}
    linear_rows: dict[str, int] = {}  # the most rows that `triton_kernels/linear.py` takes less time for


def device_name(device: torch.device) -> str:
    """The GPU's name in the file; nothing where kernels are interpreted."""
    return str(torch.cuda.get_device_properties(device).name) if device.type == "cuda" else ""


def decode_key(group: int, padded_dim: int, cache_dtype: torch.dtype) -> str:
    """The entry for attention of this shape."""
    return f"group {group}, dim {padded_dim}, {dtype_name(cache_dtype)}"


def decode_rule(padded_dim: int) -> DecodeTuning:
    """The tuning where nothing was measured."""
    return DecodeTuning(tile=max(16, min(64, _TILE_NUMBERS // padded_dim)), min_split_keys=64, programs=2, num_warps=4)


def decode_tuning(device_name: str, group: int, padded_dim: int, cache_dtype: torch.dtype) -> DecodeTuning:
    """The measured tuning, or the rule's."""
    measured = read_tunings().get(device_name, Tunings())
    return measured.decode.get(decode_key(group, padded_dim, cache_dtype), decode_rule(padded_dim))


def linear_key(width: int, num_inputs: int) -> str:
    """The entry for a linear of this shape, in a type of two bytes."""
    return f"{width}x{num_inputs}"


def linear_rows(device_name: str, width: int, num_inputs: int, dtype: torch.dtype) -> int:
    """The most rows for which a linear and the norm behind it are one kernel: as measured, or by rule; 0 for none."""
    if dtype.itemsize != 2:
        return 0
    is_small = width <= _MAX_WIDTH and num_inputs <= _MAX_INPUTS
    measured = read_tunings().get(device_name, Tunings())
    return measured.linear_rows.get(linear_key(width, num_inputs), MAX_LINEAR_ROWS if is_small else 0)


@cache
def read_tunings() -> dict[str, Tunings]:
    """The measured tunings by the name of a GPU."""
    text = files(__package__).joinpath(FILE_NAME).read_bytes()
    return msgspec.json.decode(text, type=dict[str, Tunings])
