"""The runner on a GPU: the same tokens with graphs and without, whatever the schedule; and what a step allocates."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from roseinfer.config.options import CacheConfig, Config, ModelConfig, RunnerConfig
from roseinfer.engine.core.batch import PooledRow, ScheduledBatch, ScoredRow, SlotBinding
from roseinfer.messages import SamplingParams
from roseinfer.model.attention.triton import TritonAttention
from roseinfer.model.runner import ModelRunner, load_runner
from roseinfer.model.steps.graphs import GraphSize
from roseinfer.model.steps.warm_up_batches import masked_draw, prompt_batch
from tests.gpu.conftest import NUM_BLOCKS, NUM_SLOTS, LoadRunner
from tests.unit.model.driver import Ask, Driver, Plan, plans

pytestmark = pytest.mark.gpu

GREEDY = SamplingParams(temperature=0.0)
LONG_CYCLES = 2_000_000_000  # of the GPU's clock: about a second


def asks_of(seed: int, count: int = 10, num_tokens: int = 20) -> list[Ask]:
    """Greedy requests, and drawn ones of the kinds that a graph serves and does not serve."""
    random = np.random.default_rng(seed)
    kinds = [GREEDY, SamplingParams(seed=seed), SamplingParams(temperature=0.7, seed=seed + 1), GREEDY]
    return [
        Ask(random.integers(0, 131, random.integers(1, 100)).tolist(), num_tokens, kinds[index % len(kinds)])
        for index in range(count)
    ]


def run(runner: ModelRunner, asks: list[Ask], plan: Plan) -> tuple[list[list[int]], list[int]]:
    driver = Driver(runner, runner.info, NUM_SLOTS, plan)
    return driver.generate(asks), driver.graph_rows


def decode_batch(slots: list[int], start: int) -> ScheduledBatch:
    """One token at `start` for each slot, over blocks of its own. Slot 0 still asks for what the warm-up drew last."""
    num_rows, num_columns = len(slots), 16
    table = np.arange(NUM_SLOTS * num_columns, dtype=np.int32).reshape(NUM_SLOTS, num_columns) % NUM_BLOCKS
    return ScheduledBatch(
        step_id=0,
        slots=np.array(slots, np.int32),
        starts=np.full(num_rows, start, np.int32),
        num_new_tokens=np.ones(num_rows, np.int32),
        samples=np.ones(num_rows, np.bool_),
        num_device_rows=num_rows,
        token_ids=np.zeros(0, np.int32),
        block_table=table,
        bindings=(),
    )


# --- the same tokens --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["gpt2", "qwen3"])
def test_the_tokens_of_a_cpu(load: LoadRunner, request: pytest.FixtureRequest, model: str) -> None:
    directory: Path = request.getfixturevalue(model)
    asks = asks_of(1)
    config = Config(
        model=ModelConfig(path=str(directory), dtype="float32"),
        cache=CacheConfig(num_blocks=NUM_BLOCKS),
        runner=RunnerConfig(device="cpu", kernels="off", num_threads=1),
    )
    expected, _ = run(load_runner(config, NUM_SLOTS, lambda *_: None), asks, Plan())
    runner = load(directory)
    assert runner.info.device == "cuda"
    assert run(runner, asks, Plan(seed=3, depth=1, chunk=50))[0] == expected


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("mode", ["startup", "lazy"])
def test_graphs_give_the_tokens_of_steps_without(load: LoadRunner, mode: str, depth: int) -> None:
    asks = asks_of(2, 16)
    expected, graph_rows = run(load(cuda_graphs="off"), asks, Plan())
    assert not any(graph_rows)
    tokens, graph_rows = run(load(cuda_graphs=mode), asks, Plan(seed=5, depth=depth, chunk=30, max_rows=NUM_SLOTS))
    assert tokens == expected
    assert len(set(graph_rows)) > 2
    assert all(graph_rows), "chunks and mixed steps among them"


def test_bfloat16_gives_the_same_tokens_where_steps_have_the_same_shape(load: LoadRunner) -> None:
    """In bfloat16 ties are common, so the products must be of the same shape: eight rows, as the graph has."""
    asks = [Ask(ask.prompt[:10] * 3, 24, ask.params) for ask in asks_of(3, 8)]
    found = []
    for mode in ("off", "startup"):
        runner = load(dtype="bfloat16", cuda_graphs=mode, batch_invariant=True)
        driver = Driver(runner, runner.info, NUM_SLOTS, Plan(max_rows=8))
        driver._random = Always(8)  # type: ignore[assignment]
        found.append(driver.generate(asks))
    assert found[0] == found[1]


class Always:
    """A generator of random numbers that lets all rows run in every step, in their order."""

    def __init__(self, number: int) -> None:
        self._number = number

    def integers(self, *_: int) -> int:
        return self._number

    def shuffle(self, _: object) -> None: ...


@pytest.fixture(scope="module")
def runners() -> dict[str, ModelRunner]:
    """By what they do about graphs; each serves many examples."""
    return {}


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    mode=st.sampled_from(["startup", "lazy", "off"]),
    plan=plans(NUM_SLOTS, max_chunk=200),
)
def test_seeds_decide_whatever_the_schedule(
    load: LoadRunner, runners: dict[str, ModelRunner], mode: str, plan: Plan
) -> None:
    """Batching, chunking, preemption, graphs and depth: none of them changes a token."""
    for name in ("off", mode):
        if name not in runners:
            runners[name] = load(cuda_graphs=name)
    asks = asks_of(plan.seed % 3, 8, 10)
    expected, _ = run(runners["off"], asks, Plan(max_rows=1))
    assert run(runners[mode], asks, plan)[0] == expected


@pytest.mark.parametrize("depth", [0, 1])
def test_graphs_serve_every_kind_of_sampling(load: LoadRunner, depth: int) -> None:
    kinds = [*KINDS_OF_SAMPLING.values()]
    asks = [Ask(ask.prompt, 10, kinds[index % len(kinds)]) for index, ask in enumerate(asks_of(4, 20))]
    expected, _ = run(load(cuda_graphs="off"), asks, Plan())
    tokens, graph_rows = run(load(), asks, Plan(seed=1, depth=depth, max_rows=4))
    assert tokens == expected
    assert all(graph_rows)


def test_pageable_staging_gives_the_same_tokens(load: LoadRunner) -> None:
    asks = asks_of(6)
    found = []
    for staging in ("pinned", "pageable"):
        runner = load(staging=staging)
        words = runner._staging.arenas._arenas[0].words
        assert words.is_pinned() == (staging == "pinned")
        found.append(run(runner, asks, Plan(depth=1))[0])
    assert found[0] == found[1]


# --- graphs -----------------------------------------------------------------------------------------------------------


def test_the_log_names_captures_and_their_memory(load: LoadRunner) -> None:
    told: list[tuple[object, ...]] = []
    info = load(told=told).info
    phrases = [str(each[2]) for each in told if each[1] == "cuda_graphs"]
    num_graphs = len(info.decode_graph_sizes) + len(info.prompt_graph_sizes)
    assert [int(phrase.split()[0]) for phrase in phrases][: len(info.decode_graph_sizes)] == info.decode_graph_sizes[
        ::-1
    ]
    assert len(phrases) == num_graphs
    assert 0 < info.graph_bytes <= info.max_graph_bytes


def test_a_lazy_runner_captures_what_it_meets(load: LoadRunner) -> None:
    runner = load(cuda_graphs="lazy")
    assert runner._graphs is not None
    assert not runner._graphs._graphs
    assert runner.launch(decode_batch([1, 2, 3], 0)).graph_rows == 4
    assert set(runner._graphs._graphs) == {GraphSize(4, 4, is_decode=True)}


def test_captures_and_rows_that_fill_up_touch_no_live_slot(load: LoadRunner) -> None:
    """Neither a block that the scheduler hands out, nor a last token, nor the slot's row of the block table."""
    runner = load(cuda_graphs="lazy")
    run(runner, asks_of(7, NUM_SLOTS), Plan(max_rows=1))
    assert isinstance(runner._attention, TritonAttention)
    pages = [tensor for layer in runner._attention._pages for tensor in (layer.k, layer.v)]
    watched = [*pages, runner._last_token.view(-1, 1), runner._staging.block_table]
    limits = [NUM_BLOCKS] * (len(watched) - 2) + [NUM_SLOTS] * 2

    def contents() -> list[torch.Tensor]:
        return [tensor[:limit].clone() for tensor, limit in zip(watched, limits, strict=True)]

    before = contents()
    assert runner._graphs is not None
    with torch.inference_mode():
        for is_decode in (True, False):
            assert all(map(runner._graphs._capture, runner._graphs.sizes(is_decode=is_decode)))
    assert all(torch.equal(now, then) for now, then in zip(contents(), before, strict=True))
    batch = decode_batch([7, 2, 9], 17)
    assert runner.launch(batch).graph_rows == 4
    own = {int(batch.block_table[slot, 1]) for slot in (7, 2, 9)}
    for now, then, limit in zip(contents(), before, limits, strict=True):
        changed = set((now != then).flatten(1).any(1).nonzero().flatten().tolist())
        assert changed <= (own if limit == NUM_BLOCKS else {7, 2, 9})


