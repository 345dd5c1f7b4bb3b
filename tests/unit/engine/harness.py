"""An engine without a model: the real scheduler over `FakeRunner`, and a way to run it to the end."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from roseinfer.config.options import CacheConfig, Config, SchedulerConfig
from roseinfer.engine.core.batch import ScheduledBatch
from roseinfer.engine.core.engine import Engine
from roseinfer.engine.core.scheduler import Scheduler
from roseinfer.engine.core.stopwatch import Phases
from roseinfer.engine.invariants import assert_invariants
from roseinfer.engine.pace import Pace
from roseinfer.engine.queue_estimate import QueueEstimate
from roseinfer.engine.speculation import Speculation
from roseinfer.messages import EngineInfo, PromptLogprobs, Request, SamplingParams, StepOutput, TokenLogprobs
from roseinfer.records import EngineTimes, FinishReason
from tests.fake_runner import FakeRunner

RecordBatches = Callable[[Engine], list[ScheduledBatch]]
VOCAB_SIZE = 97
EOS = 96


def roomy_estimate() -> QueueEstimate:
    """Of an engine with a place for each: no wait is predicted to be long."""
    return QueueEstimate(1 << 20)


def make_request(request_id: str, prompt: Iterable[int] = (1, 2, 3), salt: str = "", **params: Any) -> Request:
    return Request(
        request_id=request_id,
        prompt_token_ids=list(prompt),
        params=SamplingParams(**{"temperature": 0.0, "max_tokens": 4, "ignore_eos": True, **params}),
        cache_salt=salt,
    )


def make_engine(
    *,
    num_blocks: int = 64,
    block_size: Literal[8, 16] = 8,
    max_model_len: int = 128,
    vocab_size: int = VOCAB_SIZE,
    prefix_caching: bool = True,
    pipeline_depth: int = 0,
    repeats: bool = False,
    can_speculate: bool = False,
    **scheduler: Any,
) -> Engine:
    config = Config(
        scheduler=SchedulerConfig(**{"max_num_seqs": 8, "max_num_batched_tokens": 64, **scheduler}),
        cache=CacheConfig(block_size=block_size, prefix_caching=prefix_caching),
    )
    pace = Pace.of(config.scheduler, block_size, is_cpu=False)
    made = Scheduler(
        config.scheduler,
        config.cache,
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        eos_token_ids=(EOS,),
        pacer=pace,
        make_drafter=partial(Speculation, pace) if can_speculate else None,
    )
    num_slots = made.limits.max_active_seqs
    runner = FakeRunner(
        vocab_size=vocab_size, num_blocks=num_blocks, block_size=block_size, num_slots=num_slots, repeats=repeats
    )
    info = EngineInfo(
        checkpoint_dir="",
        model_type="fake",
        num_parameters=0,
        vocab_size=vocab_size,
        max_model_len=max_model_len,
        eos_token_ids=[EOS],
        device="cpu",
        dtype="float32",
        attention="fake",
        linear="fake",
        block_size=block_size,
        num_threads=1,
        num_blocks=num_blocks,
        startup_s={},
    )
    return Engine(made, runner, Phases(), info, pipeline_depth)


@dataclass
class Transcript:
    """What came out of an engine, by request id."""

    tokens: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    reasons: dict[str, FinishReason] = field(default_factory=dict)
    times: dict[str, EngineTimes] = field(default_factory=dict)  # of those that have ended
    steps: list[StepOutput] = field(default_factory=list)
    slots: dict[int, str] = field(default_factory=dict)  # of the requests that the columns tell of
    scores: dict[str, PromptLogprobs] = field(default_factory=dict)
    logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=lambda: defaultdict(list))

    def take(self, step: StepOutput) -> StepOutput:
        self.steps.append(step)
        for slot, token_id in step.tokens():
            assert self.slots[slot] not in self.reasons, "a token after the last output"
            self.tokens[self.slots[slot]].append(token_id)
        for output in step.outputs:
            assert output.request_id not in self.reasons, "an output after the last one"
            if output.prompt_logprobs is not None:
                assert not self.tokens[output.request_id], "a prompt is scored once, and told with the first token"
                self.scores[output.request_id] = output.prompt_logprobs
            self.tokens[output.request_id] += output.token_ids
            self.logprobs[output.request_id] += output.logprobs or []
            if output.slot is not None:
                self.slots[output.slot] = output.request_id
            if output.finish_reason is not None:
                self.reasons[output.request_id] = output.finish_reason
                assert output.times is not None
                self.times[output.request_id] = output.times
        return step


def run_to_end(engine: Engine, transcript: Transcript | None = None, max_steps: int = 10_000) -> Transcript:
    """Step until nothing is left to do, checking every invariant after each step."""
    transcript = transcript or Transcript()
    for _ in range(max_steps):
        if not engine.has_work:
            return transcript
        transcript.take(engine.step())
        assert_invariants(engine.scheduler)
    raise AssertionError(f"still busy after {max_steps} steps")


def run_alone(request: Request, **config: Any) -> list[int]:
    """The request's tokens when nothing else runs and nothing is cached."""
    return tell_alone(request, **config)[0]


def tell_alone(request: Request, **config: Any) -> tuple[list[int], PromptLogprobs | None]:
    """The same, and what its prompt was scored if it was asked for."""
    engine = make_engine(prefix_caching=False, **config)
    engine.add_request(request)
    transcript = run_to_end(engine)
    return transcript.tokens[request.request_id], transcript.scores.get(request.request_id)
