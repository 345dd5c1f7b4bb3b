"""Attention over pages by the compiled CPU kernel (`kernels/cpp/attention.cpp`).

The kernel writes the new keys and values, and reads them, in a layout of its own, so no other backend can read a cache
that this one has written.
"""

import ctypes
from ctypes import POINTER, Structure, c_float, c_int64, c_void_p
from functools import partial

import numpy as np
import torch

from roseinfer.model.attention.base import Attend, AttentionSpec, PackedTokens
from roseinfer.model.device import Scratch, dtype_name
from roseinfer.model.kernels.library import Kernels
from roseinfer.model.kv_cache import KVCache

_ITEM_FIELDS = 5  # of `Item` of kernels/cpp/attention.cpp


class _Call(Structure):
    """`Call` of kernels/cpp/attention.cpp."""

    _fields_ = (
        ("slots", c_void_p),
        ("positions", c_void_p),
        ("query_starts", c_void_p),
        ("block_table", c_void_p),
        ("items", c_void_p),
        ("block_table_stride", c_int64),
        ("num_items", c_int64),
        ("num_tokens", c_int64),
        ("appends_first", c_int64),
        ("num_heads", c_int64),
        ("num_kv_heads", c_int64),
        ("head_dim", c_int64),
        ("block_size", c_int64),
        ("scale", c_float),
        ("softcap", c_float),
        ("window", c_int64),
        ("sinks", c_void_p),
        ("q", c_void_p),
        ("k", c_void_p),
        ("v", c_void_p),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("key_scales", c_void_p),
        ("value_scales", c_void_p),
        ("out", c_void_p),
        ("q_strides", c_int64 * 2),
        ("k_strides", c_int64 * 2),
        ("v_strides", c_int64 * 2),
    )


class NativeAttention:
    """Attention over the cache in the kernel's layout; softmax and sums in float32.

    `attend` returns the same tensor in every layer of a step, overwritten.
    """

    name = "native"
    is_capturable = False

    def __init__(self, cache: KVCache, spec: AttentionSpec, kernels: Kernels) -> None:
        self._spec = spec
        self._cache = cache
        types = [cache.query_dtype, cache.dtype] if cache.is_quantized else [cache.dtype]
        self._run = kernels.function("_".join(["attention", *map(dtype_name, types)]), POINTER(_Call))
        self._plan = kernels.function(
            "attention_plan", c_void_p, c_void_p, c_int64, c_int64, c_int64, c_void_p, POINTER(c_int64)
        )
        self._scratch = Scratch(torch.device("cpu"))
        self._items = np.empty((0, _ITEM_FIELDS), np.int32)
        self._sinks = spec.sinks_on(torch.device("cpu"))
        self._layers = [self._fields_of(layer) for layer in range(len(spec.windows))]
        self._call = _Call(
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            block_size=cache.block_size,
            scale=spec.scale,
            softcap=spec.softcap,
        )

    @staticmethod
    def can_compute(spec: AttentionSpec) -> bool:
        """Whether the kernel supports the shape."""
        return spec.head_dim % 8 == 0

    def _fields_of(self, layer: int) -> tuple[int, int, int | None, int | None, int, int | None]:
        """Keys, values, their scales, the window and the sinks of a call."""
        cache, sinks = self._cache, self._sinks[layer]
        scales = (cache.key_scales[layer], cache.value_scales[layer]) if cache.is_quantized else (None, None)
        key_scales, value_scales = (None if x is None else x.data_ptr() for x in scales)
        return (
            *(cache.keys[layer].data_ptr(), cache.values[layer].data_ptr(), key_scales, value_scales),
            *(self._spec.windows[layer] or 0, None if sinks is None else sinks.data_ptr()),
        )

    def prepare(self, tokens: PackedTokens) -> Attend:
        arrays = tuple(map(np.ascontiguousarray, (tokens.slots, tokens.positions, tokens.query_starts)))
        slots, positions, query_starts = (array.ctypes.data for array in arrays)
        num_most = int(tokens.query_starts[-1]) * self._spec.num_heads
        if len(self._items) < num_most:
            self._items = np.empty((num_most, _ITEM_FIELDS), np.int32)
        results = (c_int64 * 2)()
        self._plan(
            query_starts,
            positions,
            len(tokens.query_starts) - 1,
            self._spec.num_heads,
            self._spec.num_kv_heads,
            self._items.ctypes.data,
            results,
        )
        call = self._call
        call.slots, call.positions, call.query_starts = slots, positions, query_starts
        call.block_table = tokens.block_table.ctypes.data
        call.block_table_stride = tokens.block_table.strides[0] // tokens.block_table.itemsize
        call.items = self._items.ctypes.data
        call.num_items, call.appends_first = results
        call.num_tokens = int(tokens.query_starts[-1])
        shape = (len(tokens.slots), self._spec.num_heads * self._spec.head_dim)
        out = self._scratch.buffer("out", shape, self._cache.query_dtype)
        call.out = out.data_ptr()
        return partial(self._attend, (arrays, tokens), ctypes.byref(call), out)

    def _attend(
        self,
        _: object,  # the arrays that the call points to, kept alive
        pointer: "ctypes._CArgObject",
        out: torch.Tensor,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> torch.Tensor:
        call = self._call
        call.keys, call.values, call.key_scales, call.value_scales, call.window, call.sinks = self._layers[layer]
        call.q, call.k, call.v = q.data_ptr(), k.data_ptr(), v.data_ptr()
        call.q_strides, call.k_strides, call.v_strides = q.stride()[:2], k.stride()[:2], v.stride()[:2]
        self._run(pointer)
        return out
