"""The way of a GPU's step without a GPU: staged integers, the device's block table, Triton's kernels, interpreted.

A graph is what was launched while it was captured, Triton's kernels and torch's operators, with the very tensors and
numbers of that moment.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from roseinfer.config.options import RunnerConfig
from roseinfer.engine.core.batch import SlotBinding
from roseinfer.engine.core.constraint import Constraint, Matcher, TokenMasks
from roseinfer.messages import Grammar, SamplingParams
from roseinfer.model.runner import ModelRunner
from roseinfer.model.steps.warm_up_batches import decode_batch, prompt_batch
from tests.unit.model.conftest import Shape, prompt_of, write_checkpoint
from tests.unit.model.driver import Ask, Driver, Plan
from tests.unit.model.fake_device import LateStream
from tests.unit.model.fake_model import MAX_MODEL_LEN, make_runner, read_model
from tests.unit.model.sampling.test_logit_edits import Fixed
from tests.unit.model.triton_processes import Worker, interpreter_process

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed; the extra `test` has it")

KINDS = [
    SamplingParams(temperature=0.0),
    SamplingParams(seed=5),
    SamplingParams(temperature=0.0, num_logprobs=2),  # its step's tokens come among log-probabilities
    SamplingParams(temperature=0.7, top_k=7, top_p=0.9, min_p=0.02, seed=6),
    SamplingParams(seed=7, presence_penalty=0.5, repetition_penalty=1.2, logit_bias={3: 2.0}),
]
LENGTHS = (3, 21, 9, 12, 5)
ASKS = [Ask(prompt_of(length, seed=length), 4, params) for length, params in zip(LENGTHS, KINDS, strict=True)]
NUM_SLOTS = 4


def runner_of(directory: Path, mode: str) -> tuple[ModelRunner, LateStream]:
    torch.set_num_threads(1)
    config, stream = RunnerConfig(cuda_graphs="lazy" if mode == "graphs" else "off"), LateStream()
    attention = "reference" if mode == "reference" else "triton"
    runner = make_runner(stream, config, NUM_SLOTS, make_model=partial(read_model, directory, attention))
    if attention == "triton":
        runner._sampler._use_triton(MAX_MODEL_LEN)
    return runner, stream


def generate(
    directory: Path, mode: str, plan: Plan, spoil: Callable[[ModelRunner], None] = lambda _: None
) -> tuple[list[list[int]], list[int], int]:
    """The tokens of the requests, the graph rows of each step, and how many launches of kernels the graphs hold.

    Modes are `reference`, without kernels, and for a process that interprets them `eager` and `graphs`.
    """
    runner, stream = runner_of(directory, mode)
    spoil(runner)
    driver = Driver(runner, runner.info, NUM_SLOTS, plan)
    return driver.generate(ASKS), driver.graph_rows, sum(graph.num_launches for graph in stream.graphs)


def read_a_counter(runner: ModelRunner) -> None:
    """Add to all token ids how often Python has run the model: what no graph would do."""
    model, counter = runner._model, count()
    forward = model.forward

    def spoilt(token_ids: torch.Tensor, *rest: Any) -> torch.Tensor:
        return forward((token_ids + next(counter)) % model.vocab_size, *rest)

    model.forward = spoilt  # type: ignore[assignment, method-assign]


@pytest.fixture(scope="module")
def interpreter() -> Iterator[Worker]:
    yield from interpreter_process()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("gpt2"), Shape())


@pytest.mark.parametrize(("seed", "depth"), [(4, 0), (5, 1), (7, 1)])
def test_frozen_launches_give_the_tokens_of_steps_run_anew(
    interpreter: Worker, directory: Path, seed: int, depth: int
) -> None:
    """Chunks, a preemption, a step launched ahead, graphs that are not full; only the staged bytes change."""
    expected, graph_rows, _ = generate(directory, "reference", Plan())
    assert not any(graph_rows)
    plan = Plan(seed=seed, depth=depth, chunk=11, preempt_every=4)
    tokens, graph_rows, num_launches = interpreter.call(generate, directory, "graphs", plan)
    assert tokens == expected
    assert all(graph_rows), "chunks and mixed steps are in graphs too, and every kind of sampling"
    assert num_launches > 0


def test_a_number_that_goes_stale_in_a_graph_is_found(interpreter: Worker, directory: Path) -> None:
    plan = Plan(seed=3, depth=1)
    anew, _, _ = interpreter.call(generate, directory, "eager", plan, read_a_counter)
    frozen, _, _ = interpreter.call(generate, directory, "graphs", plan, read_a_counter)
    assert frozen != anew


def masked(directory: Path, mode: str) -> tuple[list[list[int]], list[int], int]:
    """The tokens of a prompt's step and of three that decode, their graph rows, and how many copies there were.

    All slots but the last have grammars, which allow other tokens in each step.
    """
    runner, stream = runner_of(directory, mode)
    num_copies, tokens, graph_rows = 0, list[list[int]](), list[int]()
    for step in range(4):
        batch = decode_batch(NUM_SLOTS, step) if step else prompt_batch(NUM_SLOTS, 1, NUM_SLOTS)
        bindings = [
            SlotBinding(slot, SamplingParams(seed=slot, grammar=Grammar("regex", "") if slot < 3 else None), 1, ())
            for slot in range(0 if step else NUM_SLOTS)
        ]
        places = {
            (slot, step + 1): (constrained({30 * slot + 5 * step, 30 * slot + 5 * step + 1}, runner.vocab_size), 0)
            for slot in range(3)
        }
        batch = msgspec.structs.replace(batch, bindings=tuple(bindings), masks=TokenMasks(places))
        num_before = len(stream.copied_words)
        launched = runner.launch(batch)
        tokens.append(launched.wait().token_ids.tolist())
        graph_rows.append(launched.graph_rows)
        num_copies = len(stream.copied_words) - num_before  # of the last step, which captures nothing
    return tokens, graph_rows, num_copies


def constrained(allowed: set[int], vocab_size: int) -> Constraint:
    matcher: Future[Matcher] = Future()
    matcher.set_result(Fixed(allowed))
    return Constraint(matcher, SamplingParams(), (), vocab_size)


def test_masks_of_grammars_come_with_the_step(interpreter: Worker, directory: Path) -> None:
    expected, _, _ = masked(directory, "reference")
    tokens, graph_rows, num_copies = interpreter.call(masked, directory, "graphs")
    assert tokens == expected
    assert all(graph_rows)
    assert num_copies == 2, "one in, one out"
    assert all(
        token - 30 * slot - 5 * step in {0, 1} for step, row in enumerate(tokens) for slot, token in enumerate(row[:3])
    )
