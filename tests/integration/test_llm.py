"""`LLM` from the threads that use it: streams, results, aborts and stop strings."""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from roseinfer.bench.seeds.runs import StepLog
from roseinfer.config.options import Config, EngineConfig, ModelConfig, ServerConfig
from roseinfer.engine.link.client import AsyncEngine
from roseinfer.errors import (
    InvalidRequest,
    Overloaded,
    PromptTooLong,
    RequestError,
    UnknownRequest,
)
from roseinfer.llm.llm import LLM
from roseinfer.llm.streams import Stream
from roseinfer.messages import Grammar, Request, SamplingDefaults, SamplingParams
from roseinfer.records import FinishReason, RequestTimeline
from roseinfer.text.answers.reasoning import Thinking
from roseinfer.text.generation import Generation
from tests.integration.fake_llm import expected_tokens, greedy, text_of, until, use_fake_engine, write_tokenizer


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    write_tokenizer(tmp_path)
    return tmp_path


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch, checkpoint: Path) -> list[AsyncEngine]:
    return use_fake_engine(monkeypatch, checkpoint, latency_s=0.002)


@pytest.fixture
def log() -> StepLog:
    return StepLog()


@pytest.fixture
def llm(engines: list[AsyncEngine], log: StepLog) -> Iterator[LLM]:
    with LLM(observers=[log]) as llm:
        yield llm


def test_a_stream_is_the_text_of_the_engines_tokens(llm: LLM) -> None:
    prompt = llm.encode("Hello")
    tokens = expected_tokens(prompt, 20)
    assert "".join(llm.stream(llm.submit("Hello", greedy(20)))) == text_of(tokens)
    pieces = list(llm.stream_tokens(llm.submit(prompt, greedy(20))))
    assert [token for piece in pieces for token in piece] == tokens
    done = llm.result(llm.submit(prompt, greedy(20)))
    assert (done.text, done.token_ids, done.finish_reason) == (text_of(tokens), tokens, FinishReason.LENGTH)


def test_without_parameters_the_models_own_are_taken(
    llm: LLM, engines: list[AsyncEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[SamplingParams] = []
    generate = engines[0].generate

    def recording(requests: Sequence[Request], timelines: Sequence[RequestTimeline], **how: bool) -> object:
        taken.extend(msgspec.structs.replace(request.params, seed=None) for request in requests)
        return generate(requests, timelines, **how)

    monkeypatch.setattr(engines[0], "generate", recording)
    llm.info = msgspec.structs.replace(llm.info, sampling_defaults=SamplingDefaults(temperature=0.6, top_k=20))
    llm.generate(["Hello"])
    llm.generate(["Hello"], SamplingParams(temperature=0.5))
    assert taken == [SamplingParams(temperature=0.6, top_k=20), SamplingParams(temperature=0.5)]


@pytest.mark.parametrize("is_thinking", [True, False])
def test_a_chat_is_rendered_and_its_thoughts_are_apart(
    engines: list[AsyncEngine], checkpoint: Path, is_thinking: bool
) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ '<think>' if enable_thinking else '</think>' }}"
    write_tokenizer(checkpoint, chat_template=template)
    with LLM() as llm:
        thinking = Thinking("low" if is_thinking else "none")
        told = llm.chat([{"role": "user", "content": "Hello"}], greedy(20), thinking=thinking)
        expected = text_of(expected_tokens(llm.encode("Hello<think>" if is_thinking else "Hello</think>"), 20))
        assert (told.reasoning, told.text) == ((expected.strip(), "") if is_thinking else ("", expected))
        parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
        of_parts = llm.chat([{"role": "user", "content": parts}], greedy(20), thinking=thinking)
        assert of_parts.token_ids == told.token_ids, "this vocabulary has no token for the end of line between parts"
        image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]}
        for wrong, param in (
            ("Hello", "messages"),
            ([], "messages"),
            ([1], "messages[0]"),
            ([{"content": "Hello"}], "messages[0].role"),
            ([{"role": "user", "content": 5}], "messages[0].content"),
            ([image], "messages[0].content[0].type"),
        ):
            with pytest.raises(InvalidRequest) as refused:
                llm.chat(wrong)  # type: ignore[arg-type]
            assert refused.value.param == param
        wrong_thoughts: list[tuple[Any, str]] = [
            ("low", "thinking"),
            (Thinking("huge"), "thinking.effort"),  # type: ignore[arg-type]
            (Thinking("low", -1), "thinking.max_tokens"),
        ]
        for wrong_thinking, param in wrong_thoughts:
            with pytest.raises(InvalidRequest) as refused:
                llm.chat([{"role": "user", "content": "Hello"}], thinking=wrong_thinking)
            assert refused.value.param == param
        with pytest.raises(InvalidRequest, match="no such variable"):
            llm.chat([{"role": "user", "content": "Hello"}], variables={"colour": 1})
        with pytest.raises(InvalidRequest, match="grammar"):
            llm.chat([{"role": "user", "content": "Hello"}], greedy(5, grammar=Grammar("regex", "([")))


