"""Steps as graphs, on a device that is none: the same tokens, no live slot touched, no number asked for."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from torch.utils._python_dispatch import TorchDispatchMode

from roseinfer.config.options import RunnerConfig
from roseinfer.engine.core.batch import NO_TOKEN, Int32Array, PooledRow, ScoredRow, SlotBinding
from roseinfer.engine.core.stopwatch import unwatched
from roseinfer.messages import SamplingParams
from roseinfer.model.device_stream import Graph
from roseinfer.model.runner import ModelRunner
from roseinfer.model.steps.graphs import CudaGraphs, GraphSize, decode_graph_sizes, prompt_graph_sizes
from roseinfer.model.steps.warm_up_batches import decode_batch
from roseinfer.records import LifecycleState
from tests.unit.model.driver import Ask, Driver, Plan, plans
from tests.unit.model.fake_device import LateStream, RecordedGraph
from tests.unit.model.fake_model import NUM_BLOCKS, VOCAB_SIZE, DeviceAttention, make_runner, row_model
from tests.unit.model.steps.test_staging import batch_of

NUM_SLOTS = 12
GREEDY = SamplingParams(temperature=0.0)


def asks_of(seed: int, count: int = 6, params: Callable[[int], SamplingParams] | None = None) -> list[Ask]:
    """Requests of every kind that a graph takes, or with parameters of the given kind."""
    random = np.random.default_rng(seed)

    def plain(index: int) -> SamplingParams:
        return GREEDY if index % 2 else SamplingParams(temperature=0.8, seed=seed + index)

    return [
        Ask(random.integers(0, VOCAB_SIZE, random.integers(1, 30)).tolist(), 8, (params or plain)(index))
        for index in range(count)
    ]


def run(runner: ModelRunner, asks: list[Ask], plan: Plan) -> tuple[list[list[int]], list[int]]:
    """The tokens of each request, and the graph rows of each step."""
    driver = Driver(runner, runner.info, NUM_SLOTS, plan)
    return driver.generate(asks), driver.graph_rows


def runner_of(mode: str, stream: LateStream | None = None) -> ModelRunner:
    return make_runner(stream or LateStream(), RunnerConfig(cuda_graphs=mode), NUM_SLOTS)  # type: ignore[arg-type]


# --- sizes ------------------------------------------------------------------------------------------------------------


def test_sizes() -> None:
    assert decode_graph_sizes(1) == (1,)
    assert decode_graph_sizes(8) == (1, 2, 4, 8)
    assert decode_graph_sizes(12) == (1, 2, 4, 8, 12)
    assert decode_graph_sizes(64) == (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)
    assert decode_graph_sizes(256)[10:] == (64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 240, 256)
    assert decode_graph_sizes(300)[-2:] == (256, 300)


def test_sizes_of_steps_with_prompts() -> None:
    assert prompt_graph_sizes(2, 1) == ((2, 1),)
    assert prompt_graph_sizes(100, 12) == ((16, 8), (16, 12), (32, 8), (32, 12), (64, 8), (64, 12), (100, 8), (100, 12))
    assert prompt_graph_sizes(32, 256) == ((16, 8), (16, 16), (32, 8), (32, 32)), "no more rows than tokens"
    assert {rows for tokens, rows in prompt_graph_sizes(512, 256) if tokens == 512} == {8, 64, 256}
    assert prompt_graph_sizes(8192, 64)[-1] == (1024, 64)


def decoding(num_rows: int) -> GraphSize:
    return GraphSize(num_rows, num_rows, is_decode=True)


class Recorder:
    """A stream that only captures, and the callbacks of `CudaGraphs`."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.stream = LateStream()
        self.graphs = CudaGraphs(
            self.stream,
            [*map(decoding, (1, 2, 4, 8)), GraphSize(16, 4), GraphSize(16, 8), GraphSize(64, 4), GraphSize(64, 8)],
            lambda size: self.calls.append(f"fill {size}"),
            lambda size: self.calls.append(f"run {size}"),
        )

    def decode_sizes(self, *counts: int) -> list[GraphSize | None]:
        return [self.graphs.size_for(count, count, unwatched, is_decode=True) for count in counts]


