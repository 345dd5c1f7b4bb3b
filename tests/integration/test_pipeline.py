"""The same seeds give the same tokens: whatever the depth, the chunks, the cache, the pool and the company.

And prompts the same scores. The embedded model on this machine's processor, with whatever kernels it has, under the
real scheduler.
"""

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from transformers import AutoConfig, AutoModelForCausalLM

from roseinfer.config.options import DEMO_MODEL, CacheConfig, Config, ModelConfig, RunnerConfig, SchedulerConfig
from roseinfer.engine.core.constraint import Grammars
from roseinfer.engine.core.engine import Engine
from roseinfer.engine.core.scheduler import Scheduler
from roseinfer.engine.core.stopwatch import Phases
from roseinfer.engine.invariants import assert_invariants
from roseinfer.engine.pace import Pace
from roseinfer.engine.speculation import Speculation
from roseinfer.messages import Grammar, PromptLogprobs, Request, SamplingParams, Thought
from roseinfer.model.runner import ModelRunner, load_runner
from roseinfer.model.weights.checkpoint import resolve_checkpoint
from roseinfer.records import FinishReason
from roseinfer.text.grammar.compiler import GrammarCompiler, Vocabulary
from tests.unit.engine.harness import Transcript, run_to_end

NUM_SLOTS = 8
MAX_MODEL_LEN = 80
BLOCK_SIZE: Literal[8] = 8
NUM_BLOCKS = {"roomy": 128, "tight": 10}
SCHEMA = '{"type": "object", "properties": {"name": {"enum": ["one", "two"]}, "size": {"type": "integer"}}}'
THOUGHT = Thought("<think>", "</think>", is_open=True, max_tokens=5)


@dataclass(frozen=True)
class Loaded:
    """A runner, its traffic, and what each request generates alone."""

    runner: ModelRunner
    requests: list[Request]
    alone: dict[str, list[int]]
    scores: dict[str, PromptLogprobs]


def make_engine(
    runner: ModelRunner,
    *,
    depth: int = 0,
    budget: int = 512,
    prefix_caching: bool = False,
    pool: str = "roomy",
    speculation: int | Literal["off", "auto"] = "off",
    grammars: Grammars | None = None,
) -> Engine:
    config = SchedulerConfig(max_num_seqs=NUM_SLOTS, max_num_batched_tokens=budget, speculation=speculation)
    pace = Pace.of(config, BLOCK_SIZE, is_cpu=False)
    scheduler = Scheduler(
        config,
        CacheConfig(block_size=BLOCK_SIZE, prefix_caching=prefix_caching),
        num_blocks=NUM_BLOCKS[pool],
        max_model_len=MAX_MODEL_LEN,
        eos_token_ids=tuple(runner.info.eos_token_ids),
        grammars=grammars,
        pacer=pace,
        make_drafter=None if depth else partial(Speculation, pace),
    )
    return Engine(scheduler, runner, Phases(), runner.info, depth)


def make_requests(vocab_size: int) -> list[Request]:
    """Three prompts, two of which begin alike, each asked for several times.

    Greedy, sampled with two seeds, with penalties on what was said before, and with the prompt scored.
    """
    random = np.random.default_rng(5)
    shared = random.integers(1, vocab_size, 37).tolist()
    prompts = [
        [*shared, *random.integers(1, vocab_size, 9).tolist()],
        random.integers(1, vocab_size, 3).tolist(),
        [*shared, *random.integers(1, vocab_size, 2).tolist()],
    ]
    kinds = [
        SamplingParams(temperature=0.0),
        *(SamplingParams(temperature=0.9, top_p=0.95, seed=i) for i in (1, 2)),
        SamplingParams(temperature=0.0, frequency_penalty=0.4, presence_penalty=0.3, num_prompt_logprobs=3),
        SamplingParams(seed=3, repetition_penalty=1.2, logit_bias={11: 2.0, 12: -100.0}, num_prompt_logprobs=0),
    ]
    return [
        Request(
            request_id=f"r{i}-{j}",
            prompt_token_ids=prompt,
            params=replace(kind, max_tokens=24 - 4 * i, ignore_eos=i != 1, num_logprobs=1 if j == 2 else None),
        )
        for i, prompt in enumerate(prompts)
        for j, kind in enumerate(kinds)
    ]


def by_transformers(directory: Path) -> str:
    """A model that transformers' code computes, with windows, soft caps and the embedded model's vocabulary."""
    torch.manual_seed(0)
    demo = resolve_checkpoint(DEMO_MODEL)
    config = AutoConfig.for_model(
        "gemma2",
        vocab_size=json.loads((demo / "config.json").read_text())["vocab_size"],
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=24,
        initializer_range=0.2,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo / name, directory)
    return str(directory)


@pytest.fixture(scope="module", params=["float32", "bfloat16", "bfloat16, kv int8", "float32, by transformers"])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loaded]:
    num_threads = torch.get_num_threads()
    dtype, _, other = request.param.partition(", ")
    kv_dtype, path = other.removeprefix("kv "), DEMO_MODEL
    if other == "by transformers":
        kv_dtype, path = "auto", by_transformers(tmp_path_factory.mktemp("model"))
    config = Config(
        model=ModelConfig(path=path, dtype=dtype, max_model_len=MAX_MODEL_LEN),
        cache=CacheConfig(block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS["roomy"], dtype=kv_dtype or "auto"),
        runner=RunnerConfig(num_threads=1),
    )
    runner = load_runner(config, NUM_SLOTS, lambda *_: None)
    requests = make_requests(runner.vocab_size)
    alone: dict[str, list[int]] = {}
    scores: dict[str, PromptLogprobs] = {}
    for each in requests:
        engine = make_engine(runner)
        engine.add_request(each)
        transcript = run_to_end(engine)
        alone[each.request_id] = transcript.tokens[each.request_id]
        scores |= transcript.scores
    assert len(scores) == sum(each.params.num_prompt_logprobs is not None for each in requests)
    yield Loaded(runner, with_a_stop(requests, alone), alone, scores)
    torch.set_num_threads(num_threads)


