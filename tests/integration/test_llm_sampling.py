"""What `LLM` draws and how likely it was: seeds, and log-probabilities beside the tokens."""

from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from pathlib import Path

import msgspec
import pytest

from roseinfer.config.options import Config, ServerConfig
from roseinfer.engine.link.client import AsyncEngine
from roseinfer.llm.llm import LLM
from roseinfer.messages import Request, SamplingParams, TokenLogprobs, TokenOutput
from roseinfer.records import RequestTimeline
from tests.integration.fake_llm import expected_tokens, greedy, text_of, use_fake_engine, write_tokenizer


@pytest.fixture
def checkpoint(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    write_tokenizer(tmp_path)
    use_fake_engine(monkeypatch, tmp_path)
    return tmp_path


@pytest.fixture
def llm(checkpoint: Path) -> Iterator[LLM]:
    with LLM() as llm:
        yield llm


def drawn(llm: LLM, **params: int) -> list[list[int]]:
    """Tokens of five equal requests: three of one call, one of another, and one that was submitted."""
    asked = SamplingParams(max_tokens=20, ignore_eos=True, **params)  # type: ignore[arg-type]
    done = llm.generate(["Hello"] * 3, asked) + llm.generate("Hello", asked)
    return [completion.token_ids for completion in (*done, llm.result(llm.submit("Hello", asked)))]


def test_without_a_seed_each_request_is_drawn_anew(llm: LLM) -> None:
    tokens = drawn(llm)
    assert all(tokens.count(each) == 1 for each in tokens)
    without_params = [llm.result(llm.submit("Hello")).token_ids for _ in range(5)]
    assert len({tuple(each) for each in without_params}) > 1


def test_a_seed_gives_the_same_each_time_and_0_is_one(llm: LLM) -> None:
    by_seed = {seed: drawn(llm, seed=seed) for seed in (0, 7, 2**63 - 1)}
    for tokens in by_seed.values():
        assert tokens == tokens[:1] * 5
    assert len({tuple(tokens[0]) for tokens in by_seed.values()}) == 3


@pytest.mark.parametrize("stream_interval", [1, 4])
@pytest.mark.parametrize("num_logprobs", [None, 0, 3])
def test_log_probabilities_stand_beside_the_tokens(
    num_logprobs: int | None, stream_interval: int, checkpoint: Path
) -> None:
    params = greedy(11, num_logprobs=num_logprobs)
    with LLM(config=Config(server=ServerConfig(stream_interval=stream_interval))) as llm:
        for done in (*llm.generate(["Hello", "there"], params), llm.result(llm.submit("Hello", params))):
            if num_logprobs is None:
                assert done.logprobs is None
                continue
            assert done.logprobs is not None
            assert len(done.logprobs) == len(done.token_ids) == 11


def test_what_a_stop_string_cut_has_none(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine tells two tokens at a time, and may be ahead of the text."""
    generate = AsyncEngine.generate

    async def generate_in_pairs(
        engine: AsyncEngine, requests: Sequence[Request], timelines: Sequence[RequestTimeline], **how: bool
    ) -> AsyncGenerator[list[TokenOutput], None]:
        kept: TokenOutput | None = None
        async with aclosing(generate(engine, requests, timelines, **how)) as steps:
            async for outputs in steps:
                for output in outputs:
                    scored = [TokenLogprobs(-float(token_id), 1, [], []) for token_id in output.token_ids]
                    before = (kept.token_ids, kept.logprobs or []) if kept is not None else ([], [])
                    kept = msgspec.structs.replace(
                        output, token_ids=before[0] + output.token_ids, logprobs=before[1] + scored
                    )
                    if len(kept.token_ids) == 2 or kept.finish_reason is not None:
                        yield [kept]
                        kept = None

    monkeypatch.setattr(AsyncEngine, "generate", generate_in_pairs)
    text = text_of(expected_tokens(llm.encode("Hello"), 60))
    for end in (12, 13):  # one of them ends amid a pair
        [done] = llm.generate("Hello", greedy(60, num_logprobs=0), stop=text[10:end])
        assert done.logprobs is not None
        assert len(done.token_ids) < 60
        assert [scored.logprob for scored in done.logprobs] == [-token_id for token_id in done.token_ids]