def test_all_are_captured_and_each_is_reported() -> None:
    recorder = Recorder()
    told: list[str] = []
    recorder.graphs.capture_all(told.append)
    sizes = ["8 rows", "4 rows", "2 rows", "1 rows"]
    sizes += [f"{tokens} tokens in {rows} rows" for tokens, rows in ((16, 4), (16, 8), (64, 4), (64, 8))]
    assert [call for call in recorder.calls if call.startswith("fill")] == [f"fill {size}" for size in sizes]
    assert told == [f"{size}, graph {index} of 8" for index, size in enumerate(sizes, 1)]
    assert recorder.stream.num_captures == 8


def test_a_step_runs_in_the_smallest_graph_that_holds_it() -> None:
    recorder = Recorder()
    sizes = recorder.decode_sizes(1, 2, 3, 5, 8, 9)
    assert sizes == [*map(decoding, (1, 2, 4, 8, 8)), None]
    found = [
        recorder.graphs.size_for(*step, unwatched)
        for step in ((1, 1), (16, 4), (9, 5), (17, 1), (20, 8), (20, 9), (65, 1))
    ]
    assert found == [(16, 4, False), (16, 4, False), (16, 8, False), (64, 4, False), (64, 8, False), None, None]


def test_a_size_is_captured_when_it_is_first_met() -> None:
    recorder = Recorder()
    assert recorder.decode_sizes(3) == [decoding(4)]
    assert recorder.calls[0] == "fill 4 rows"
    assert set(recorder.calls[1:]) == {"run 4 rows"}
    assert recorder.decode_sizes(4) == [decoding(4)]
    assert recorder.stream.num_captures == 1


def test_a_runner_captures_before_it_is_ready_and_says_so() -> None:
    told: list[tuple[LifecycleState, str, str]] = []
    stream = LateStream()
    runner = make_runner(stream, RunnerConfig(), NUM_SLOTS, lambda *stage: told.append(stage))
    runner.warm_up(64)
    num_graphs = len(decode_graph_sizes(NUM_SLOTS)) + len(prompt_graph_sizes(256, NUM_SLOTS))
    assert [(state, stage) for state, stage, _ in told] == [(LifecycleState.WARMUP, "cuda_graphs")] * num_graphs
    assert stream.num_captures == num_graphs
    _, graph_rows = run(runner, asks_of(0), Plan())
    assert stream.num_captures == num_graphs
    assert all(graph_rows), "no step was queued operation by operation"
    assert runner.info.decode_graph_sizes == list(decode_graph_sizes(NUM_SLOTS))
    assert runner.info.prompt_graph_sizes == list(prompt_graph_sizes(256, NUM_SLOTS))
    assert runner.info.graph_bytes == num_graphs * stream.graph_bytes


# --- memory -----------------------------------------------------------------------------------------------------------


def test_graphs_take_half_of_the_memory_that_is_free(caplog: pytest.LogCaptureFixture) -> None:
    """And what it does not suffice for are the largest steps with prompts."""
    recorder = Recorder()
    recorder.stream.num_free_bytes, recorder.stream.graph_bytes = 100 << 20, 8 << 20
    with caplog.at_level("INFO", "roseinfer.model.steps.graphs"):
        recorder.graphs.capture_all(lambda _: None)
    assert recorder.graphs.sizes(is_decode=True) == [*map(decoding, (1, 2, 4, 8))]
    assert recorder.graphs.sizes(is_decode=False) == [(16, 4, False), (16, 8, False)]
    assert recorder.graphs.size_for(17, 1, unwatched) is None
    assert recorder.stream.num_captures == 7, "one of them was given up"
    assert (recorder.graphs.num_bytes, recorder.graphs.max_bytes) == (48 << 20, 50 << 20)
    assert [record.message for record in caplog.records] == [
        "no memory is left for a CUDA graph of 64 tokens in 4 rows: steps without a graph are slower",
        "6 CUDA graphs take 48 MiB, of 50 that they may take",
    ]


