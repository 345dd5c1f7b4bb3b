"""The real scheduler on a virtual clock: what follows from a seed, what holds in every history, what a cause costs."""

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roseinfer.bench.load.plan import Arrivals, PlannedRequest, Segment, Workload, plan_of_recording
from roseinfer.bench.options import Delay, Lengths
from roseinfer.bench.simulate.cost_model import CostModel, fit
from roseinfer.bench.simulate.simulate import without
from roseinfer.bench.simulate.simulation import Decision, Setup, Simulated, Simulation
from roseinfer.config.options import CacheConfig, SchedulerConfig
from roseinfer.engine.core.steps import StepCounts
from roseinfer.engine.invariants import assert_invariants
from roseinfer.engine.pace import Pace
from roseinfer.errors import ConfigError
from roseinfer.messages import StepOutput
from roseinfer.observe.gaps.attribution import Attribution
from roseinfer.observe.gaps.causes import Cause
from roseinfer.records import MAX_PREFIX_WAIT_STEPS, Advanced, FinishReason

MS = 1_000_000
COSTS = CostModel(2 * MS, 0.1 * MS, 0.05 * MS, 0.0, 0.5 * MS)


def make_setup(*, num_blocks: int = 256, prefix_caching: bool = True, **scheduler: Any) -> Setup:
    return Setup(
        scheduler=SchedulerConfig(**({"max_num_seqs": 8, "max_num_batched_tokens": 64} | scheduler)),
        cache=CacheConfig(block_size=8, prefix_caching=prefix_caching),
        num_blocks=num_blocks,
        max_model_len=128,
        costs=COSTS,
        vocab_size=500,
    )


def asked(offset_ms: float, num_prompt_tokens: int, max_tokens: int, **changes: Any) -> PlannedRequest:
    segments = (Segment(hash((offset_ms, num_prompt_tokens)), num_prompt_tokens),)
    fields: dict[str, Any] = {"offset_ns": round(offset_ms * MS), "segments": segments, "max_tokens": max_tokens}
    return PlannedRequest(**(fields | changes))


def plan_of(num_requests: int, seed: int = 0, rate: float = 200.0) -> list[PlannedRequest]:
    arrivals = Arrivals(1e9 / rate, is_poisson=True)
    return Workload(arrivals, num_requests, None, Lengths(1, 60), Lengths(1, 30), 0.25, None, seed).plan()


def test_one_request_takes_what_the_cost_model_says() -> None:
    """A prompt of 70 tokens is two steps of 64 and 6; then a step for each further token."""
    [timeline] = Simulation(make_setup()).run([asked(0, 70, 3)]).timelines
    first, second = 2 * MS + 64 * 0.05 * MS, 2 * MS + 6 * 0.05 * MS
    assert timeline.token_ns[0] - timeline.recv_ns == first + 0.5 * MS + second
    gaps = [later - earlier for earlier, later in zip(timeline.token_ns, timeline.token_ns[1:], strict=False)]
    assert gaps == [0.5 * MS + 2.1 * MS] * 2
    assert timeline.finish_reason is FinishReason.LENGTH


def test_drafts_that_hold_take_no_step_of_their_own_and_cost_a_row_each() -> None:
    setup, planned = make_setup(speculation=4), [asked(0, 8, 61)]
    without_drafts, all_held, none_held = (
        Simulation(setup._replace(draft_share=share)).run(planned) for share in (0.0, 1.0, 1e-9)
    )
    assert len(without_drafts.steps) == len(none_held.steps) == 61
    assert len(all_held.steps) == 1 + 60 // 5
    decode_ns = [step.tokens_ns - step.start_ns for step in all_held.steps[1:-1]]
    assert decode_ns == [2 * MS + 5 * 0.1 * MS] * len(decode_ns)
    assert sum(step.num_accepted_tokens for step in none_held.steps) == 0
    half = Simulation(setup._replace(draft_share=0.5)).run([asked(0, 8, 100)])
    held = sum(step.num_accepted_tokens for step in half.steps)
    assert 0.3 < held / (held + len(half.steps)) < 0.65
    assert [len(timeline.token_ns) for timeline in half.timelines] == [100]


