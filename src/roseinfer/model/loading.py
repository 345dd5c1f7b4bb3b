"""Loads a model as configured: device, weights, KV cache and attention.

Weights go to the device tensor by tensor out of the mapped files; the host never holds a copy of them all.
"""

import dataclasses
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch

from roseinfer.config.options import Config
from roseinfer.errors import ConfigError
from roseinfer.messages import EngineInfo, SamplingDefaults
from roseinfer.model.attention.base import AttentionBackend
from roseinfer.model.attention.kv_cache import KVCache, plan_num_blocks
from roseinfer.model.attention.registry import choose_attention
from roseinfer.model.device import (
    GroupCount,
    Placement,
    WeightMemory,
    check_num_threads,
    default_num_threads,
    dtype_name,
    resolve_device,
    resolve_dtype,
)
from roseinfer.model.families.causal_lm import CausalLM
from roseinfer.model.families.registry import build_model
from roseinfer.model.kernels.library import load_kernels
from roseinfer.model.pooling import read_embedding
from roseinfer.model.sampling.edit_table import edit_bytes
from roseinfer.model.weights.checkpoint import Checkpoint, resolve_checkpoint
from roseinfer.model.weights.packed_cache import PackedCache, open_packed_cache
from roseinfer.records import LifecycleState
from roseinfer.runtime.cgroup import cpu_groups, cpu_quota

# Tokens of context. In a step with a longer one FlashInfer's kernel is worth more than a graph: a guess.
_MAX_FLASHINFER_GRAPH_CONTEXT = 4096

_LEAST_MODEL_LEN = 1024  # without `model.max_model_len`: a server with less is of no use, so it does not start

_log = logging.getLogger(__name__)

