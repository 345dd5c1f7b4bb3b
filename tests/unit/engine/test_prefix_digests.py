"""Digests of prompts: equal exactly where prompts share their beginnings, and useless without the key."""

from hypothesis import given
from hypothesis import strategies as st

from roseinfer.engine.prefix_digests import DIGEST_BYTES, PrefixDigests

BLOCK = 4
SECRET = b"s" * 32


def split(digests: bytes) -> list[bytes]:
    return [digests[start : start + DIGEST_BYTES] for start in range(0, len(digests), DIGEST_BYTES)]


tokens = st.lists(st.integers(0, 2), max_size=20)


@given(tokens, tokens)
def test_two_prompts_share_digests_as_far_as_they_share_blocks(first: list[int], second: list[int]) -> None:
    digests = PrefixDigests(BLOCK, SECRET)
    ours, theirs = split(digests.digests_of(first)), split(digests.digests_of(second))
    assert (len(ours), len(theirs)) == (len(first) // BLOCK, len(second) // BLOCK)
    for index, (a, b) in enumerate(zip(ours, theirs, strict=False), 1):
        assert (a == b) == (first[: index * BLOCK] == second[: index * BLOCK])


def test_salts_and_secrets_keep_prompts_apart() -> None:
    prompt = list(range(8))
    digests = PrefixDigests(BLOCK, SECRET)
    assert digests.digests_of(prompt) == digests.digests_of(tuple(prompt))
    assert not set(split(digests.digests_of(prompt, "tenant"))) & set(split(digests.digests_of(prompt)))
    assert not set(split(PrefixDigests(BLOCK).digests_of(prompt))) & set(split(PrefixDigests(BLOCK).digests_of(prompt)))


def test_what_is_no_full_block_has_none() -> None:
    assert PrefixDigests(BLOCK).digests_of([1, 2, 3]) == b""


def test_the_prompt_of_several_choices_is_digested_once_for_each_salt() -> None:
    digests, prompt = PrefixDigests(4), list(range(12))
    first = digests.digests_of(prompt)
    assert digests.digests_of(prompt) is first
    assert digests.digests_of(prompt, "other") != first
    assert digests.digests_of(prompt) == first
    assert digests.digests_of(list(reversed(prompt))) != first
