"""Decode steps as graphs, on a device that is none: the same tokens, no live slot touched, no number asked for."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roseinfer.config.options import RunnerConfig
from roseinfer.messages import SamplingParams
from roseinfer.model.attention.base import Attend
from roseinfer.model.device_stream import CudaGraphs, graph_sizes
from roseinfer.model.runner import ModelRunner
from roseinfer.records import LifecycleState
from tests.unit.model.driver import Ask, Driver, Plan
from tests.unit.model.fake_device import LateStream, RecordedGraph
from tests.unit.model.fake_model import NUM_BLOCKS, VOCAB_SIZE, DeviceAttention, make_runner, row_model
from tests.unit.model.test_staging import batch_of

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
    assert graph_sizes(1) == (1,)
    assert graph_sizes(8) == (1, 2, 4, 8)
    assert graph_sizes(12) == (1, 2, 4, 8, 12)
    assert graph_sizes(64) == (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)
    assert graph_sizes(256)[10:] == (64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 240, 256)
    assert graph_sizes(300)[-2:] == (256, 300)


class Recorder:
    """A stream that only captures, and the callbacks of `CudaGraphs`."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.stream = LateStream()
        self.graphs = CudaGraphs(
            self.stream,
            (1, 2, 4, 8),
            lambda size: self.calls.append(f"fill {size}"),
            lambda size: self.calls.append(f"run {size}"),
        )


def test_all_are_captured_largest_first_and_each_is_told() -> None:
    recorder = Recorder()
    told: list[str] = []
    recorder.graphs.capture_all(told.append)
    assert [call for call in recorder.calls if call.startswith("fill")] == ["fill 8", "fill 4", "fill 2", "fill 1"]
    assert told == ["8 rows, graph 1 of 4", "4 rows, graph 2 of 4", "2 rows, graph 3 of 4", "1 rows, graph 4 of 4"]
    assert [recorder.graphs.size_for(num_rows) for num_rows in (1, 2, 3, 5, 8, 9)] == [1, 2, 4, 8, 8, 0]
    assert recorder.stream.num_captures == 4


def test_a_size_is_captured_when_it_is_first_met() -> None:
    recorder = Recorder()
    assert recorder.graphs.size_for(3) == 4
    assert recorder.calls[0] == "fill 4"
    assert set(recorder.calls[1:]) == {"run 4"}
    assert recorder.graphs.size_for(4) == 4
    assert recorder.stream.num_captures == 1


def test_a_runner_captures_before_it_is_ready_and_says_so() -> None:
    told: list[tuple[LifecycleState, str, str]] = []
    stream = LateStream()
    runner = make_runner(stream, RunnerConfig(), NUM_SLOTS, lambda *stage: told.append(stage))
    runner.warm_up(64)
    assert [(state, stage) for state, stage, _ in told] == [(LifecycleState.WARMUP, "cuda_graphs")] * 5
    assert stream.num_captures == 5
    run(runner, asks_of(0), Plan())
    assert stream.num_captures == 5


def test_the_largest_prompt_and_draw_run_again_after_the_captures() -> None:
    """Each of them has torch give back the memory of steps, and the first stream would wait for all of it anew."""
    model, attention = row_model()
    num_tokens: list[int] = []
    forward = model.forward

    def noted(token_ids: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        num_tokens.append(len(token_ids))
        return forward(token_ids, positions, attend)

    model.forward = noted  # type: ignore[method-assign]
    runner = make_runner(LateStream(), RunnerConfig(), NUM_SLOTS, make_model=lambda: (model, attention))
    runner.warm_up(64)
    assert num_tokens[-4:] == [1, 64, NUM_SLOTS, NUM_SLOTS], "the smallest graph, the prompt, the draw and the masks"


@pytest.mark.parametrize(("mode", "num_captures"), [("lazy", 0), ("off", 0)])
def test_a_runner_that_does_not_capture_at_startup(mode: str, num_captures: int) -> None:
    stream = LateStream()
    runner = runner_of(mode, stream)
    runner.warm_up(64)
    assert stream.num_captures == num_captures
    _, graph_rows = run(runner, asks_of(0), Plan())
    assert stream.num_captures == len(set(graph_rows) - {0})
    assert any(graph_rows) == (mode == "lazy")


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


@settings(max_examples=25, deadline=None)
@given(
    mode=st.sampled_from(["startup", "lazy", "off"]),
    plan=st.builds(
        Plan,
        seed=st.integers(0, 1000),
        depth=st.integers(0, 1),
        max_rows=st.integers(1, NUM_SLOTS),
        chunk=st.integers(1, 40),
        preempt_every=st.integers(0, 7),
    ),
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


def test_the_host_is_asked_nothing_during_a_capture() -> None:
    """Nor can it be: the fake refuses as CUDA does."""
    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
        RecordedGraph(lambda: print(torch.ones(1).sum().item()))


# --- rows of nobody ---------------------------------------------------------------------------------------------------


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
        for size in graph_sizes(NUM_SLOTS):
            graphs._capture(size)
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


def test_a_decode_step_takes_no_memory_and_makes_one_copy_each_way() -> None:
    stream = LateStream()
    runner = runner_of("startup", stream)
    runner.warm_up(64)
    allocations, copies = stream.num_allocations, len(stream.copied_words)
    _, graph_rows = run(runner, asks_of(6), Plan(depth=1))
    assert stream.num_allocations == allocations
    assert len(stream.copied_words) - copies == 2 * len(graph_rows)
