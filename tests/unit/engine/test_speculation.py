"""Drafts change how many steps an answer takes, and nothing of the answer."""

import copy
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from roseinfer.engine.core.batch import MAX_STEP_DRAFTS
from roseinfer.engine.core.constraint import Constraint, MaskArray, Matcher
from roseinfer.engine.core.engine import Engine
from roseinfer.engine.core.sequence import SlotTable
from roseinfer.engine.core.steps import StepCounts
from roseinfer.engine.invariants import assert_invariants
from roseinfer.engine.pace import Pace
from roseinfer.engine.speculation import MAX_DRAFT_TOKENS, Speculation, find_draft
from roseinfer.messages import Grammar, Request, SamplingParams
from roseinfer.records import FinishReason
from tests.unit.engine.harness import (
    EOS,
    VOCAB_SIZE,
    Transcript,
    make_engine,
    make_request,
    run_alone,
    run_to_end,
)


@pytest.mark.parametrize(
    ("text", "draft"),
    [
        ([1, 2, 3, 4, 5, 9, 1, 2, 3], [4, 5, 9, 1]),
        ([1, 2, 3, 4, 9, 1, 2, 3, 5, 9, 1, 2, 3], [5, 9, 1, 2]),  # of equal places the later one
        ([7, 1, 2, 3, 4, 8, 1, 2, 3, 5, 7, 1, 2, 3], [4, 8, 1, 2]),  # but the longer one before it
        ([6, 6, 6, 6], [6, 6, 6, 6]),
        ([0, 5, 6, 5, 6, 5], [6, 5, 6, 5]),  # what it repeats is shorter than the draft
        ([1, 2, 3, 4, 5], []),
        ([1, 2, 9, 1, 2], []),  # too short a match
        ([1, 2, 3], []),
        ([1], []),
    ],
)
def test_a_draft_continues_the_place_most_like_the_end(text: list[int], draft: list[int]) -> None:
    assert find_draft(np.array(text, np.int32), 4).tolist() == draft


def test_drafts_grow_where_they_hold_and_end_where_they_do_not() -> None:
    table = SlotTable(2, 256, 8)
    table.last_positions[:] = 199
    pace = Pace(target_ns=None, least=16, cuts=True)
    speculation = Speculation(pace, table)
    for _ in range(16):
        pace.learn_step(StepCounts(num_decode_seqs=1), 1000)
    least = speculation._least_likely(2)
    assert 0 < speculation._wanted(0, 0, least) < MAX_DRAFT_TOKENS
    for _ in range(20):
        speculation.learn(0, 4, 4)
        speculation.learn(1, 4, 0)
    assert speculation._wanted(0, 0, least) == MAX_DRAFT_TOKENS
    assert speculation._wanted(0, 1, least) == 0
    for _ in range(600):
        recovered = speculation._wanted(0, 1, least)
    assert recovered > 0  # it is tried again


CONFIGS: list[dict[str, Any]] = [
    {},
    {"num_blocks": 17, "max_model_len": 128},  # preemption
    {"max_num_seqs": 2, "max_prefill_seqs": 6, "max_prefill_tokens": 5},  # turns, and chunks
    {"prefix_caching": False, "num_blocks": 18, "max_num_batched_tokens": 24},
]

REQUESTS = st.fixed_dictionaries(
    {
        "prompt": st.lists(st.integers(1, 5), min_size=1, max_size=30),
        "max_tokens": st.integers(1, 60),
        "temperature": st.sampled_from([0.0, 1.0]),
        "seed": st.integers(0, 3),
        "ignore_eos": st.booleans(),
        "stop_token_ids": st.sampled_from([(), (7, 8, 9), tuple(range(40, 60))]),
        "num_logprobs": st.sampled_from([None, 1]),
        "frequency_penalty": st.sampled_from([0.0, 0.0, 0.5]),
        "min_tokens": st.sampled_from([0, 1, 9]),
        "grammar": st.none()
        | st.builds(Grammar, st.just("lark"), st.from_regex(r"[0-9]{1,2} [0-9]{1,2}", fullmatch=True)),
    }
)


