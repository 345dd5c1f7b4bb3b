"""The kind of linear that device, type, quantisation and kernels mean."""

import pytest
import torch

from roseinfer.errors import ConfigError
from roseinfer.model.placement import LinearKind, Placement
from tests.conftest import BuiltKernels
from tests.unit.model.setups import LEVELS_HERE, Setup

CPU = torch.device("cpu")


@pytest.mark.parametrize("level", ["off", *LEVELS_HERE])
def test_compiled_linears_serve_where_there_are_any(built_kernels: BuiltKernels, level: str) -> None:
    bfloat16: dict[str, LinearKind] = {"amx": "amx", "avx512_bf16": "registers"}
    expected: dict[str, LinearKind] = {
        "float32-none": "onednn" if level == "off" else "registers",
        "bfloat16-none": bfloat16.get(level, "onednn"),
        "bfloat16-int8": "int8",
    }
    placements = {
        "float32-none": Setup("float32", "none", level).placement(built_kernels),
        "bfloat16-none": Setup("bfloat16", "none", level).placement(built_kernels),
        "bfloat16-int8": Setup("bfloat16", "int8", level).placement(built_kernels),
    }
    assert {name: placement.linears for name, placement in placements.items()} == expected


def test_int8_is_refused_on_a_gpu() -> None:
    with pytest.raises(ConfigError, match="int8") as caught:
        Placement(torch.device("cuda"), torch.bfloat16, "int8")
    assert caught.value.param == "model.quantization"


def test_rows_for_onednn_are_padded_to_few_sizes() -> None:
    placement = Placement(CPU, torch.float32)
    sizes = {num_rows: placement.padded_rows(num_rows) for num_rows in range(1, 2049)}
    assert all(size >= max(2, num_rows) for num_rows, size in sizes.items())
    assert all(size <= max(num_rows + 1, num_rows * 9 / 8) for num_rows, size in sizes.items())
    assert all(placement.padded_rows(size) == size for size in sizes.values())
    assert len({size for size in sizes.values() if size > 16}) == 8 * 7  # eight to each doubling


def test_other_rows_are_not_padded(built_kernels: BuiltKernels) -> None:
    for level in LEVELS_HERE:
        assert Setup("float32", "none", level).placement(built_kernels).padded_rows(13) == 13
    assert Placement(CPU, torch.float32, "int8").padded_rows(13) == 13
    assert Placement(torch.device("cuda"), torch.bfloat16).padded_rows(13) == 13
