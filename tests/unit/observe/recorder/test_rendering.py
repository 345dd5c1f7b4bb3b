"""A process of its own makes the same of a recording as this one, says no in the same words, and comes back."""

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from roseinfer.errors import InvalidRequest, NotReady
from roseinfer.observe.recorder.rendering import Job, RenderProcess, render
from tests.unit.observe.flights import make_flight

VIEW = Job(kind="view", slow_factor=3, slow_min_ns=2_000_000)


@pytest.fixture(scope="module")
def process() -> Iterator[RenderProcess]:
    process = RenderProcess()
    yield process
    process.close()


def test_the_child_makes_the_same(process: RenderProcess) -> None:
    archive = make_flight(num_streams=2, num_steps=30).recording()()
    for job in (VIEW, Job(kind="trace", slow_factor=3, slow_min_ns=2_000_000)):
        assert process.render(job, archive) == render(job, archive)


def test_the_child_refuses_in_the_same_words(process: RenderProcess) -> None:
    with pytest.raises(InvalidRequest, match="no recording of roseinfer") as refusal:
        process.render(VIEW, b"none")
    assert refusal.value.param == "recording"


def test_a_child_that_died_is_replaced(process: RenderProcess) -> None:
    archive = make_flight(num_streams=2, num_steps=30).recording()()
    process.render(VIEW, archive)
    assert process._child.process is not None
    first = process._child.process.pid
    process._child.process.kill()
    process._child.process.wait()
    assert process.render(VIEW, archive) == render(VIEW, archive)
    assert process._child.process.pid != first


def test_closing_ends_a_job_under_way() -> None:
    process = RenderProcess()
    archive = make_flight(num_streams=1, num_steps=3).recording()()
    process.render(VIEW, archive)
    child = process._child.process
    assert child is not None
    os.kill(child.pid, signal.SIGSTOP)  # it will not answer any more
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(process.render, VIEW, archive)
        while not process._child._turn.locked():
            time.sleep(0.001)
        process.close()
        with pytest.raises(NotReady):
            asked.result(timeout=30)
    assert child.returncode is not None


def test_closing_ends_the_child_and_may_be_done_twice() -> None:
    process = RenderProcess()
    process.render(VIEW, make_flight(num_streams=1, num_steps=3).recording()())
    child = process._child.process
    assert child is not None
    process.close()
    process.close()
    assert child.returncode is not None
