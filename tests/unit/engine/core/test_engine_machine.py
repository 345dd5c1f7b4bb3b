"""Random life of an engine: whatever is asked, in whatever order, nothing is lost and every promise holds.

The tokens must be those of the request run alone, and that one is run without a pipeline: so depths agree too.
"""

from typing import Any

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from roseinfer.engine.invariants import assert_invariants
from roseinfer.messages import PromptLogprobs, Request
from roseinfer.records import FinishReason
from tests.unit.engine.harness import Transcript, make_engine, make_request, run_to_end, tell_alone

CONFIGS: list[dict[str, Any]] = [
    {},
    {"num_blocks": 17, "max_model_len": 128},  # one long sequence fills it: preemption
    {"max_num_seqs": 2, "max_prefill_seqs": 6, "max_prefill_tokens": 5},
    {"admission": "pack", "fifo_every": 3, "lookahead": 4, "num_blocks": 24},
    {"prefix_caching": False, "num_blocks": 18, "max_num_batched_tokens": 24},
    {"max_num_seqs": 3, "max_prefill_seqs": 2},
]


class EngineMachine(RuleBasedStateMachine):
    """Adds, aborts and steps at random; the end of each run checks tokens, reasons and blocks."""

    @initialize(config=st.sampled_from(CONFIGS), depth=st.sampled_from([0, 1]))
    def start(self, config: dict[str, Any], depth: int) -> None:
        self.engine = make_engine(pipeline_depth=depth, **config)
        self.transcript = Transcript()
        self.requests: dict[str, Request] = {}
        self.aborted: set[str] = set()
        self.alone: dict[bytes, tuple[list[int], PromptLogprobs | None]] = {}

    @rule(
        copies=st.integers(1, 3),
        shared=st.integers(0, 30),
        own=st.lists(st.integers(1, 5), min_size=1, max_size=30),
        max_tokens=st.integers(1, 40),
        seed=st.integers(0, 3),
        salt=st.sampled_from(["", "", "tenant"]),
        extra=st.sampled_from(
            [{}, {}, {"frequency_penalty": 0.5}, {"num_prompt_logprobs": 0}, {"num_prompt_logprobs": 2}]
        ),
    )
    def add(
        self, copies: int, shared: int, own: list[int], max_tokens: int, seed: int, salt: str, extra: dict[str, Any]
    ) -> None:
        for _ in range(copies):
            request = make_request(
                f"r{len(self.requests)}",
                [*range(10, 10 + shared), *own],
                salt,
                max_tokens=max_tokens,
                temperature=1.0 if seed else 0.0,
                seed=seed,
                ignore_eos=bool(seed % 2),
                stop_token_ids=(7, 8, 9) if seed == 2 else (),
                min_tokens=3 if seed == 2 and max_tokens >= 3 else 0,
                **extra,
            )
            self.requests[request.request_id] = request
            self.engine.add_request(request)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.requests)))
        if request_id not in self.transcript.reasons:
            self.aborted.add(request_id)
        self.engine.abort(request_id)

    @rule(count=st.integers(1, 12))
    def step(self, count: int) -> None:
        for _ in range(count):
            if self.engine.has_work:
                self.transcript.take(self.engine.step())
                assert_invariants(self.engine.scheduler)

    @invariant()
    def sound(self) -> None:
        assert_invariants(self.engine.scheduler)

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        run_to_end(self.engine, self.transcript)
        assert self.transcript.reasons.keys() == self.requests.keys(), "not exactly one end for each request"
        for request_id, request in self.requests.items():
            expected, scores = self.run_alone(request)
            if self.transcript.tokens[request_id]:
                assert self.transcript.scores.get(request_id) == scores
            if request_id in self.aborted:
                assert self.transcript.reasons[request_id] is FinishReason.ABORT
                expected = expected[: len(self.transcript.tokens[request_id])]
            assert self.transcript.tokens[request_id] == expected
        pool = self.engine.scheduler.kv_cache.pool
        assert pool.num_used == 0
        assert self.engine.scheduler.kv_cache.prefix_cache.num_pending == 0
        for request_id, each in self.transcript.times.items():
            assert bool(each.preempted_ns) == bool(each.num_preemptions) >= bool(each.resumed_ns)
            assert each.resumed_ns >= each.preempted_ns or request_id in self.aborted
        records, times = [step.record for step in self.transcript.steps], self.transcript.times.values()
        assert self.engine.scheduler.num_added == len(self.requests)
        assert sum(each.num_generated_tokens for each in records) == sum(map(len, self.transcript.tokens.values()))
        assert sum(each.num_finished for each in records) == len(self.requests)
        assert sum(each.num_preemptions for each in records) == sum(each.num_preemptions for each in times)
        assert sum(each.num_prefix_hit_tokens for each in records) == sum(each.num_cached_tokens for each in times)

    def run_alone(self, request: Request) -> tuple[list[int], PromptLogprobs | None]:
        """As the harness's, once for equal requests."""
        key = msgspec.json.encode(msgspec.structs.replace(request, request_id=""))
        if key not in self.alone:
            self.alone[key] = tell_alone(request)
        return self.alone[key]


EngineMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestEngine = EngineMachine.TestCase
