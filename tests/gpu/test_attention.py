"""The attention kernels on a real GPU: the cases of the interpreter in the types of a GPU, graphs, and bits."""

from importlib.util import find_spec

import pytest
import torch

from roseinfer.model.attention.base import Attend, AttentionBackend, PackedTokens
from tests.attention_cases import (
    Bench,
    Case,
    check_history,
    check_padding,
    check_splits,
    invariant_results,
    new_backend,
)

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
BRAIN, HALF = torch.bfloat16, torch.float16
CASES = [
    Case(12, 12, dtype=BRAIN),  # GPT-2 small
    Case(12, 12),
    Case(16, 4, 128, dtype=BRAIN),  # Llama 3
    Case(14, 2, dtype=BRAIN),  # Qwen2 0.5B: a group of seven
    Case(8, 2, 128, 64, 65, dtype=BRAIN),  # Mistral
    Case(5, 5, 80, 8, 50, dtype=HALF),
    Case(8, 1, 96, 32, dtype=HALF),
    Case(4, 4, 256, 16, 1, dtype=BRAIN),
    Case(4, 1, 256, 64, dtype=BRAIN),
    Case(4, 2, 24, 8, 100),
    Case(8, 4, 256, 16, 70, dtype=BRAIN, softcap=50.0),  # Gemma 2
    Case(64, 8, dtype=BRAIN, has_sinks=True),  # gpt-oss
    Case(16, 8, 128, dtype=BRAIN, cache_type="int8"),  # Qwen3 0.6B
    Case(5, 5, 80, 8, 50, dtype=HALF, cache_type="int8"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_sequences_in_pieces_are_the_textbooks(case: Case) -> None:
    check_history(case, CUDA)


@pytest.mark.parametrize("num_splits", [1, 2, 4, 8, 32])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_rows_of_any_length_are_split_and_joined(case: Case, num_splits: int) -> None:
    check_splits(case, CUDA, num_splits)


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_padding_rows_touch_no_block(case: Case, batch_invariant: bool) -> None:
    check_padding(case, CUDA, batch_invariant=batch_invariant)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_batch_invariant_results_are_equal_bit_by_bit(case: Case) -> None:
    alone, among_others, decoded = invariant_results(case, CUDA)
    assert torch.equal(alone, among_others)
    assert torch.equal(alone[135:], decoded)


def decoding(case: Case, lengths: tuple[int, ...]) -> Bench:
    bench = Bench(case, CUDA, len(lengths), max(lengths) + 40)
    for slot, length in enumerate(lengths):
        bench.fill(slot, length)
    return bench


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_same_step_has_the_same_bits(case: Case) -> None:
    """Splits race with each other, and their order decides nothing."""
    lengths = (2000, 1, 700, 300)
    bench = decoding(case, lengths)
    attend = new_backend(bench).prepare(bench.pack([(slot, 1) for slot in range(4)]))
    inputs = bench.inputs([(slot, 1) for slot in range(4)])
    first = attend(0, *inputs).clone()
    for _ in range(50):
        assert torch.equal(attend(0, *inputs), first)


class Replayed:
    """A backend whose steps of `num_rows` single tokens were captured once, and are replayed with other integers."""

    name = "replayed"
    is_capturable = False

    def __init__(self, backend: AttentionBackend, bench: Bench, num_rows: int, max_context_len: int) -> None:
        self._backend = backend  # whose memory the graph reads: the sinks of its layers
        self._tokens = bench.pack(
            [], num_rows, max_context_len
        )  # a capture runs, so it uses the block that no sequence owns
        self._inputs = tuple(x.clone() for x in bench.inputs([(0, 1)] * num_rows))
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            backend.prepare(self._tokens)(0, *self._inputs)
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._out = backend.prepare(self._tokens)(0, *self._inputs)

    def prepare(self, tokens: PackedTokens) -> Attend:
        mine, new = self._tokens.device, tokens.device
        assert mine is not None
        assert new is not None
        mine.slots.copy_(new.slots)
        mine.starts.copy_(new.starts)
        mine.query_starts.copy_(new.query_starts)
        mine.block_table.copy_(new.block_table)

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            for static, given in zip(self._inputs, (q, k, v), strict=True):
                static.copy_(given)
            num_allocations = torch.cuda.memory_stats()["allocation.all.allocated"]
            self._graph.replay()
            assert torch.cuda.memory_stats()["allocation.all.allocated"] == num_allocations
            return self._out

        return attend


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_captured_graph_serves_every_length(case: Case, batch_invariant: bool) -> None:
    """Rows come and go, grow over the ends of blocks, and fill the graph or not."""
    bench = decoding(case, (0, 5, 62, 255, 1000))
    replayed = Replayed(new_backend(bench, batch_invariant=batch_invariant), bench, 6, 1024)
    for step in range(20):
        slots = [slot for slot in range(5) if (slot + step) % 4]
        bench.step(replayed, [(slot, 1) for slot in slots], num_padding_rows=6 - len(slots))


def test_a_decode_step_allocates_nothing() -> None:
    bench = decoding(Case(12, 12, dtype=BRAIN), (3, 700))
    backend = new_backend(bench)
    rows = [(0, 1), (1, 1)]
    bench.step(backend, rows)
    tokens, inputs = bench.pack(rows), bench.inputs(rows)
    num_allocations = torch.cuda.memory_stats()["allocation.all.allocated"]
    backend.prepare(tokens)(0, *inputs)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == num_allocations


@pytest.mark.skipif(find_spec("flashinfer") is None, reason="flashinfer is not installed")
@pytest.mark.parametrize(
    "case", [case for case in CASES if case.dtype != torch.float32 and case.head_dim in {64, 128, 256}], ids=str
)
def test_flashinfer_takes_over_what_has_longer_rows(case: Case) -> None:
    check_history(case, CUDA, "flashinfer")


@pytest.mark.parametrize("width", [768, 1000, 4096])
@pytest.mark.parametrize("dtype", [torch.float32, BRAIN])
def test_norms(width: int, dtype: torch.dtype) -> None:
    from roseinfer.model.triton_kernels.pointwise import add_norm

    x, delta = torch.randn(65, width, device=CUDA) + 2, torch.randn(65, width, device=CUDA).to(dtype)
    weight, bias = torch.randn(2, width, device=CUDA)
    total = x.double() + delta.double()
    centred = total - total.mean(-1, keepdim=True)
    layer = centred * (centred.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight + bias
    rms = total * (total.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight
    tolerance = 1e-5 if dtype == torch.float32 else 2**-7
    for given, expected in ((bias, layer), (None, rms)):
        summed = x.clone()
        normed = add_norm(summed, delta, weight, given, 1e-5, dtype)
        torch.testing.assert_close(summed, total.float(), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(normed, expected.to(dtype), atol=tolerance, rtol=tolerance)
        alone = add_norm(x[3:4].clone(), delta[3:4], weight, given, 1e-5, dtype)
        assert torch.equal(alone, normed[3:4])
