"""FlashInfer's backend without FlashInfer: a wrapper by the textbook stands in its place."""

import logging
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any, ClassVar
from unittest.mock import patch

import pytest
import torch

from roseinfer.errors import ConfigError
from roseinfer.model.attention import registry
from roseinfer.model.attention.base import AttentionSpec
from roseinfer.model.attention.kv_cache import dtype_of
from roseinfer.model.device import Placement
from tests.attention_cases import CPU, Bench, Case, check_history, new_backend, textbook
from tests.unit.model.fake_device import LateStream
from tests.unit.model.triton_processes import Worker, interpreter_process

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed; the extra `test` has it")

HALF = torch.float16


@pytest.fixture(scope="module")
def interpreter() -> Iterator[Worker]:
    yield from interpreter_process()


class FakeWrapper:
    """FlashInfer's wrapper as its documentation has it, by the textbook."""

    def __init__(self, workspace: torch.Tensor, *, kv_layout: str) -> None:
        assert workspace.dtype == torch.uint8
        assert kv_layout == "HND"

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        *shape: int,
        causal: bool,
        **options: Any,
    ) -> None:
        assert causal
        self._index = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        self._page_size = shape[-1]
        window = None if options["window_left"] == -1 else options["window_left"] + 1
        num_heads, num_kv_heads, head_dim, _ = shape
        self._spec = AttentionSpec(num_heads, num_kv_heads, head_dim, options["sm_scale"], (window,))

    def run(self, q: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor], *, out: torch.Tensor) -> None:
        query_starts, page_starts, pages, last_page_lens = (x.tolist() for x in self._index)
        assert len(q) == len(out) == query_starts[-1]
        for row, last_page_len in enumerate(last_page_lens):
            blocks = pages[page_starts[row] : page_starts[row + 1]]
            length = (len(blocks) - 1) * self._page_size + last_page_len
            keys, values = (x[blocks].transpose(1, 2).flatten(0, 1)[:length] for x in cache)
            span = slice(query_starts[row], query_starts[row + 1])
            start = length - (span.stop - span.start)
            out[span] = textbook(q[span], keys, values, start, self._spec).view_as(q[span])


def install(wrapper: type) -> None:
    flashinfer = ModuleType("flashinfer")
    flashinfer.__spec__ = ModuleSpec("flashinfer", None)
    vars(flashinfer)["BatchPrefillWithPagedKVCacheWrapper"] = wrapper
    sys.modules["flashinfer"] = flashinfer


def check_flashinfer(case: Case) -> None:
    install(FakeWrapper)
    check_history(case, CPU, "flashinfer")


class LatePlans(FakeWrapper):
    """As FlashInfer does: a plan lies in the wrapper's host memory until the stream has copied it."""

    stream: ClassVar = LateStream(is_late=True)

    def __init__(self, workspace: torch.Tensor, *, kv_layout: str) -> None:
        self._on_host, self._on_device = torch.zeros(2, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)

    def plan(self, qo_indptr: torch.Tensor, *_: object, **__: object) -> None:
        self._on_host.copy_(qo_indptr)
        self.stream.copy(self._on_device, self._on_host)

    def run(self, q: torch.Tensor, cache: object, *, out: torch.Tensor) -> None:
        """In the stream too: what the device finds there when its turn comes."""
        self.stream.queue(lambda: out.fill_(int(self._on_device[1])))


def planned_ahead(num_tokens: list[int]) -> tuple[list[int], list[int]]:
    """The plans that prompts of so many tokens are run with, and how many calls wait for the device at each step."""
    install(LatePlans)
    from roseinfer.model.attention.flashinfer import FlashInferAttention

    case, stream = Case(1, 1, dtype=HALF), LatePlans.stream
    bench = Bench(case, CPU, 1, 64)
    backend = FlashInferAttention(bench.cache, case.spec, stream.new_event)
    outs, num_pending = [], []
    for count in num_tokens:
        rows = [(0, count)]
        outs.append(backend.prepare(bench.pack(rows))(0, *bench.inputs(rows)))
        num_pending.append(stream.num_pending)
    stream.run_until(stream.num_queued)
    return [int(out[0, 0]) for out in outs], num_pending


