"""Reference attention in plain torch, one token at a time, with which the tests compare the other backends.

A token's result is computed from its own query and the keys and values that it sees, by operations whose shapes follow
from its position alone; so it cannot depend on other tokens.
"""

from functools import partial

import numpy as np
import torch

from roseinfer.model.attention.base import Attend, AttentionSpec, PackedTokens
from roseinfer.model.attention.kv_cache import KVCache, quantized_heads


class ReferenceAttention:
    """Attention over a cache `[blocks, kv_heads, block_size, head_dim]`; softmax and sums in float32."""

    name = "reference"
    is_capturable = False

    def __init__(self, cache: KVCache, spec: AttentionSpec) -> None:
        self._cache = cache
        self._spec = spec
        self._sinks = spec.sinks_on(cache.keys[0].device)

    def prepare(self, tokens: PackedTokens) -> Attend:
        num_tokens = int(tokens.query_starts[-1])
        return partial(
            self._attend,
            tokens.slots[:num_tokens].tolist(),
            tokens.positions[:num_tokens].tolist(),
            torch.from_numpy(tokens.block_table.astype(np.int64)).to(self._cache.keys[0].device),
        )

    def _attend(
        self,
        slots: list[int],
        positions: list[int],
        block_table: torch.Tensor,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> torch.Tensor:
        cache, block_size = self._cache, self._cache.block_size
        written = [(cache.keys[layer], k), (cache.values[layer], v)]
        if cache.is_quantized:
            (keys, key_scales), (values, value_scales) = quantized_heads(k), quantized_heads(v)
            written = [(cache.keys[layer], keys), (cache.values[layer], values)]
            written += [(cache.key_scales[layer], key_scales), (cache.value_scales[layer], value_scales)]
        for token, (slot, position) in enumerate(zip(slots, positions, strict=True)):
            block, offset = block_table[slot, position // block_size], position % block_size
            for pages, new in written:
                pages[block, :, offset] = new[token]
        out = torch.zeros_like(q, memory_format=torch.contiguous_format)  # zero for the repetitions of the last token
        for token, (slot, position) in enumerate(zip(slots, positions, strict=True)):
            blocks = block_table[slot, : position // block_size + 1]
            out[token] = self._token(layer, q[token], position, *self._read(layer, blocks))
        return out.flatten(1)

    def _read(self, layer: int, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and values in these blocks, each [blocks, kv_heads, block_size, head_dim] float32."""
        cache = self._cache
        keys, values = cache.keys[layer][blocks].float(), cache.values[layer][blocks].float()
        if cache.is_quantized:
            keys = keys * cache.key_scales[layer][blocks].unsqueeze(-1)
            values = values * cache.value_scales[layer][blocks].unsqueeze(-1)
        return keys, values

    def _token(
        self, layer: int, q: torch.Tensor, position: int, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """The query [heads, head_dim] of one token and its sequence's pages up to its own -> [heads, head_dim]."""
        window = self._spec.windows[layer]
        seen = slice(0 if window is None else max(0, position - window + 1), position + 1)
        keys, values = (pages.transpose(0, 1).flatten(1, 2)[:, seen] for pages in (keys, values))
        grouped = q.float().view(self._spec.num_kv_heads, -1, self._spec.head_dim)
        scores = grouped @ keys.transpose(1, 2) * self._spec.scale  # [kv_heads, heads / kv_heads, keys]
        if self._spec.softcap:
            scores = torch.tanh(scores / self._spec.softcap) * self._spec.softcap
        if (sinks := self._sinks[layer]) is not None:
            scores = torch.cat((scores, sinks.view(*scores.shape[:2], 1)), -1)
        weights = scores.softmax(-1)[..., : keys.shape[1]]
        return (weights @ values).view_as(q)
