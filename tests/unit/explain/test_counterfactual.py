"""What `explain` says p99 would be without a cause, against the simulator in a world that does not have it."""

from typing import Any

import pytest

from roseinfer.bench.load.plan import Arrivals, LongPrompts, PlannedRequest, Workload
from roseinfer.bench.options import Delay, Lengths
from roseinfer.bench.simulate.cost_model import CostModel
from roseinfer.bench.simulate.simulate import without
from roseinfer.bench.simulate.simulation import Setup, Simulation
from roseinfer.config.options import CacheConfig, SchedulerConfig
from roseinfer.explain.explanation import Explanation, explain
from roseinfer.observe.gaps.causes import Cause
from roseinfer.observe.gaps.request_gaps import gaps_of

MS = 1_000_000
BAND = 0.1
"""Of what a cause really costs: so far may the saving that is foretold be off. docs/explain.md says so too."""


def make_setup(*delays: Delay, **scheduler: Any) -> Setup:
    return Setup(
        scheduler=SchedulerConfig(**({"max_num_seqs": 16, "max_num_batched_tokens": 256} | scheduler)),
        cache=CacheConfig(block_size=16, prefix_caching=False),
        num_blocks=4096,
        max_model_len=512,
        costs=CostModel(2 * MS, 0.1 * MS, 0.05 * MS, 100, 0.5 * MS),
        delays=delays,
    )


def streams_beside(newcomers: LongPrompts) -> list[PlannedRequest]:
    """Eight streams of a second, and beside them newcomers in every twelfth step or so."""
    return Workload(Arrivals(0), 8, None, Lengths(8, 40), Lengths(250, 350), 0.0, newcomers, 3).plan()


def newcomers(num_tokens: int, max_tokens: int) -> LongPrompts:
    return LongPrompts(num_tokens, max_tokens, tuple(range(100 * MS, 1000 * MS, 40 * MS)))


PROMPTS = streams_beside(newcomers(150, 1))
ROWS = streams_beside(newcomers(8, 4))
MIXED = Workload(
    Arrivals(1e9 / 25, is_poisson=True), 120, None, Lengths(20, 200), Lengths(20, 100), 0.0, None, 5
).plan()
FEW_ROWS = {"max_num_seqs": 8, "max_active_seqs": 16}
TURNS = Workload(Arrivals(1e9 / 200), 40, None, Lengths(24, 30), Lengths(40, 60), 0.0, None, 5).plan()


def make_small_pool() -> Setup:
    """Two or three sequences fit, and computing a prompt again is cheap beside waiting for one of them to end."""
    costs = CostModel(2 * MS, 0.1 * MS, 0.01 * MS, 100, 0.5 * MS)
    return make_setup(max_num_seqs=8)._replace(costs=costs, num_blocks=8, max_model_len=128)


def explained(setup: Setup, planned: list[PlannedRequest]) -> Explanation:
    recording = Simulation(setup).run(planned).recording()
    return explain(gaps_of(recording, "engine"), recording, "simulated", "engine")


def saved_s(found: Explanation, cause: Cause) -> float:
    return next((world.saved_s for world in found.without if world.cause is cause), 0.0)


@pytest.mark.parametrize("is_pipelined", [False, True], ids=["host", "device"])
@pytest.mark.parametrize(
    ("cause", "setup", "planned"),
    [
        (Cause.PREFILL_OF_OTHERS, make_setup(), MIXED),
        (Cause.PREFILL_OF_OTHERS, make_setup(max_prefill_tokens=64), PROMPTS),
        (Cause.NOT_SELECTED, make_setup(**FEW_ROWS), ROWS),
        (Cause.KV_WAIT, make_small_pool(), TURNS),
        (Cause.GC, make_setup(Delay(Cause.GC, 25, 20 * MS)), MIXED),
        *(
            (cause, make_setup(Delay(cause, 25, 20 * MS)), PROMPTS)
            for cause in (Cause.H2D_COPY, Cause.GRAPH_CAPTURE, Cause.SAMPLE_SYNC)
        ),
    ],
)
def test_p99_without_a_cause_is_that_of_the_world_without_it(
    cause: Cause, setup: Setup, planned: list[PlannedRequest], is_pipelined: bool
) -> None:
    """On a host that computes, and on a device that works while its host goes on."""
    setup = setup._replace(pipeline_depth=int(is_pipelined), is_asynchronous=is_pipelined)
    with_it, without_it = explained(setup, planned), explained(without(setup, cause), planned)
    assert with_it.causes[0].cause is cause
    cost_s = with_it.p99_s - without_it.p99_s
    assert cost_s > with_it.p50_s / 2, "the cause matters, or nothing would be tested"
    assert with_it.without[0].p99_s == pytest.approx(without_it.p99_s, abs=BAND * cost_s)
    assert saved_s(without_it, cause) < BAND * cost_s, "what does not exist cannot be saved"


@pytest.mark.parametrize("is_pipelined", [False, True], ids=["host", "device"])
def test_kv_wait_and_preempted_together_are_what_a_larger_pool_saves(is_pipelined: bool) -> None:
    """Whatever takes one of them away takes the other too, so that no world has `preempted` alone."""

    def told_as_one(setup: Setup) -> Explanation:
        recording = Simulation(setup).run(TURNS).recording()
        gaps = gaps_of(recording, "engine")
        for gap in gaps:
            if preempted_ns := gap.parts.pop(Cause.PREEMPTED, 0):
                gap.parts[Cause.KV_WAIT] = gap.parts.get(Cause.KV_WAIT, 0) + preempted_ns
        return explain(gaps, recording, "simulated", "engine")

    setup = make_small_pool()._replace(pipeline_depth=int(is_pipelined), is_asynchronous=is_pipelined)
    shares = {found.cause: found.share for found in explained(setup, TURNS).causes}
    assert shares[Cause.PREEMPTED] > BAND, "both matter"
    with_them, without_them = told_as_one(setup), told_as_one(without(setup, Cause.PREEMPTED))
    cost_s = with_them.p99_s - without_them.p99_s
    assert cost_s > with_them.p50_s / 2
    assert with_them.without[0].p99_s == pytest.approx(without_them.p99_s, abs=BAND * cost_s)
    assert saved_s(without_them, Cause.KV_WAIT) < BAND * cost_s


@pytest.mark.parametrize("planned", [PROMPTS, ROWS], ids=["prompts", "rows"])
def test_a_cause_that_is_not_there_saves_nothing(planned: list[PlannedRequest]) -> None:
    """Prompts that cost nothing, and rows enough for all."""
    setup = without(without(make_setup(**FEW_ROWS), Cause.PREFILL_OF_OTHERS), Cause.NOT_SELECTED)
    found = explained(setup, planned)
    for cause in (Cause.PREFILL_OF_OTHERS, Cause.NOT_SELECTED, Cause.GC):
        assert saved_s(found, cause) < BAND * found.p50_s
