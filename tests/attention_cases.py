"""Plays steps to an attention backend of a GPU, and holds every row against the textbook and the reference backend.

Runs wherever the backend does: on a GPU, or on a CPU under Triton's interpreter.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from roseinfer.model.attention.base import AttentionBackend, AttentionSpec, DeviceTokens, PackedTokens
from roseinfer.model.attention.kv_cache import CacheType, KVCache, quantized_heads
from roseinfer.model.attention.registry import choose_attention
from roseinfer.model.device import Placement

CPU = torch.device("cpu")
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2**-9, torch.bfloat16: 2**-6}


@dataclass(frozen=True)
class Case:
    """A model's attention, a cache, and the type of both; queries may have another, which the results have too."""

    num_heads: int
    num_kv_heads: int
    head_dim: int = 64
    block_size: int = 16
    window: int | None = None
    dtype: torch.dtype = torch.float32
    query_dtype: torch.dtype | None = None
    softcap: float = 0.0
    has_sinks: bool = False
    cache_type: CacheType = "auto"

    @property
    def spec(self) -> AttentionSpec:
        return AttentionSpec(
            self.num_heads,
            self.num_kv_heads,
            self.head_dim,
            1.3 * self.head_dim**-0.5,
            (self.window,),
            self.softcap,
            (torch.linspace(-3.0, 4.0, self.num_heads),) if self.has_sinks else None,
        )

    def new_cache(self, num_blocks: int, device: torch.device) -> KVCache:
        """Full of what a former owner might have left there: not even numbers."""
        cache = KVCache(self.spec, num_blocks, self.block_size, Placement(device, self.dtype), self.cache_type)
        floats = (*cache.key_scales, *cache.value_scales) if cache.is_quantized else (*cache.keys, *cache.values)
        for pages in floats:
            pages.fill_(torch.nan)
        return cache


def textbook(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int, spec: AttentionSpec) -> torch.Tensor:
    """The tokens of a sequence from `start` on: q [n, heads, dim], k and v [start + n, kv_heads, dim]."""
    groups = q.shape[1] // k.shape[1]
    q, k, v = (x.double().transpose(0, 1) for x in (q, k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)))
    scores = q @ k.transpose(1, 2) * spec.scale
    if spec.softcap:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    [window] = spec.windows
    distance = torch.arange(start, k.shape[1])[:, None] - torch.arange(k.shape[1])
    is_seen = (distance >= 0) & (distance < (k.shape[1] + 1 if window is None else window))
    scores = scores.masked_fill(~is_seen, -torch.inf)
    if spec.sinks is not None:
        scores = torch.cat([scores, spec.sinks[0].double().view(-1, 1, 1).expand(-1, q.shape[1], 1)], -1)
    return torch.matmul(scores.softmax(-1)[..., : k.shape[1]], v).transpose(0, 1).flatten(1)


