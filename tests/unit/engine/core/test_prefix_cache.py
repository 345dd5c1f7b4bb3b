"""What is found, what never is, and the burst that computes a new prefix once."""

import hashlib
from collections import deque

import numpy as np
import pytest

from roseinfer.engine.core import scheduler
from roseinfer.engine.core.engine import Engine
from roseinfer.engine.core.prefix_cache import BlockChain, PrefixCache
from tests.unit.engine.harness import make_engine, make_request, run_alone, run_to_end

PREFIX = list(range(1, 41))  # five blocks of eight


def run_one(engine: Engine, request_id: str, prompt: list[int], salt: str = "") -> int:
    """Tokens found in the cache for this prompt."""
    engine.add_request(make_request(request_id, prompt, salt))
    transcript = run_to_end(engine)
    assert transcript.tokens[request_id] == run_alone(make_request(request_id, prompt))
    times = transcript.steps[-1].outputs[0].times
    assert times is not None
    return times.num_cached_tokens


def test_the_longest_common_prefix_of_full_blocks_is_shared() -> None:
    engine = make_engine()
    assert run_one(engine, "a", [*PREFIX, 50]) == 0
    assert run_one(engine, "b", [*PREFIX, 51, 52]) == 40
    assert run_one(engine, "c", [*PREFIX[:20], 60]) == 16
    assert run_one(engine, "d", [7, *PREFIX]) == 0


def test_a_whole_prompt_in_the_cache_still_computes_its_last_token() -> None:
    engine = make_engine()
    run_one(engine, "a", PREFIX)
    assert run_one(engine, "b", PREFIX) == 32


@pytest.mark.parametrize("pipeline_depth", [0, 1])
@pytest.mark.parametrize(("max_tokens", "num_cached"), [(20, 56), (24, 56), (25, 64)])
def test_generated_tokens_are_found_by_the_next_turn_of_a_conversation(
    max_tokens: int, num_cached: int, pipeline_depth: int
) -> None:
    engine = make_engine(pipeline_depth=pipeline_depth)
    engine.add_request(make_request("a", PREFIX, max_tokens=max_tokens))
    answer = run_to_end(engine).tokens["a"]
    # The last token of an answer was never computed, so a block that it fills is not there.
    assert run_one(engine, "b", [*PREFIX, *answer, 3]) == num_cached


def test_another_salt_shares_nothing() -> None:
    engine = make_engine()
    run_one(engine, "a", [*PREFIX, 50], salt="alice")
    assert run_one(engine, "b", [*PREFIX, 50], salt="bob") == 0
    assert run_one(engine, "c", [*PREFIX, 50], salt="alice") == 40


def test_without_prefix_caching_nothing_is_kept() -> None:
    engine = make_engine(prefix_caching=False)
    assert run_one(engine, "a", [*PREFIX, 50]) == 0
    assert run_one(engine, "b", [*PREFIX, 50]) == 0
    assert engine.scheduler.kv_cache.pool.num_cached == 0


def test_a_digest_collision_can_only_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    class Colliding:
        def __init__(self, data: bytes) -> None:
            self.data = data

        def digest(self) -> bytes:
            return hashlib.md5(self.data[-4:], usedforsecurity=False).digest()[:1]

    monkeypatch.setattr(hashlib, "sha256", Colliding)
    cache = PrefixCache(16, 4)
    chains = []
    for tokens in ([1, 2, 3, 4], [9, 8, 7, 4]):
        chain = cache.new_chain("", "")
        cache.extend(chain, np.array(tokens, np.int32))
        chains.append(chain)
    assert chains[0].digests == chains[1].digests
    cache.publish(chains[0], 0, cache.pool.allocate(1))
    assert len(cache.match(chains[0], 1)) == 1
    assert cache.match(chains[1], 1) == []


def test_eviction_forgets_and_the_next_request_computes_again() -> None:
    engine = make_engine(num_blocks=17, max_model_len=128)
    run_one(engine, "a", [*PREFIX, 50])
    for i in range(4):
        run_one(engine, f"other{i}", [70 + i] * 60)
    assert run_one(engine, "b", [*PREFIX, 50]) == 0


def test_a_burst_with_a_new_shared_prefix_computes_it_once() -> None:
    engine = make_engine(max_num_batched_tokens=64)
    requests = [make_request(f"r{i}", [*PREFIX, 50 + i], max_tokens=3) for i in range(6)]
    for request in requests:
        engine.add_request(request)
    transcript = run_to_end(engine)
    assert sum(step.record.num_prefill_tokens for step in transcript.steps) == 41 + 5
    assert transcript.tokens == {r.request_id: run_alone(r) for r in requests}


