"""Device, dtype, threads and the kind of linear as configured; memory that is used again."""

import os
import resource
import sys
from collections.abc import Callable
from contextlib import nullcontext
from importlib.machinery import ModuleSpec
from pathlib import Path
from subprocess import CalledProcessError
from types import ModuleType, SimpleNamespace

import pytest
import torch

from roseinfer.errors import ConfigError
from roseinfer.model import device
from roseinfer.model.device import LinearKind, Placement, Scratch, resolve_device, resolve_dtype, sparse_zeros
from tests.conftest import BuiltKernels
from tests.emulated_kernels import EMULATED_LEVELS
from tests.unit.model.setups import LEVELS_HERE, TESTED_LEVELS, Setup

MIB = 2**20
LARGE = 2**40


@pytest.fixture
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.usefixtures("no_cuda")
@pytest.mark.parametrize(
    ("version", "reason"), [(None, "install torch for CUDA"), ("13.0", r"no driver that serves its CUDA 13\.0")]
)
def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch, version: str | None, reason: str) -> None:
    """What is missing is named: on a node without a driver another torch would not help."""
    monkeypatch.setattr(torch.version, "cuda", version)
    assert resolve_device("auto") == resolve_device("cpu") == torch.device("cpu")
    with pytest.raises(ConfigError, match=reason) as caught:
        resolve_device("cuda")
    assert caught.value.param == "runner.device"


def a_triton(monkeypatch: pytest.MonkeyPatch, version: str, ask_for_target: Callable[[], object]) -> None:
    """Have torch find a GPU, and imports find a Triton."""
    triton = ModuleType("triton")
    triton.__spec__ = ModuleSpec("triton", None)
    active = SimpleNamespace(get_current_target=ask_for_target)
    vars(triton).update(__version__=version, runtime=SimpleNamespace(driver=SimpleNamespace(active=active)))
    monkeypatch.setitem(sys.modules, "triton", triton)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


def test_with_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    a_triton(monkeypatch, "3.7.1", lambda: None)
    assert resolve_device("auto") == resolve_device("cuda") == torch.device("cuda")
    assert resolve_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize(("version", "is_refused"), [("3.3.1", True), ("3.4.0", False), ("3.10.0+git1", False)])
def test_a_triton_that_the_kernels_cannot_use_is_named(
    monkeypatch: pytest.MonkeyPatch, version: str, is_refused: bool
) -> None:
    a_triton(monkeypatch, version, lambda: None)
    with pytest.raises(ConfigError, match=r"Triton 3\.3\.1 .* need 3\.4 or newer") if is_refused else nullcontext():
        resolve_device("cuda")
    assert resolve_device("cpu") == torch.device("cpu"), "a CPU has no use for it"


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (
            RuntimeError("Failed to find C compiler. Please specify."),
            r"here: Failed to find C compiler\. Please specify\.",
        ),
        (CalledProcessError(1, ["/usr/bin/gcc", "main.c"]), r"here: its compiler failed\."),  # there is no Python.h
        (PermissionError(13, "Permission denied", "/.triton"), r"here: .*Permission denied: '/\.triton'\."),
    ],
    ids=lambda given: type(given).__name__,
)
def test_a_triton_that_cannot_compile_is_found_before_the_weights_are_loaded(
    monkeypatch: pytest.MonkeyPatch, error: Exception, reason: str
) -> None:
    def fail() -> None:
        raise error

    a_triton(monkeypatch, "3.7.1", fail)
    with pytest.raises(ConfigError, match=rf"{reason} It needs a C compiler and Python's headers") as caught:
        resolve_device("auto")
    assert caught.value.param == "runner.device"
    assert resolve_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize(("has_bf16", "has_amx"), [(True, False), (False, True), (False, False)])
def test_auto_dtype_is_what_the_hardware_multiplies(
    monkeypatch: pytest.MonkeyPatch, has_bf16: bool, has_amx: bool
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: has_bf16)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: has_amx)
    expected = torch.bfloat16 if has_bf16 or has_amx else torch.float32
    assert resolve_dtype("auto", torch.device("cpu")) == expected
    assert resolve_dtype("auto", torch.device("cuda")) == torch.bfloat16
    assert resolve_dtype("float32", torch.device("cuda")) == torch.float32
    assert resolve_dtype("bfloat16", torch.device("cpu")) == torch.bfloat16


@pytest.mark.parametrize(
    ("quota", "expected"),
    [(None, 8), (2.5, 2), (0.5, 1), (16.0, 8)],
)
def test_cores_are_what_the_container_may_use(
    monkeypatch: pytest.MonkeyPatch, quota: float | None, expected: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(8)), raising=False)
    monkeypatch.setattr(device, "cpu_quota", lambda _groups: quota)
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


CPU = torch.device("cpu")


@pytest.mark.parametrize("level", ["off", *TESTED_LEVELS])
def test_compiled_linears_serve_where_there_are_any(built_kernels: BuiltKernels, level: str) -> None:
    bfloat16: dict[str, LinearKind] = {"amx": "amx", **dict.fromkeys(("avx512_bf16", *EMULATED_LEVELS), "registers")}
    has_bfloat16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    expected: dict[str, LinearKind] = {
        "float32-none": "onednn" if level == "off" else "registers",
        "bfloat16-none": bfloat16.get(level, "onednn" if has_bfloat16 else "torch"),
        "bfloat16-int8": "int8",
    }
    placements = {
        "float32-none": Setup("float32", "none", level).placement(built_kernels),
        "bfloat16-none": Setup("bfloat16", "none", level).placement(built_kernels),
        "bfloat16-int8": Setup("bfloat16", "int8", level).placement(built_kernels),
    }
    assert {name: placement.linears for name, placement in placements.items()} == expected


def test_onednn_serves_where_its_rows_were_measured_to_be_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "machine", lambda: "aarch64")
    assert Placement(CPU, torch.float32).linears == "torch"


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


META = torch.device("meta")  # a device with addresses of its own, as far as Scratch can see


def test_a_name_keeps_its_memory() -> None:
    scratch = Scratch(torch.device("cpu"))
    first = scratch.buffer("a", (4, 3))
    assert scratch.buffer("a", (2, 2)).data_ptr() == first.data_ptr()
    assert scratch.buffer("b", (4, 3)).data_ptr() != first.data_ptr()
    assert scratch.buffer("a", (5, 3)).shape == (5, 3)


def test_a_gpu_keeps_what_was_outgrown() -> None:
    """A CUDA graph may have its address. All that is kept is no larger than what is used."""
    scratch = Scratch(META)
    for size in range(1, 100):
        scratch.buffer("a", (size,))
    sizes = [buffer.numel() for buffer in scratch._outgrown]
    assert sizes == [1, 2, 4, 8, 16, 32, 64]
    assert scratch.buffer("a", (128,)).numel() == 128
    assert len(scratch._outgrown) == len(sizes)


def test_a_cpu_takes_what_was_asked_for() -> None:
    scratch = Scratch(torch.device("cpu"))
    for size in (10, 11, 30):
        scratch.buffer("a", (size,))
    assert scratch._outgrown == []
    assert scratch._buffers["a"].numel() == 30


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="this system does not tell of a process's memory")
def test_sparse_zeros_take_memory_where_they_are_written() -> None:
    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    before = resident_bytes()
    zeros = sparse_zeros(16 << 20, torch.device("cpu"))
    zeros.index_add_(0, torch.tensor([5, 9 << 20, 5]), torch.ones(3))
    assert zeros[[5, 6, 9 << 20]].tolist() == [2.0, 0.0, 1.0]
    assert resident_bytes() - before < 4 << 20