# Of state, stage, a phrase for people, and, once that is known, the checkpoint's place.
OnProgress = Callable[..., None]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model with its cache, as a runner takes it."""

    model: CausalLM
    attention: AttentionBackend
    placement: Placement
    info: EngineInfo  # without start-up times, and without the spare block
    packed_cache: PackedCache | None = None  # holds packed weights that are new and not written yet

    @property
    def max_graph_context(self) -> int:
        """The longest context of a step with prompts that runs in a CUDA graph."""
        return _MAX_FLASHINFER_GRAPH_CONTEXT if self.attention.name == "flashinfer" else sys.maxsize


def load_model(config: Config, max_active_seqs: int, on_progress: OnProgress) -> LoadedModel:
    """Weights and cache as configured, for slots 0..max_active_seqs-1.

    Raises ConfigError when the checkpoint cannot be used, or does not fit.
    """
    device = resolve_device(config.runner.device)
    kernels = load_kernels(config.runner) if device.type == "cpu" else None
    placement = Placement(device, resolve_dtype(config.model.dtype, device), config.model.quantization, kernels)
    device_name, type_name = placement.device.type, dtype_name(placement.dtype)
    check_num_threads(config.runner.num_threads, splits_sums=placement.splits_sums)
    on_progress(LifecycleState.LOADING, "checkpoint", config.model.path)
    directory = resolve_checkpoint(config.model.path, config.model.revision)
    cache = open_packed_cache(config.model.packed_cache, directory, placement)
    origin = "" if cache is None or cache.is_new else ", as they were packed before"
    on_progress(LifecycleState.LOADING, "weights", f"to {device_name} as {type_name}{origin}", str(directory))
    placement = dataclasses.replace(placement, memory=WeightMemory(cache))
    with Checkpoint(directory) as checkpoint:
        if device_name == "cpu":
            _set_num_threads(config.runner.num_threads, placement, checkpoint)
        model = build_model(checkpoint, placement)
        _log_exact_groups(checkpoint, placement.groups)
        eos_token_ids = checkpoint.eos_token_ids(model.vocab_size)
        is_auto = config.model.generation_config == "auto"
        sampling_defaults = checkpoint.sampling_defaults() if is_auto else SamplingDefaults()
    spec, cache_config = model.attention_spec, config.cache
    num_blocks, max_model_len = _plan_pool(config, model, placement, max_active_seqs)
    model.max_positions = max_model_len
    on_progress(LifecycleState.LOADING, "kv_cache", f"{num_blocks} blocks of {cache_config.block_size} tokens")
    num_all = num_blocks + (device_name != "cpu")  # one for rows that fill up a CUDA graph
    kv_cache = KVCache(spec, num_all, cache_config.block_size, placement, cache_config.dtype)
    invariant = config.runner.batch_invariant
    attention = choose_attention(config.runner.attention, kv_cache, spec, placement.kernels, batch_invariant=invariant)
    info = EngineInfo(
        checkpoint_dir=str(directory),
        model_type=model.model_type,
        num_parameters=model.num_parameters,
        vocab_size=model.vocab_size,
        max_model_len=max_model_len,
        eos_token_ids=list(eos_token_ids),
        sampling_defaults=sampling_defaults,
        embedding=read_embedding(directory, model.head.num_inputs),
        device=device_name,
        dtype=type_name,
        kv_dtype=dtype_name(kv_cache.dtype),
        quantization=placement.quantization,
        checkpoint_quantization=checkpoint.quantization.quant_method if checkpoint.quantization else "none",
        kernels=placement.kernels.level if placement.kernels else "",
        attention=attention.name,
        linear=placement.linears,
        num_threads=torch.get_num_threads() if device_name == "cpu" else 0,
        cpu_limit=cpu_quota(cpu_groups()),
        pid=os.getpid(),
        block_size=config.cache.block_size,
        num_blocks=num_blocks,
    )
    return LoadedModel(model, attention, placement, info, cache)


def _plan_pool(config: Config, model: CausalLM, placement: Placement, max_active_seqs: int) -> tuple[int, int]:
    """Blocks of the cache, and the longest request. Raises ConfigError for a cache that is too small."""
    configured, positions = config.model.max_model_len, model.max_positions
    if configured is not None and configured > positions:
        raise ConfigError(
            f"max_model_len is {configured}, but the model has only {positions} positions.",
            param="model.max_model_len",
        )
    wanted, least = configured or positions, configured or min(positions, _LEAST_MODEL_LEN)
    sampling_bytes = edit_bytes(max_active_seqs + 1, model.vocab_size, wanted)
    num_blocks = plan_num_blocks(
        config.cache, model.attention_spec, placement, wanted, max_active_seqs, sampling_bytes, least
    )
    num_tokens = num_blocks * config.cache.block_size
    if num_tokens < wanted:
        _log.warning(
            "a request may have %d tokens, which is all that the KV cache holds, and not the %d of the model; a larger "
            "cache allows more: cache.cpu_memory_mib, or on a GPU cache.memory_utilization",
            *(num_tokens, wanted),
        )
    return num_blocks, min(wanted, num_tokens)


def _log_exact_groups(checkpoint: Checkpoint, groups: GroupCount) -> None:
    """Say how much of a quantised checkpoint is in int4 as it is stored."""
    if checkpoint.quantization and groups.num_groups:
        method, num_other = checkpoint.quantization.quant_method, groups.num_groups - groups.num_exact
        if num_other:
            _log.warning(
                "%d of %d groups of 32 weights do not have the numbers of the %s file in int4 and were quantised again",
                *(num_other, groups.num_groups, method),
            )
        else:
            _log.info("the weights have the numbers of the %s file in int4", method)


def _set_num_threads(configured: int | None, placement: Placement, checkpoint: Checkpoint) -> None:
    bytes_each = {"none": placement.dtype.itemsize, "int8": 1, "int4": 0.5625}[placement.quantization]
    num_weight_bytes = int(checkpoint.num_matrix_elements * bytes_each)
    default = default_num_threads(num_weight_bytes=num_weight_bytes, splits_sums=placement.splits_sums)
    torch.set_num_threads(configured or default)