def test_nothing_happens_between_a_request_and_the_next() -> None:
    simulated = Simulation(make_setup()).run([asked(0, 4, 2), asked(60_000, 4, 2)])
    first, second = simulated.timelines
    assert second.recv_ns - first.recv_ns == 60_000 * MS
    assert second.scheduled_ns == second.recv_ns, "COSTS lets arrivals take no time"
    assert len(simulated.steps) == 4


def test_clients_go_away_at_the_token_or_the_moment_that_was_planned() -> None:
    planned = [
        asked(0, 4, 50, abort_after_tokens=3),
        asked(0, 5, 50),
        asked(1, 6, 50, abort_after_ns=1),
        asked(2, 7, 5, abort_after_tokens=5),
    ]
    first, second, third, fourth = Simulation(make_setup()).run(planned).timelines
    assert (len(first.token_ns), first.finish_reason, first.client_disconnected) == (3, FinishReason.ABORT, True)
    assert (len(second.token_ns), second.finish_reason) == (50, FinishReason.LENGTH)
    assert (len(third.token_ns), third.finish_reason, third.scheduled_ns) == (0, FinishReason.ABORT, 0)
    assert fourth.finish_reason is FinishReason.LENGTH, "it was over before its client could go"


def run(setup: Setup, planned: Sequence[PlannedRequest]) -> tuple[Simulated, list[Decision], list[list[int]]]:
    """What happened, what was decided, and the tokens of each request."""
    decisions: list[Decision] = []
    tokens: dict[int, list[int]] = defaultdict(list)
    owners: dict[int, int] = {}

    def take(output: StepOutput) -> None:
        for slot, token_id in output.tokens():
            tokens[owners[slot]].append(token_id)
        for told in output.outputs:
            if told.slot is not None:
                owners[told.slot] = int(told.request_id[1:])
            tokens[int(told.request_id[1:])] += told.token_ids

    simulated = Simulation(setup, on_decision=decisions.append, after_step=take).run(planned)
    return simulated, decisions, [tokens[index] for index in range(len(planned))]


def test_a_seed_is_a_history_and_limits_do_not_change_tokens() -> None:
    planned = plan_of(40)
    first, decisions, tokens = run(make_setup(), planned)
    again, same_decisions, same_tokens = run(make_setup(), planned)
    assert (decisions, tokens) == (same_decisions, same_tokens)
    assert [timeline.token_ns for timeline in first.timelines] == [timeline.token_ns for timeline in again.timelines]
    _, other_decisions, other_tokens = run(make_setup(max_num_seqs=3, max_active_seqs=9, num_blocks=20), planned)
    assert decisions != other_decisions
    assert tokens == other_tokens, "a token depends on its request and position alone"
    assert run(make_setup()._replace(seed=1), planned)[2] != tokens


def test_a_step_is_decided_in_rows_admissions_and_preemptions() -> None:
    """Two sequences that together need more blocks than there are: the younger one is preempted and comes back."""
    setup = make_setup(num_blocks=17, prefix_caching=False)
    _, decisions, _ = run(setup, [asked(0, 60, 40), asked(0, 60, 40)])
    assert decisions[0].admitted == ["r0", "r1"]
    assert decisions[0].rows == [("r0", 0, 60), ("r1", 0, 4)], "a budget of 64"
    [lost] = [decision for decision in decisions if decision.preempted]
    assert lost.preempted == ["r1"]
    [back] = [decision for decision in decisions if decision.resumed]
    assert (back.resumed, back.step > lost.step) == (["r1"], True)
    assert [decision.step for decision in decisions] == sorted(decision.step for decision in decisions)