@pytest.mark.parametrize("pipeline_depth", [0, 1])
@pytest.mark.parametrize("max_prefill_tokens", [None, 64])
def test_eight_long_prompts_at_once_compute_what_they_share_once(
    max_prefill_tokens: int | None, pipeline_depth: int
) -> None:
    engine = make_engine(
        pipeline_depth=pipeline_depth,
        num_blocks=512,
        block_size=16,
        max_model_len=1024,
        max_num_seqs=64,
        max_num_batched_tokens=512,
        max_prefill_tokens=max_prefill_tokens,
    )
    shared = [1 + i % 90 for i in range(448)]
    requests = [make_request(f"r{i}", [*shared, *([i + 1] * 64)], max_tokens=4) for i in range(8)]
    for request in requests:
        engine.add_request(request)
    transcript = run_to_end(engine)
    assert sum(step.record.num_prefill_tokens for step in transcript.steps) == 448 + 8 * 64
    assert sum(step.record.num_prefix_hit_tokens for step in transcript.steps) == 7 * 448
    alone = {request.request_id: run_alone(request, max_model_len=1024, num_blocks=128) for request in requests}
    assert transcript.tokens == alone


def test_waiting_for_a_prefix_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "MAX_PREFIX_WAIT_STEPS", 3)
    engine = make_engine()
    cache = engine.scheduler.kv_cache.prefix_cache
    chain = cache.new_chain("", "")
    cache.extend(chain, np.array(PREFIX, np.int32))
    cache.announce(chain, 0, 5)  # somebody says it is computing the prefix, and never does
    engine.add_request(make_request("a", PREFIX, max_tokens=1))
    running = [engine.step().record.num_prefill_seqs for _ in range(4)]
    assert running == [0, 0, 0, 1]


def test_a_prompt_that_is_scored_waits_for_no_prefix() -> None:
    """It computes all of its tokens itself."""
    engine = make_engine(max_num_batched_tokens=64)
    engine.add_request(make_request("leader", [*PREFIX, 50]))
    engine.add_request(make_request("scored", [*PREFIX, 51], num_prompt_logprobs=0))
    assert engine.step().record.num_prefill_seqs == 2


def test_an_aborted_leader_does_not_hold_up_its_followers() -> None:
    engine = make_engine(max_prefill_tokens=8)
    engine.add_request(make_request("leader", [*PREFIX, 50]))
    engine.add_request(make_request("follower", [*PREFIX, 51]))
    engine.step()
    engine.abort("leader")
    transcript = run_to_end(engine)
    assert transcript.tokens["follower"] == run_alone(make_request("follower", [*PREFIX, 51]))
    assert len(transcript.steps) <= 8


def chain_of(cache: PrefixCache, *token_ids: int) -> BlockChain:
    cache.extend(chain := cache.new_chain("", ""), np.array(token_ids, np.int32))
    return chain


def test_a_block_that_several_compute_is_pending_until_the_last_gives_up() -> None:
    cache = PrefixCache(8, 1)
    chain = chain_of(cache, 1, 2)
    for _ in range(3):
        cache.announce(chain, 0, 2)
    for _ in range(2):
        cache.withdraw(chain, 0, 2)
        assert [cache.is_pending(chain, index) for index in range(3)] == [True, True, False]
    cache.withdraw(chain, 0, 1)
    assert [cache.is_pending(chain, index) for index in range(2)] == [False, True]
    cache.withdraw(chain, 1, 2)
    assert cache.num_pending == 0


def test_what_is_forgotten_takes_what_was_computed_after_it_along_and_nothing_else() -> None:
    cache = PrefixCache(8, 1)
    cache.changes = deque()
    short, long, other = (chain_of(cache, *ids) for ids in ((1, 2), (1, 2, 3, 4), (7, 2)))
    blocks, others = cache.pool.allocate(4), cache.pool.allocate(2)
    cache.publish(long, 0, blocks)
    cache.publish(other, 0, others)
    cache.pool.release(blocks)
    cache.pool.release(others)
    cache.pool.share(blocks[:3])  # the last is held by no sequence
    assert cache.match(long, 4) == blocks
    cache.changes.clear()

    cache.forget_chain(short)
    assert cache.match(long, 4) == []
    assert cache.match(other, 2) == others
    assert sorted((change.block_id, change.digest) for change in cache.changes) == sorted(
        zip(blocks, long.digests, strict=True)
    )
    assert [*cache.find_faults(), *cache.pool.find_faults(blocks[:3])] == []
    assert (cache.pool.num_used, cache.pool.num_cached) == (3, 2)
    cache.pool.release(blocks[:3])
    assert [*cache.find_faults(), *cache.pool.find_faults([])] == []
    assert (cache.pool.num_used, cache.pool.num_cached) == (0, 2), "what was forgotten is free"


def test_what_is_forgotten_is_so_where_its_first_blocks_are_evicted() -> None:
    cache = PrefixCache(8, 1)
    chain = chain_of(cache, 1, 2, 3)
    blocks = cache.pool.allocate(3)
    cache.publish(chain, 2, blocks[2:])  # those before it were published by another sequence, and are gone
    cache.forget_chain(chain)
    cache.publish(chain, 0, blocks[:2])
    assert cache.match(chain, 3) == blocks[:2]
