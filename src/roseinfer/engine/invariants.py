"""Checks the invariants of a scheduler between two steps.

Tests check after every step. Production checks when the engine is idle, counts what it finds and continues: stopping
over one lost block would turn a small fault into a large one.
"""

from collections.abc import Iterator

from roseinfer.engine.core.scheduler import Scheduler
from roseinfer.engine.core.sequence import NO_SLOT, SequenceStatus
from roseinfer.records import Invariant, Violation

_OVER = {SequenceStatus.ENDING, SequenceStatus.FINISHED}


def find_violations(scheduler: Scheduler) -> list[Violation]:
    """Each broken invariant, once for each way in which it is broken."""
    checks = (_blocks, _slots, _states, _lists, _bounds)
    return [Violation(Invariant(name), detail) for check in checks for name, detail in check(scheduler)]


def assert_invariants(scheduler: Scheduler) -> None:
    """The same as an assertion, for tests and for debugging."""
    found = find_violations(scheduler)
    assert not found, "; ".join(f"{violation.invariant}: {violation.detail}" for violation in found)


def _blocks(scheduler: Scheduler) -> Iterator[tuple[str, str]]:
    kv_cache = scheduler.kv_cache
    held = [block for sequence in kv_cache.residents for block in kv_cache.table.blocks_of(sequence.slot)]
    yield from kv_cache.pool.find_faults(held)
    yield from kv_cache.prefix_cache.find_faults()
    if not kv_cache.residents and kv_cache.prefix_cache.num_pending:
        yield Invariant.PENDING, f"{kv_cache.prefix_cache.num_pending} blocks are announced that no sequence computes"


def _slots(scheduler: Scheduler) -> Iterator[tuple[str, str]]:
    residents, table = scheduler.kv_cache.residents, scheduler.kv_cache.table
    if len(residents) + table.num_free != len(table.owners):
        yield Invariant.SLOTS, "slots held and slots free are not all slots"
    for sequence in residents:
        slot = sequence.slot
        if sequence.status is SequenceStatus.WAITING or table.owners[slot] is not sequence:
            yield Invariant.SLOTS, f"slot {slot} has another owner, or none"
            continue
        num_computed, num_tokens = int(table.num_computed[slot]), table.num_tokens(slot)
        if num_tokens - 1 > table.last_positions[slot] or num_computed > table.capacities[slot]:
            yield Invariant.SLOTS, f"slot {slot}: {num_computed} tokens of {num_tokens} do not fit what it holds"
    held = {sequence.slot for sequence in residents}
    if num_foreign := len((table.stop_token_ids.keys() | table.constraints.keys()) - held):
        yield Invariant.BOUNDED, f"stop ids or grammars are kept for {num_foreign} slots that no sequence holds"


def _states(scheduler: Scheduler) -> Iterator[tuple[str, str]]:
    """An unfinished sequence is waiting or resident, never both; an ended one is resident for a launched step only."""
    residents = scheduler.kv_cache.residents
    queued = [*scheduler.waiting, *scheduler.compiling]
    waiting, resident = set(map(id, queued)), set(map(id, residents))
    leaving = set(map(id, scheduler.leaving))
    unfinished = set(map(id, scheduler.sequences.values()))
    if len(waiting) != len(queued) or waiting & resident:
        yield Invariant.STATES, "a sequence is in two states"
    if unfinished != waiting | (resident - leaving):
        yield Invariant.STATES, "an unfinished sequence is in no state, or an ended one in some"
    for sequence in queued:
        if sequence.status is not SequenceStatus.WAITING or sequence.slot != NO_SLOT:
            yield Invariant.STATES, f"a waiting sequence is {sequence.status.value} in slot {sequence.slot}"
    for sequence in residents:
        if sequence.status in _OVER and not any(step.holds(sequence.slot) for step in scheduler.in_flight):
            yield Invariant.ENDED, f"an ended sequence holds slot {sequence.slot} for no step"


def _lists(scheduler: Scheduler) -> Iterator[tuple[str, str]]:
    residents = scheduler.kv_cache.residents
    decoding = [sequence.slot for sequence in residents if sequence.status is SequenceStatus.DECODING]
    if sorted(scheduler.ring) != sorted(decoding):
        yield Invariant.TURNS, "the decode ring differs from the decoding sequences"
    if scheduler.prefilling != [s for s in residents if s.status is SequenceStatus.PREFILLING]:
        yield Invariant.TURNS, "the list of prompts being prefilled differs from the sequences"


def _bounds(scheduler: Scheduler) -> Iterator[tuple[str, str]]:
    deadlines = scheduler.deadlines
    if len(deadlines) > deadlines.limit:
        yield Invariant.BOUNDED, f"{len(deadlines)} deadlines are watched, more than {deadlines.limit}"
    if not scheduler.has_work and scheduler.leaving:
        yield Invariant.ENDED, f"{len(scheduler.leaving)} sequences leave an engine without work"