def test_its_recording_says_the_same_and_gives_the_cost_model_back() -> None:
    simulated, _, _ = run(make_setup(), plan_of(60))
    recording = simulated.recording()
    assert fit(recording).model == pytest.approx(COSTS, rel=1e-3, abs=1.0)
    assert [request.token_ns for request in recording.requests] == [t.token_ns for t in simulated.timelines]
    assert len(recording.steps) == len(simulated.steps)
    replayed, _, _ = run(make_setup(), plan_of_recording(recording).requests)
    assert [t.token_ns for t in replayed.timelines] == [t.token_ns for t in simulated.timelines]
    hits = [sum(step.num_prefix_hit_tokens for step in each.steps) for each in (simulated, replayed)]
    assert hits[0] == hits[1] > 0, "prompts share prefixes as the recorded ones did"


@pytest.mark.parametrize(
    ("cause", "setup"),
    [
        (Cause.PREFILL_OF_OTHERS, make_setup()),
        (Cause.NOT_SELECTED, make_setup(max_num_seqs=2, max_prefill_seqs=8)),
        (Cause.KV_WAIT, make_setup(num_blocks=17)),
        (Cause.PREEMPTED, make_setup(num_blocks=17)),
        (Cause.GC, make_setup()._replace(delays=(Delay(Cause.GC, 9, 50 * MS),))),
        (Cause.GRAPH_CAPTURE, make_setup()._replace(delays=(Delay(Cause.GRAPH_CAPTURE, 9, 50 * MS),))),
        (Cause.H2D_COPY, make_setup()._replace(delays=(Delay(Cause.H2D_COPY, 9, 50 * MS),))),
        (Cause.SAMPLE_SYNC, make_setup()._replace(delays=(Delay(Cause.SAMPLE_SYNC, 9, 50 * MS),))),
    ],
)
def test_a_world_without_a_cause_has_none_of_it(cause: Cause, setup: Setup) -> None:
    """The observer that serves live metrics names the cause where it exists, and only there."""
    planned = plan_of(30, rate=400)

    def total_ns(setup: Setup) -> int:
        simulated = Simulation(setup).run(planned)
        attribution = Attribution()
        by_stamp: dict[int, list[int]] = defaultdict(list)
        for index, timeline in enumerate(simulated.timelines):
            attribution.on_start(timeline)
            for stamp in timeline.token_ns:
                by_stamp[stamp].append(index)
            timeline.token_ns = []
        for step in simulated.steps:
            advanced = [simulated.timelines[index] for index in by_stamp[step.tokens_ns]]
            for timeline in advanced:
                timeline.token_ns.append(step.tokens_ns)
            attribution.on_step(step, Advanced.newest(advanced))
        return attribution.total_ns[cause]

    assert total_ns(setup) > 0
    if cause is Cause.PREFILL_OF_OTHERS:  # an estimate, and before there is experience a rough one
        assert total_ns(without(setup, cause)) < 0.2 * total_ns(setup)
    else:
        assert total_ns(without(setup, cause)) == 0


def test_what_cannot_run_is_refused_before_it_starts() -> None:
    with pytest.raises(ConfigError, match="do not fit into 128"):
        Simulation(make_setup()).run([asked(0, 100, 29)])
    with pytest.raises(ConfigError, match="15 blocks of 8 do not hold one sequence of 128 tokens"):
        Simulation(make_setup(num_blocks=15))


# --- every history --------------------------------------------------------------------------------------------------

LIMITS: list[dict[str, Any]] = [
    {},
    {"num_blocks": 17},
    {"max_num_seqs": 2, "max_prefill_seqs": 6, "max_prefill_tokens": 5},
    {"admission": "pack", "fifo_every": 3, "lookahead": 4, "num_blocks": 24},
    {"prefix_caching": False, "num_blocks": 18, "max_num_batched_tokens": 24},
    {"max_num_seqs": 3, "max_prefill_seqs": 2, "max_active_seqs": 7},
]

