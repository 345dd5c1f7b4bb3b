"""The Triton kernels of a model's layers, on tensors of its shape, for what times them and what compiles them."""

from collections.abc import Callable, Sequence

import torch

from benchmarks.gpu.performance_model import Model
from roseinfer.model.attention.base import AttentionSpec, DeviceTokens
from roseinfer.model.attention.kv_cache import KVCache
from roseinfer.model.device import Placement
from roseinfer.model.triton_kernels import linear, paging, pointwise
from roseinfer.model.triton_kernels.decode import Parts, choose_num_splits, decode
from roseinfer.model.triton_kernels.tunings import DecodeTuning, decode_rule, linear_rows
from roseinfer.model.triton_kernels.varlen import tiles_of, varlen

BLOCK_SIZE = 16
NUM_PROCESSORS = 132  # of an H100 or H200
_EPSILON = 1e-5

Calls = dict[str, Callable[[], object]]


class LayerKernels:
    """One layer's cache and weights, of arbitrary numbers, and the slots of a step."""

    def __init__(
        self, model: Model, max_rows: int, context_len: int, device: torch.device, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        self.model, self._device, self._dtype = model, device, dtype
        self.spec = AttentionSpec(
            model.num_heads, model.num_kv_heads, model.head_dim, scale=model.head_dim**-0.5, windows=(None,)
        )
        self._columns = -(-context_len // BLOCK_SIZE)
        self._context_len = context_len
        cache = KVCache(self.spec, max_rows * self._columns, BLOCK_SIZE, Placement(device, dtype))
        self._heads, self._pages = paging.heads_of(self.spec), paging.pages_of(cache, 0)
        [self._scores] = paging.scores_of(self.spec, device)
        self._tiles = tiles_of(self._heads, dtype)
        self._table = torch.arange(max_rows * self._columns, dtype=torch.int32, device=device).view(max_rows, -1)
        self.rule = decode_rule(self._heads.padded_dim.value)
        shifts = None if model.is_gated else torch.zeros(model.width, device=device)
        out = torch.zeros(model.width, model.num_heads * model.head_dim, device=device, dtype=dtype)
        self._scale = torch.ones(model.width, device=device)
        bias = None if shifts is None else shifts.to(dtype)
        counters = torch.zeros(linear.NUM_COUNTERS, dtype=torch.int32, device=device)
        self._shifts = shifts
        self.weights = linear.Weights(out, bias, self._scale, shifts, _EPSILON, 1.0, counters)
        self._angles = torch.zeros(context_len, model.head_dim // 2, device=device)
        scale = torch.ones(model.head_dim, device=device)
        self._head_norms = scale, scale

    def _rows(self, counts: Sequence[int], start: int) -> DeviceTokens:
        num_rows = len(counts)
        query_starts = torch.tensor([0, *counts], dtype=torch.int32, device=self._device).cumsum(0).int()
        slots = torch.arange(num_rows, dtype=torch.int32, device=self._device)
        return DeviceTokens(slots, torch.full_like(slots, start), query_starts, self._table, self._table.stride(0))

    def _numbers(self, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=self._dtype, device=self._device)

    def decoding(self, num_rows: int, tuning: DecodeTuning | None = None) -> Callable[[], None]:
        """Attention of rows that have one new token each, at the end of the context."""
        model, tuning = self.model, tuning or self.rule
        rows = self._rows([1] * num_rows, self._context_len - 1)
        num_splits = choose_num_splits(num_rows * model.num_kv_heads, self._context_len, NUM_PROCESSORS, tuning)
        shape = (num_rows, model.num_heads, num_splits)
        mixed, peaks = (torch.zeros(size, device=self._device) for size in ((*shape, model.head_dim), shape))
        arrivals = torch.zeros(num_rows, model.num_kv_heads, dtype=torch.int32, device=self._device)
        parts = Parts(mixed, peaks, torch.zeros_like(peaks), arrivals)
        q, k, v, out = self._merged(num_rows)

        def run() -> None:
            step = paging.step_of(q, k, v, out)
            decode(step, self._pages, rows, parts, self._heads, self._scores, tuning)

        return run

    def prompts(self, counts: Sequence[int]) -> Callable[[], None]:
        """Attention of rows with a number of new tokens each, from the beginning of their contexts."""
        rows = self._rows(counts, 0)
        q, k, v, out = self._merged(sum(counts))

        def run() -> None:
            step = paging.step_of(q, k, v, out)
            varlen(step, self._pages, rows, self._heads, self._tiles, self._scores)

        return run

    def _merged(self, num_tokens: int) -> list[torch.Tensor]:
        """q, k and v as views of one projection, and the result."""
        model = self.model
        sizes = [model.num_heads, model.num_kv_heads, model.num_kv_heads]
        merged = self._numbers(num_tokens, sum(sizes), model.head_dim)
        return [*torch.split(merged, sizes, 1), self._numbers(num_tokens, model.num_heads, model.head_dim)]

    def rest(self, num_tokens: int) -> Calls:
        """What a layer is made of beside attention and the library's products, and the embedding."""
        model, dtype = self.model, self._dtype
        x = torch.zeros(num_tokens, model.width, device=self._device)
        delta, table = self._numbers(num_tokens, model.width), self._numbers(64, model.width)
        ids = torch.zeros(num_tokens, dtype=torch.int64, device=self._device)
        positions = None if model.is_gated else ids
        shifts = self._shifts
        calls: Calls = {
            "embed": lambda: pointwise.embed(ids, table, positions, None if positions is None else table),
            "first norm": lambda: pointwise.add_norm(x, None, self._scale, shifts, _EPSILON, dtype),
            "norm": lambda: pointwise.add_norm(x, delta, self._scale, shifts, _EPSILON, dtype),
        }
        if num_tokens <= linear_rows("", model.width, model.num_heads * model.head_dim, dtype):
            mixed = self._numbers(num_tokens, model.num_heads * model.head_dim)
            calls["linear and norm"] = lambda: linear.linear_add_norm(mixed, self.weights, x, dtype)
        if model.is_gated:
            turns = pointwise.Turns(self._angles, self._angles, ids)
            merged = self._numbers(num_tokens, self.spec.num_merged_heads, model.head_dim)
            heads = (model.num_heads, model.num_kv_heads)
            gates = self._numbers(num_tokens, 2 * model.inner)
            calls["rotation"] = lambda: pointwise.turn_heads(merged, *heads, turns, None, _EPSILON)
            norms = self._head_norms
            calls["norms and rotation"] = lambda: pointwise.turn_heads(merged, *heads, turns, norms, _EPSILON)
            calls["gate"] = lambda: pointwise.silu_gate(gates)
        return calls