def test_generate_keeps_the_order_of_mixed_prompts(llm: LLM) -> None:
    prompts: list[str | list[int]] = ["one", [1, 2, 3], "a longer one " * 3, "one"]
    done = llm.generate(prompts, greedy(7))
    ids = [prompt if isinstance(prompt, list) else llm.encode(prompt) for prompt in prompts]
    assert [completion.token_ids for completion in done] == [expected_tokens(prompt, 7) for prompt in ids]
    assert [completion.timeline.num_prompt_tokens for completion in done] == [len(prompt) for prompt in ids]


def test_the_timeline_is_whole_and_in_order(llm: LLM) -> None:
    timeline = llm.result(llm.submit("Hello", greedy(5))).timeline
    stamps = [
        *(timeline.recv_ns, timeline.parsed_ns, timeline.tokenized_ns, timeline.inbox_ns, timeline.scheduled_ns),
        *(*timeline.token_ns, timeline.end_ns),
    ]
    assert len(timeline.token_ns) == 5
    assert stamps[0] > 0
    assert stamps == sorted(stamps)
    assert llm.timeline(timeline.request_id) is timeline


def test_the_stream_interval_groups_tokens_and_moves_no_stamp(engines: list[AsyncEngine]) -> None:
    with LLM(config=Config(server=ServerConfig(stream_interval=4))) as llm:
        request_id = llm.submit("Hello", greedy(11))
        assert [len(piece) for piece in llm.stream_tokens(request_id)] == [1, 4, 4, 2]
        timeline = llm.timeline(request_id)
        assert (len(timeline.token_ns), len(timeline.write_ns)) == (11, 4)


def test_a_stream_can_be_read_once(llm: LLM) -> None:
    request_id = llm.submit("Hello", greedy(2))
    assert "".join(llm.stream(request_id)) != ""
    for call in (llm.stream, llm.stream_tokens, llm.result):
        with pytest.raises(
            UnknownRequest, match=f"no request '{request_id}' here, or what it generated has been taken"
        ):
            call(request_id)
    assert llm.timeline(request_id).finish_reason is FinishReason.LENGTH


def test_leaving_a_stream_early_aborts_the_request(llm: LLM, engines: list[AsyncEngine], log: StepLog) -> None:
    request_id = llm.submit("Hello", greedy(110))
    with closing(llm.stream_tokens(request_id)) as pieces:  # type: ignore[type-var]
        assert next(iter(pieces))
    until(lambda: engines[0].num_unfinished == 0)
    timeline = llm.timeline(request_id)
    assert timeline.finish_reason is FinishReason.ABORT
    assert len(timeline.token_ns) < 110
    assert log.steps[-1].num_used_blocks == 0


def test_abort_ends_a_stream_without_a_reader(llm: LLM, engines: list[AsyncEngine]) -> None:
    ids = [llm.submit("Hello", greedy(100)) for _ in range(20)]
    for request_id in ids:
        llm.abort(request_id)
    until(lambda: engines[0].num_unfinished == 0)
    until(lambda: {llm.timeline(request_id).finish_reason for request_id in ids} == {FinishReason.ABORT})


