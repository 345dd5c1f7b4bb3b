"""The limit that holds a request back is named with its option and value, and its start is estimated from the queue."""

from typing import Any

import pytest

from roseinfer.config.tree import CacheConfig, Config, SchedulerConfig
from roseinfer.observe.queue_estimate import MIN_STARTS, QueueDrain, limit_of
from roseinfer.observe.recorder.flight import Flight
from roseinfer.records import Advanced, BlockedBy, RequestTimeline, StepRecord
from tests.unit.observe.facts import ENGINE, MS, make_step, make_timeline

CONFIG = Config(
    cache=CacheConfig(num_blocks=100),
    scheduler=SchedulerConfig(
        max_num_seqs=8, max_prefill_seqs=6, max_active_seqs=16, max_num_batched_tokens=64, max_prefix_wait_steps=5
    ),
)


def blocked(blocked_by: BlockedBy, **counts: int) -> StepRecord:
    return make_step(blocked_by=blocked_by, **counts)


@pytest.mark.parametrize(
    ("blocked_by", "option", "value", "words"),
    [
        (BlockedBy.TOKEN_BUDGET, "scheduler.max_num_batched_tokens", 64, "8 decoding sequences and 56 prompt tokens"),
        (BlockedBy.PREFILL_SEQS, "scheduler.max_prefill_seqs", 6, "6 requests were admitted"),
        (BlockedBy.SLOTS, "scheduler.max_active_seqs", 16, "all 16 places"),
        (BlockedBy.KV_BLOCKS, "cache.num_blocks", 100, "of the 100 KV blocks 97 are in use"),
        (BlockedBy.PREFIX, "scheduler.max_prefix_wait_steps", 5, "5 steps"),
    ],
)
def test_each_limit_has_its_option(blocked_by: BlockedBy, option: str, value: int, words: str) -> None:
    step = blocked(blocked_by, num_decode_seqs=8, num_prefill_tokens=56, num_used_blocks=97)
    limit = limit_of(step, CONFIG)
    assert limit is not None
    assert (limit.option, limit.value) == (option, value)
    assert words in limit.sentence


def test_the_smaller_of_the_two_token_limits_is_named() -> None:
    config = Config(scheduler=SchedulerConfig(max_num_batched_tokens=512, max_prefill_tokens=64))
    limit = limit_of(blocked(BlockedBy.TOKEN_BUDGET, num_decode_seqs=8), config)
    assert limit is not None
    assert (limit.option, limit.value) == ("scheduler.max_prefill_tokens", 64)


@pytest.mark.parametrize(
    ("given", "of_slots", "of_prefills"),
    [
        ({"max_num_seqs": 8}, ("max_num_seqs", 8), ("max_num_seqs", 8)),
        ({"max_num_seqs": 8, "max_prefill_seqs": 12}, ("max_prefill_seqs", 12), ("max_prefill_seqs", 12)),
        ({"max_num_seqs": 8, "max_prefill_seqs": 4}, ("max_num_seqs", 8), ("max_prefill_seqs", 4)),
        ({"max_num_seqs": 8, "max_active_seqs": 8}, ("max_active_seqs", 8), ("max_num_seqs", 8)),
    ],
    ids=str,
)
def test_a_limit_left_at_its_default_has_the_option_that_this_follows(
    given: dict[str, int], of_slots: tuple[str, int], of_prefills: tuple[str, int]
) -> None:
    config = Config(scheduler=SchedulerConfig(**given))  # type: ignore[arg-type]
    for blocked_by, (option, value) in ((BlockedBy.SLOTS, of_slots), (BlockedBy.PREFILL_SEQS, of_prefills)):
        limit = limit_of(blocked(blocked_by), config)
        assert limit is not None
        assert (limit.option, limit.value) == (f"scheduler.{option}", value)


def test_every_limit_is_explained() -> None:
    explained = {limit for limit in BlockedBy if limit_of(blocked(limit), CONFIG) is not None}
    assert explained == set(BlockedBy) - {BlockedBy.NOTHING}


def queue_of(arrivals: dict[str, tuple[int, int]], num_waiting: int, **scheduler: Any) -> Flight:
    """Requests that arrived so many ms before the last step (or after it) and have a priority; so many of them wait."""
    flight = Flight(Config(scheduler=SchedulerConfig(**scheduler)), "1.2.3")
    flight.set_engine_info(ENGINE)
    now_ns = flight.recorder.clock_pair.monotonic_ns
    for request_id, (before_ms, priority) in arrivals.items():
        at_ns = now_ns - before_ms * MS
        timeline = RequestTimeline(request_id=request_id, recv_ns=at_ns, parsed_ns=at_ns, tokenized_ns=at_ns)
        timeline.max_tokens, timeline.priority = 9, priority
        flight.on_start(timeline)
    flight.on_step(make_step(num_waiting=num_waiting, start_ns=now_ns, tokens_ns=now_ns + 1), Advanced())
    return flight