# --- what a step costs ------------------------------------------------------------------------------------------------


def mixed_batch(position: int) -> ScheduledBatch:
    """Slots 3 and 5 decode at the position, and a prompt of 20 tokens goes on in slot 1."""
    batch = decode_batch([3, 5, 1], position)
    counts, tokens = np.array([1, 1, 20], np.int32), np.zeros(20, np.int32)
    return msgspec.structs.replace(batch, num_new_tokens=counts, num_device_rows=2, token_ids=tokens)


@pytest.mark.parametrize("staging", ["pinned", "pageable"])
def test_a_step_in_a_graph_allocates_nothing(load: LoadRunner, staging: str) -> None:
    """Neither on the device, by torch's counters, nor in pinned memory."""
    runner = load(staging=staging)

    def counters() -> tuple[int, int, int]:
        device, host = torch.cuda.memory_stats(), torch.cuda.host_memory_stats()
        return device["allocation.all.allocated"], device["num_device_alloc"], host["num_host_alloc"]

    for batch in (decode_batch([3, 5, 1], 8), mixed_batch(8)):
        runner.launch(batch).wait()
    before = counters()
    for position in range(9, 60):
        assert runner.launch(decode_batch([3, 5, 1], position)).graph_rows == 4
        assert runner.launch(mixed_batch(position)).graph_rows == 8
    torch.cuda.synchronize()
    assert counters() == before