def test_a_larger_graph_serves_where_there_is_no_memory_for_another() -> None:
    recorder = Recorder()
    recorder.stream.num_free_bytes, recorder.stream.graph_bytes = 100, 40
    assert recorder.graphs.size_for(20, 8, unwatched) == (64, 8, False)
    assert recorder.graphs.size_for(3, 2, unwatched) == (64, 8, False)
    assert recorder.decode_sizes(1) == [None]
    assert recorder.stream.num_captures == 2


def test_a_capture_that_runs_out_of_memory_is_given_up() -> None:
    """And not the engine: where graphs are captured lazily, that would be in a stream."""
    stream = LateStream()
    runner, asks = runner_of("lazy", stream), asks_of(8)
    expected, _ = run(runner_of("off"), asks, Plan())
    capture = stream.capture

    def run_out(work: Callable[[], None]) -> Graph:
        if stream.num_captures < 2:
            return capture(work)
        work()  # a first run may end before memory does
        raise torch.OutOfMemoryError("CUDA out of memory.")

    stream.capture = run_out  # type: ignore[method-assign]
    tokens, graph_rows = run(runner, asks, Plan(max_rows=4))
    assert tokens == expected
    assert 0 in graph_rows
    assert any(graph_rows)


def test_steps_that_no_memory_was_left_for_give_the_same_tokens() -> None:
    asks = asks_of(8)
    expected, _ = run(runner_of("off"), asks, Plan())
    stream = LateStream()
    stream.num_free_bytes, stream.graph_bytes = 160, 10
    runner = runner_of("startup", stream)
    runner.warm_up(64)
    assert runner.info.decode_graph_sizes == list(decode_graph_sizes(NUM_SLOTS))
    assert runner.info.prompt_graph_sizes == [(16, 8), (16, 12), (32, 8)]
    assert (runner.info.graph_bytes, runner.info.max_graph_bytes) == (80, 80)
    tokens, graph_rows = run(runner, asks, Plan(max_rows=4))
    assert tokens == expected
    assert 0 in graph_rows
    assert any(graph_rows)


def test_the_largest_prompt_and_draw_run_again_after_the_captures() -> None:
    """Each of them has torch give back the memory of steps, and the first stream would wait for all of it anew."""
    model, attention = row_model()
    num_tokens: list[int] = []
    forward = model.forward

    def noted(token_ids: torch.Tensor, *rest: Any) -> torch.Tensor:
        num_tokens.append(len(token_ids))
        return forward(token_ids, *rest)

    model.forward = noted  # type: ignore[assignment, method-assign]
    runner = make_runner(LateStream(), RunnerConfig(), NUM_SLOTS, make_model=lambda: (model, attention))
    runner.warm_up(64)
    assert num_tokens[-5:] == [256, 64, NUM_SLOTS, NUM_SLOTS, NUM_SLOTS], "the last graph, the prompt, three draws"


@pytest.mark.parametrize(("mode", "num_captures"), [("lazy", 0), ("off", 0)])
def test_a_runner_that_does_not_capture_at_startup(mode: str, num_captures: int) -> None:
    stream = LateStream()
    runner = runner_of(mode, stream)
    runner.warm_up(64)
    assert stream.num_captures == num_captures
    _, graph_rows = run(runner, asks_of(0), Plan())
    assert (stream.num_captures > 0) == all(graph_rows) == any(graph_rows) == (mode == "lazy")


# --- the same tokens --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["startup", "lazy"])
@pytest.mark.parametrize("depth", [0, 1])
def test_graphs_give_the_tokens_of_steps_without(mode: str, depth: int) -> None:
    asks = asks_of(1, 10)
    expected, _ = run(runner_of("off"), asks, Plan())
    runner = runner_of(mode)
    runner.warm_up(64)
    tokens, graph_rows = run(runner, asks, Plan(seed=9, depth=depth, chunk=11))
    assert tokens == expected
    assert {1, 8} <= set(graph_rows)
    assert all(graph_rows), "chunks and mixed steps among them"


