"""Each invariant catches the mistake it is there for: the engine is broken on purpose, one line at a time."""

import contextlib
from collections.abc import Callable

import pytest

from roseinfer.engine.core.block_pool import BlockPool
from roseinfer.engine.core.deadlines import MIN_SWEPT
from roseinfer.engine.core.decode_ring import DecodeRing
from roseinfer.engine.core.engine import Engine
from roseinfer.engine.core.prefix_cache import PrefixCache
from roseinfer.engine.core.scheduler import Scheduler
from roseinfer.engine.core.sequence import SlotTable
from roseinfer.engine.core.waiting_queue import WaitingQueue
from roseinfer.engine.invariants import find_violations
from roseinfer.records import Invariant
from tests.unit.engine.core.test_deadlines import until
from tests.unit.engine.harness import make_engine, make_request

Break = Callable[[pytest.MonkeyPatch], None]


def found(engine: Engine) -> set[Invariant]:
    return {violation.invariant for violation in find_violations(engine.scheduler)}


def live(engine: Engine) -> set[Invariant]:
    """Three requests that share a prefix, one of them aborted, others preempted; what is found after each step."""
    for i in range(3):
        engine.add_request(make_request(f"r{i}", [*range(1, 25), 30 + i], max_tokens=40, stop_token_ids=(95,)))
    seen = set[Invariant]()
    for step in range(200):
        if not engine.has_work:
            break
        engine.step()
        if step == 5:
            engine.abort("r1")
        seen |= found(engine)
    return seen | found(engine)


def nothing(*_: object) -> None:
    """Forget to."""


def skip_release(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockPool, "release", nothing)


def release_twice(patch: pytest.MonkeyPatch) -> None:
    release = BlockPool.release

    def twice(pool: BlockPool, block_ids: list[int]) -> None:
        release(pool, block_ids)
        pool._free += [block_id for block_id in block_ids if pool._reference_counts[block_id] == 0]

    patch.setattr(BlockPool, "release", twice)


def lose_a_reference(patch: pytest.MonkeyPatch) -> None:
    share = BlockPool.share
    patch.setattr(BlockPool, "share", lambda pool, block_ids: share(pool, list(block_ids)[1:]))


def mark_a_free_block(patch: pytest.MonkeyPatch) -> None:
    release = BlockPool.release

    def marking(pool: BlockPool, block_ids: list[int]) -> None:
        release(pool, block_ids)
        pool._tenants[pool._free[-1]] = b""

    patch.setattr(BlockPool, "release", marking)


def forget_only_the_digest(patch: pytest.MonkeyPatch) -> None:
    publish = PrefixCache.publish

    def losing(cache: PrefixCache, *args: object) -> None:
        publish(cache, *args)  # type: ignore[arg-type]
        cache._blocks.popitem() if cache._blocks else None

    patch.setattr(PrefixCache, "publish", losing)


def never_withdraw(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PrefixCache, "withdraw", nothing)
    patch.setattr(PrefixCache, "publish", nothing)


def keep_the_slot(patch: pytest.MonkeyPatch) -> None:
    def unbind(table: SlotTable, sequence: object) -> list[int]:
        slot = sequence.slot  # type: ignore[attr-defined]
        sequence.slot = -1  # type: ignore[attr-defined]
        table.owners[slot] = None
        table.stop_token_ids.pop(slot, None)
        return table.blocks_of(slot)  # and the slot has no owner and is not free

    patch.setattr(SlotTable, "unbind", unbind)


def keep_stop_ids(patch: pytest.MonkeyPatch) -> None:
    unbind = SlotTable.unbind

    def keeping(table: SlotTable, sequence: object) -> list[int]:
        slot = sequence.slot  # type: ignore[attr-defined]
        kept = table.stop_token_ids.get(slot, frozenset())
        blocks = unbind(table, sequence)  # type: ignore[arg-type]
        table.stop_token_ids[slot] = kept
        return blocks

    patch.setattr(SlotTable, "unbind", keeping)


def stay_in_the_queue(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WaitingQueue, "drop_admitted", nothing)


def forget_who_is_unfinished(patch: pytest.MonkeyPatch) -> None:
    add = Scheduler.add_request

    def forgetting(scheduler: Scheduler, request: object, inbox_ns: int) -> None:
        add(scheduler, request, inbox_ns)  # type: ignore[arg-type]
        if request.request_id == "r2":  # type: ignore[attr-defined]
            del scheduler.sequences["r2"]

    patch.setattr(Scheduler, "add_request", forgetting)


def stay_in_the_ring(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DecodeRing, "pass_turn", lambda ring, _: ring._slots.append(7) if len(ring._slots) == 2 else None)


def never_leave(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Scheduler, "_free_ended", nothing)


MISTAKES: list[tuple[Break, Invariant]] = [
    (skip_release, Invariant.REFCOUNTS),
    (release_twice, Invariant.BLOCKS),
    (lose_a_reference, Invariant.REFCOUNTS),
    (mark_a_free_block, Invariant.CACHED_BLOCKS),
    (forget_only_the_digest, Invariant.PREFIX_CACHE),
    (never_withdraw, Invariant.PENDING),
    (keep_the_slot, Invariant.SLOTS),
    (keep_stop_ids, Invariant.BOUNDED),
    (stay_in_the_queue, Invariant.STATES),
    (forget_who_is_unfinished, Invariant.STATES),
    (stay_in_the_ring, Invariant.TURNS),
    (never_leave, Invariant.ENDED),
]


def test_a_sound_engine_breaks_none() -> None:
    assert live(make_engine(num_blocks=17)) == set()


@pytest.mark.parametrize(("mistake", "invariant"), MISTAKES, ids=[mistake.__name__ for mistake, _ in MISTAKES])
def test_each_mistake_is_caught(monkeypatch: pytest.MonkeyPatch, mistake: Break, invariant: Invariant) -> None:
    engine = make_engine(num_blocks=17)
    mistake(monkeypatch)
    seen = set[Invariant]()
    with contextlib.suppress(AssertionError, LookupError, ValueError):  # it may also stop the engine: see what is left
        seen = live(engine)
    assert invariant in seen | found(engine)


def test_deadlines_that_are_never_swept_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roseinfer.engine.core.deadlines._sequence_of", lambda entry: entry)
    engine = make_engine()
    for i in range(MIN_SWEPT + 8):
        engine.add_request(until(f"r{i}", s=1e9, max_tokens=1))
        engine.step()
    assert Invariant.BOUNDED in found(engine)


def test_each_invariant_of_the_engine_has_its_mistake() -> None:
    of_front_end = {Invariant.REQUESTS}
    assert {invariant for _, invariant in MISTAKES} == set(Invariant) - of_front_end
