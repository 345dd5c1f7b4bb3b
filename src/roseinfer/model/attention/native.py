"""Attention over pages by the compiled CPU kernel (`kernels/cpp/attention.cpp`).

The kernel writes the new keys and values, and reads them, in a layout of its own, so no other backend can read a cache
that this one has written.
"""

from ctypes import POINTER, Structure, byref, c_float, c_int64, c_void_p
from functools import partial

import numpy as np
import torch

from roseinfer.model.attention.base import Attend, AttentionSpec, PackedTokens
from roseinfer.model.attention.kv_cache import KVCache
from roseinfer.model.device import Scratch, dtype_name
from roseinfer.model.kernels.library import Kernels

_ITEM_FIELDS = 5  # of `Item` of kernels/cpp/attention.cpp
_Strides = c_int64 * 2


class _Step(Structure):
    """`Step` of kernels/cpp/attention.h."""

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
    )


class _Layer(Structure):
    """`Layer` of kernels/cpp/attention.h."""

    _fields_ = (
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
        ("q_strides", _Strides),
        ("k_strides", _Strides),
        ("v_strides", _Strides),
    )


class NativeAttention:
    """Attention over the cache in the kernel's layout; softmax and sums in float32.

    `attend` returns the same tensor in every layer of a step, overwritten.
    """

    name = "native"
    is_capturable = True  # a call has its layer's own addresses, and reads the step's from one place

    def __init__(self, cache: KVCache, spec: AttentionSpec, kernels: Kernels) -> None:
        self._spec = spec
        self._cache = cache
        types = [cache.query_dtype, cache.dtype] if cache.is_quantized else [cache.dtype]
        name = "_".join(["attention", *map(dtype_name, types)])
        self._run = kernels.function(name, POINTER(_Step), POINTER(_Layer))
        self._plan = kernels.function(
            "attention_plan", c_void_p, c_void_p, c_int64, c_int64, c_int64, c_void_p, POINTER(c_int64)
        )
        self._scratch = Scratch(torch.device("cpu"))
        self._planned = (c_int64 * 2)()  # the number of items, and whether they append first
        self._tokens: PackedTokens | None = None  # of the last step
        self._attend_step: Attend
        self._items = np.empty((0, _ITEM_FIELDS), np.int32)
        self._sinks = spec.sinks_on(torch.device("cpu"))
        self._layers = [self._fields_of(layer) for layer in range(len(spec.windows))]
        self._step = _Step(
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

    def _fields_of(self, layer: int) -> tuple[tuple[int, int | None], tuple[int | None, ...]]:
        """Window and sinks of a call; keys, values and their scales."""
        cache, sinks = self._cache, self._sinks[layer]
        scales = (cache.key_scales[layer], cache.value_scales[layer]) if cache.is_quantized else (None, None)
        pages = (cache.keys[layer], cache.values[layer], *scales)
        limits = self._spec.windows[layer] or 0, None if sinks is None else sinks.data_ptr()
        return limits, tuple(None if page is None else page.data_ptr() for page in pages)

    def prepare(self, tokens: PackedTokens) -> Attend:
        if tokens is not self._tokens:  # rows that decode on are the same but for their positions
            self._point_to(tokens)
        step = self._step
        self._plan(
            step.query_starts,
            step.positions,
            len(tokens.query_starts) - 1,
            self._spec.num_heads,
            self._spec.num_kv_heads,
            step.items,
            self._planned,
        )
        step.num_items, step.appends_first = self._planned
        return self._attend_step

    def _point_to(self, tokens: PackedTokens) -> None:
        """Fill in what a step's calls read, but for what the plan finds out."""
        arrays = tuple(map(np.ascontiguousarray, (tokens.slots, tokens.positions, tokens.query_starts)))
        step, num_tokens = self._step, int(tokens.query_starts[-1])
        if len(self._items) < num_tokens * self._spec.num_heads:
            self._items = np.empty((num_tokens * self._spec.num_heads, _ITEM_FIELDS), np.int32)
        step.slots, step.positions, step.query_starts = (array.ctypes.data for array in arrays)
        step.block_table = tokens.block_table.ctypes.data
        step.block_table_stride = tokens.block_table.strides[0] // tokens.block_table.itemsize
        step.items = self._items.ctypes.data
        step.num_tokens = num_tokens
        shape = (len(tokens.slots), self._spec.num_heads * self._spec.head_dim)
        self._attend_step = partial(self._attend, self._scratch.buffer("out", shape, self._cache.query_dtype))
        self._tokens, self._alive = tokens, arrays  # what the step points to

    def _attend(self, out: torch.Tensor, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        limits, pages = self._layers[layer]
        addresses = q.data_ptr(), k.data_ptr(), v.data_ptr(), *pages, out.data_ptr()
        strides = (_Strides(*each.stride()[:2]) for each in (q, k, v))
        self._run(byref(self._step), byref(_Layer(*limits, *addresses, *strides)))
        return out
