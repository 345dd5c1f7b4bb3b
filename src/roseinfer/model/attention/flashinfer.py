"""Attention over pages with FlashInfer's kernel for long steps with prompts, and Triton's for others.

FlashInfer plans a step on the host, from lengths, before it runs; a captured graph has no host and no lengths. So steps
of single tokens, and all that a graph holds, go through `TritonAttention`, and steps with a longer row that no graph
holds through FlashInfer, whose kernels are faster there.

A wrapper of FlashInfer writes its plan to pinned memory of its own, from where it is copied in the stream. A host that
is a step ahead would write the next plan over one that has not been copied. So each step takes the other of two
wrappers, and a wrapper plans again only after an event behind its last plan, which a host one step ahead finds passed.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from subprocess import SubprocessError
from typing import Any, NamedTuple

import numpy as np
import torch

from roseinfer.engine.core.batch import Int32Array
from roseinfer.errors import ConfigError
from roseinfer.model.attention.base import Attend, AttentionSpec, PackedTokens
from roseinfer.model.attention.kv_cache import KVCache
from roseinfer.model.attention.triton import TritonAttention
from roseinfer.model.device_stream import Event, Stream
from roseinfer.model.triton_kernels.paging import heads_of, pages_of, step_of
from roseinfer.model.triton_kernels.varlen import append

_HEAD_DIMS = (64, 128, 256)
_DTYPES = (torch.float16, torch.bfloat16)
_WORKSPACE_BYTES = 128 << 20  # as its documentation recommends
# Of FlashInfer's import, compiler and calls: a library that is missing or of another version may raise any of these.
_FAILURES = (
    *(ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, OSError, RuntimeError),
    *(SubprocessError, SyntaxError, TypeError, ValueError),
)


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


class _Planner(NamedTuple):
    """A wrapper of FlashInfer, and a mark behind the copy of its last plan."""

    wrapper: Any
    planned: Event


class FlashInferAttention:
    """Attention over a head-major cache `[blocks, kv_heads, block_size, head_dim]`, FlashInfer's layout HND."""

    name = "flashinfer"
    is_capturable = True

    def __init__(self, cache: KVCache, spec: AttentionSpec, new_event: Callable[[], Event] | None = None) -> None:
        """Raises ConfigError where FlashInfer is not installed, fails, or does not support the shape of the heads.

        `new_event` makes marks in the stream that FlashInfer copies in; None: in the current one.
        """
        reason = refusal(spec, cache.dtype) if find_spec("flashinfer") else "FlashInfer is not installed."
        if reason is not None:
            raise ConfigError(f"{reason} runner.attention can be triton.", param="runner.attention")
        self._cache = cache
        self._spec = spec
        self._heads = heads_of(spec)
        self._single = TritonAttention(cache, spec)
        self._device = cache.keys[0].device
        self._turn = 0
        try:
            self._turns = self._new_planners(new_event or self._new_event)
            self._try_out()
        except _FAILURES as error:
            sentence = f"FlashInfer fails here with {type(error).__name__}: {_first_line(error)}"
            raise ConfigError(f"{sentence}; runner.attention can be triton.", param="runner.attention") from error

    def _new_event(self) -> Event:
        if self._device.type == "cpu":
            return Stream().new_event()
        event: Event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        return event

    def _new_planners(self, new_event: Callable[[], Event]) -> Sequence[Mapping[int | None, _Planner]]:
        """By turn and by window. All share one workspace, which the stream's order protects."""
        wrapper = import_module("flashinfer").BatchPrefillWithPagedKVCacheWrapper
        workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=self._device)
        return [
            {window: _Planner(wrapper(workspace, kv_layout="HND"), new_event()) for window in set(self._spec.windows)}
            for _ in range(2)
        ]

    def _try_out(self) -> None:
        """Run one token over the last block: what cannot be compiled or run here fails now, and not in a stream."""
        last_block = len(self._cache.keys[0]) - 1
        self._plan([np.array(numbers, np.int32) for numbers in ([0, 1], [0, 1], [last_block], [1])])
        shape = (1, self._spec.num_heads, self._spec.head_dim)
        q = torch.zeros(shape, dtype=self._cache.keys[0].dtype, device=self._device)
        for planner in self._turns[self._turn].values():
            planner.wrapper.run(q, (self._cache.keys[0], self._cache.values[0]), out=torch.empty_like(q))
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def prepare(self, tokens: PackedTokens) -> Attend:
        """Reads both the host's and the device's side of the step."""
        if tokens.max_query_len == 1 or tokens.is_captured:
            return self._single.prepare(tokens)
        self._plan([tokens.query_starts, *page_index(tokens, self._cache.block_size)])
        return partial(self._attend, tokens)

    def _plan(self, index: Sequence[Int32Array]) -> None:
        """Plan a step in the planners of the other turn; `index` is its query starts and its page index."""
        self._turn ^= 1
        # Pinned, since a copy out of other memory may wait for all that was queued before.
        on_host = [torch.from_numpy(numbers) for numbers in index]
        on_host = [numbers.pin_memory() if self._device.type == "cuda" else numbers for numbers in on_host]
        for window, planner in self._turns[self._turn].items():
            planner.planned.synchronize()
            planner.wrapper.plan(
                *on_host,
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
            planner.planned.record()

    def _attend(
        self, tokens: PackedTokens, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        assert tokens.device is not None
        num_tokens = int(tokens.query_starts[-1])
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        append(step_of(q, k, v, out), pages_of(self._cache, layer), tokens.device, self._heads)
        wrapper = self._turns[self._turn][self._spec.windows[layer]].wrapper
        cache = (self._cache.keys[layer], self._cache.values[layer])
        wrapper.run(q[:num_tokens], cache, out=out[:num_tokens])
        return out.flatten(1)


def _first_line(error: BaseException) -> str:
    """The first line of an error's message, which may be a compiler's output."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "no message").rstrip(".")


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
