"""The reference attention against the textbook: softmax over all positions up to one's own, in double precision."""

import numpy as np
import pytest
import torch

from roseinfer.model.attention import PackedTokens, choose_attention
from roseinfer.model.kv_cache import CacheShape, KVCache
from roseinfer.model.layers import Placement

CPU = torch.device("cpu")


def textbook(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """All positions of one sequence: q [n, heads, dim], k and v [n, kv_heads, dim] -> [n, heads * dim]."""
    groups = q.shape[1] // k.shape[1]
    q, k, v = (x.double().transpose(0, 1) for x in (q, k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)))
    scores = q @ k.transpose(1, 2) / q.shape[-1] ** 0.5
    scores.masked_fill_(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    return torch.matmul(scores.softmax(-1), v).transpose(0, 1).flatten(1)


@pytest.mark.parametrize("block_size", [8, 16, 32, 64])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (3, 3), (4, 2), (6, 1)])
def test_sequences_in_pieces_are_the_whole(num_heads: int, num_kv_heads: int, block_size: int) -> None:
    """Three sequences of different lengths advance by uneven pieces in shared steps; every row is the textbook's."""
    head_dim, lengths = 24, (70, 9, 200)
    generator = torch.Generator().manual_seed(1)
    sequences = [
        [torch.randn(n, heads, head_dim, generator=generator) for heads in (num_heads, num_kv_heads, num_kv_heads)]
        for n in lengths
    ]
    columns = 256 // block_size
    table = np.random.default_rng(0).permutation(3 * columns).astype(np.int32).reshape(3, columns)
    cache = KVCache(CacheShape(1, num_kv_heads, head_dim), 3 * columns, block_size, Placement(CPU, torch.float32))
    attention = choose_attention("auto", cache, num_heads)
    pieces = [(0, 1, 2, 20, 69, 70), (0, 3, 6, 8, 9, 9), (0, 64, 65, 130, 191, 200)]  # where each step begins
    results: list[list[torch.Tensor]] = [[], [], []]
    for step in range(5):
        spans = [(slot, range(pieces[slot][step], pieces[slot][step + 1])) for slot in range(3)]
        tokens = PackedTokens(
            np.array([slot for slot, span in spans for _ in span], np.int32),
            np.array([position for _, span in spans for position in span], np.int32),
            table,
        )
        q, k, v = (torch.cat([sequences[slot][i][span.start : span.stop] for slot, span in spans]) for i in range(3))
        out = attention.prepare(tokens)(0, q, k, v)
        for slot, part in enumerate(torch.split(out, [len(span) for _, span in spans])):
            results[slot].append(part)
    for slot, sequence in enumerate(sequences):
        torch.testing.assert_close(torch.cat(results[slot]).double(), textbook(*sequence), atol=1e-5, rtol=1e-5)


def test_large_scores_do_not_overflow() -> None:
    cache = KVCache(CacheShape(1, 1, 16), 16, 16, Placement(CPU, torch.float32))
    q = torch.full((100, 1, 16), 30.0)
    k, v = q * torch.linspace(-1, 1, 100)[:, None, None], torch.randn(100, 1, 16)
    tokens = PackedTokens(np.zeros(100, np.int32), np.arange(100, dtype=np.int32), np.arange(16, dtype=np.int32)[None])
    out = choose_attention("reference", cache, 1).prepare(tokens)(0, q, k, v)
    torch.testing.assert_close(out.double(), textbook(q, k, v), atol=1e-4, rtol=1e-4)


def test_the_cache_keeps_its_type_and_the_sums_are_float32() -> None:
    """bfloat16 in and out; only the rounding of the inputs and of the result is lost."""
    cache = KVCache(CacheShape(1, 2, 32), 16, 16, Placement(CPU, torch.bfloat16))
    q, k, v = (torch.randn(200, 2, 32, generator=torch.Generator().manual_seed(i)).bfloat16() for i in range(3))
    tokens = PackedTokens(np.zeros(200, np.int32), np.arange(200, dtype=np.int32), np.arange(16, dtype=np.int32)[None])
    out = choose_attention("reference", cache, 2).prepare(tokens)(0, q, k, v)
    assert out.dtype == cache.keys[0].dtype == torch.bfloat16
    torch.testing.assert_close(out, textbook(q, k, v).bfloat16(), atol=0, rtol=2**-7)