def test_an_abort_may_come_before_the_engine_has_the_request(
    llm: LLM, engines: list[AsyncEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm._loop.post(time.sleep, 0.05)  # so that what follows comes in one turn of the loop
    request_id = llm.submit([1, 2], greedy(100))
    timeline = llm.timeline(request_id)
    llm.abort(request_id)
    until(lambda: timeline.end_ns > 0)
    assert (timeline.finish_reason, timeline.token_ns, timeline.inbox_ns) == (FinishReason.ABORT, [], 0)

    drive = LLM._drive

    async def abort_one_and_drive(llm: LLM, streams: Sequence[Stream], generation: Generation) -> None:
        llm._abort(streams[0])
        await drive(llm, streams, generation)

    monkeypatch.setattr(LLM, "_drive", abort_one_and_drive)
    done = llm.generate([[1], [2]], greedy(50))
    assert [completion.finish_reason for completion in done] == [FinishReason.ABORT, FinishReason.LENGTH]
    until(lambda: engines[0].num_unfinished == 0)


def test_a_stop_string_ends_the_text_before_it(llm: LLM, engines: list[AsyncEngine]) -> None:
    text = text_of(expected_tokens(llm.encode("Hello"), 60))
    stop = text[10:13]
    done = llm.result(llm.submit("Hello", greedy(60), stop=[stop]))
    assert done.text == text[: text.index(stop)]
    assert done.finish_reason is FinishReason.STOP
    until(lambda: engines[0].num_unfinished == 0)
    assert len(llm.timeline(done.timeline.request_id).token_ns) < 60


def test_a_stop_token_is_counted_and_not_shown(llm: LLM) -> None:
    tokens = expected_tokens(llm.encode("Hello"), 30)
    stop = next(token for token in tokens[5:] if token < 95)
    done = llm.result(llm.submit("Hello", greedy(30, stop_token_ids=(stop,))))
    end = tokens.index(stop)
    assert done.token_ids == tokens[: end + 1]
    assert done.text == text_of(tokens[:end])
    assert done.finish_reason is FinishReason.STOP


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "param", "error"),
    [
        ("", 1, "", InvalidRequest),
        ([], 1, "", InvalidRequest),
        ([1, 97], 1, "[1]", InvalidRequest),
        ([-1], 1, "[0]", InvalidRequest),
        ([2**40], 1, "[0]", InvalidRequest),
        ([1, 1.5], 1, "[1]", InvalidRequest),
        ([True], 1, "[0]", InvalidRequest),
        ("x" * 129, 1, "", PromptTooLong),
        (b"text", 1, "", InvalidRequest),
        (5, 1, "", InvalidRequest),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_prompt_that_cannot_run_is_refused(
    prompt: str | list[int], max_tokens: int, param: str, error: type[RequestError], llm: LLM
) -> None:
    with pytest.raises(error) as caught:
        llm.submit(prompt, greedy(max_tokens))
    assert caught.value.param == f"prompt{param}"
    with pytest.raises(error) as caught:
        llm.generate(["fine", prompt], greedy(max_tokens))
    assert caught.value.param == f"prompts[1]{param}"
    assert llm.result(llm.submit("x" * 100, greedy(28))).finish_reason is FinishReason.LENGTH


def test_a_limit_that_does_not_fit_is_named(llm: LLM) -> None:
    with pytest.raises(PromptTooLong) as caught:
        llm.submit("x" * 100, greedy(29))
    assert caught.value.param == "max_tokens"


def test_one_prompt_is_a_list_of_one(llm: LLM) -> None:
    [listed] = llm.generate(["Hello"], greedy(4))
    [[spelled], [as_ids]] = llm.generate("Hello", greedy(4)), llm.generate(llm.encode("Hello"), greedy(4))
    assert listed.token_ids == spelled.token_ids == as_ids.token_ids
    with pytest.raises(InvalidRequest) as caught:
        llm.generate(5, greedy(4))  # type: ignore[arg-type]
    assert caught.value.param == "prompts"


REJECTED: list[tuple[dict[str, object], str]] = [
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -3}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 5}, "min_tokens"),  # of 4
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": math.nan}, "temperature"),
    ({"temperature": math.inf}, "temperature"),
    ({"top_k": -1}, "top_k"),
    ({"top_p": -1.0}, "top_p"),
    ({"top_p": 0.0}, "top_p"),
    ({"min_p": 1.1}, "min_p"),
    ({"seed": -1}, "seed"),
    ({"seed": 2**63}, "seed"),
    ({"stop_token_ids": (1, 97)}, "stop_token_ids[1]"),
    ({"stop_token_ids": (-1,)}, "stop_token_ids[0]"),
    ({"stop_token_ids": (1,) * 65}, "stop_token_ids"),
    ({"num_logprobs": 21}, "num_logprobs"),
    ({"ignore_eos": 1}, "ignore_eos"),
]


@pytest.mark.parametrize(("wrong", "param"), REJECTED, ids=str)
def test_params_that_cannot_run_are_refused_and_the_engine_lives(
    wrong: dict[str, object], param: str, engines: list[AsyncEngine]
) -> None:
    params = SamplingParams(**{"max_tokens": 4, **wrong})  # type: ignore[arg-type]
    with LLM(tokenize_workers=1) as llm:
        for call in (
            lambda: llm.submit([1], params),
            lambda: llm.generate(["a"], params),
            lambda: llm.result(llm.submit("tokenised on the loop", params)),
        ):
            with pytest.raises(InvalidRequest) as caught:
                call()
            assert caught.value.param == param
            assert caught.value.message.endswith(".")
        assert engines[0].trouble is None
        assert len(llm.result(llm.submit("Hello", greedy(4))).token_ids) == 4