@settings(max_examples=15, deadline=None)
@given(
    mode=st.sampled_from(["startup", "lazy", "off"]),
    plan=plans(NUM_SLOTS, max_chunk=40),
)
def test_seeds_decide_whatever_the_schedule(mode: str, plan: Plan) -> None:
    """Batching, chunking, preemption, graphs and depth: none of them changes a token."""
    asks = asks_of(plan.seed % 3)
    expected, _ = run(runner_of("off"), asks, Plan(max_rows=1))
    assert run(runner_of(mode), asks, plan)[0] == expected


def test_a_step_with_a_row_that_no_graph_serves_goes_without() -> None:
    asks = [*asks_of(2, 2), *asks_of(3, 2, lambda index: SamplingParams(top_p=0.9, seed=index))]
    expected, _ = run(runner_of("off"), asks, Plan())
    tokens, graph_rows = run(runner_of("startup"), asks, Plan(seed=3, depth=1, max_rows=2))
    assert tokens == expected
    assert 0 in graph_rows
    assert any(graph_rows)


@pytest.mark.parametrize(
    "wanted",
    [
        {"scored": (ScoredRow(0, np.array([3, 4], np.int32), 1),)},
        {"pooled": (PooledRow(0, "last"),)},
        {"drafted": np.array([NO_TOKEN], np.int32)},
    ],
    ids=lambda wanted: next(iter(wanted)),
)
def test_a_prompt_of_which_more_is_wanted_than_its_token_goes_without(wanted: dict[str, Any]) -> None:
    batch = batch_of([(0, 0, 5)], table=np.zeros((NUM_SLOTS, 8), np.int32))
    launched = runner_of("lazy").launch(replace(batch, **wanted))
    assert launched.graph_rows == 0
    sampled = launched.wait()
    assert len(sampled.scores) == len(wanted.get("scored", ()))
    assert len(sampled.pooled) == len(wanted.get("pooled", ()))


def test_a_long_context_goes_without_where_other_kernels_are_worth_more() -> None:
    """Steps with prompts only: others have no such kernels."""
    asks = [Ask([index] * 40, 4) for index in range(3)]
    runner = runner_of("lazy")
    runner._max_graph_context = 20
    tokens, graph_rows = run(runner, asks, Plan(chunk=15, max_rows=1))
    assert tokens == run(runner_of("off"), asks, Plan())[0]
    assert (graph_rows.count(0), len(graph_rows)) == (3 * 2, 3 * (3 + 3)), "the second and the third chunk of each"


def test_the_host_is_asked_nothing_during_a_capture() -> None:
    """Nor can it be: the fake refuses as CUDA does."""
    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
        RecordedGraph(lambda: print(torch.ones(1).sum().item()))


# --- rows of no request -----------------------------------------------------------------------------------------------


class Watched:
    """A runner after some requests, every slot used, and its cache."""

    def __init__(self, seed: int) -> None:
        model, attention = row_model()
        config = RunnerConfig(cuda_graphs="lazy")
        self.runner = make_runner(LateStream(), config, NUM_SLOTS, make_model=lambda: (model, attention))
        run(self.runner, asks_of(seed, NUM_SLOTS), Plan(chunk=9))
        assert isinstance(attention, DeviceAttention)
        self.pages = [*attention.cache.keys, *attention.cache.values]
        self.pages_before = [page.clone() for page in self.pages]
        self.last_tokens_before = self.runner._last_token.clone()

    def changed_blocks(self) -> set[int]:
        """Blocks of which a key or a value is another than before."""
        changes = [page != before for page, before in zip(self.pages, self.pages_before, strict=True)]
        return {block for change in changes for block in change.flatten(1).any(1).nonzero().flatten().tolist()}

    def changed_slots(self) -> set[int]:
        """Slots whose last token is another than before."""
        return set((self.runner._last_token != self.last_tokens_before).nonzero().flatten().tolist())


def test_capturing_touches_no_live_slot() -> None:
    """Neither its blocks nor its last token: the runs of a capture have rows of their own."""
    watched = Watched(4)
    graphs, table = watched.runner._graphs, watched.runner._staging.block_table[:NUM_SLOTS].clone()
    assert graphs is not None
    with torch.inference_mode():
        for size in (*graphs.sizes(is_decode=True), *graphs.sizes(is_decode=False)):
            assert graphs._capture(size)
    assert watched.changed_blocks() <= {NUM_BLOCKS}
    assert watched.changed_slots() <= {NUM_SLOTS}
    assert torch.equal(watched.runner._staging.block_table[:NUM_SLOTS], table)


