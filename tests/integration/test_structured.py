"""The embedded model under the real library of grammars: whatever the schema, seed and schedule, the JSON is valid."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jsonschema_rs
import pytest
import torch
from msgspec.structs import replace

from roseinfer.config.options import CacheConfig, Config, ModelConfig, RunnerConfig, SchedulerConfig
from roseinfer.engine.core.engine import Engine
from roseinfer.engine.core.scheduler import Scheduler
from roseinfer.engine.core.stopwatch import Phases
from roseinfer.messages import Grammar, Request, SamplingParams, Thought
from roseinfer.model.runner import ModelRunner, load_runner
from roseinfer.records import FinishReason
from roseinfer.text.grammar.compiler import GrammarCompiler, Vocabulary
from roseinfer.text.tokenizer.tokenizer import Tokenizer
from tests.unit.engine.harness import Transcript, run_to_end

BLOCK_SIZE: Literal[8] = 8
MAX_MODEL_LEN = 112
NUM_SLOTS = 8
THOUGHT_TOKENS = 9
THOUGHT = Thought("<think>", "</think>", is_open=True, max_tokens=THOUGHT_TOKENS)

SHORT = {"type": "string", "maxLength": 12}
SCHEMAS: Mapping[str, dict[str, Any]] = {
    "const": {"const": {"a": [1, None]}},
    "enum": {"enum": ["red", 7, None, True]},
    "integer": {"type": "integer", "minimum": -20, "maximum": 4000},
    "number": {"type": "number", "multipleOf": 0.25, "minimum": 0, "maximum": 1},
    "string": SHORT,
    "pattern": {"type": "string", "pattern": "^[a-z]{2,6}-[0-9]{3}$"},
    "date": {"type": "string", "format": "date"},
    "list": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 5},
    "tuple": {"type": "array", "prefixItems": [{"type": "integer"}, SHORT], "items": False, "minItems": 2},
    "object": {
        "type": "object",
        "properties": {
            "name": SHORT,
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "ok": {"type": "boolean"},
        },
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    "any of": {"anyOf": [{"type": "null"}, {"type": "array", "items": {"enum": ["x", "y"]}, "maxItems": 3}]},
    "one of": {"oneOf": [{"type": "integer", "minimum": 1, "maximum": 9}, {"const": "none"}]},
    "references": {
        "$ref": "#/$defs/pair",
        "$defs": {
            "leaf": {"enum": [0, 1]},
            "pair": {"type": "array", "prefixItems": [{"$ref": "#/$defs/leaf"}] * 2, "items": False, "minItems": 2},
        },
    },
    "nested": {
        "type": "object",
        "properties": {"a": {"type": "object", "properties": {"b": {"enum": ["é", "日本", "\n"]}}, "required": ["b"]}},
        "required": ["a"],
        "additionalProperties": False,
    },
}
SCHEMAS["nested"]["properties"]["a"]["additionalProperties"] = False


@dataclass(frozen=True)
class Loaded:
    """A runner, its vocabulary and how it compiles."""

    runner: ModelRunner
    tokenizer: Tokenizer
    grammars: GrammarCompiler

    def engine(
        self, *, depth: int = 0, num_blocks: int = 200, budget: int = 256, prefix_caching: bool = True
    ) -> Engine:
        info = self.runner.info
        scheduler = Scheduler(
            SchedulerConfig(max_num_seqs=NUM_SLOTS, max_num_batched_tokens=budget),
            CacheConfig(block_size=BLOCK_SIZE, prefix_caching=prefix_caching),
            num_blocks=num_blocks,
            max_model_len=MAX_MODEL_LEN,
            eos_token_ids=tuple(info.eos_token_ids),
            grammars=self.grammars,
        )
        return Engine(scheduler, self.runner, Phases(), info, depth)

    def text(self, token_ids: list[int]) -> str:
        return b"".join(map(self.tokenizer.text_bytes, token_ids)).decode()


@pytest.fixture(scope="module")
def loaded() -> Iterator[Loaded]:
    num_threads = torch.get_num_threads()
    config = Config(
        model=ModelConfig(max_model_len=MAX_MODEL_LEN),
        cache=CacheConfig(block_size=BLOCK_SIZE, num_blocks=200),
        runner=RunnerConfig(num_threads=1),
    )
    runner = load_runner(config, NUM_SLOTS, lambda *_: None)
    directory = Path(runner.info.checkpoint_dir)
    vocabulary = Vocabulary.load(directory, runner.info.vocab_size, runner.info.eos_token_ids)
    yield Loaded(runner, Tokenizer.load(directory), GrammarCompiler(vocabulary, 8 << 20))
    torch.set_num_threads(num_threads)


def requests(loaded: Loaded) -> list[Request]:
    """Each schema greedily and with two seeds, and once behind a thought, after prompts that begin alike."""
    [prompt] = [loaded.tokenizer._inner.encode("Write a value of the config as JSON: ").ids]
    kinds = [
        SamplingParams(temperature=0.0),
        SamplingParams(seed=1),
        SamplingParams(temperature=1.4, top_p=0.9, seed=2),
        SamplingParams(seed=3),
    ]
    return [
        Request(
            request_id=f"{name}/{i}",
            prompt_token_ids=[*prompt, *range(200, 200 + i)],
            params=replace(
                kind,
                max_tokens=90,
                num_logprobs=1 if i == 1 else None,
                min_tokens=3 * (i == 2),
                grammar=Grammar("json_schema", json.dumps(schema), THOUGHT if i == 3 else None),
            ),
        )
        for name, schema in SCHEMAS.items()
        for i, kind in enumerate(kinds)
    ]


def run(engine: Engine, asked: list[Request], *, together: bool = False) -> Transcript:
    """`together`: all grammars are compiled before the first step, however busy the machine is."""
    for request in asked:
        engine.add_request(request)
    for sequence in engine.scheduler.compiling if together else ():
        assert sequence.constraint is not None
        sequence.constraint.pending.result()
    return run_to_end(engine)


@pytest.fixture(scope="module")
def expected(loaded: Loaded) -> dict[str, list[int]]:
    """Every request's tokens when nothing else runs."""
    alone: dict[str, list[int]] = {}
    for request in requests(loaded):
        alone |= run(loaded.engine(prefix_caching=False), [request]).tokens
    return alone


