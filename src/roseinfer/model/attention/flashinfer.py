"""Attention over pages with FlashInfer's kernel for prompts, and Triton's for decoding.

FlashInfer plans a step on the host, from lengths, before it runs; a captured graph has no host and no lengths. So steps
of single tokens go through `TritonAttention`, which a graph can hold, and steps with a longer row, which run outside of
graphs in any case, through FlashInfer, whose kernels are faster there.
"""

from collections.abc import Mapping
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from roseinfer.engine.core.batch import Int32Array
from roseinfer.errors import ConfigError
from roseinfer.model.attention.base import Attend, AttentionSpec, PackedTokens
from roseinfer.model.attention.triton import TritonAttention
from roseinfer.model.kv_cache import KVCache
from roseinfer.model.triton_kernels.paging import heads_of, pages_of, step_of
from roseinfer.model.triton_kernels.varlen import append

_HEAD_DIMS = (64, 128, 256)
_DTYPES = (torch.float16, torch.bfloat16)
_WORKSPACE_BYTES = 128 << 20  # as its documentation recommends


def refusal(spec: AttentionSpec, dtype: torch.dtype) -> str | None:
    """Why FlashInfer cannot serve this model, in one sentence; None if it can."""
    if spec.head_dim not in _HEAD_DIMS:
        return f"FlashInfer knows heads of {', '.join(map(str, _HEAD_DIMS))} dimensions, not of {spec.head_dim}."
    if spec.softcap or spec.sinks is not None:
        return "FlashInfer is used for attention without soft caps and sinks."
    if dtype == torch.int8:
        return "FlashInfer has no keys and values in int8 with a scale for each token."
    if dtype not in _DTYPES:
        return f"FlashInfer computes in {' or '.join(str(d).removeprefix('torch.') for d in _DTYPES)}."
    return None


class FlashInferAttention:
    """Attention over a head-major cache `[blocks, kv_heads, block_size, head_dim]`, FlashInfer's layout HND."""

    name = "flashinfer"
    is_capturable = True

    def __init__(self, cache: KVCache, spec: AttentionSpec) -> None:
        """Raises ConfigError where FlashInfer is not installed, or does not support the shape of the model's heads."""
        reason = refusal(spec, cache.dtype) if find_spec("flashinfer") else "FlashInfer is not installed."
        if reason is not None:
            raise ConfigError(f"{reason} runner.attention can be triton.", param="runner.attention")
        self._cache = cache
        self._spec = spec
        self._heads = heads_of(spec)
        self._single = TritonAttention(cache, spec)
        self._workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=cache.keys[0].device)
        flashinfer = import_module("flashinfer")
        self._wrappers: Mapping[int | None, Any] = {
            window: flashinfer.BatchPrefillWithPagedKVCacheWrapper(self._workspace, kv_layout="HND")
            for window in set(spec.windows)
        }

    def prepare(self, tokens: PackedTokens) -> Attend:
        """Reads both the host's and the device's side of the step."""
        if tokens.max_query_len == 1:
            return self._single.prepare(tokens)
        page_starts, pages, last_page_lens = page_index(tokens, self._cache.block_size)
        for window, wrapper in self._wrappers.items():
            wrapper.plan(
                torch.from_numpy(tokens.query_starts),
                torch.from_numpy(page_starts),
                torch.from_numpy(pages),
                torch.from_numpy(last_page_lens),
                self._spec.num_heads,
                self._spec.num_kv_heads,
                self._spec.head_dim,
                self._cache.block_size,
                causal=True,
                sm_scale=self._spec.scale,
                window_left=-1 if window is None else window - 1,  # it does not count the token itself
                q_data_type=self._cache.keys[0].dtype,
                kv_data_type=self._cache.keys[0].dtype,
            )
        return partial(self._attend, tokens)

    def _attend(
        self, tokens: PackedTokens, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        assert tokens.device is not None
        num_tokens = int(tokens.query_starts[-1])
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        append(step_of(q, k, v, out), pages_of(self._cache, layer), tokens.device, self._heads)
        wrapper = self._wrappers[self._spec.windows[layer]]
        cache = (self._cache.keys[layer], self._cache.values[layer])
        wrapper.run(q[:num_tokens], cache, out=out[:num_tokens])
        return out.flatten(1)


def page_index(tokens: PackedTokens, block_size: int) -> tuple[Int32Array, Int32Array, Int32Array]:
    """The index of each row's first page [rows + 1], the pages' block ids, and positions in each last page [rows].

    This is FlashInfer's form: the first array ends with the number of pages.
    """
    last_tokens = tokens.query_starts[1:] - 1
    context_lens = tokens.positions[last_tokens] + 1
    counts = -(-context_lens // block_size)
    starts = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=starts[1:])
    columns = np.arange(starts[-1]) - np.repeat(starts[:-1], counts)
    pages: Int32Array = tokens.block_table[np.repeat(tokens.slots[last_tokens], counts), columns].astype(np.int32)
    last_page_lens: Int32Array = (context_lens - (counts - 1) * block_size).astype(np.int32)
    return starts, pages, last_page_lens
