"""Chooses the device, its dtype and threads, and the kind of linear; and hands out memory that is used again."""

import math
import mmap
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from subprocess import SubprocessError
from typing import Any, Literal, Protocol

import torch

from roseinfer.errors import ConfigError
from roseinfer.model.kernels.library import Kernels, machine
from roseinfer.runtime.cgroup import cpu_groups, cpu_quota
from roseinfer.runtime.memory import ask_for_huge_pages

LinearKind = Literal["torch", "onednn", "amx", "registers", "int8", "int4"]
Quantization = Literal["none", "int8", "int4"]
TILES, PAIRS, FOURS = "linear_bfloat16", "linear_bfloat16_pairs", "linear_int8_fours_of_float32"  # kernels by name
Parts = Sequence[torch.Tensor]  # of a weight [outputs, inputs], one below the other; each of any dtype and strides
Pack = Callable[[list[torch.Tensor]], None]  # writes to pieces uint8, which are zeros
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

_TRITON_FLOOR = (3, 4)  # that of the extra `cuda` in pyproject.toml
_MAX_EXACT_BFLOAT16_THREADS = 8
_WEIGHT_BYTES_PER_THREAD = 16 << 20
_BLOCK_BYTES = 256 << 20  # of address space; huge pages that are not written take no memory
_HUGE_PAGE_BYTES = 2 << 20
_CACHE_LINE_BYTES = 64


def resolve_device(name: str) -> torch.device:
    """The device that `auto`, `cpu` or `cuda` means.

    Raises ConfigError for `cuda` without a usable GPU, and for a GPU beside a Triton that the kernels cannot use, or
    that cannot start them.
    """
    has_cuda = torch.cuda.is_available()
    if name == "cuda" and not has_cuda:
        reason = "torch is built without it; install torch for CUDA"
        if torch.version.cuda is not None:
            reason = f"torch finds no GPU, or no driver that serves its CUDA {torch.version.cuda}; see nvidia-smi"
        raise ConfigError(f"No CUDA device can be used: {reason}, or choose --device cpu.", param="runner.device")
    if not has_cuda or name == "cpu":
        return torch.device("cpu")
    _check_triton()
    return torch.device("cuda")


def _check_triton() -> None:
    if find_spec("triton") is None:
        return
    triton = import_module("triton")
    version = triton.__version__
    if tuple(map(int, version.split(".")[:2])) < _TRITON_FLOOR:
        raise ConfigError(
            f"Triton {version} is too old for the kernels, which need {'.'.join(map(str, _TRITON_FLOOR))} or newer: "
            "torch 2.8 is the first to bring one. Upgrade torch, or choose --device cpu.",
            param="runner.device",
        )
    try:  # it compiles its launcher at the first use, which would be when the weights are loaded
        triton.runtime.driver.active.get_current_target()
    except (AssertionError, ImportError, OSError, RuntimeError, SubprocessError) as error:
        said = "its compiler failed" if isinstance(error, SubprocessError) else str(error).partition("\n")[0]
        raise ConfigError(
            f"Triton cannot start kernels here: {said.rstrip('.')}. It needs a C compiler and Python's headers, "
            "such as gcc and python3-dev, and a directory to write to and load from (TRITON_CACHE_DIR). Or choose "
            "--device cpu.",
            param="runner.device",
        ) from error


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype of weights and KV cache; `auto` takes bfloat16 where the hardware multiplies it, else float32."""
    if name != "auto":
        return DTYPES[name]
    # Without these instructions oneDNN emulates bfloat16 by widening, which is slower than float32. Torch has no public
    # question for it in all the versions we support.
    on_cpu = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()  # noqa: SLF001
    return torch.bfloat16 if device.type == "cuda" or on_cpu else torch.float32


def dtype_name(dtype: torch.dtype) -> str:
    """`float32`, `bfloat16` or `int8`."""
    return str(dtype).removeprefix("torch.")


def check_num_threads(configured: int | None, *, splits_sums: bool) -> None:
    """Raise ConfigError for a number of CPU threads with which a request's tokens would depend on other requests.

    With 16 threads oneDNN in bfloat16 (`splits_sums`) splits sums by the number of rows (docs/log.md, 2026-11-21).
    """
    if splits_sums and configured is not None and configured > _MAX_EXACT_BFLOAT16_THREADS:
        raise ConfigError(
            f"With {configured} threads a request's tokens could depend on what else runs: in bfloat16 without "
            f"compiled kernels that multiply it no more than {_MAX_EXACT_BFLOAT16_THREADS} are exact. Take --dtype "
            "float32, or run `roseinfer kernels build` where the processor has AMX or AVX-512 in bfloat16.",
            param="runner.num_threads",
        )


def default_num_threads(*, num_weight_bytes: int, splits_sums: bool) -> int:
    """One thread for each 16 MiB of weights, up to every usable core; at most 8 if sums are split.

    In a small model waiting for other threads takes longer than the work between (docs/log.md, 2026-11-22).
    """
    most = min(num_usable_cores(), _MAX_EXACT_BFLOAT16_THREADS) if splits_sums else num_usable_cores()
    return max(1, min(most, num_weight_bytes // _WEIGHT_BYTES_PER_THREAD))


def num_usable_cores() -> int:
    """Cores that this process may use: its affinity, and its container's CPU quota, rounded down."""
    num_cores = len(os.sched_getaffinity(0))
    quota = cpu_quota(cpu_groups())
    return num_cores if quota is None else max(1, min(num_cores, int(quota)))


