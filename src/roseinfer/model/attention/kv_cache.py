"""The paged KV cache: its tensors, their type, and how many blocks fit into memory."""

import os
from typing import Literal

import torch

from roseinfer.config.options import CacheConfig
from roseinfer.errors import ConfigError
from roseinfer.model.attention.base import AttentionSpec
from roseinfer.model.device import Placement
from roseinfer.model.layers.int8 import quantized_rows

CacheType = Literal["auto", "int8"]

_STEP_BYTES = 1 << 30  # of a GPU's memory, left for a step's temporaries and the pool of the CUDA graphs


class KVCache:
    """Keys and values, one tensor of each a layer, `[num_blocks, num_kv_heads, block_size, head_dim]`.

    In int8 a key, or value, of one token and head is scale * numbers, |numbers| <= 127. Every token has scales of its
    own, so a later token changes no earlier one, and what a request reads does not depend on how it was cut into steps.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        num_blocks: int,
        block_size: int,
        placement: Placement,
        cache_type: CacheType = "auto",
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.dtype = dtype_of(cache_type, placement)
        self.query_dtype = placement.dtype  # of queries, and of keys and values that are to be stored
        num_layers, layer = len(spec.windows), (num_blocks, spec.num_kv_heads, block_size, spec.head_dim)
        zeros = [torch.zeros(layer, dtype=self.dtype, device=placement.device) for _ in range(2 * num_layers)]
        self.keys, self.values = zeros[:num_layers], zeros[num_layers:]
        # [num_blocks, num_kv_heads, block_size] float32 of each layer; none but in int8
        num_scales = 2 * num_layers if self.is_quantized else 0
        scales = [torch.zeros(layer[:-1], device=placement.device) for _ in range(num_scales)]
        self.key_scales, self.value_scales = scales[:num_layers], scales[num_layers:]

    @property
    def is_quantized(self) -> bool:
        return self.dtype == torch.int8


def dtype_of(cache_type: CacheType, placement: Placement) -> torch.dtype:
    """Of the keys and values that `cache.dtype` means."""
    return torch.int8 if cache_type == "int8" else placement.dtype


def quantized_heads(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys or values [tokens, kv_heads, head_dim] as an int8 cache holds them, and their scales [tokens, kv_heads]."""
    quantized, scales = quantized_rows(rows.reshape(-1, rows.shape[-1]))
    return quantized.view(rows.shape), scales.view(rows.shape[:-1])


def plan_num_blocks(
    config: CacheConfig,
    spec: AttentionSpec,
    placement: Placement,
    max_model_len: int,
    max_active_seqs: int,
    sampling_bytes: int = 0,
    least_model_len: int | None = None,
) -> int:
    """Blocks of the pool: as configured, or what `max_active_seqs` of full length need, or what the memory holds.

    Of a GPU's memory `sampling_bytes` are left for the tables of the sampler.
    Call it when the weights are on the device. Raises ConfigError when not even one sequence of `least_model_len`
    fits, by default of `max_model_len`, or when a CPU's memory could not hold them.
    """
    blocks_per_seq = -(-max_model_len // config.block_size)
    block_bytes = config.block_size * spec.bytes_per_token(dtype_of(config.dtype, placement))
    used = ""
    if config.num_blocks is not None:
        num_blocks, cause = config.num_blocks, "cache.num_blocks"
    else:
        used = _used_memory(placement.device)
        budget_bytes, cause = _budget_bytes(config, placement.device, sampling_bytes)
        num_blocks = min(blocks_per_seq * max_active_seqs, budget_bytes // block_bytes)
    least_model_len = least_model_len or max_model_len
    least_blocks = -(-least_model_len // config.block_size)
    if num_blocks < least_blocks:
        raise ConfigError(
            f"The KV cache would hold {max(0, num_blocks) * config.block_size} tokens, but one sequence may take "
            f"{least_model_len}: raise {cause} (at least {least_blocks} blocks are needed) or lower "
            f"model.max_model_len.{used}",
            param="cache.num_blocks",
        )
    if placement.device.type == "cpu" and num_blocks * block_bytes > (memory := _machine_bytes()):
        raise ConfigError(
            f"The {num_blocks} blocks of the KV cache would take {num_blocks * block_bytes / 2**30:.1f} GiB, and this "
            f"machine has {memory / 2**30:.1f} GiB of memory.",
            param=cause,
        )
    return num_blocks


def _machine_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _used_memory(device: torch.device) -> str:
    """How much of a GPU's memory is in use, as a sentence behind another: no option helps where others hold it."""
    if device.type == "cpu":
        return ""
    free, total = torch.cuda.mem_get_info(device)
    return (
        f" Of the GPU's {total / 2**30:.1f} GiB {(total - free) / 2**30:.1f} are in use, by the weights and by other "
        "processes; CUDA_VISIBLE_DEVICES chooses another GPU."
    )


def _budget_bytes(config: CacheConfig, device: torch.device, sampling_bytes: int) -> tuple[int, str]:
    """Bytes that the cache may take, and the option that decides it."""
    if device.type == "cpu":
        return config.cpu_memory_mib << 20, "cache.cpu_memory_mib"
    torch.cuda.empty_cache()  # memory that only loading needed counts as in use until torch returns it
    free, total = torch.cuda.mem_get_info(device)
    share = int(total * config.memory_utilization) - (total - free)
    return min(share, free - _STEP_BYTES) - sampling_bytes, "cache.memory_utilization"
