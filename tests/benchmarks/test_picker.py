"""The stand-in for llm-d's picker: what it believes of replicas from their events, and whom it picks by that."""

import hashlib
from collections import deque

import pytest

from benchmarks.picker import BELIEF_S, Index, Replica, block_keys, scores, weights
from roseinfer.engine.kv_events import events_of
from tests.unit.engine.harness import make_engine, make_request, run_to_end

WEIGHTS = {"prefix-cache-scorer": 3, "queue-scorer": 2, "kv-cache-utilization-scorer": 2}


def replica(**facts: float) -> Replica:
    made = Replica("http://a", "tcp://a", "tcp://a")
    made.index.block_size = 4
    made.num_waiting, made.kv_use = facts.get("waiting", 0.0), facts.get("use", 0.0)
    return made


def stored(token_ids: list[int], hashes: list[int], parent: int | None = None, salt: str = "") -> list[object]:
    extra_keys = [[salt], *[None] * (len(hashes) - 1)] if salt else None
    return ["BlockStored", hashes, parent, token_ids, 4, None, "CPU", None, extra_keys]


def held(index: Index, token_ids: list[int], salt: str = "", now: float = 0.0) -> int:
    return index.num_held(block_keys(token_ids, 4, b"", salt), now)


def test_weights_are_the_charts() -> None:
    assert weights() == WEIGHTS


def test_events_say_what_is_held() -> None:
    index, prompt = Index(), list(range(12))
    index.apply(stored(prompt[:8], [1, 2]))
    assert (held(index, prompt), held(index, prompt[:7]), held(index, prompt[4:])) == (2, 1, 0)
    index.apply(stored(prompt[8:], [3], parent=2))
    assert held(index, prompt) == 3
    index.apply(["BlockRemoved", [2], "CPU"])
    assert held(index, prompt) == 1, "what follows a gap is of no use"
    index.apply(["AllBlocksCleared"])
    assert held(index, prompt) == 0
    index.apply(stored(prompt[8:], [3], parent=2))
    assert held(index, prompt) == 0, "its predecessor is unknown"


def test_a_salt_is_another_prefix() -> None:
    index, prompt = Index(), list(range(8))
    index.apply(stored(prompt, [1, 2], salt="mine"))
    assert (held(index, prompt), held(index, prompt, "mine"), held(index, prompt, "other")) == (0, 2, 0)


def test_equal_blocks_of_two_keys_are_one_until_both_are_gone() -> None:
    index, prompt = Index(), list(range(4))
    for engine_hash in (1, 2):
        index.apply(stored(prompt, [engine_hash]))
    index.apply(["BlockRemoved", [1], "CPU"])
    assert held(index, prompt) == 1
    index.apply(["BlockRemoved", [2], "CPU"])
    assert held(index, prompt) == 0


def test_what_was_just_sent_is_believed_for_a_moment() -> None:
    index, prompt = Index(), list(range(8))
    index.believe(block_keys(prompt, 4, b""), now=10.0)
    assert held(index, prompt, now=10.0 + BELIEF_S) == 2
    assert held(index, prompt, now=10.1 + BELIEF_S) == 0


def test_the_engines_own_events_are_understood() -> None:
    engine, index, prompt = make_engine(num_blocks=32), Index(), list(range(1, 30))
    cache = engine.scheduler.kv_cache.prefix_cache
    cache.changes = deque()
    engine.add_request(make_request("r", prompt, max_tokens=1))
    run_to_end(engine)
    for event in events_of(list(cache.changes), cache.block_size, "CPU"):
        index.apply(event)
    assert index.block_size == cache.block_size
    num_blocks = len(prompt) // cache.block_size
    assert num_blocks > 1
    assert index.num_held(block_keys(prompt, cache.block_size, b""), 0.0) == num_blocks


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ({}, {}, [3 * 0.5 + 2 + 2, 2 + 2]),  # the first holds half of the prompt
        ({"waiting": 4}, {"waiting": 1}, [3 * 0.5 + 0 + 2, 0 + 2 + 2]),
        ({"use": 0.75}, {"use": 0.5}, [3 * 0.5 + 2 + 0.5, 0 + 2 + 1]),
    ],
)
def test_scores_are_weighted_sums(first: dict[str, float], second: dict[str, float], expected: list[float]) -> None:
    replicas, prompt = [replica(**first), replica(**second)], list(range(8))
    replicas[0].index.apply(stored(prompt[:4], [1]))
    assert scores(replicas, [prompt], "", WEIGHTS, 0.0) == pytest.approx(expected)


def test_without_tokens_load_decides() -> None:
    assert scores([replica(waiting=1), replica()], [], "", WEIGHTS, 0.0) == [2, 4]


def test_load_is_read_under_vllms_names() -> None:
    page = 'vllm:num_requests_waiting{model_name="a"} 3.0\nvllm:kv_cache_usage_perc{model_name="a"} 0.25\n'
    made = replica()
    made.read_load(page)
    assert (made.num_waiting, made.kv_use) == (3.0, 0.25)


def test_keys_are_chained() -> None:
    first, second = block_keys(list(range(8)), 4, b"")
    assert block_keys([4, 5, 6, 7], 4, first) == [second]
    assert len({first, second, hashlib.blake2b(b"", digest_size=16).digest()}) == 3
