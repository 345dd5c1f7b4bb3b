"""A cost model is found again in the steps that it made, and no coefficient is negative."""

import random
from collections.abc import Callable

import msgspec
import pytest

from roseinfer.bench.load.plan import Arrivals, Workload
from roseinfer.bench.options import Lengths
from roseinfer.bench.simulate.cost_model import CostModel, fit
from roseinfer.bench.simulate.simulation import Setup, Simulation
from roseinfer.config.options import CacheConfig, SchedulerConfig
from roseinfer.errors import ConfigError
from roseinfer.observe.recorder.recording import RequestRecord
from roseinfer.records import PhaseTimes, StepRecord
from tests.unit.bench.recordings import make_recording
from tests.unit.observe.facts import make_step

MODEL = CostModel(1_000_000, 20_000, 30_000, 50, 70_000)


def make_steps(count: int, noise: Callable[[int], int] = lambda _: 0) -> list[StepRecord]:
    """Of MODEL, one after the other; `noise` is added to the computing of step i."""
    source, now_ns, steps = random.Random(1), 1_000_000_000, []
    for index in range(count):
        rows, prompt_tokens = source.randint(1, 60), source.choice([0, 0, source.randint(1, 300)])
        context = source.randint(100, 20_000)
        compute = MODEL.compute_ns(rows, prompt_tokens, context) + noise(index)
        start_ns = now_ns + int(MODEL.host_ns)
        now_ns = start_ns + compute
        steps.append(
            make_step(
                step_id=index + 1,
                start_ns=start_ns,
                tokens_ns=now_ns,
                end_ns=now_ns,
                num_running=rows,
                num_decode_seqs=rows,
                num_prefill_seqs=int(prompt_tokens > 0),
                num_prefill_tokens=prompt_tokens,
                num_context_tokens=context,
                gc_ns=0,
                phases=PhaseTimes(launch=compute - 5_000, wait=5_000),
            )
        )
    return steps


def test_the_model_is_found_again() -> None:
    found = fit(make_recording([], make_steps(60)))
    assert found.model == pytest.approx(MODEL, rel=1e-4)
    assert found.num_steps == 60
    assert found.median_error < 1e-6
    assert "from 60 steps, median error 0.0%" in found.line()


def test_the_model_of_steps_that_overlap_is_found_again() -> None:
    """While the device computes one, the host launches the next: the wait is less than what the device takes."""
    costs = MODEL._replace(arrival_ns=200_000)
    scheduler, cache = SchedulerConfig(max_num_seqs=16), CacheConfig()
    setup = Setup(scheduler, cache, 512, 512, costs, pipeline_depth=1, is_asynchronous=True)
    arrivals = Arrivals(8e6, is_poisson=True)
    planned = Workload(arrivals, 40, None, Lengths(8, 90), Lengths(20, 60), 0.0, None, seed=3).plan()
    found = fit(Simulation(setup).run(planned).recording())
    assert found.model == pytest.approx(costs, rel=1e-3)
    assert found.median_error < 1e-3


def test_steps_that_something_unnamed_held_up_do_not_count() -> None:
    """One in ten takes 100 ms longer; the others jitter by a hundredth of a millisecond."""
    source = random.Random(2)

    def noise(index: int) -> int:
        return 100_000_000 if index % 10 == 0 else source.randint(-10_000, 10_000)

    found = fit(make_recording([], make_steps(200, noise)))
    assert found.num_steps == 180
    assert found.model.step_ns == pytest.approx(MODEL.step_ns, rel=0.05)
    assert found.model.prefill_token_ns == pytest.approx(MODEL.prefill_token_ns, rel=0.05)


def test_collections_captures_and_profiled_steps_are_left_out() -> None:
    steps = make_steps(40)
    steps[0] = msgspec.structs.replace(steps[0], gc_ns=9)
    steps[1] = msgspec.structs.replace(steps[1], is_profiled=True)
    steps[2] = msgspec.structs.replace(steps[2], num_decode_seqs=0, num_prefill_seqs=0)
    assert fit(make_recording([], steps)).num_steps == 37


def test_no_coefficient_is_negative() -> None:
    """Steps that get faster with every row: the rows cost nothing, and time does not run backwards."""
    steps = [
        make_step(
            num_decode_seqs=rows,
            num_context_tokens=100,
            phases=PhaseTimes(launch=2_000_000 - 1_000 * rows),
        )
        for rows in range(1, 40)
    ]
    model = fit(make_recording([], steps)).model
    assert min(model) >= 0
    assert model.decode_row_ns == 0
    assert model.compute_ns(10, 0, 100) == pytest.approx(1_980_000, rel=0.01)


def test_an_arrival_costs_reading_and_an_undisturbed_crossing() -> None:
    """Nine in ten crossings waited for a step, which the simulation makes its requests do anyway."""
    requests = [
        RequestRecord(
            serial=index,
            request_id=f"r{index}",
            recv_ns=1_000_000,
            tokenized_ns=1_400_000,
            inbox_ns=1_400_000 + (60_000 if index % 10 < 2 else 900_000),
        )
        for index in range(40)
    ]
    never_there = RequestRecord(serial=40, request_id="r40", recv_ns=7)
    recording = make_recording([*requests, never_there], make_steps(20))
    assert fit(recording).model.arrival_ns == pytest.approx(460_000)


def test_too_few_steps_are_named() -> None:
    with pytest.raises(ConfigError, match="holds 3 undisturbed steps and a cost model needs 16"):
        fit(make_recording([], make_steps(3)))
