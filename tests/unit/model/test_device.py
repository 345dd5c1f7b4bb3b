"""Device, dtype and threads as configured."""

import os
from pathlib import Path

import pytest
import torch

from roseinfer.errors import ConfigError
from roseinfer.model import device

MIB = 2**20
LARGE = 2**40


@pytest.fixture
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.usefixtures("no_cuda")
def test_without_a_gpu() -> None:
    assert device.resolve_device("auto") == device.resolve_device("cpu") == torch.device("cpu")
    with pytest.raises(ConfigError) as caught:
        device.resolve_device("cuda")
    assert caught.value.param == "runner.device"


def test_with_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert device.resolve_device("auto") == device.resolve_device("cuda") == torch.device("cuda")
    assert device.resolve_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize(("has_bf16", "has_amx"), [(True, False), (False, True), (False, False)])
def test_auto_dtype_is_what_the_hardware_multiplies(
    monkeypatch: pytest.MonkeyPatch, has_bf16: bool, has_amx: bool
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: has_bf16)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: has_amx)
    expected = torch.bfloat16 if has_bf16 or has_amx else torch.float32
    assert device.resolve_dtype("auto", torch.device("cpu")) == expected
    assert device.resolve_dtype("auto", torch.device("cuda")) == torch.bfloat16
    assert device.resolve_dtype("float32", torch.device("cuda")) == torch.float32
    assert device.resolve_dtype("bfloat16", torch.device("cpu")) == torch.bfloat16


@pytest.mark.parametrize(
    ("cpu_max", "expected"),
    [("max 100000", 8), ("250000 100000", 2), ("50000 100000", 1), ("1600000 100000", 8), (None, 8)],
)
def test_cores_are_what_the_container_may_use(
    monkeypatch: pytest.MonkeyPatch, cpu_max: str | None, expected: int
) -> None:
    def read_text(_path: Path, **_options: object) -> str:
        if cpu_max is None:
            raise FileNotFoundError
        return cpu_max

    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(8)), raising=False)
    monkeypatch.setattr(Path, "read_text", read_text)
    assert device.num_usable_cores() == expected


@pytest.mark.parametrize(
    ("num_weight_bytes", "splits_sums", "num_cores", "expected"),
    [
        (LARGE, False, 32, 32),
        (LARGE, True, 32, 8),  # more would make a row depend on its neighbours
        (LARGE, True, 2, 2),
        (LARGE, False, 2, 2),
        (0, False, 32, 1),
        (32 * MIB - 1, False, 32, 1),
        (32 * MIB, False, 32, 2),
        (32 * MIB, False, 1, 1),
        (70 * MIB, True, 32, 4),
    ],
)
def test_threads_are_as_many_as_the_weights_keep_busy(
    monkeypatch: pytest.MonkeyPatch, num_weight_bytes: int, splits_sums: bool, num_cores: int, expected: int
) -> None:
    monkeypatch.setattr(device, "num_usable_cores", lambda: num_cores)
    num_threads = device.default_num_threads(num_weight_bytes=num_weight_bytes, splits_sums=splits_sums)
    assert num_threads == expected


@pytest.mark.parametrize(("configured", "splits_sums"), [(None, True), (1, True), (8, True), (9, False), (64, False)])
def test_threads_that_keep_a_row_exact_are_taken(configured: int | None, splits_sums: bool) -> None:
    device.check_num_threads(configured, splits_sums=splits_sums)


def test_more_threads_than_keep_a_row_exact_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"With 9 threads .* no more than 8 are exact") as caught:
        device.check_num_threads(9, splits_sums=True)
    assert caught.value.param == "runner.num_threads"
