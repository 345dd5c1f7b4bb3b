"""A scheduler at rest between two steps into what is wrong with it. Changes nothing; knows no requests' contents.

Tests ask after every step. Production asks when the engine is idle, counts what is found and goes on: to die of one
lost block would turn a small fault into a large one.
"""

from collections.abc import Iterator

from roseinfer.engine.core.scheduler import Scheduler
from roseinfer.engine.core.sequence import NO_SLOT, SequenceStatus
from roseinfer.records import Invariant, Violation

_WITHOUT_SLOT = {SequenceStatus.WAITING}
_OVER = {SequenceStatus.ENDING, SequenceStatus.FINISHED}


def violations(scheduler: Scheduler) -> list[Violation]:
    """Each broken invariant, once for each way in which it is broken; empty when all is well."""
    return [Violation(Invariant(name), detail) for name, detail in _faults(scheduler)]


def _faults(scheduler: Scheduler) -> Iterator[tuple[str, str]]:
    yield from _blocks(scheduler)
    yield from _slots(scheduler)
    yield from _states(scheduler)
    yield from _lists(scheduler)
    yield from _bounds(scheduler)


def _blocks(scheduler: Scheduler) -> Iterator[tuple[str, str]]:
    residency = scheduler.residency
    held = [block for sequence in residency.sequences for block in residency.table.blocks.of(sequence.slot)]
    yield from residency.pool.find_faults(held)
    yield from residency.prefix_cache.find_faults()
    if not residency.sequences and residency.prefix_cache.num_pending:
        yield Invariant.PENDING, f"{residency.prefix_cache.num_pending} blocks are announced that nobody computes"


def _slots(scheduler: Scheduler) -> Iterator[tuple[str, str]]:
    residency, table = scheduler.residency, scheduler.residency.table
    if len(residency.sequences) + table.num_free != len(table.owners):
        yield Invariant.SLOTS, "slots held and slots free are not all slots"
    for sequence in residency.sequences:
        slot = sequence.slot
        if sequence.status in _WITHOUT_SLOT or table.owners[slot] is not sequence:
            yield Invariant.SLOTS, f"slot {slot} has another owner, or none"
            continue
        num_computed, num_tokens = int(table.num_computed[slot]), int(table.num_tokens[slot])
        if not num_computed < num_tokens <= table.max_tokens[slot] or num_computed > table.blocks.capacities[slot]:
            yield Invariant.SLOTS, f"slot {slot}: {num_computed} tokens of {num_tokens} do not fit what it holds"
    num_foreign = len(
        (table.stop_token_ids.keys() | table.constraints.keys()) - {sequence.slot for sequence in residency.sequences}
    )
    if num_foreign:
        yield Invariant.BOUNDED, f"stop ids or grammars are kept for {num_foreign} slots that nobody holds"


def _states(scheduler: Scheduler) -> Iterator[tuple[str, str]]:
    """Each unfinished id is waiting or resident and never both; what has ended holds nothing but a launched step."""
    residents = scheduler.residency.sequences
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
    residents = scheduler.residency.sequences
    decoding = [sequence.slot for sequence in residents if sequence.status is SequenceStatus.DECODING]
    if sorted(scheduler.ring) != sorted(decoding):
        yield Invariant.TURNS, "the decode ring differs from the decoding sequences"
    if scheduler.prefilling != [s for s in residents if s.status is SequenceStatus.PREFILLING]:
        yield Invariant.TURNS, "the list of prompts being prefilled differs from the sequences"


def _bounds(scheduler: Scheduler) -> Iterator[tuple[str, str]]:
    """What grows with requests shrinks with them."""
    deadlines = scheduler.deadlines
    if len(deadlines) > deadlines.limit:
        yield Invariant.BOUNDED, f"{len(deadlines)} deadlines are watched, more than {deadlines.limit}"
    if not scheduler.has_work and len(scheduler.leaving):
        yield Invariant.ENDED, f"{len(scheduler.leaving)} sequences leave an engine without work"
