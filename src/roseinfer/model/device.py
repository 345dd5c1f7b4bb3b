"""Words of the configuration into a torch device, a dtype and a number of threads. Knows nothing about models."""

import os
from pathlib import Path

import torch

from roseinfer.errors import ConfigError

_MAX_EXACT_BFLOAT16_THREADS = 8
_WEIGHT_BYTES_PER_THREAD = 16 << 20
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def resolve_device(name: str) -> torch.device:
    """`auto`, `cpu` or `cuda` into a device. Raises ConfigError for `cuda` without a usable GPU."""
    has_cuda = torch.cuda.is_available()
    if name == "cuda" and not has_cuda:
        raise ConfigError(
            "No CUDA device can be used here; choose --device cpu or install torch for CUDA.", param="runner.device"
        )
    return torch.device("cuda" if has_cuda and name != "cpu" else "cpu")


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype of weights and KV cache; `auto` takes bfloat16 where the hardware multiplies it, else float32."""
    if name != "auto":
        return DTYPES[name]
    return torch.bfloat16 if device.type == "cuda" or _cpu_multiplies_bfloat16() else torch.float32


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` or `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def _cpu_multiplies_bfloat16() -> bool:
    # Without these instructions oneDNN emulates bfloat16 by widening, which is slower than float32. Torch has no
    # public question for it in all the versions we support.
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()  # noqa: SLF001


def check_num_threads(configured: int | None, *, splits_sums: bool) -> None:
    """Raise ConfigError for more threads on a CPU than keep a request's tokens its own.

    `splits_sums`: matrices are multiplied by oneDNN in bfloat16. With 16 threads it was seen to split a sum between
    threads by the number of rows, and a row's bits would depend on its neighbours (docs/log.md, 2026-11-21).
    """
    if splits_sums and configured is not None and configured > _MAX_EXACT_BFLOAT16_THREADS:
        raise ConfigError(
            f"With {configured} threads a request's tokens could depend on what else runs: in bfloat16 without "
            f"compiled kernels that multiply it no more than {_MAX_EXACT_BFLOAT16_THREADS} are exact. Take --dtype "
            "float32, or run `roseinfer kernels build` where the processor has AMX or AVX-512 in bfloat16.",
            param="runner.num_threads",
        )


def default_num_threads(*, num_weight_bytes: int, splits_sums: bool) -> int:
    """One for each 16 MiB of weights, up to every usable core; no more than 8 where sums are split.

    Threads wait for each other several times in each layer. A small model's have less to do between two such meetings
    than a meeting takes, and it takes longer while the front end has a core (docs/log.md, 2026-11-22).
    """
    most = min(num_usable_cores(), _MAX_EXACT_BFLOAT16_THREADS) if splits_sums else num_usable_cores()
    return max(1, min(most, num_weight_bytes // _WEIGHT_BYTES_PER_THREAD))


def num_usable_cores() -> int:
    """Cores this process may use: its affinity, and the CPU quota of its container (cgroup v2) rounded down, from 1.

    More OpenMP threads than that wait for each other through whole scheduler slices.
    """
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return num_cores
    return num_cores if quota == "max" else max(1, min(num_cores, int(quota) // int(period)))