class Bench:
    """A backend over its cache and the reference over another, in which the same blocks belong to the same slots.

    No sequence owns the last row of the block table and the last block: they serve rows that only fill up.
    """

    def __init__(self, case: Case, device: torch.device, num_slots: int, max_len: int) -> None:
        self.case = case
        self.device = device
        columns = -(-max_len // case.block_size)
        self.spare_slot, self.spare_block = num_slots, num_slots * columns
        blocks = np.random.default_rng(3).permutation(self.spare_block).astype(np.int32)
        self.table = np.full((num_slots + 1, columns), self.spare_block, np.int32)
        self.table[:num_slots] = blocks.reshape(num_slots, columns)
        self.cache = case.new_cache(self.spare_block + 1, device)
        self.reference_cache = case.new_cache(self.spare_block + 1, CPU)
        self.reference = choose_attention("reference", self.reference_cache, case.spec, None)
        self.lengths = [0] * num_slots
        generator = torch.Generator().manual_seed(5)
        query_dtype = case.query_dtype or case.dtype
        self.q = self._random(generator, num_slots, max_len, case.num_heads).to(query_dtype)
        self.k, self.v = (self._random(generator, num_slots, max_len, case.num_kv_heads) for _ in range(2))
        self.k, self.v = self.k.to(case.dtype), self.v.to(case.dtype)

    def _random(self, generator: torch.Generator, num_slots: int, max_len: int, num_heads: int) -> torch.Tensor:
        return torch.randn(num_slots, max_len, num_heads, self.case.head_dim, generator=generator)

    def fill(self, slot: int, length: int) -> None:
        """As if so many positions of the slot had been computed before."""
        positions = np.arange(self.lengths[slot], length)
        blocks = torch.from_numpy(self.table[slot, positions // self.case.block_size].astype(np.int64))
        offsets = torch.from_numpy(positions % self.case.block_size)
        for cache in (self.cache, self.reference_cache):
            new = [self.k[slot, positions], self.v[slot, positions]]
            if cache.is_quantized:
                (keys, key_scales), (values, value_scales) = map(quantized_heads, new)
                new = [keys, values, key_scales, value_scales]
            for pages, some in zip(self._pages_of(cache), new, strict=True):
                pages[blocks.to(pages.device), :, offsets.to(pages.device)] = some.to(pages.device)
        self.lengths[slot] = length

    def pack(
        self, rows: Sequence[tuple[int, int]], num_padding_rows: int = 0, max_context_len: int | None = None
    ) -> PackedTokens:
        """A step of (slot, number of new tokens), filled up as a graph's is.

        Rows that fill up have one token of the spare slot each if others have no more, and otherwise none.
        """
        counts = np.array([count for _, count in rows], np.int32)
        slots = np.array([slot for slot, _ in rows], np.int32)
        starts = np.array([self.lengths[slot] for slot in slots], np.int32)
        spans = [np.arange(start, start + count) for start, count in zip(starts, counts, strict=True)]
        query_starts = np.append(0, np.cumsum(counts)).astype(np.int32)
        positions = np.concatenate([np.arange(0), *spans])
        padding = np.arange(1, num_padding_rows + 1) * (counts.max(initial=1) == 1)
        return PackedTokens(
            slots=np.repeat(slots, counts),
            positions=positions.astype(np.int32),
            query_starts=query_starts,
            block_table=self.table,
            max_query_len=int(counts.max(initial=1)),
            max_context_len=max_context_len or int((starts + counts).max()),
            device=DeviceTokens(
                slots=self._int32(np.append(slots, np.full(num_padding_rows, self.spare_slot))),
                starts=self._int32(np.append(starts, np.zeros(num_padding_rows))),
                query_starts=self._int32(np.append(query_starts, query_starts[-1] + padding)),
                block_table=self._int32(self.table),
                table_stride=self.table.shape[1],
            ),
            is_captured=num_padding_rows > 0,
        )

    def _int32(self, array: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> torch.Tensor:
        return torch.from_numpy(array.astype(np.int32)).to(self.device)

    def inputs(
        self, rows: Sequence[tuple[int, int]], num_more: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k and v of the step, as views of one projection; `num_more` tokens behind them hold no numbers."""
        spans = [(slot, slice(self.lengths[slot], self.lengths[slot] + count)) for slot, count in rows]
        parts = [torch.cat([x[slot, span] for slot, span in spans]) for x in (self.q, self.k, self.v)]
        if self.case.query_dtype is None:
            projected = torch.cat(parts, 1)
            projected = torch.cat([projected, torch.full((num_more, *projected.shape[1:]), torch.nan).to(projected)])
            q, k, v = torch.split(projected.to(self.device), [part.shape[1] for part in parts], 1)
        else:
            assert num_more == 0
            q, k, v = (part.to(self.device) for part in parts)
        return q, k, v

    def step(
        self,
        backend: AttentionBackend,
        rows: Sequence[tuple[int, int]],
        num_padding_rows: int = 0,
        max_context_len: int | None = None,
    ) -> torch.Tensor:
        """Run the step in the backend and check every row of it, and what it wrote; [tokens, heads * head_dim]."""
        tokens = self.pack(rows, num_padding_rows, max_context_len)
        inputs = self.inputs(rows, num_padding_rows)
        out = backend.prepare(tokens)(0, *inputs)
        num_tokens = int(tokens.query_starts[-1])
        out = out[:num_tokens].to("cpu", copy=True)
        assert out.dtype == self.q.dtype
        expected = self.reference.prepare(tokens)(0, *(x[:num_tokens].cpu() for x in inputs))
        tolerance = TOLERANCES[self.case.dtype]
        torch.testing.assert_close(out, expected, atol=tolerance, rtol=tolerance)
        for (slot, count), part in zip(rows, torch.split(out, [count for _, count in rows]), strict=True):
            start, end = self.lengths[slot], self.lengths[slot] + count
            k, v = self.k[slot, :end], self.v[slot, :end]
            if self.cache.is_quantized:
                k, v = (numbers * scales.unsqueeze(-1) for numbers, scales in map(quantized_heads, (k, v)))
            exact = textbook(self.q[slot, start:end], k, v, start, self.case.spec)
            torch.testing.assert_close(part.double(), exact, atol=tolerance, rtol=tolerance)
            self.lengths[slot] = end
        self._check_caches()
        return out

    def _check_caches(self) -> None:
        """Bit by bit, and in every block that is not the spare one: what was there before, and the step's own."""
        for pages, expected in zip(*map(self._pages_of, (self.cache, self.reference_cache)), strict=True):
            bits = {1: torch.int8, 2: torch.int16, 4: torch.int32}[pages.dtype.itemsize]
            assert torch.equal(pages[:-1].cpu().view(bits), expected[:-1].view(bits))

    def _pages_of(self, cache: KVCache) -> list[torch.Tensor]:
        """Keys and values of the layer, and their scales if there are some."""
        return [cache.keys[0], cache.values[0], *cache.key_scales, *cache.value_scales]


def new_backend(bench: Bench, name: str = "triton", *, batch_invariant: bool = False) -> AttentionBackend:
    from roseinfer.model.attention.flashinfer import FlashInferAttention
    from roseinfer.model.attention.triton import TritonAttention

    if name == "flashinfer":
        return FlashInferAttention(bench.cache, bench.case.spec)
    return TritonAttention(bench.cache, bench.case.spec, batch_invariant=batch_invariant)


PIECES = ((0, 1, 2, 20, 69, 70), (0, 3, 6, 8, 9, 10), (0, 64, 65, 130, 139, 140))  # where each step begins, by slot


def check_history(case: Case, device: torch.device, name: str = "triton") -> None:
    """Three sequences of different lengths advance by uneven pieces in shared steps; the last step decodes."""
    bench = Bench(case, device, 3, 144)
    backend = new_backend(bench, name)
    for step in range(5):
        rows = [(slot, pieces[step + 1] - pieces[step]) for slot, pieces in enumerate(PIECES)]
        bench.step(backend, rows[::-1] if step % 2 else rows)


def check_splits(case: Case, device: torch.device, num_splits: int) -> None:
    """Rows of very different lengths decode together, each cut into as many pieces as its length is worth."""
    from roseinfer.model.attention.triton import TritonAttention

    lengths = (0, 1, 63, 64, 65, 129, 255, 257, 700)
    bench = Bench(case, device, len(lengths), max(lengths) + 2)
    for slot, length in enumerate(lengths):
        bench.fill(slot, length)
    backend = TritonAttention(bench.cache, case.spec)
    for slots in ((*range(len(lengths)),), (7, 8)):
        bench.step(backend, [(slot, 1) for slot in slots], max_context_len=num_splits * backend.tuning.min_split_keys)


def check_padding(case: Case, device: torch.device, *, batch_invariant: bool = False) -> None:
    """Rows and tokens that fill up a step read and write the spare block at most, and change nothing for the others."""
    bench = Bench(case, device, 2, 64)
    backend = new_backend(bench, batch_invariant=batch_invariant)
    bench.step(backend, [(0, 17), (1, 30)], num_padding_rows=6)
    bench.step(backend, [(1, 1), (0, 1)], num_padding_rows=6)
    bench.step(backend, [(1, 1), (0, 1)])


def invariant_results(case: Case, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One sequence alone and at once; in uneven pieces among others; decoded from a prefix that others computed."""
    results = []
    for pieces in ((140,), (3, 64, 1, 1, 30, 41)):
        bench = Bench(case, device, 3, 144)
        backend = new_backend(bench, batch_invariant=True)
        rows = [[(0, count)] if len(pieces) == 1 else [(1, 1), (0, count), (2, 2)] for count in pieces]
        spans = [slice(1, 1 + count) if len(pieces) > 1 else slice(count) for count in pieces]
        results.append(torch.cat([bench.step(backend, row)[span] for row, span in zip(rows, spans, strict=True)]))
    bench = Bench(case, device, 3, 144)
    backend = new_backend(bench, batch_invariant=True)
    bench.fill(0, 135)
    results.append(torch.cat([bench.step(backend, [(0, 1)]) for _ in range(5)]))
    return results[0], results[1], results[2]