requests = st.builds(
    lambda offset, shared, own, max_tokens, abort: PlannedRequest(
        offset_ns=offset * MS // 2,
        segments=tuple(part for part in (Segment(0, shared), Segment(1 + own + offset, own)) if part.num_tokens),
        max_tokens=max_tokens,
        abort_after_tokens=abort,
    ),
    offset=st.integers(0, 120),
    shared=st.sampled_from([0, 0, 8, 16, 24]),
    own=st.integers(1, 60),
    max_tokens=st.integers(1, 40),
    abort=st.one_of(st.none(), st.none(), st.none(), st.integers(1, 20)),
)


@settings(max_examples=200, deadline=None)
@given(
    planned=st.lists(requests, min_size=1, max_size=12),
    limits=st.sampled_from(LIMITS),
    depth=st.sampled_from([0, 1]),
    is_asynchronous=st.booleans(),
)
def test_in_every_history_all_end_once_blocks_are_kept_and_no_request_starves(
    planned: list[PlannedRequest], limits: dict[str, Any], depth: int, is_asynchronous: bool
) -> None:
    planned.sort(key=lambda request: request.offset_ns)
    setup = make_setup(**limits)._replace(pipeline_depth=depth, is_asynchronous=is_asynchronous)
    endings: list[str] = []
    decisions: list[Decision] = []

    def check(output: StepOutput) -> None:
        endings.extend(told.request_id for told in output.outputs if told.finish_reason is not None)
        assert_invariants(simulation.engine.scheduler)
        pool = simulation.engine.scheduler.kv_cache.pool
        assert pool.num_used + pool.num_available == pool.num_blocks

    simulation = Simulation(setup, on_decision=decisions.append, after_step=check)
    simulated = simulation.run(planned)
    assert sorted(endings) == sorted(timeline.request_id for timeline in simulated.timelines)
    assert len(endings) == len(planned), "one terminal event each"
    assert simulation.engine.scheduler.kv_cache.pool.num_used == 0
    for request, timeline in zip(planned, simulated.timelines, strict=True):
        if timeline.finish_reason is FinishReason.LENGTH:
            assert len(timeline.token_ns) == request.max_tokens
        else:
            assert request.abort_after_tokens is not None
            assert request.abort_after_tokens <= len(timeline.token_ns) <= request.abort_after_tokens + depth
    check_fairness(setup, planned, decisions)


