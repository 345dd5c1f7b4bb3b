"""The way of a GPU's step without a GPU: staged integers, the device's block table, Triton's kernels, interpreted."""

from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from roseinfer.config.options import RunnerConfig
from roseinfer.messages import SamplingParams
from roseinfer.model.device_stream import Graph
from tests.unit.model.conftest import Shape, prompt_of, write_checkpoint
from tests.unit.model.driver import Ask, Driver, Plan
from tests.unit.model.fake_device import LateStream
from tests.unit.model.fake_model import make_runner, read_model
from tests.unit.model.triton_processes import Worker, interpreter_process

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed; the extra `test` has it")

ASKS = [
    Ask(prompt_of(3, seed=1), 4, SamplingParams(temperature=0.0)),
    Ask(prompt_of(21, seed=2), 4, SamplingParams(seed=5)),
    Ask(prompt_of(9, seed=3), 3, SamplingParams(temperature=0.0)),
]


class InterpretedStream(LateStream):
    """Interpreted kernels are no operators that could be recorded: a graph is the work itself."""

    def capture(self, work: Callable[[], None]) -> Graph:
        self.num_captures += 1
        return _Again(work)


class _Again:
    def __init__(self, work: Callable[[], None]) -> None:
        self.replay = work


def generate(directory: Path, attention: str, plan: Plan) -> tuple[list[list[int]], list[int]]:
    """The tokens of the requests, and the graph rows of each step. For a process that interprets kernels."""
    torch.set_num_threads(1)
    config = RunnerConfig(cuda_graphs="lazy" if attention == "triton" else "off")
    runner = make_runner(InterpretedStream(), config, 3, make_model=partial(read_model, directory, attention))
    driver = Driver(runner, runner.info, 3, plan)
    return driver.generate(ASKS), driver.graph_rows


@pytest.fixture(scope="module")
def interpreter() -> Iterator[Worker]:
    yield from interpreter_process()


def test_the_tokens_of_a_cpu(interpreter: Worker, tmp_path: Path) -> None:
    """Chunks, a preemption, a step launched ahead, graphs that are not full."""
    directory = write_checkpoint(tmp_path / "gpt2", Shape())
    expected, graph_rows = generate(directory, "reference", Plan())
    assert not any(graph_rows)
    plan = Plan(seed=3, depth=1, chunk=11, preempt_every=4)
    tokens, graph_rows = interpreter.call(generate, directory, "triton", plan)
    assert tokens == expected
    assert all(graph_rows), "chunks and mixed steps are in graphs too"
