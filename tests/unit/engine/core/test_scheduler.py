"""The scheduler's promises, each on a real engine over the fake runner."""

import gc
from typing import Any

import numpy as np
import pytest

from roseinfer.engine.core.decode_ring import Plan, rows_of
from roseinfer.engine.core.sequence import Sequence, SlotTable
from roseinfer.engine.invariants import assert_invariants
from roseinfer.errors import ConfigError
from roseinfer.records import BlockedBy, FinishReason
from tests.unit.engine.harness import EOS, RecordBatches, Transcript, make_engine, make_request, run_alone, run_to_end


def test_one_request_gets_its_tokens_and_one_last_output() -> None:
    engine = make_engine()
    engine.add_request(make_request("a", max_tokens=5))
    transcript = run_to_end(engine)
    assert len(transcript.tokens["a"]) == 5
    assert transcript.reasons == {"a": FinishReason.LENGTH}
    assert len(transcript.steps) == 5  # the prompt's step samples the first token, so no step is spent on nothing


def test_tokens_do_not_depend_on_company() -> None:
    requests = [make_request(f"r{i}", range(1, 4 + 7 * i), max_tokens=9) for i in range(6)]
    engine = make_engine()
    for request in requests:
        engine.add_request(request)
    transcript = run_to_end(engine)
    assert {r.request_id: run_alone(r) for r in requests} == transcript.tokens


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 8, 9, 40])
def test_tokens_do_not_depend_on_chunk_size(chunk: int) -> None:
    request = make_request("a", range(1, 41), max_tokens=6)
    engine = make_engine(max_prefill_tokens=chunk)
    engine.add_request(request)
    transcript = run_to_end(engine)
    assert transcript.tokens["a"] == run_alone(request)
    assert len(transcript.steps) == -(-40 // chunk) + 5


def test_running_sequences_come_first_and_prompts_share_the_rest_of_the_budget(record_batches: RecordBatches) -> None:
    engine = make_engine(max_num_batched_tokens=16)
    batches = record_batches(engine)
    engine.add_request(make_request("a", max_tokens=20))
    engine.step()
    engine.add_request(make_request("long", range(1, 60), max_tokens=2))
    engine.step()
    mixed = batches[-1]
    assert mixed.num_device_rows == 1
    assert mixed.num_new_tokens.tolist() == [1, 15]
    assert mixed.samples.tolist() == [True, False]


def test_decode_is_not_starved_by_a_long_prompt() -> None:
    engine = make_engine(max_num_batched_tokens=16)
    engine.add_request(make_request("a", max_tokens=30))
    transcript = Transcript()
    transcript.take(engine.step())
    engine.add_request(make_request("long", range(1, 100), max_tokens=1))
    for _ in range(8):
        transcript.take(engine.step())
    assert len(transcript.tokens["a"]) == 1 + 8  # one token in every step, whatever else the step carries


def test_prefill_is_not_starved_by_full_decode() -> None:
    engine = make_engine(max_num_seqs=8, max_active_seqs=9, max_num_batched_tokens=16, num_blocks=128)
    for i in range(8):
        engine.add_request(make_request(f"r{i}", [i + 1], max_tokens=100))
    transcript = Transcript()
    transcript.take(engine.step())
    engine.add_request(make_request("late", range(1, 65), max_tokens=1))
    for _ in range(64 // 8):  # the budget leaves eight tokens beside eight decode rows
        transcript.take(engine.step())
    assert transcript.reasons.get("late") is FinishReason.LENGTH


def test_more_active_than_decoded_take_turns() -> None:
    engine = make_engine(max_num_seqs=4, max_prefill_seqs=12)
    for i in range(12):
        engine.add_request(make_request(f"r{i}", [i + 1], max_tokens=7))
    transcript = Transcript()
    assert len(transcript.take(engine.step()).outputs) == 12  # E10: all are admitted at once
    for turn in range(1, 7):
        for _ in range(3):
            step = transcript.take(engine.step())
            assert step.record.num_decode_seqs == 4
        assert {len(tokens) for tokens in transcript.tokens.values()} == {turn + 1}  # E1: no sequence is a turn behind
    assert not engine.has_work


def test_not_selected_is_counted() -> None:
    engine = make_engine(max_num_seqs=4, max_prefill_seqs=10)
    for i in range(10):
        engine.add_request(make_request(f"r{i}", [i + 1], max_tokens=5))
    engine.step()
    assert engine.step().record.num_not_selected == 6


def test_admission_cap_is_per_step_and_independent_of_decode_width() -> None:
    engine = make_engine(max_num_seqs=8, max_prefill_seqs=2)
    for i in range(5):
        engine.add_request(make_request(f"r{i}", [i + 1], max_tokens=9))
    admitted = [engine.step().record.num_prefill_seqs for _ in range(3)]
    assert admitted == [2, 2, 1]


@pytest.mark.parametrize(
    ("blocked_by", "prompt_length", "config"),
    [
        (BlockedBy.TOKEN_BUDGET, 20, {"max_prefill_tokens": 30}),
        (BlockedBy.TOKEN_BUDGET, 20, {"max_prefill_tokens": 20}),
        (BlockedBy.PREFILL_SEQS, 1, {"max_prefill_seqs": 1}),
        (BlockedBy.SLOTS, 1, {"max_active_seqs": 2, "max_prefill_seqs": 2}),
        (BlockedBy.KV_BLOCKS, 60, {"num_blocks": 16, "max_num_batched_tokens": 200}),
        (BlockedBy.NOTHING, 1, {}),
    ],
)
def test_a_step_names_the_limit_that_keeps_out_the_first_that_waits(
    blocked_by: BlockedBy, prompt_length: int, config: dict[str, Any]
) -> None:
    engine = make_engine(**{"max_num_seqs": 2, "max_prefill_seqs": 4, "max_active_seqs": 8, **config})
    for i in range(4):
        engine.add_request(make_request(f"r{i}", range(1 + i, 1 + i + prompt_length)))
    engine.step()
    record = engine.step().record
    assert record.blocked_by is blocked_by
    assert bool(record.num_waiting) == (blocked_by is not BlockedBy.NOTHING)


def test_contradicting_limits_are_refused_at_construction() -> None:
    with pytest.raises(ConfigError) as caught:
        make_engine(max_num_seqs=64, max_num_batched_tokens=64)
    assert caught.value.param == "scheduler.max_num_batched_tokens"


def test_a_pool_too_small_for_one_sequence_cannot_be_scheduled_over() -> None:
    with pytest.raises(AssertionError, match="never run"):
        make_engine(num_blocks=15, block_size=8, max_model_len=121)


def test_finished_blocks_are_free_in_the_finishing_step() -> None:
    engine = make_engine(prefix_caching=False)
    engine.add_request(make_request("a", range(1, 30), max_tokens=3))
    *_, last = run_to_end(engine).steps
    assert last.record.num_finished == 1
    assert last.record.num_used_blocks == 0
    assert last.record.num_running == 0


@pytest.mark.parametrize("max_tokens", [30, 5])  # with 5 it is the last token anyway
def test_eos_and_stop_tokens_end_a_request(max_tokens: int) -> None:
    free = run_alone(make_request("a", max_tokens=30))
    assert free.index(free[4]) == 4
    engine = make_engine()
    engine.add_request(make_request("stop", max_tokens=max_tokens, stop_token_ids=(free[4],)))
    transcript = run_to_end(engine)
    assert transcript.tokens["stop"] == free[:5]
    assert transcript.reasons["stop"] is FinishReason.STOP
    assert transcript.steps[-1].outputs[0].stop_token_id == free[4]


def test_eos_is_heeded_unless_ignored() -> None:
    for seed in range(1, 200):
        request = make_request("a", temperature=1.0, seed=seed, max_tokens=60)
        if EOS in run_alone(request)[:-1]:
            break
    engine = make_engine()
    engine.add_request(make_request("b", temperature=1.0, seed=seed, max_tokens=60, ignore_eos=False))
    transcript = run_to_end(engine)
    assert transcript.reasons["b"] is FinishReason.STOP
    assert transcript.tokens["b"][-1] == EOS
    assert len(run_alone(request)) == 60


@pytest.mark.parametrize("steps_before", [0, 1, 2, 5])
def test_abort_ends_a_request_within_one_step_wherever_it_is(steps_before: int) -> None:
    engine = make_engine(max_prefill_tokens=16)
    engine.add_request(make_request("a", range(1, 40), max_tokens=50))  # queued, mid-prefill twice, decoding
    for _ in range(steps_before):
        engine.step()
    engine.abort("a")
    engine.abort("a")
    engine.abort("never seen")
    assert_invariants(engine.scheduler)
    transcript = Transcript()
    record = transcript.take(engine.step()).record
    assert transcript.reasons == {"a": FinishReason.ABORT}
    assert record.num_used_blocks == 0
    assert not engine.has_work


def test_preemption_recomputes_the_same_tokens_and_the_oldest_always_progresses() -> None:
    requests = [make_request(f"r{i}", range(1 + i, 18 + i), max_tokens=60) for i in range(6)]
    engine = make_engine(num_blocks=20, block_size=8, prefix_caching=False)
    for request in requests:
        engine.add_request(request)
    transcript = Transcript()
    oldest: list[int] = []
    while engine.has_work:
        transcript.take(engine.step())
        assert_invariants(engine.scheduler)
        oldest.append(len(transcript.tokens["r0"]))
    preemptions = sum(step.record.num_preemptions for step in transcript.steps)
    assert preemptions > 3  # a preemption test that did not preempt proves nothing
    assert {r.request_id: run_alone(r) for r in requests} == transcript.tokens
    assert oldest[:60] == list(range(1, 61))
    assert set(transcript.reasons.values()) == {FinishReason.LENGTH}


def test_a_preempted_sequence_that_was_overtaken_is_no_younger() -> None:
    """Under `pack` a shorter one may come in first; the next preemption is not of the same sequence again."""
    kv_cache = make_engine().scheduler.kv_cache
    old, young = (
        Sequence(make_request(name), 0, np.arange(3, dtype=np.int32), kv_cache.prefix_cache.new_chain("", ""))
        for name in ("old", "young")
    )
    kv_cache.allocate(old, [])
    kv_cache.free(old)
    kv_cache.allocate(young, [])
    kv_cache.allocate(old, [])
    assert kv_cache.residents == [old, young]


def test_a_preempted_request_goes_to_the_head_of_the_queue() -> None:
    engine = make_engine(num_blocks=8, block_size=8, max_model_len=64, prefix_caching=False)
    for i in range(3):
        engine.add_request(make_request(f"r{i}", range(1 + i, 16 + i), max_tokens=40))
    engine.add_request(make_request("last", max_tokens=2))
    while not engine.step().record.num_preemptions:
        pass
    assert next(iter(engine.scheduler.waiting)).request.request_id == "r2"


def test_seeded_tokens_survive_preemption() -> None:
    requests = [make_request(f"r{i}", range(1, 12), max_tokens=40, temperature=1.0, seed=i) for i in range(5)]
    engine = make_engine(num_blocks=16, block_size=8, max_model_len=64)
    for request in requests:
        engine.add_request(request)
    transcript = run_to_end(engine)
    assert sum(step.record.num_preemptions for step in transcript.steps) > 0
    assert {r.request_id: run_alone(r) for r in requests} == transcript.tokens


def test_pack_takes_short_prompts_first_and_fifo_turns_keep_the_long_one_from_starving() -> None:
    engine = make_engine(admission="pack", fifo_every=4, max_prefill_seqs=1, max_num_seqs=4, max_active_seqs=4)
    engine.add_request(make_request("long", range(1, 50), max_tokens=1))
    for i in range(12):
        engine.add_request(make_request(f"short{i}", [i + 1], max_tokens=1))
    order = list(run_to_end(engine).reasons)
    assert order.index("long") == 3
    assert order[:3] == ["short0", "short1", "short2"]


def test_fifo_does_not_overtake_one_that_does_not_fit() -> None:
    engine = make_engine(num_blocks=16, block_size=8, max_model_len=128, prefix_caching=False)
    engine.add_request(make_request("a", range(1, 80), max_tokens=20))
    engine.step()
    engine.add_request(make_request("big", range(1, 70), max_tokens=1))
    engine.add_request(make_request("small", [5], max_tokens=1))
    assert list(run_to_end(engine).reasons) == ["a", "big", "small"]


def test_times_are_stamped_in_order() -> None:
    engine = make_engine()
    engine.add_request(make_request("a", max_tokens=2))
    steps = run_to_end(engine).steps
    times = steps[-1].outputs[0].times
    assert times is not None
    assert steps[0].outputs[0].times == times  # with the first token, and once more with the last
    assert times.inbox_ns <= times.scheduled_ns <= steps[0].record.tokens_ns <= steps[1].record.tokens_ns
    assert steps[0].record.kind == "prefill"
    assert steps[1].record.kind == "decode"


def test_a_plan_says_what_the_table_says() -> None:
    """Whatever other rows have had a step in between, and for longer than it was made for."""
    table = SlotTable(num_slots=5, max_model_len=60, block_size=4)
    table.num_computed[:], table.capacities[:] = [9, 3, 8, 16, 5], [12, 4, 8, 24, 8]
    table.last_positions[:] = [24, 60, 60, 60, 60]
    plan, rows, others = Plan(table), rows_of([2, 0, 3]), rows_of([4, 1, 2])
    num_planned = 0
    for step in range(30):
        decodes = others if step in {3, 4, 9} else rows
        slots, starts = decodes.slots.tolist(), table.num_computed[decodes.index].tolist()
        full = plan.full_slots(decodes)
        assert full == [slot for slot, start in zip(slots, starts, strict=True) if start == table.capacities[slot]]
        assert plan.full_slots(decodes) == full, "a step that cannot be scheduled yet is asked for again"
        table.append_blocks(full, full)
        ends = [start + 1 for start in starts]
        if (planned := plan.pass_step(decodes)) is not None:
            num_planned += 1
            found = planned.starts.tolist(), planned.ends.tolist(), planned.num_context_tokens
            assert found == (starts, ends, sum(ends))
            assert planned.has_last == any(end == table.last_positions[s] for s, end in zip(slots, ends, strict=True))
        table.num_computed[decodes.index] = ends
        if step == 20:  # some of the rows are not in a step after all
            assert plan.pass_step(rows_of(slots[1:])) is None
            table.num_computed[decodes.index[1:]] += 1
            grown = [s for s in slots if table.num_computed[s] > table.capacities[s]]
            table.append_blocks(grown, grown)
    assert num_planned > 12


def test_arrays_are_mutated_in_place() -> None:
    engine = make_engine()
    table = engine.scheduler.kv_cache.table
    before = [table.num_computed, table.token_ids, table.block_ids, table.capacities]
    engine.add_request(make_request("a", range(1, 20), max_tokens=30))
    run_to_end(engine)
    after = [table.num_computed, table.token_ids, table.block_ids, table.capacities]
    assert all(np.shares_memory(one, other) and one is other for one, other in zip(before, after, strict=True))


def test_decode_steps_leave_nothing_for_the_garbage_collector() -> None:
    engine = make_engine(num_blocks=128)
    for i in range(8):
        engine.add_request(make_request(f"r{i}", range(1, 10 + i), max_tokens=100))
    for _ in range(5):
        engine.step()
    gc.collect()
    num_tracked = len(gc.get_objects())
    for _ in range(60):
        engine.step()
    gc.collect()
    assert len(gc.get_objects()) - num_tracked < 10  # not one a step, and not one a block


def test_what_steps_take_is_learnt_only_where_prompts_are_cut_by_it_or_drafts_weighed() -> None:
    for options, learns in (({}, False), ({"target_itl_ms": 10.0}, True), ({"can_speculate": True}, True)):
        assert (make_engine(**options).scheduler._pacer is not None) == learns


def test_blocks_roll_over_exactly_when_full() -> None:
    engine = make_engine(block_size=8)
    engine.add_request(make_request("a", range(1, 8), max_tokens=12))  # the first block has one place left
    used = [step.record.num_used_blocks for step in run_to_end(engine).steps[:-1]]
    assert used == [1, 1] + [2] * 8 + [3]