def test_every_text_is_valid_by_its_schema(loaded: Loaded, expected: dict[str, list[int]]) -> None:
    eos = set(loaded.runner.info.eos_token_ids)
    for name, tokens in expected.items():
        text = loaded.text([token for token in tokens if token not in eos])
        schema, _, kind = name.partition("/")
        if kind == "3":
            thought, _, text = text.partition(THOUGHT.closing)
            assert thought.strip()
            assert THOUGHT.closing in loaded.text(tokens[: THOUGHT_TOKENS + len(THOUGHT.closing)])
        assert jsonschema_rs.is_valid(SCHEMAS[schema], json.loads(text), validate_formats=True), (name, text)
    assert len({tuple(tokens) for name, tokens in expected.items() if name.startswith("object")}) == 4


@pytest.mark.parametrize(
    ("depth", "num_blocks", "budget", "prefix_caching"),
    [(0, 200, 256, True), (1, 200, 256, True), (0, 14, 64, False), (1, 14, 64, False)],
)
def test_no_schedule_changes_a_token(
    loaded: Loaded,
    expected: dict[str, list[int]],
    depth: int,
    num_blocks: int,
    budget: int,
    prefix_caching: bool,
) -> None:
    engine = loaded.engine(depth=depth, num_blocks=num_blocks, budget=budget, prefix_caching=prefix_caching)
    is_short_of_blocks, asked = num_blocks == 14, requests(loaded)
    if is_short_of_blocks:  # the longest beside each other
        asked.sort(key=lambda request: -len(expected[request.request_id]))
    transcript = run(engine, asked, together=is_short_of_blocks)
    assert transcript.tokens == expected
    assert set(transcript.reasons.values()) == {FinishReason.STOP}
    if is_short_of_blocks:
        assert sum(step.record.num_preemptions for step in transcript.steps) > 0


def test_a_text_that_max_tokens_cuts_says_so_and_is_a_beginning(loaded: Loaded) -> None:
    grammar = Grammar("json_schema", json.dumps({"type": "array", "items": SHORT, "minItems": 40}))
    params = SamplingParams(max_tokens=30, seed=3, grammar=grammar)
    transcript = run(loaded.engine(), [Request(request_id="long", prompt_token_ids=[5, 6, 7], params=params)])
    assert transcript.reasons == {"long": FinishReason.LENGTH}
    assert len(transcript.tokens["long"]) == 30
    assert loaded.text(transcript.tokens["long"]).startswith('["')


def test_a_limit_that_is_met_deep_in_a_text_fails_it_alone_and_says_why(loaded: Loaded) -> None:
    """Deeper than a grammar is followed before it is said to be usable: behind a few brackets that must come."""
    deep: dict[str, Any] = {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(600)}}
    for _ in range(8):
        deep = {"type": "object", "properties": {"a": deep}, "required": ["a"], "additionalProperties": False}
    asked = [
        Request(
            request_id=name,
            prompt_token_ids=[5, 6, 7],
            params=SamplingParams(max_tokens=90, seed=1, grammar=Grammar("json_schema", json.dumps(schema))),
        )
        for name, schema in (("deep", deep), ("sound", SCHEMAS["integer"]))
    ]
    transcript = run(loaded.engine(), asked)
    assert transcript.reasons == {"deep": FinishReason.ERROR, "sound": FinishReason.STOP}
    errors = {o.request_id: o.grammar_error for step in transcript.steps for o in step.outputs if o.finish_reason}
    assert (errors["sound"], "Current row has 2407 items" in errors["deep"]) == ("", True), errors


def test_an_expression_is_matched_from_end_to_end(loaded: Loaded) -> None:
    pattern = "(ab|cd){2,5}[0-9]{1,3}"
    asked = [
        Request(
            request_id=str(seed),
            prompt_token_ids=[5, 6, 7],
            params=SamplingParams(max_tokens=40, seed=seed, grammar=Grammar("regex", pattern)),
        )
        for seed in range(12)
    ]
    transcript = run(loaded.engine(), asked)
    eos = set(loaded.runner.info.eos_token_ids)
    texts = {loaded.text([t for t in tokens if t not in eos]) for tokens in transcript.tokens.values()}
    assert all(re.fullmatch(pattern, text) for text in texts)
    assert len(texts) > 3
