"""Attention over pages in Triton kernels on a GPU.

A step in which every row has one token goes through the split-KV kernel (triton_kernels/decode.py), any other through
the kernel for packed rows (triton_kernels/varlen.py). Both read slots, starts, lengths and block ids on the device, so
a captured graph serves every step of its shape: `max_context_len` decides how rows are split, not the result.

`batch_invariant` sends every step through the kernel for packed rows, which cuts keys at absolute positions: then the
bits of a token's attention depend on its own sequence alone. It costs a long sequence in a small batch most of the GPU,
since one program for each key head reads all of its keys.
"""

from functools import partial

import torch

from roseinfer.errors import ConfigError
from roseinfer.model.attention.base import Attend, AttentionSpec, DeviceTokens, PackedTokens
from roseinfer.model.attention.kv_cache import KVCache
from roseinfer.model.device import Scratch
from roseinfer.model.triton_kernels.decode import Parts, choose_num_splits, decode
from roseinfer.model.triton_kernels.language import IS_INTERPRETED
from roseinfer.model.triton_kernels.paging import heads_of, pages_of, scores_of, step_of
from roseinfer.model.triton_kernels.tunings import decode_tuning
from roseinfer.model.triton_kernels.varlen import tiles_of, varlen

_MAX_HEAD_DIM = 256
_NOT_A_GPU = "", 132  # name and multiprocessors, where kernels are interpreted


class TritonAttention:
    """Attention over a head-major cache `[blocks, kv_heads, block_size, head_dim]`; softmax and sums in float32.

    The result of `attend` for a step of single tokens is valid until its next call, and nothing is allocated. With
    `batch_invariant`, as for any other step, each layer's result is a tensor of its own.
    """

    name = "triton"
    is_capturable = True

    def __init__(self, cache: KVCache, spec: AttentionSpec, *, batch_invariant: bool = False) -> None:
        device = cache.keys[0].device
        if device.type != "cuda" and not IS_INTERPRETED:
            raise ConfigError("Attention by triton needs a CUDA device.", param="runner.attention")
        if spec.head_dim > _MAX_HEAD_DIM:
            raise ConfigError(
                f"Attention by triton takes heads of up to {_MAX_HEAD_DIM} dimensions, and this model's have "
                f"{spec.head_dim}.",
                param="runner.attention",
            )
        self._spec = spec
        self._heads = heads = heads_of(spec)
        self._tiles = tiles_of(heads, cache.query_dtype if cache.is_quantized else cache.dtype)
        self._scores = scores_of(spec, device)
        self._pages = [pages_of(cache, layer) for layer in range(len(cache.keys))]
        self._batch_invariant = batch_invariant
        name, self._num_processors = _NOT_A_GPU
        if device.type == "cuda":
            properties = torch.cuda.get_device_properties(device)
            name, self._num_processors = properties.name, properties.multi_processor_count
        self.tuning = decode_tuning(name, heads.group.value, heads.padded_dim.value, cache.dtype)
        self._scratch = Scratch(device)

    def prepare(self, tokens: PackedTokens) -> Attend:
        """Reads `tokens.device` and the two maxima; launches nothing and copies nothing."""
        assert tokens.device is not None
        rows = tokens.device
        if tokens.max_query_len > 1 or self._batch_invariant:
            return partial(self._attend_packed, rows)
        num_splits = choose_num_splits(
            rows.starts.shape[0] * self._spec.num_kv_heads,
            self._num_seen(tokens.max_context_len),
            self._num_processors,
            self.tuning,
        )
        return partial(self._attend_single, rows, num_splits)

    def _num_seen(self, context_len: int) -> int:
        """The most positions that a token sees in any layer."""
        return max(context_len if window is None else min(window, context_len) for window in self._spec.windows)

    def _attend_packed(
        self, rows: DeviceTokens, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        varlen(step_of(q, k, v, out), self._pages[layer], rows, self._heads, self._tiles, self._scores[layer])
        return out.flatten(1)

    def _attend_single(
        self, rows: DeviceTokens, num_splits: int, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        shape = (rows.starts.shape[0], self._spec.num_heads, num_splits)
        parts = Parts(
            mixed=self._scratch.buffer("mixed", (*shape, self._spec.head_dim)),
            peaks=self._scratch.buffer("peaks", shape),
            totals=self._scratch.buffer("totals", shape),
            arrivals=self._scratch.zeros("arrivals", (shape[0], self._spec.num_kv_heads), torch.int32),
        )
        out = self._scratch.buffer("out", (q.shape[0], self._spec.num_heads, self._spec.head_dim), q.dtype)
        step, pages = step_of(q, k, v, out), self._pages[layer]
        decode(step, pages, rows, parts, self._heads, self._scores[layer], self.tuning)
        return out.flatten(1)