def with_a_stop(requests: list[Request], alone: dict[str, list[int]]) -> list[Request]:
    """The same, but some end at a token that they are known to sample; `alone` is cut there too."""
    stopping = []
    for number, request in enumerate(requests):
        tokens = alone[request.request_id]
        if number % 3 == 1 and len(tokens) > 8:
            stop = tokens[8]
            alone[request.request_id] = tokens[: tokens.index(stop) + 1]
            stopping.append(replace(request, params=replace(request.params, stop_token_ids=(stop,))))
        else:
            stopping.append(request)
    return stopping


@pytest.mark.parametrize("pool", NUM_BLOCKS)
@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("budget", [512, 24])
@pytest.mark.parametrize("depth", [0, 1])
def test_the_same_seeds_give_the_same_tokens(
    loaded: Loaded, depth: int, budget: int, prefix_caching: bool, pool: str
) -> None:
    engine = make_engine(loaded.runner, depth=depth, budget=budget, prefix_caching=prefix_caching, pool=pool)
    random = np.random.default_rng(3)
    transcript = Transcript()
    engine.add_request(Request(request_id="gone", prompt_token_ids=[5] * 20, params=SamplingParams(max_tokens=60)))
    for number, request in enumerate(loaded.requests):
        engine.add_request(request)
        if number == 6:
            engine.abort("gone")
        for _ in range(int(random.integers(0, 4))):
            transcript.take(engine.step())
            assert_invariants(engine.scheduler)
    run_to_end(engine, transcript)
    assert transcript.reasons.pop("gone") is FinishReason.ABORT
    assert {name: tokens for name, tokens in transcript.tokens.items() if name != "gone"} == loaded.alone
    assert transcript.scores == loaded.scores, "bit for bit, in however many chunks a prompt was read"
    assert set(transcript.reasons.values()) >= {FinishReason.LENGTH, FinishReason.STOP}
    records = [step.record for step in transcript.steps]
    assert (sum(record.num_preemptions for record in records) > 0) == (pool == "tight")
    assert (sum(record.num_prefix_hit_tokens for record in records) > 0) == prefix_caching


@pytest.fixture(scope="module")
def grammars(loaded: Loaded) -> GrammarCompiler:
    info = loaded.runner.info
    return GrammarCompiler(Vocabulary.load(Path(info.checkpoint_dir), info.vocab_size, info.eos_token_ids))


def repeating_requests() -> list[Request]:
    """Prompts that say a sentence three times, for texts that go on repeating it for a while."""
    random = np.random.default_rng(7)
    sentences = [random.integers(1, 200, length).tolist() for length in (5, 9, 13)]
    kinds = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.3, seed=1),
        SamplingParams(temperature=0.8, top_k=4, seed=2, min_tokens=9),
        SamplingParams(temperature=0.0, logit_bias={11: 2.0}),
        SamplingParams(temperature=0.0, frequency_penalty=0.1),
        SamplingParams(temperature=0.8, seed=3, repetition_penalty=1.1, presence_penalty=0.2, logit_bias={12: 1.0}),
        SamplingParams(temperature=0.9, seed=4, min_tokens=6, grammar=Grammar("json_schema", SCHEMA)),
        SamplingParams(temperature=0.0, frequency_penalty=0.2, grammar=Grammar("regex", "(the same words, ){1,6}")),
        SamplingParams(temperature=0.0, grammar=Grammar("regex", "[a-z]+( again and again and [a-z]+)*", THOUGHT)),
    ]
    return [
        Request(
            request_id=f"r{i}-{j}",
            prompt_token_ids=3 * sentence,
            params=replace(kind, max_tokens=36, num_logprobs=2, ignore_eos=j % 2 == 0),
        )
        for i, sentence in enumerate(sentences)
        for j, kind in enumerate(kinds)
    ]


@pytest.mark.parametrize("pool", NUM_BLOCKS)
@pytest.mark.parametrize("speculation", ["auto", 1, 7])
def test_drafts_change_no_token_and_no_bit(
    loaded: Loaded, grammars: GrammarCompiler, speculation: int | Literal["auto"], pool: str
) -> None:
    """Tokens, log-probabilities and ends are those without drafts, alone and in company, with preemption and chunks."""
    found: list[Transcript] = []
    drafting: tuple[int | Literal["off", "auto"], ...] = ("off", speculation)
    for each in drafting:
        engine = make_engine(
            loaded.runner, budget=40, prefix_caching=True, pool=pool, speculation=each, grammars=grammars
        )
        random, transcript = np.random.default_rng(3), Transcript()
        for request in repeating_requests():
            engine.add_request(request)
            for _ in range(int(random.integers(0, 6))):
                transcript.take(engine.step())
        run_to_end(engine, transcript)
        found.append(transcript)
    off, on = found
    assert on.tokens == off.tokens
    assert on.logprobs == off.logprobs
    assert on.reasons == off.reasons
    records = [step.record for step in on.steps]
    num_drafted = sum(record.num_draft_tokens for record in records)
    num_accepted = sum(record.num_accepted_tokens for record in records)
    if speculation != "auto":  # whether it pays, the clock says
        assert 0 < num_accepted < num_drafted
    assert not any(step.record.num_draft_tokens for step in off.steps)