@pytest.mark.parametrize("mode", ["startup", "off"])
def test_a_step_is_launched_before_the_one_before_is_done(load: LoadRunner, mode: str) -> None:
    """Also one without a graph, whose sampling needs numbers of the host."""
    runner = load(cuda_graphs=mode)
    for num_cycles in (LONG_CYCLES // 100, LONG_CYCLES):  # at first torch takes the pinned memory of two such steps
        torch.cuda._sleep(num_cycles)  # type: ignore[no-untyped-call]
        launched = [runner.launch(decode_batch([1, 2], position)) for position in (1, 2)]
        is_first_done = launched[0]._event.query()  # type: ignore[attr-defined]
        assert [len(step.wait().token_ids) for step in launched] == [2, 2]
    assert not is_first_done


KINDS_OF_SAMPLING = {
    "greedy": GREEDY,
    "drawn": SamplingParams(seed=1),
    "temperature": SamplingParams(temperature=0.7, seed=1),
    "top_k": SamplingParams(top_k=5, seed=1),
    "top_p": SamplingParams(top_p=0.9, seed=1),
    "min_p": SamplingParams(min_p=0.05, seed=1),
    "of Qwen3": SamplingParams(temperature=0.6, top_k=20, top_p=0.95, seed=1),
    "presence": SamplingParams(presence_penalty=0.5, seed=1),
    "frequency": SamplingParams(frequency_penalty=0.5, seed=1),
    "repetition": SamplingParams(repetition_penalty=1.1, seed=1),
    "biases": SamplingParams(logit_bias={3: 1.0, 7: -100.0}, seed=1),
    "min_tokens": SamplingParams(min_tokens=9, max_tokens=20, stop_token_ids=(5,), seed=1),
    "logprobs": SamplingParams(num_logprobs=0, seed=1),
    "likeliest": SamplingParams(num_logprobs=3, seed=1),
}


@contextmanager
def waits_are_errors() -> Iterator[None]:
    """Whatever of torch makes the host wait for the device raises: an item, a blocking copy, a boolean index."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("mode", ["startup", "off"])
@pytest.mark.parametrize("kind", [*KINDS_OF_SAMPLING, "all", "grammar"])
def test_no_kind_of_sampling_waits_for_the_device(load: LoadRunner, mode: str, kind: str) -> None:
    """With all graphs captured and without one: binding slots, a prompt's step, and decode steps one after another."""
    runner = load(cuda_graphs=mode)
    params = [*KINDS_OF_SAMPLING.values()] if kind == "all" else [KINDS_OF_SAMPLING.get(kind, GREEDY)] * 2
    prompt = np.arange(8, dtype=np.int32)
    bindings = tuple(SlotBinding(slot, each, len(prompt), (7,), prompt) for slot, each in enumerate(params))
    slots = list(range(len(params)))
    steps = [prompt_batch(len(prompt), len(prompt), 1, bindings[:1])]
    steps += [msgspec.structs.replace(decode_batch(slots, len(prompt)), bindings=bindings[1:])]
    steps += [decode_batch(slots, len(prompt) + later) for later in (1, 2, 3)]
    if kind == "grammar":
        steps = [masked_draw(NUM_SLOTS, runner.vocab_size)] * 3
    for step in steps:  # what is compiled, or taken from the allocator, at first is not what is asked here
        runner.launch(step).wait()
    launched = []
    for step in steps:
        with waits_are_errors():
            launched.append(runner.launch(step))
        launched[-1].wait()
    assert [len(each.wait().token_ids) for each in launched] == [int(step.samples.sum()) for step in steps]


WANTED_OF_PROMPTS: dict[str, dict[str, Any]] = {
    "scored": {"scored": (ScoredRow(0, np.arange(8, dtype=np.int32), 3),)},
    "last row pooled": {"pooled": (PooledRow(0, "last"),)},
    "all rows pooled": {"pooled": (PooledRow(0, "mean"),)},
}


@pytest.mark.parametrize("kind", WANTED_OF_PROMPTS)
def test_scores_and_pooled_rows_wait_for_nothing(load: LoadRunner, kind: str) -> None:
    runner = load(cuda_graphs="off")
    step = msgspec.structs.replace(prompt_batch(8, 8, 1), **WANTED_OF_PROMPTS[kind])
    runner.launch(step).wait()
    with waits_are_errors():
        launched = runner.launch(step)
    sampled = launched.wait()
    assert len(sampled.scores) + len(sampled.pooled) == 1


def test_who_waits_for_a_step_does_not_wait_for_the_next(load: LoadRunner) -> None:
    runner = load()
    first = runner.launch(decode_batch([1, 2], 0))
    torch.cuda._sleep(LONG_CYCLES)  # type: ignore[no-untyped-call]
    second = runner.launch(decode_batch([1, 2], 1))
    first.wait()
    assert not second._event.query()  # type: ignore[attr-defined]
    second.wait()


def test_a_late_device_gets_the_integers_of_its_own_step(load: LoadRunner) -> None:
    """The host is six steps ahead if nothing holds it back, and there are two arenas."""
    runner = load()
    staging = runner._staging
    starts = staging.decode_step(1).packed.device
    assert starts is not None
    seen = []
    torch.cuda._sleep(LONG_CYCLES)  # type: ignore[no-untyped-call]
    for position in range(6):
        staging.stage_decode(decode_batch([3], 30 + position), 1)
        seen.append(starts.starts.clone())
    assert torch.cat(seen).tolist() == list(range(30, 36))