class Whims:
    """A grammar that leaves one token, a few or nearly all, by what was said; it may end, end there, or break.

    Its source is a seed, and how many tokens it has at most.
    """

    error = ""

    def __init__(self, source: str) -> None:
        seed, limit = map(int, source.split())
        self._state, self._left, self._breaks = seed, limit, seed % 7 == 0
        self.has_failed = False

    @property
    def is_over(self) -> bool:
        return self._left == 0 and not self._breaks

    def _allowed(self) -> list[int]:
        if not self._left:
            return [] if self._breaks else [EOS]
        match self._state % 5:
            case 0 | 1:
                return [self._state % 90]
            case 2:
                return [self._state % 90, EOS]
            case 3:
                return [*range(5)]
            case _:
                return [*range(VOCAB_SIZE)]

    def fill(self, allowed: MaskArray) -> None:
        allowed[:] = 0
        for token_id in self._allowed():
            allowed[token_id // 32] |= np.uint32(1 << (token_id % 32))

    def accept(self, token_id: int) -> None:
        self.has_failed |= token_id not in self._allowed()
        self._left = 0 if token_id == EOS else self._left - 1
        self._breaks &= token_id != EOS
        self._state = (self._state * 7 + token_id * 3) % 101

    def copy(self) -> "Whims":
        return copy.copy(self)

    def forced(self) -> list[int]:
        ahead, forced = self.copy(), list[int]()
        while len(allowed := ahead._allowed()) == 1 and len(forced) < 9:
            forced += allowed
            ahead.accept(allowed[0])
        return [*forced[:-1], 1] if len(forced) % 4 == 3 else forced  # now and then it spells the last one otherwise


class WhimsicalGrammars:
    """Compiles at once."""

    vocab_size = VOCAB_SIZE

    def open(self, grammar: Grammar) -> Future[Matcher]:
        future: Future[Matcher] = Future()
        future.set_result(Whims(grammar.source))
        return future


def engine_of(**config: Any) -> Engine:
    engine = make_engine(repeats=True, **config)
    engine.scheduler.compiling._grammars = WhimsicalGrammars()
    return engine


def live(engine: Engine, requests: list[Request], pauses: list[int], aborted: dict[str, int]) -> Transcript:
    """Adds requests with steps between them, and aborts some once they have so many tokens."""
    transcript = Transcript()

    def step() -> None:
        record = transcript.take(engine.step()).record
        num_tokens = record.num_decode_seqs + record.num_draft_tokens + record.num_prefill_tokens
        assert num_tokens <= engine.scheduler.limits.max_num_batched_tokens
        assert_invariants(engine.scheduler)
        for request_id, least in aborted.items():
            if len(transcript.tokens[request_id]) >= least:
                engine.abort(request_id)

    for request, pause in zip(requests, pauses, strict=True):
        engine.add_request(request)
        for _ in range(pause):
            if engine.has_work:
                step()
    for _ in range(10_000):
        if not engine.has_work:
            break
        step()
    assert not engine.has_work
    return transcript


@settings(max_examples=150, deadline=None)
@given(
    config=st.sampled_from(CONFIGS),
    speculation=st.sampled_from(["auto", 1, 3, 16]),
    asked=st.lists(REQUESTS, min_size=1, max_size=8),
    data=st.data(),
)
def test_answers_are_those_without(
    config: dict[str, Any], speculation: str | int, asked: list[dict[str, Any]], data: st.DataObject
) -> None:
    requests = [make_request(f"r{i}", **each) for i, each in enumerate(asked)]
    pauses = [data.draw(st.integers(0, 6)) for _ in requests]
    aborted = data.draw(st.dictionaries(st.sampled_from([each.request_id for each in requests]), st.integers(1, 20)))
    off = live(engine_of(**config), requests, pauses, aborted)
    engine = engine_of(can_speculate=True, speculation=speculation, **config)
    on = live(engine, requests, pauses, aborted)
    for request in requests:
        name = request.request_id
        if on.reasons[name] is FinishReason.ABORT or off.reasons[name] is FinishReason.ABORT:
            assert name in aborted
            length = min(len(on.tokens[name]), len(off.tokens[name]))
            assert on.tokens[name][:length] == off.tokens[name][:length]
            continue
        assert on.tokens[name] == off.tokens[name]
        assert on.reasons[name] is off.reasons[name]
        assert on.logprobs[name] == off.logprobs[name]
    assert engine.scheduler.kv_cache.pool.num_used == 0
    assert sum(step.record.num_generated_tokens for step in on.steps) == sum(map(len, on.tokens.values()))


def test_a_text_that_repeats_itself_takes_fewer_steps() -> None:
    request = make_request("r", [1, 2, 3], max_tokens=100)
    off, on = make_engine(repeats=True), make_engine(repeats=True, can_speculate=True, speculation=8)
    for engine in (off, on):
        engine.add_request(request)
    without, with_drafts = run_to_end(off), run_to_end(on)
    assert without.tokens == with_drafts.tokens
    assert len(with_drafts.steps) < 0.7 * len(without.steps)
    records = [step.record for step in with_drafts.steps]
    accepted = sum(record.num_accepted_tokens for record in records)
    assert 0 < accepted < sum(record.num_draft_tokens for record in records)
    assert len(without.steps) - len(with_drafts.steps) == accepted


def test_what_a_grammar_forces_takes_no_step_of_its_own() -> None:
    request = make_request("r", [1, 2, 3], max_tokens=60, grammar=Grammar("lark", "45 50"))
    off, on = engine_of(), engine_of(can_speculate=True, speculation=16)
    for engine in (off, on):
        engine.add_request(request)
    without, with_drafts = run_to_end(off), run_to_end(on)
    assert without.tokens == with_drafts.tokens
    assert without.reasons == with_drafts.reasons
    assert len(with_drafts.steps) < 0.3 * len(without.steps)


@pytest.mark.parametrize("budget", [24, 256])
def test_drafts_end_with_the_budget_the_step_and_the_context(budget: int) -> None:
    """Those that grammars force and those that repeat the text share one budget."""
    grammars = [Grammar("lark", "45 99"), None, None, None]
    requests = [make_request(f"r{i}", [1, 2, i], max_tokens=125, grammar=grammars[i % 4]) for i in range(8)]
    config = {"num_blocks": 128, "max_num_batched_tokens": budget}
    off = live(engine_of(**config), requests, [0] * 8, {})
    on = live(engine_of(can_speculate=True, speculation=16, **config), requests, [0] * 8, {})
    assert on.tokens == off.tokens
    assert max(map(len, on.tokens.values())) == 125, "to the end of the context"
    most = max(step.record.num_draft_tokens for step in on.steps)
    assert most == MAX_STEP_DRAFTS if budget == 256 else 16 <= most < budget


def test_drafts_end_where_the_grammar_does() -> None:
    """Of a draft only what may come is computed, and nothing behind a token that may be the last."""
    constraint = Constraint(WhimsicalGrammars().open(Grammar("lark", "45 3")), SamplingParams(), (EOS,), VOCAB_SIZE)
    assert Whims("45 9").forced()[:4] == [45, 46, 56, 55]
    assert constraint.look_ahead([45, 46, 56, 55]) == 2  # the third token is the last
    assert constraint.look_ahead([45, 47, 56]) == 1
    assert constraint.look_ahead([]) == 0


def test_drafts_leave_a_block_for_each_sequence() -> None:
    engine = make_engine(num_blocks=5, max_model_len=40)
    for name in ("a", "b"):
        engine.add_request(make_request(name, [1, 2, 3, 4, 5, 6], max_tokens=30))
    engine.step()
    kv_cache = engine.scheduler.kv_cache
    slots = [sequence.slot for sequence in kv_cache.residents]
    assert kv_cache.pool.num_available == 3
    assert [kv_cache.reserve(slot, 16) for slot in slots] == [9, 1]
    assert kv_cache.pool.num_available == 2


def test_rejected_tokens_are_never_in_the_prefix_cache() -> None:
    """A second request that continues the first one's answer computes what it would have computed alone."""
    engine = make_engine(repeats=True, can_speculate=True, speculation=16)
    first = make_request("first", range(1, 20), max_tokens=40)
    engine.add_request(first)
    tokens = run_to_end(engine).tokens["first"]
    second = make_request("second", [*range(1, 20), *tokens, 3], max_tokens=20)
    engine.add_request(second)
    transcript = run_to_end(engine)
    alone = make_engine(repeats=True, prefix_caching=False)
    alone.add_request(second)
    assert transcript.tokens["second"] == run_to_end(alone).tokens["second"]
    assert transcript.steps[0].record.num_prefix_hit_tokens > 20


@pytest.mark.parametrize("max_prefill_tokens", [5, 9])
def test_rows_draft_beside_chunks_of_prompts(max_prefill_tokens: int) -> None:
    requests = [make_request("stream", [1, 2, 3], max_tokens=80), make_request("prompt", [4] * 90, max_tokens=5)]
    config: dict[str, Any] = {"repeats": True, "max_prefill_tokens": max_prefill_tokens}
    config |= {"max_num_batched_tokens": 12, "max_num_seqs": 4}
    off = live(make_engine(**config), requests, [40, 0], {})
    on = live(make_engine(can_speculate=True, speculation=8, **config), requests, [10, 0], {})
    assert on.tokens == off.tokens
    assert any(step.record.num_prefill_tokens and step.record.num_draft_tokens for step in on.steps)


def test_a_deadline_ends_a_stream_that_drafts_between_two_steps() -> None:
    engine, now = make_engine(repeats=True, can_speculate=True, speculation=8), iter(range(10**6))
    engine.phases.clock = lambda: next(now)
    engine.add_request(replace(make_request("late", [1, 2, 3], max_tokens=100), deadline_ns=200))
    engine.add_request(make_request("other", [1, 2, 4], max_tokens=40))
    told = run_to_end(engine)
    alone = run_alone(make_request("alone", [1, 2, 3], max_tokens=100), repeats=True)
    assert told.reasons == {"late": FinishReason.TIMEOUT, "other": FinishReason.LENGTH}
    assert 3 < len(told.tokens["late"]) < 100
    assert told.tokens["late"] == alone[: len(told.tokens["late"])]
    assert engine.scheduler.kv_cache.pool.num_used == 0