def places_of(flight: Flight) -> dict[str, int | None]:
    places = {one["id"]: one["place"] for one in flight.requests()["requests"]}
    for request_id, place in places.items():
        told = flight.request(request_id)
        assert told is not None
        assert place == (told["waiting"] and told["waiting"]["num_before"]), "the list says the same as the detail"
    return places


ARRIVALS = {"early": (300, 0), "patient": (200, 5), "urgent": (100, -5)}


def test_places_are_by_priority_where_the_scheduler_is() -> None:
    assert places_of(queue_of(ARRIVALS, 3, admission="fifo")) == {"early": 0, "patient": 1, "urgent": 2}
    assert places_of(queue_of(ARRIVALS, 3, admission="priority")) == {"urgent": 0, "early": 1, "patient": 2}
    short = queue_of(ARRIVALS, 3, admission="priority", priority_wait_s=0.001)
    assert places_of(short) == {"early": 0, "patient": 1, "urgent": 2}, "a level is worth so much waiting and no more"


def test_who_comes_after_the_last_step_waits_however_urgent() -> None:
    arrivals = {"computed": (300, 0), "newcomer": (-1, -5)}
    assert places_of(queue_of(arrivals, 0, admission="priority")) == {"computed": None, "newcomer": 0}


@pytest.mark.parametrize(("admission", "is_exact"), [("fifo", True), ("pack", False), ("priority", False)])
def test_the_list_says_whether_places_are_exact(admission: str, is_exact: bool) -> None:
    flight = queue_of(ARRIVALS, 3, admission=admission)
    told = flight.request("early")
    assert told is not None
    assert flight.requests()["is_place_exact"] is told["waiting"]["is_place_exact"] is is_exact


def drained(*starts_ms: int, num_waiting: int = 3) -> QueueDrain:
    drain = QueueDrain()
    for start_ms in starts_ms:
        timeline = make_timeline(scheduled_ns=start_ms * MS, token_ns=[start_ms * MS + 1])
        drain.note_step(make_step(num_waiting=num_waiting, num_prefill_seqs=1), Advanced.newest([timeline]))
    return drain


def test_an_even_queue_gives_an_even_estimate() -> None:
    drain = drained(*range(0, 200, 10))  # one start each 10 ms, the last at 190
    estimate = drain.estimate(2, 194 * MS)
    assert estimate is not None
    assert estimate.seconds == estimate.low_seconds == estimate.high_seconds == pytest.approx(0.026)
    assert estimate.num_starts == 20


def test_an_uneven_queue_has_a_spread() -> None:
    drain = drained(*(block * 100 + within for block in range(20) for within in (0, 1, 2, 3)))
    estimate = drain.estimate(0, 1903 * MS)
    assert estimate is not None
    assert estimate.low_seconds == pytest.approx(0.001)
    assert estimate.low_seconds <= estimate.seconds < estimate.high_seconds == pytest.approx(0.097)


def test_a_long_queue_is_stretched_from_what_is_known() -> None:
    estimate = drained(*range(0, 200, 10)).estimate(99, 190 * MS)
    assert estimate is not None
    assert estimate.seconds == pytest.approx(1.0)


def test_what_is_overdue_may_start_now() -> None:
    estimate = drained(*range(0, 200, 10)).estimate(0, 500 * MS)
    assert estimate is not None
    assert estimate.seconds == 0


def test_too_few_starts_tell_nothing() -> None:
    assert QueueDrain().estimate(0, 1) is None
    assert drained(*range(MIN_STARTS - 1)).estimate(0, 1) is None


def test_starts_without_a_queue_tell_nothing() -> None:
    drain = drained(*range(0, 200, 10))
    drain.note_step(make_step(num_waiting=0), Advanced())
    assert drain.estimate(0, 200 * MS) is None


def test_only_first_tokens_are_starts() -> None:
    drain = QueueDrain()
    for _ in range(20):
        drain.note_step(make_step(num_waiting=1, num_prefill_seqs=1), Advanced.newest([make_timeline()]))
    assert drain.estimate(0, 1) is None