class KeptWeights(Protocol):
    """Where packed weights are kept for the next start."""

    def find(self, kind: str, parts: Parts, sizes: Sequence[int]) -> list[torch.Tensor] | None:
        """The pieces uint8 of a weight that was packed in this way; None if it is to be packed."""

    def keep(self, kind: str, parts: Parts, pieces: list[torch.Tensor]) -> None:
        """Keep the pieces of a packed weight, which is complete."""


class WeightMemory:
    """Cuts memory for packed weights out of large blocks on huge pages, where the system has them.

    On pages of 4 KiB one step in ten is spent waiting for address translations. Many weights are smaller than a huge
    page, so they share blocks; a block is freed with the last tensor in it.
    """

    def __init__(self, kept: KeptWeights | None = None) -> None:
        self._kept = kept
        self._free = torch.empty(0, dtype=torch.uint8)

    def packed(self, kind: str, parts: Parts, sizes: Sequence[int], pack: Pack) -> list[torch.Tensor]:
        """Pieces uint8 of these sizes that begin on a cache line, and hold what `pack` makes of a weight.

        Those that were kept at an earlier start are not packed again, and must not be written to. `kind` is the way
        in which `pack` packs; where that is not the only thing that the bytes depend on, the cache must know the rest.
        """
        if self._kept is not None and (pieces := self._kept.find(kind, parts, sizes)) is not None:
            return pieces
        pieces = list(map(self._allocate, sizes))
        pack(pieces)
        if self._kept is not None:
            self._kept.keep(kind, parts, pieces)
        return pieces

    def _allocate(self, num_bytes: int) -> torch.Tensor:
        """Zeros [num_bytes] uint8."""
        size = -(-num_bytes // _CACHE_LINE_BYTES) * _CACHE_LINE_BYTES
        if size > self._free.numel():
            self._free = _new_block(max(size, _BLOCK_BYTES))
        piece, self._free = self._free[:num_bytes], self._free[size:]
        return piece


def _new_block(num_bytes: int) -> torch.Tensor:
    # Private: pages of shared memory are huge only where the system is set so.
    memory = mmap.mmap(-1, num_bytes + _HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    ask_for_huge_pages(memory)
    block = torch.frombuffer(memory, dtype=torch.uint8)
    start = -block.data_ptr() % _HUGE_PAGE_BYTES
    return block[start : start + num_bytes]


def sparse_zeros(size: int, device: torch.device) -> torch.Tensor:
    """Zeros [size] float32, of which a CPU's take memory for the pages that are written."""
    if device.type != "cpu":
        return torch.zeros(size, device=device)
    memory = mmap.mmap(-1, size * torch.float32.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=torch.float32)


class Scratch:
    """Grow-only buffers of one device, by name: a fresh temporary of megabytes costs ten times its copy in page faults.

    A buffer is valid until its name is asked for again; its content is arbitrary.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[str, torch.Tensor] = {}
        self._outgrown: list[torch.Tensor] = []

    def buffer(self, name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The buffer `name` as a contiguous tensor of `shape`; each name keeps to one dtype."""
        size = math.prod(shape)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < size:
            buffer = torch.empty(self._new_size(size, buffer), dtype=dtype, device=self._device)
            self._buffers[name] = buffer
        return buffer[:size].view(shape)

    def zeros(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """As `buffer`, and zeroed when it is new. Kernels that use it leave zeros behind."""
        known = self._buffers.get(name)
        buffer = self.buffer(name, shape, dtype)
        if self._buffers[name] is not known:
            self._buffers[name].zero_()
        return buffer

    def _new_size(self, size: int, outgrown: torch.Tensor | None) -> int:
        """The size to allocate for `size`. A GPU keeps an outgrown buffer, since a CUDA graph may write to its address.

        At least doubling bounds all outgrown buffers by the last.
        """
        if outgrown is None or self._device.type == "cpu":
            return size
        self._outgrown.append(outgrown)
        return max(size, 2 * outgrown.numel())


@dataclass(slots=True)
class GroupCount:
    """The groups of int4 weights, and how many have exactly the numbers that they were given."""

    num_groups: int = 0
    num_exact: int = 0

    def count(self, num_groups: int, num_exact: int) -> None:
        self.num_groups += num_groups
        self.num_exact += num_exact


@dataclass(frozen=True, slots=True)
class Placement:
    """Where weights are kept and in what type they are multiplied. Norms and residuals are float32 regardless.

    Raises ConfigError for int8 and int4 anywhere but on a CPU.
    """

    device: torch.device
    dtype: torch.dtype  # of activations, and of weights and a KV cache that are not quantised
    quantization: Quantization = "none"
    kernels: Kernels | None = None
    memory: WeightMemory = field(default_factory=WeightMemory, compare=False, repr=False)  # of packed weights
    groups: GroupCount = field(default_factory=GroupCount, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.quantization != "none" and self.device.type != "cpu":
            raise ConfigError(
                f"{self.quantization} weights are for CPUs: choose --quantization none, or --device cpu.",
                param="model.quantization",
            )

    @property
    def linears(self) -> LinearKind:
        """How linears are multiplied. All but `torch` give a row the same bits whatever the others (`padded_rows`)."""
        if self.quantization != "none":
            return self.quantization
        if self.device.type != "cpu":
            return "torch"
        if self.dtype == torch.bfloat16 and self.has_kernel(TILES):
            return "amx"
        if self.kernels is not None and (self.dtype == torch.float32 or self.has_kernel(PAIRS)):
            return "registers"
        if machine() != "x86_64":  # elsewhere it is not measured whether oneDNN keeps rows exact
            return "torch"
        has_type = self.dtype == torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported()  # noqa: SLF001
        return "onednn" if has_type and hasattr(torch.ops.mkldnn, "_linear_pointwise") else "torch"

    @property
    def splits_sums(self) -> bool:
        """Whether many threads would make a row's bits depend on its neighbours."""
        return self.linears == "onednn" and self.dtype == torch.bfloat16

    def has_kernel(self, name: str) -> bool:
        """Whether the compiled kernels have `roseinfer_<name>` at their level."""
        return self.kernels is not None and self.kernels.has(f"roseinfer_{name}")

    @property
    def has_triton(self) -> bool:
        """Whether Triton kernels can run on the device."""
        return self.device.type == "cuda" and find_spec("triton") is not None

    def compiled(self, name: str, *argtypes: Any) -> Callable[..., None] | None:
        """The CPU kernel `roseinfer_<name>_<dtype>`, which takes these ctypes types; None if there is none."""
        name = f"{name}_{dtype_name(self.dtype)}"
        if self.kernels is None or not self.has_kernel(name):
            return None
        return self.kernels.function(f"roseinfer_{name}", *argtypes)

    def padded_rows(self, num_rows: int) -> int:
        """The number of rows to run linears with for `num_rows`: oneDNN needs few sizes, the others take any.

        oneDNN builds a kernel for each number of rows, and multiplies a single row to other bits. So: even, with at
        most four significant bits, 8 sizes to a doubling, which can all be run before the first request.
        """
        if self.linears != "onednn":
            return num_rows
        step = max(2, 1 << max(0, (num_rows - 1).bit_length() - 4))
        return -(-num_rows // step) * step