def test_a_plan_is_not_written_before_the_one_before_is_copied(interpreter: Worker) -> None:
    """Nor does a step wait for the one before it: that is the host's lead."""
    plans, num_pending = interpreter.call(planned_ahead, [2, 3, 4, 5])
    assert plans == [2, 3, 4, 5]
    assert num_pending[1:] == [5, 5, 5]


class Broken(FakeWrapper):
    """A FlashInfer without a compiler."""

    def plan(self, *_: object, **__: object) -> None:
        raise RuntimeError("\nninja is not installed.\nmore\nlines")


def chosen_without_flashinfer(name: str) -> tuple[str, list[str]]:
    """The backend that is taken and what is logged, with a FlashInfer that fails, as if the cache were on a GPU."""
    install(Broken)
    bench, records = Bench(Case(2, 2, dtype=HALF), CPU, 1, 16), list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(registry.__name__).addHandler(handler)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_is_on_cuda", lambda _: True)
        return registry.choose_attention(name, bench.cache, bench.case.spec, None).name, records


def test_auto_does_without_a_flashinfer_that_fails_and_says_why(interpreter: Worker) -> None:
    name, [told] = interpreter.call(chosen_without_flashinfer, "auto")
    assert name == "triton"
    assert "RuntimeError: ninja is not installed; runner.attention" in told


def test_a_flashinfer_that_was_asked_for_and_fails_ends_the_start_with_one_sentence(interpreter: Worker) -> None:
    with pytest.raises(ConfigError) as caught:
        interpreter.call(chosen_without_flashinfer, "flashinfer")
    told = "FlashInfer fails here with RuntimeError: ninja is not installed; runner.attention can be triton."
    assert caught.value.message == told


@pytest.mark.parametrize("case", [Case(2, 2, dtype=HALF), Case(4, 1, 128, 8, 50, dtype=HALF)], ids=str)
def test_flashinfer_gets_the_pages_to_read(interpreter: Worker, case: Case) -> None:
    interpreter.call(check_flashinfer, case)


def check_captured(case: Case) -> None:
    check_flashinfer(case)
    bench = Bench(case, CPU, 2, 64)
    backend = new_backend(bench, "flashinfer")
    with patch.object(FakeWrapper, "plan", side_effect=AssertionError):
        bench.step(backend, [(0, 17), (1, 30)], num_padding_rows=6)


def test_a_graph_with_prompts_does_without_a_plan(interpreter: Worker) -> None:
    interpreter.call(check_captured, Case(2, 2, dtype=HALF))


def test_the_pages_of_flashinfer() -> None:
    from roseinfer.model.attention.flashinfer import page_index

    bench = Bench(Case(1, 1, block_size=8), CPU, 3, 32)
    for slot, length in enumerate((7, 8, 16)):
        bench.fill(slot, length)
    starts, pages, last_page_lens = page_index(bench.pack([(2, 1), (0, 1), (1, 9)]), 8)
    assert starts.tolist() == [0, 3, 4, 7]
    assert pages.tolist() == [*bench.table[2, :3], bench.table[0, 0], *bench.table[1, :3]]
    assert last_page_lens.tolist() == [1, 8, 1]


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (Case(2, 2, 80, dtype=HALF), "not of 80"),
        (Case(2, 2), "float16 or bfloat16"),
        (Case(2, 2, dtype=torch.bfloat16, cache_type="int8"), "no keys and values in int8"),
        (Case(2, 2, dtype=torch.bfloat16), None),
    ],
    ids=str,
)
def test_flashinfer_says_what_it_does_not_know(case: Case, reason: str | None) -> None:
    from roseinfer.model.attention.flashinfer import refusal

    told = refusal(case.spec, dtype_of(case.cache_type, Placement(CPU, case.dtype)))
    assert told is None if reason is None else told is not None and reason in told