def test_rows_that_fill_up_touch_no_live_slot() -> None:
    """Five rows in a graph of eight: their own blocks change, and the spare one."""
    watched = Watched(5)
    slots, blocks = [7, 2, 9, 0, 4], [31, 3, 17, 22, 8]
    table = np.zeros((NUM_SLOTS, 8), np.int32)
    table[slots, 1] = blocks
    batch = batch_of([(slot, 8 + row, 1) for row, slot in enumerate(slots)], len(slots), table)
    assert watched.runner.launch(batch).graph_rows == 8
    assert set(blocks) <= watched.changed_blocks() <= {*blocks, NUM_BLOCKS}
    assert watched.changed_slots() <= {*slots, NUM_SLOTS}


def test_what_fills_up_a_step_with_prompts_touches_no_live_slot() -> None:
    """A decoding row, a chunk that goes on and one that ends; the graph has more rows, and more tokens."""
    watched = Watched(6)
    table = np.zeros((NUM_SLOTS, 8), np.int32)
    table[7, 1], table[2, :2], table[9, 0] = 31, (17, 3), 22
    batch = batch_of([(7, 8, 1), (2, 0, 9), (9, 0, 5)], 1, table, [True, False, True])
    assert watched.runner.launch(replace(batch, token_ids=batch.token_ids % VOCAB_SIZE)).graph_rows == 8
    assert {31, 17, 3, 22} <= watched.changed_blocks() <= {31, 17, 3, 22, NUM_BLOCKS}
    assert watched.changed_slots() <= {7, 9, NUM_SLOTS}


def with_prefix(mode: str) -> list[int]:
    """The first tokens of two requests with one prompt; the second finds 16 of its tokens in blocks of the first."""
    runner, prompt = runner_of(mode), np.arange(19, dtype=np.int32) % VOCAB_SIZE
    table = np.zeros((NUM_SLOTS, 8), np.int32)
    table[0, :3], table[1, :3] = (5, 6, 7), (5, 6, 9)
    return [first_token(runner, 0, prompt, 0, table), first_token(runner, 1, prompt, 16, table)]


def first_token(runner: ModelRunner, slot: int, prompt: Int32Array, num_found: int, table: Int32Array) -> int:
    batch = batch_of([(slot, num_found, len(prompt) - num_found)], 0, table)
    bindings = (SlotBinding(slot, GREEDY, len(prompt), ()),)
    launched = runner.launch(replace(batch, token_ids=prompt[num_found:], bindings=bindings))
    assert bool(launched.graph_rows) == (runner._graphs is not None)
    return int(launched.wait().token_ids[0])


def test_a_prefix_that_was_found_is_read_where_it_is() -> None:
    found = with_prefix("lazy")
    assert found[0] == found[1]
    assert found == with_prefix("off")


def test_a_step_takes_no_memory_and_makes_one_copy_each_way() -> None:
    stream = LateStream()
    runner = runner_of("startup", stream)
    runner.warm_up(64)
    allocations, copies = stream.num_allocations, len(stream.copied_words)
    _, graph_rows = run(runner, asks_of(6), Plan(depth=1))
    assert stream.num_allocations == allocations
    assert len(stream.copied_words) - copies == 2 * len(graph_rows)


class NoteOperators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The names of torch's operators that run meanwhile."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.names.append(function._schema.name)
        return function(*args, **(kwargs or {}))


def test_the_host_of_a_graph_runs_no_operator_but_the_copies() -> None:
    stream = LateStream()
    runner = runner_of("lazy", stream)
    for _ in range(2):  # once for each of the buffers that take turns
        runner.launch(decode_batch(4)).wait()
    stream.graphs[0].forget()
    with NoteOperators() as noted:
        runner.launch(decode_batch(4)).wait()
    assert noted.names == ["aten::copy_"] * 2
