"""Sequences with a grammar in the engine, over a runner that samples what a fake grammar allows.

The fake grammar counts: the next token is one more than the last, modulo ten, up to so many tokens in all. So a mask
that comes too late, twice, or from another sequence's state shows at once.
"""

import copy
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from roseinfer.engine.core.constraint import Constraint, MaskArray, Matcher
from roseinfer.engine.core.engine import Engine
from roseinfer.engine.invariants import assert_invariants
from roseinfer.messages import Grammar, Request, SamplingParams
from roseinfer.records import FinishReason
from tests.unit.engine.harness import EOS, VOCAB_SIZE, Transcript, make_engine, make_request, run_to_end
from tests.unit.engine.poison import poison

BASE = 10  # tokens 10 to 19 are the digits


class Counting:
    """A matcher; the source is the number of tokens, with `*` when it may end before.

    With `!` nothing is allowed behind them, and with `?` a limit is met there.
    """

    def __init__(self, source: str) -> None:
        self.num_tokens = 0
        self.limit = int(source.strip("*!?"))
        self.may_end = "*" in source
        self.meets_limit = "?" in source
        self.breaks = "!" in source or self.meets_limit
        self.has_failed = False
        self.error = ""

    @property
    def is_over(self) -> bool:
        return self.num_tokens == self.limit and not self.breaks

    def fill(self, allowed: MaskArray) -> None:
        allowed[:] = 0
        if self.num_tokens < self.limit:
            self._allow(allowed, BASE + self.num_tokens % 10)
            if self.may_end:
                self._allow(allowed, EOS)
        elif self.meets_limit:
            self.has_failed, self.error = True, "a limit"
            self._allow(allowed, EOS)  # what a failed matcher writes says nothing

    def _allow(self, allowed: MaskArray, token_id: int) -> None:
        allowed[token_id // 32] |= np.uint32(1 << (token_id % 32))

    def accept(self, token_id: int) -> None:
        assert token_id >= 0, "no token"
        if token_id != BASE + self.num_tokens % 10:
            self.has_failed = True
        self.num_tokens += 1

    def copy(self) -> "Counting":
        return copy.copy(self)

    def forced(self) -> list[int]:
        count = 0 if self.may_end else self.limit - self.num_tokens
        return [BASE + (self.num_tokens + i) % 10 for i in range(count)]


class CountingGrammars:
    """Compiles at once, or when told to."""

    vocab_size = VOCAB_SIZE

    def __init__(self, *, is_slow: bool = False) -> None:
        self.is_slow = is_slow
        self.pending: list[tuple[Future[Matcher], str]] = []

    def open(self, grammar: Grammar) -> Future[Matcher]:
        self.pending.append((Future(), grammar.source))
        if not self.is_slow:
            self.finish()
        return self.pending[-1][0] if self.is_slow else self.done

    def finish(self) -> None:
        for future, source in self.pending:
            if not future.set_running_or_notify_cancel():  # as an executor does
                continue
            if source == "bad":
                future.set_exception(ValueError("no grammar"))
            else:
                future.set_result(Counting(source))
            self.done = future
        self.pending.clear()


def engine_with(grammars: CountingGrammars | None = None, **config: object) -> Engine:
    engine = make_engine(**config)  # type: ignore[arg-type]
    engine.scheduler.compiling._grammars = grammars or CountingGrammars()
    return engine


def constrained(name: str, source: str, prompt: list[int] | None = None, **params: Any) -> Request:
    grammar = Grammar("lark", source)
    asked: dict[str, Any] = {"grammar": grammar, "max_tokens": 40, "ignore_eos": False} | params
    return make_request(name, prompt or [1, 2, 3], **asked)


def digits(count: int) -> list[int]:
    return [BASE + i % 10 for i in range(count)]


@pytest.mark.parametrize("depth", [0, 1])
def test_the_text_follows_the_grammar_and_ends_with_it(depth: int) -> None:
    engine = engine_with(pipeline_depth=depth)
    engine.add_request(constrained("a", "7"))
    transcript = run_to_end(engine)
    assert transcript.tokens["a"] == digits(7)
    assert transcript.reasons["a"] is FinishReason.STOP
    last = next(o for step in transcript.steps for o in step.outputs if o.finish_reason is not None)
    assert last.stop_token_id is None  # its last token is text


def test_a_row_that_failed_advances_no_grammar() -> None:
    engine = poison(engine_with(), lambda name, position: name == "bad" and position == 5)
    for name in ("bad", "other"):
        engine.add_request(constrained(name, "7"))
    transcript = run_to_end(engine)
    assert transcript.tokens == {"bad": digits(2), "other": digits(7)}
    assert transcript.reasons == {"bad": FinishReason.ERROR, "other": FinishReason.STOP}
    assert not any(output.grammar_error for step in transcript.steps for output in step.outputs)


@pytest.mark.parametrize("depth", [0, 1])
def test_max_tokens_cuts_the_text_and_says_so(depth: int) -> None:
    engine = engine_with(pipeline_depth=depth)
    engine.add_request(constrained("a", "7", max_tokens=4))
    engine.add_request(constrained("whole", "7", max_tokens=7))
    transcript = run_to_end(engine)
    assert (transcript.tokens["a"], transcript.reasons["a"]) == (digits(4), FinishReason.LENGTH)
    assert (transcript.tokens["whole"], transcript.reasons["whole"]) == (digits(7), FinishReason.STOP)


@pytest.mark.parametrize("depth", [0, 1])
def test_others_are_what_they_are_alone_and_are_in_every_step(depth: int) -> None:
    alone = make_engine(pipeline_depth=depth)
    alone.add_request(make_request("plain", [5, 6], max_tokens=20))
    expected = run_to_end(alone)
    engine = engine_with(pipeline_depth=depth)
    engine.add_request(make_request("plain", [5, 6], max_tokens=20))
    for i in range(3):
        engine.add_request(constrained(f"c{i}", str(5 + i), [7, i]))
    transcript = run_to_end(engine)
    assert transcript.tokens["plain"] == expected.tokens["plain"]
    assert [transcript.tokens[f"c{i}"] for i in range(3)] == [digits(5 + i) for i in range(3)]
    steps_of_plain = [i for i, step in enumerate(transcript.steps) if tells_of(transcript, i, "plain")]
    assert steps_of_plain == list(range(steps_of_plain[0], steps_of_plain[0] + 20))


def tells_of(transcript: Transcript, index: int, name: str) -> bool:
    step = transcript.steps[index]
    in_columns = any(transcript.slots.get(slot) == name for slot, _ in step.tokens())
    return in_columns or any(output.request_id == name and output.token_ids for output in step.outputs)


@pytest.mark.parametrize("depth", [0, 1])
def test_chunked_prompts_prefix_hits_and_turns_change_nothing(depth: int) -> None:
    engine = engine_with(pipeline_depth=depth, max_num_seqs=2, max_active_seqs=6, max_num_batched_tokens=16)
    prompt = list(range(20, 60))
    for i in range(6):
        engine.add_request(constrained(f"c{i}", str(9 + i), prompt))
    transcript = run_to_end(engine)
    assert [transcript.tokens[f"c{i}"] for i in range(6)] == [digits(9 + i) for i in range(6)]
    assert sum(step.record.num_prefix_hit_tokens for step in transcript.steps) > 0


@pytest.mark.parametrize("depth", [0, 1])
def test_a_preempted_sequence_goes_on_where_it_was(depth: int) -> None:
    engine = engine_with(pipeline_depth=depth, num_blocks=17, max_model_len=128, prefix_caching=False)
    for i in range(4):
        engine.add_request(constrained(f"c{i}", "35", [7, i]))
    transcript = run_to_end(engine)
    assert sum(step.record.num_preemptions for step in transcript.steps) > 0
    assert all(transcript.tokens[f"c{i}"] == digits(35) for i in range(4))


@pytest.mark.parametrize("depth", [0, 1])
def test_an_aborted_sequence_leaves_nothing(depth: int) -> None:
    grammars = CountingGrammars(is_slow=True)
    engine = engine_with(grammars, pipeline_depth=depth)
    engine.add_request(constrained("waits", "7"))
    engine.abort("waits")
    assert all(future.cancelled() for future, _ in grammars.pending), "nothing is compiled for a request that has left"
    engine.add_request(constrained("runs", "30"))
    grammars.finish()
    transcript = Transcript()
    for _ in range(5):
        transcript.take(engine.step())
    engine.abort("runs")
    run_to_end(engine, transcript)
    assert transcript.reasons == {"waits": FinishReason.ABORT, "runs": FinishReason.ABORT}
    assert not engine.scheduler.kv_cache.table.constraints
    assert not len(engine.scheduler.compiling)


def test_no_other_sequence_waits_for_a_grammar_that_is_being_compiled() -> None:
    grammars = CountingGrammars(is_slow=True)
    engine = engine_with(grammars)
    engine.add_request(constrained("slow", "3"))
    engine.add_request(make_request("plain", [5, 6], max_tokens=6))
    transcript = Transcript()
    while "plain" not in transcript.reasons:
        assert transcript.take(engine.step()).record.num_waiting == 1
        assert_invariants(engine.scheduler)
    grammars.finish()
    run_to_end(engine, transcript)
    assert transcript.tokens["slow"] == digits(3)


def test_an_engine_with_nothing_but_a_slow_grammar_steps_idly_until_it_is_there() -> None:
    grammars = CountingGrammars(is_slow=True)
    engine = engine_with(grammars)
    engine.add_request(constrained("slow", "3"))
    assert engine.has_work
    assert engine.step().record.kind == "idle"
    grammars.finish()
    assert run_to_end(engine).tokens["slow"] == digits(3)


def test_what_does_not_compile_or_breaks_fails_alone() -> None:
    engine = engine_with()
    engine.add_request(constrained("bad", "bad"))
    engine.add_request(constrained("breaks", "4!"))  # after four tokens nothing is allowed
    engine.add_request(constrained("sound", "6"))
    transcript = run_to_end(engine)
    assert transcript.reasons == {
        "bad": FinishReason.ERROR,
        "breaks": FinishReason.ERROR,
        "sound": FinishReason.STOP,
    }
    told = {o.request_id: o.grammar_error for step in transcript.steps for o in step.outputs if o.finish_reason}
    assert told == {"bad": "ValueError: no grammar", "breaks": "no token is allowed", "sound": ""}
    assert transcript.tokens["bad"] == []
    assert transcript.tokens["breaks"] == digits(4)
    assert transcript.tokens["sound"] == digits(6)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize(("source", "error"), [("4!", "no token is allowed"), ("4?", "a limit")])
def test_a_token_that_ends_a_text_does_not_complete_one_that_cannot_go_on(source: str, error: str, depth: int) -> None:
    engine = engine_with(pipeline_depth=depth)
    engine.add_request(constrained("a", source, stop_token_ids=tuple({*range(VOCAB_SIZE)}.difference(digits(10)))))
    transcript = run_to_end(engine)
    assert (transcript.tokens["a"], transcript.reasons["a"]) == (digits(4), FinishReason.ERROR)
    assert [o.grammar_error for step in transcript.steps for o in step.outputs if o.finish_reason] == [error]


def test_an_engine_without_grammars_refuses_one_and_lives() -> None:
    engine = make_engine()
    engine.add_request(constrained("a", "3"))
    engine.add_request(make_request("plain", max_tokens=2))
    transcript = run_to_end(engine)
    assert transcript.reasons == {"a": FinishReason.ERROR, "plain": FinishReason.LENGTH}


def constraint_of(matcher: Matcher, **params: Any) -> Constraint:
    pending: Future[Matcher] = Future()
    pending.set_result(matcher)
    return Constraint(pending, SamplingParams(**params), (EOS,), VOCAB_SIZE)


def mask_of(constraint: Constraint, num_drafted: int = 0) -> set[int]:
    allowed = np.zeros(-(-VOCAB_SIZE // 32), np.uint32)
    constraint.fill(allowed, num_drafted)
    return {i for i in range(VOCAB_SIZE) if allowed[i // 32] >> (i % 32) & 1}


def first_mask_of(may: set[int], **params: object) -> set[int]:
    """What is left of a grammar's mask for a sequence that has said nothing yet."""

    class Fixed(Counting):
        def fill(self, allowed: MaskArray) -> None:
            allowed[:] = 0
            for token_id in may:
                self._allow(allowed, token_id)

    return mask_of(constraint_of(Fixed("9"), **params))


def test_ends_are_barred_as_long_as_the_text_can_go_on() -> None:
    assert first_mask_of({5, EOS}) == {5, EOS}
    assert first_mask_of({5, EOS}, min_tokens=1) == {5}
    assert first_mask_of({5, 6, EOS}, min_tokens=1, stop_token_ids=(6,)) == {5}
    assert first_mask_of({6, EOS}, min_tokens=1, stop_token_ids=(6,)) == {6, EOS}
    assert first_mask_of({5, EOS}, min_tokens=1, stop_token_ids=(32 * -(-VOCAB_SIZE // 32),)) == {5}, "no token"
    assert first_mask_of({5, EOS}, ignore_eos=True) == {5}
    assert first_mask_of({EOS}, ignore_eos=True) == {EOS}


def test_ends_are_barred_until_there_are_enough_tokens() -> None:
    constraint, may_end = constraint_of(Counting("9*"), min_tokens=2), []
    for token_id in digits(3):
        may_end.append(EOS in mask_of(constraint))
        constraint.accept(token_id)
    assert may_end == [False, False, True]


def test_a_look_ahead_shows_the_matcher_no_token_that_it_does_not_allow() -> None:
    """Its failure would discard the compiled grammar."""

    class Strict(Counting):
        def accept(self, token_id: int) -> None:
            super().accept(token_id)
            assert not self.has_failed

    assert constraint_of(Strict("9")).look_ahead([*digits(2), EOS, *digits(2)]) == 2


def test_a_look_ahead_counts_the_drafted_tokens() -> None:
    constraint = constraint_of(Counting("9*"), min_tokens=2)
    assert constraint.look_ahead(digits(4)) == 4
    assert [EOS in mask_of(constraint, behind) for behind in range(5)] == [False, False, True, True, True]


def test_a_look_ahead_ends_before_the_token_behind_which_the_matcher_fails() -> None:
    constraint = constraint_of(Counting("2?"))
    assert constraint.look_ahead(digits(4)) == 1
    assert not constraint.has_failed


@pytest.mark.parametrize("depth", [0, 1])
def test_the_end_token_ends_a_text_that_may_end(depth: int) -> None:
    engine = engine_with(pipeline_depth=depth)
    for i in range(8):
        engine.add_request(constrained(f"e{i}", "30*", [i + 1], temperature=1.0, seed=i))
        engine.add_request(constrained(f"m{i}", "30*", [i + 1], temperature=1.0, seed=i, min_tokens=12))
    transcript = run_to_end(engine)
    for name, tokens in transcript.tokens.items():
        text = tokens[:-1] if tokens[-1] == EOS else tokens
        assert text == digits(len(text))
        assert transcript.reasons[name] is FinishReason.STOP
        assert len(text) >= (12 if name.startswith("m") else 0)
    assert any(transcript.tokens[f"e{i}"][-1] == EOS for i in range(8))
