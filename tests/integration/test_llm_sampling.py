"""What `LLM` draws and how likely it was: seeds, and log-probabilities beside the tokens."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from roseinfer.llm import LLM
from roseinfer.messages import SamplingParams
from tests.integration.fake_llm import use_fake_engine, write_tokenizer


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