def check_fairness(setup: Setup, planned: Sequence[PlannedRequest], decisions: Sequence[Decision]) -> None:
    """Bounds of `config/options.py:Limits` on what a sequence may wait for, in launched steps.

    A decoding sequence has its turn again within ceil(active / rows) steps unless it is preempted. A waiting one is
    admitted before more tokens have been computed than all others have, a preempted one's counted again, and the
    steps in which it let a prefix go first.
    """
    limits = setup.scheduler.limits
    longest_turn = -(-limits.max_active_seqs // limits.max_num_seqs)
    last_turn: dict[str, int] = {}
    num_computed, num_preempted, arrived = 0, 0, dict[str, int]()
    for number, decision in enumerate(decisions):
        for lost in decision.preempted:
            last_turn.pop(lost, None)
        num_preempted += len(decision.preempted)
        for index, request in enumerate(planned):
            if request.offset_ns + 1_000_000_000 <= decision.now_ns:
                arrived.setdefault(f"r{index}", number)
        for name, start, count in decision.rows:
            num_computed += count
            if start + count > planned[int(name[1:])].num_prompt_tokens:
                assert number - last_turn.get(name, number) <= longest_turn, "a decoding sequence lost its turn"
                last_turn[name] = number
        total = sum(request.num_prompt_tokens + request.max_tokens for request in planned)
        bound = total + num_preempted * setup.max_model_len + MAX_PREFIX_WAIT_STEPS
        for name in decision.admitted:
            assert number - arrived.pop(name, number) <= bound


STREAMS_AND_PROMPTS = [asked(offset, 4, 300) for offset in (0, 1, 2, 3)] + [
    asked(60 + 250 * i, 20 + 90 * (i % 7), 8) for i in range(25)
]


def mixed_gaps_ms(*, draft_share: float = 0.0, **scheduler: Any) -> list[float]:
    """The gaps that steps with prompts ended beside streams, once the costs have been learnt."""
    setup = make_setup(num_blocks=1024, **{"max_num_batched_tokens": 2048, "max_num_seqs": 16} | scheduler)
    costs = CostModel(20 * MS, 2 * MS, 0.5 * MS, 0.001 * MS, 0.5 * MS)
    setup = setup._replace(max_model_len=1024, costs=costs, draft_share=draft_share)
    steps = Simulation(setup).run(STREAMS_AND_PROMPTS).steps
    gaps = [(later.tokens_ns - earlier.tokens_ns) / MS for earlier, later in pairwise(steps)]
    mixed = [step.num_prefill_tokens > 0 < step.num_decode_seqs for step in steps[1:]]
    return [gap for gap, is_mixed in zip(gaps, mixed, strict=True) if is_mixed][8:]


@pytest.mark.parametrize("target_ms", [50, 80, 150])
def test_prompts_fill_the_time_that_the_target_leaves_and_no_more(target_ms: float) -> None:
    gaps = sorted(mixed_gaps_ms(target_itl_ms=target_ms))
    assert gaps[-1] <= 1.2 * target_ms
    assert gaps[len(gaps) // 2] >= 0.8 * target_ms


@pytest.mark.parametrize("speculation", [6, "auto"])
def test_drafted_tokens_have_their_part_in_the_time_of_the_target(speculation: Any) -> None:
    gaps = sorted(mixed_gaps_ms(target_itl_ms=120, speculation=speculation, draft_share=0.9))
    assert 0.8 * 120 <= gaps[len(gaps) // 2] <= 1.1 * 120


def test_without_options_a_step_with_prompts_takes_no_more_than_twice_the_time() -> None:
    assert max(mixed_gaps_ms(max_prefill_tokens=2048)) > 250
    assert max(mixed_gaps_ms()) < 2.5 * (20 + 2 * 8)  # in one step five wait beside four


def test_prompts_come_first_where_more_requests_wait_than_stream() -> None:
    """Eight at once: the sooner their prompts are done, the more of them share each step."""
    setup = make_setup(num_blocks=1024, max_num_batched_tokens=512)
    setup = setup._replace(max_model_len=1024, costs=CostModel(14 * MS, 0.8 * MS, 0.8 * MS, 0, 0.5 * MS))
    beside: dict[int, int] = {}  # most prompt tokens, by decoding sequences
    for step in Simulation(setup).run([asked(offset, 500, 64) for offset in range(8)]).steps:
        beside[step.num_decode_seqs] = max(step.num_prefill_tokens, beside.get(step.num_decode_seqs, 0))
    assert beside[2] > 400, "six wait beside two"
    assert 20 < beside[4] < 30, "four beside four"


def test_what_a_step_takes_is_learnt_again_when_the_machine_slows_down() -> None:
    pace = Pace(target_ns=100 * MS, least=16, cuts=True)

    def live(slowness: float, num_steps: int) -> float:
        for turn in range(num_steps):
            tokens = pace.most_prompt_tokens(8, 1) if turn % 3 else 0
            duration = slowness * (30 + 0.5 * tokens)
            pace.learn_step(StepCounts(num_decode_seqs=8, num_prefill_tokens=tokens), round(duration * MS))
        return slowness * (30 + 0.5 * pace.most_prompt_tokens(8, 1))

    assert live(1.0, 40) == pytest.approx(100, rel=0.1)
    assert live(1.6, 20) == pytest.approx(100, rel=0.2)


def test_a_prompt_that_delays_no_stream_is_not_cut() -> None:
    setup = make_setup(num_blocks=1024, max_num_batched_tokens=512, target_itl_ms=1.0)
    [first, *_] = Simulation(setup._replace(max_model_len=1024)).run([asked(0, 500, 2)]).steps
    assert first.num_prefill_tokens == 500