def test_a_salt_that_could_not_go_over_is_refused_with_its_name(llm: LLM, log: StepLog) -> None:
    for begin in (llm.submit, llm.generate):
        with pytest.raises(InvalidRequest, match="`cache_salt` holds a lone surrogate") as caught:
            begin("Hello", greedy(2), cache_salt="\ud800")
        assert caught.value.param == "cache_salt"
    assert log.steps == []
    assert len(llm.result(llm.submit("Hello", greedy(2), cache_salt="é")).token_ids) == 2


@pytest.mark.parametrize(
    ("grammar", "told"),
    [
        (Grammar("regex", "([)"), "The regular expression cannot be used: unclosed character class"),
        (Grammar("regex", "a" * 10_000), "is 10000 bytes long"),
        (Grammar("json_schema", '{"items":' * 70 + "{}" + "}" * 70), "nested more than 64 deep"),
    ],
    ids=["bad", "long", "nested"],
)
def test_a_grammar_that_cannot_be_used_is_refused_before_the_engine_hears_of_it(
    llm: LLM, log: StepLog, grammar: Grammar, told: str
) -> None:
    for begin in (llm.submit, lambda prompt, params: llm.generate([prompt], params)):
        with pytest.raises(InvalidRequest, match=told) as caught:
            begin("Hello", greedy(2, grammar=grammar))
        assert caught.value.param == "grammar"
    assert log.steps == []


def test_a_grammar_of_no_kind_is_refused_with_its_field(llm: LLM) -> None:
    for wrong, param in ((Grammar("rhyme", "a"), "grammar.kind"), ("a+", "grammar")):  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest) as caught:
            llm.submit("Hello", greedy(2, grammar=wrong))
        assert caught.value.param == param


def test_stop_is_a_text_or_several(llm: LLM) -> None:
    text = text_of(expected_tokens(llm.encode("Hello"), 60))
    stop = text[10:13]
    for given in (stop, [stop], ("never to be seen", stop)):
        [done] = llm.generate(["Hello"], greedy(60), stop=given)
        assert done.text == text[: text.index(stop)]
    with pytest.raises(InvalidRequest, match="empty"):
        llm.submit("Hello", greedy(1), stop="")


def test_tokenize_workers_take_encoding_off_the_caller(engines: list[AsyncEngine]) -> None:
    with LLM(tokenize_workers=2) as llm:
        ids = [llm.submit("Hello", greedy(5)) for _ in range(8)]
        tokens = expected_tokens(llm.encode("Hello"), 5)
        assert [llm.result(request_id).token_ids for request_id in ids] == [tokens] * 8
        refused = llm.submit("x" * 200, greedy(5))
        with pytest.raises(PromptTooLong):
            llm.result(refused)
        assert llm.timeline(refused).finish_reason is FinishReason.REJECTED


def test_max_inflight_refuses_and_places_come_back(engines: list[AsyncEngine]) -> None:
    with LLM(max_inflight=2) as llm:
        for _ in range(2):
            ids = [llm.submit("Hello", greedy(50)) for _ in range(2)]
            with pytest.raises(Overloaded):
                llm.submit("Hello", greedy(1))
            llm.generate(["takes", "no", "place"], greedy(2))  # so it has none to give back
            with pytest.raises(PromptTooLong):
                llm.generate(["x" * 200], greedy(1))
            with pytest.raises(Overloaded):
                llm.submit("Hello", greedy(1))
            for request_id in ids:
                llm.result(request_id)
            with pytest.raises(PromptTooLong):
                llm.submit("x" * 200, greedy(1))  # takes no place for good
        assert [llm.result(llm.submit("Hello", greedy(1))).token_ids for _ in range(3)]


def test_prefixes_are_shared_within_a_salt_only(llm: LLM) -> None:
    prompt = "a shared beginning of forty characters!!"
    cached = [
        llm.result(llm.submit(prompt, greedy(2), cache_salt=salt)).timeline.num_cached_tokens
        for salt in ("a", "a", "b")
    ]
    assert cached[0] == cached[2] == 0
    assert cached[1] > 0


def test_the_engine_config_and_the_model_reach_the_client(engines: list[AsyncEngine]) -> None:
    config = Config(model=ModelConfig(path="x", dtype="float32"), engine=EngineConfig(step_timeout_s=3))
    with LLM("openai-community/gpt2", config=config) as llm:
        assert llm.config.model == ModelConfig(path="openai-community/gpt2", dtype="float32")
        assert llm.config.engine.step_timeout_s == 3
        assert engines[0]._step_timeout_ns == 3_000_000_000
    with LLM(config=config) as llm:
        assert llm.config == config
