"""Workloads: as many requests and tokens as their table says, new in each repeat, the same for every entrant."""

from pathlib import Path

import pytest

from benchmarks.workloads import WORKLOADS, Words, requests_of

DEMO_TOKENIZER = Path(__file__).parents[2] / "src" / "roseinfer" / "demo" / "tokenizer.json"


@pytest.fixture(scope="module")
def words() -> Words:
    return Words(DEMO_TOKENIZER)


@pytest.mark.parametrize("name", WORKLOADS)
def test_lengths_are_exact(name: str, words: Words) -> None:
    shape = WORKLOADS[name]
    requests = requests_of(name, words, repeat=0)
    assert len(requests) == shape.num_requests
    assert [len(request.token_ids) for request in requests[:4]] == [
        shape.prompt_lengths[i % len(shape.prompt_lengths)] for i in range(min(4, shape.num_requests))
    ]
    assert {request.new_tokens for request in requests} == {shape.new_tokens}
    assert requests[-1].at == pytest.approx((shape.num_requests - 1) * shape.interval_s)
    assert all(words.encode(request.text) == request.token_ids for request in requests[:2])


def test_a_repeat_is_new_and_can_be_repeated(words: Words) -> None:
    first = requests_of("W4", words, repeat=0)
    assert requests_of("W4", words, repeat=0) == first
    others = {request.text for request in requests_of("W4", words, repeat=1)}
    assert others.isdisjoint({request.text for request in first})


def test_only_w4b_shares_a_prefix(words: Words) -> None:
    one, other, *_ = (request.token_ids for request in requests_of("W4b", words, repeat=0))
    assert one[:448] == other[:448]
    assert one[448:] != other[448:]
    [again, *_] = requests_of("W4b", words, repeat=1)
    assert again.token_ids[:448] != one[:448], "new in each repeat, so the first of a burst cannot hit"
    one, other, *_ = (request.token_ids for request in requests_of("W4", words, repeat=0))
    assert one[:16] != other[:16]
