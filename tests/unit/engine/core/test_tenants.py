"""Who shares cached prefixes, and whose blocks make room: no salt sees another's, and none can flood the cache."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from roseinfer.engine.core.block_pool import BlockPool
from roseinfer.engine.core.engine import Engine
from roseinfer.messages import Request
from tests.unit.engine.harness import make_engine, make_request, run_to_end

PREFIX = list(range(1, 41))  # five blocks of eight


def cached(engine: Engine, request_id: str, prompt: list[int], salt: str) -> int:
    engine.add_request(make_request(request_id, prompt, salt, max_tokens=1))
    times = run_to_end(engine).steps[-1].outputs[0].times
    assert times is not None
    return times.num_cached_tokens


def steps_of(engine: Engine, request: Request) -> list[int]:
    engine.add_request(request)
    return [step.record.num_prefill_tokens for step in run_to_end(engine).steps]


def test_a_foreign_salt_finds_nothing_and_does_the_work_of_a_stranger() -> None:
    """What a prober could time is the work: with another's prefix in the cache it is that of an empty cache."""
    engine, empty = make_engine(max_prefill_tokens=16), make_engine(max_prefill_tokens=16)
    assert cached(engine, "a", [*PREFIX, 50], "alice") == 0
    probe = make_request("b", [*PREFIX, 50], "bob", max_tokens=1)
    assert steps_of(engine, probe) == steps_of(empty, probe)
    assert cached(engine, "c", [*PREFIX, 50], "carol") == 0
    assert cached(engine, "d", [*PREFIX, 50], "alice") == 40


def test_a_foreign_salt_does_not_wait_for_anothers_prefix() -> None:
    """Nor may it be held up until somebody else has computed the same: that too could be timed."""
    engine = make_engine(max_prefill_tokens=16)
    engine.add_request(make_request("a", [*PREFIX, 50], "alice"))
    engine.add_request(make_request("b", [*PREFIX, 51], "bob"))
    records = [step.record for step in run_to_end(engine).steps]
    assert not any(record.blocked_by == "prefix" for record in records)
    assert sum(record.num_prefill_tokens for record in records) == 2 * 41


def test_a_flood_evicts_itself() -> None:
    engine = make_engine(num_blocks=40)
    assert cached(engine, "mine", [*PREFIX, 50], "alice") == 0
    for i in range(30):
        cached(engine, f"flood{i}", [i + 2] * 60, "mallory")
    assert cached(engine, "again", [*PREFIX, 50], "alice") == 40


def test_a_tenant_that_is_alone_has_the_whole_cache() -> None:
    engine = make_engine(num_blocks=40)
    for i in range(5):
        cached(engine, f"r{i}", [i + 2] * 60, "alice")
    pool = engine.scheduler.kv_cache.pool
    assert pool.num_cached == 5 * 7
    assert [cached(engine, f"again{i}", [i + 2] * 60, "alice") for i in range(5)] == [56] * 5


@settings(max_examples=100, deadline=None)
@given(
    share=st.sampled_from([0.5, 0.75, 1.0]),
    turns=st.lists(st.tuples(st.sampled_from([b"a", b"b", b"c"]), st.integers(1, 6)), max_size=60),
)
def test_no_tenant_loses_a_block_while_another_holds_more_than_its_share(
    share: float, turns: list[tuple[bytes, int]]
) -> None:
    evicted: list[int] = []
    pool = BlockPool(12, evicted.append, share)
    owner: dict[int, bytes] = {}  # of cached blocks that no sequence holds, oldest first
    for tenant, count in turns:
        before, evicted[:] = dict(owner), []
        sizes = Counter(before.values())
        most = max(sizes.values(), default=0)
        candidates = {name for name, size in sizes.items() if size == most}  # of equal ones either counts
        block_ids = pool.allocate(count)
        for block_id in evicted:
            sizes = Counter(before.values())
            flooding = {name for name in candidates if len(sizes) > 1 and sizes[name] > share * len(before)}
            if before[block_id] not in flooding:
                assert block_id == next(iter(before)), "the least recently used goes first"
                assert not flooding or len(candidates) > 1, "a flood was spared"
            del before[block_id], owner[block_id]
        for block_id in block_ids:
            pool.mark_cached(block_id, tenant)
        pool.release(block_ids)
        owner.update(dict.fromkeys(reversed(block_ids), tenant))
        assert not list(pool.find_faults([]))
