"""Whatever a program gives `LLM` that cannot be used, it is told which argument it was; the engine hears nothing."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from roseinfer.bench.seeds.runs import StepLog
from roseinfer.errors import ConfigError, InvalidRequest, UnknownRequest
from roseinfer.llm.llm import LLM
from roseinfer.messages import Grammar, SamplingParams
from tests.integration.fake_llm import greedy, use_fake_engine, write_tokenizer

NO_VALUE: Any = object()
HALF = "a\ud800"  # half of a character


@pytest.fixture
def log() -> StepLog:
    return StepLog()


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, log: StepLog) -> Iterator[LLM]:
    write_tokenizer(tmp_path)
    use_fake_engine(monkeypatch, tmp_path)
    with LLM(observers=[log]) as llm:
        yield llm
        assert log.steps == [], "the engine was given something"


def refused(call: Callable[[], object]) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        call()
    assert f"`{caught.value.param}`" in caught.value.message
    assert caught.value.message.endswith(".")
    return caught.value


@pytest.mark.parametrize(
    ("arguments", "param"),
    [
        ({"params": {"max_tokens": 3}}, "params"),
        ({"params": SamplingParams}, "params"),
        ({"params": 5}, "params"),
        ({"params": SamplingParams(num_prompt_logprobs=1)}, "num_prompt_logprobs"),
        ({"params": SamplingParams(temperature=10**400)}, "temperature"),
        ({"params": SamplingParams(temperature=math.nan)}, "temperature"),
        ({"params": SamplingParams(repetition_penalty=1e-39)}, "repetition_penalty"),
        ({"params": SamplingParams(repetition_penalty=5e-324)}, "repetition_penalty"),
        ({"params": SamplingParams(frequency_penalty=math.nan)}, "frequency_penalty"),
        ({"params": SamplingParams(logit_bias={5: math.inf})}, "logit_bias.5"),
        ({"params": SamplingParams(max_tokens=2**70)}, "max_tokens"),
        ({"params": SamplingParams(logit_bias={2**70: 1.0})}, "logit_bias"),
        ({"params": SamplingParams(logit_bias={97: 1.0})}, "logit_bias"),
        ({"params": SamplingParams(grammar=Grammar(HALF, "a"))}, "grammar.kind"),  # type: ignore[arg-type]
        ({"params": SamplingParams(grammar=Grammar([], "a"))}, "grammar.kind"),  # type: ignore[arg-type]
        ({"params": SamplingParams(grammar=Grammar("regex", 5))}, "grammar.source"),  # type: ignore[arg-type]
        ({"params": SamplingParams(grammar=Grammar("regex", HALF))}, "grammar"),
        ({"params": SamplingParams(grammar=Grammar("choice", f'["{HALF}"]'))}, "grammar"),
        ({"stop": 5}, "stop"),
        ({"stop": None}, "stop"),
        ({"stop": ["a", 5]}, "stop[1]"),
        ({"stop": HALF}, "stop"),
        ({"cache_salt": 5}, "cache_salt"),
        ({"cache_salt": None}, "cache_salt"),
        ({"cache_salt": b"a"}, "cache_salt"),
        ({"cache_salt": HALF}, "cache_salt"),
    ],
    ids=ascii,
)
def test_an_argument_that_cannot_be_used_is_named(arguments: dict[str, Any], param: str, llm: LLM) -> None:
    assert refused(lambda: llm.submit("Hello", **arguments)).param == param
    assert refused(lambda: llm.submit([1, 2], **arguments)).param == param
    assert refused(lambda: llm.generate(["Hello", "there"], **arguments)).param == param


@pytest.mark.parametrize("field", SamplingParams.__struct_fields__)
def test_every_parameter_of_a_wrong_type_is_named(field: str, llm: LLM) -> None:
    params = SamplingParams(**{field: NO_VALUE})
    for given in ([1, 2], "Hello"):
        assert refused(lambda given=given: llm.submit(given, params)).param == field  # type: ignore[misc]


def test_prompts_are_named_with_their_place(llm: LLM) -> None:
    for wrong in (HALF, {"text": "a"}, {5}, NO_VALUE, None):
        assert refused(lambda wrong=wrong: llm.submit(wrong)).param == "prompt"  # type: ignore[misc]
        assert refused(lambda wrong=wrong: llm.generate(["a", wrong])).param == "prompts[1]"  # type: ignore[misc]
    for none_at_all in ({"text": "a"}, {5}, NO_VALUE, None):
        assert refused(lambda given=none_at_all: llm.generate(given)).param == "prompts"  # type: ignore[misc]


def test_a_text_to_encode_is_one(llm: LLM) -> None:
    for wrong in (5, None, b"a", HALF):
        assert refused(lambda wrong=wrong: llm.encode(wrong)).param == "text"  # type: ignore[misc]
    wrong_flag: Any = "no"
    assert refused(lambda: llm.encode("a", add_special_tokens=wrong_flag)).param == "add_special_tokens"


@pytest.mark.parametrize("variables", [{"misspelt": 1}, {"misspelt": NO_VALUE}], ids=["json", "object"])
def test_a_variable_of_the_template_is_named(variables: dict[str, Any], llm: LLM) -> None:
    messages = [{"role": "user", "content": "a"}]
    assert refused(lambda: llm.chat(messages, variables=variables)).param == "variables.misspelt"


def test_an_unknown_request_id_is_refused(llm: LLM) -> None:
    no_ids: list[Any] = [5, None, []]
    for call in (llm.stream, llm.stream_tokens, llm.result, llm.timeline):
        with pytest.raises(UnknownRequest, match="'nobody'"):
            call("nobody")
        for wrong in no_ids:
            assert refused(lambda call=call, wrong=wrong: call(wrong)).param == "request_id"  # type: ignore[misc]
    llm.abort("nobody")
    assert refused(lambda: llm.abort([])).param == "request_id"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "param"),
    [
        ({"model": 5}, "model.path"),
        ({"config": {}}, "config"),
        ({"config": {"model": {}}}, "config"),
        ({"observers": 5}, "observers"),
        ({"observers": [5]}, "observers"),
        ({"on_progress": 5}, "on_progress"),
        ({"tokenize_workers": -1}, "tokenize_workers"),
        ({"tokenize_workers": 1.5}, "tokenize_workers"),
        ({"max_inflight": 0}, "max_inflight"),
        ({"max_inflight": "5"}, "max_inflight"),
    ],
    ids=str,
)
def test_what_it_cannot_be_started_with_is_named(arguments: dict[str, Any], param: str) -> None:
    with pytest.raises(ConfigError) as caught:
        LLM(**arguments)
    assert caught.value.param == param
    assert str(caught.value).startswith(f"{param}: ")
    assert f"`{param}`" not in str(caught.value)


def test_what_fits_still_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    use_fake_engine(monkeypatch, tmp_path)
    params = greedy(2, stop_token_ids=[1, 2], logit_bias={5: 1}, seed=2**63 - 1, num_logprobs=3)
    with LLM(observers=(), max_inflight=1) as llm:
        [done] = llm.generate("Hello", params, stop=("é",), cache_salt="é")
    assert done.token_ids
