"""The limit that holds a request back is named with its option and value, and the queue is shown as it is reported."""

import msgspec
import pytest

from roseinfer.config.options import CacheConfig, Config, SchedulerConfig
from roseinfer.observe.recorder.flight import Flight, limit_of
from roseinfer.records import Advanced, BlockedBy, QueueReport, RequestTimeline, StartEstimate, StepRecord
from tests.unit.observe.facts import ENGINE, MS, make_step

CONFIG = Config(
    cache=CacheConfig(num_blocks=100),
    scheduler=SchedulerConfig(max_num_seqs=8, max_prefill_seqs=6, max_active_seqs=16, max_num_batched_tokens=64),
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
        (BlockedBy.PREFIX, "scheduler.max_num_batched_tokens", 64, "64 steps"),
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


def test_prompts_that_fill_the_time_of_a_step_leave_tokens_of_the_budget() -> None:
    step = blocked(BlockedBy.TOKEN_BUDGET, num_decode_seqs=8, num_prefill_tokens=48)
    limit = limit_of(step, Config(scheduler=SchedulerConfig(max_num_batched_tokens=512)))
    assert limit is not None
    assert (limit.option, limit.value) == ("scheduler.target_itl_ms", 48)


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


def queue_of(arrivals: dict[str, int], waiting: dict[str, StartEstimate | None]) -> Flight:
    """Requests that arrived so many ms before now, and those of them that wait."""
    flight = Flight(Config(), "1.2.3")
    flight.engine_info = ENGINE
    flight.queue = lambda: QueueReport(waiting, is_order_exact=False)
    now_ns = flight.clock_pair.monotonic_ns
    for request_id, before_ms in arrivals.items():
        at_ns = now_ns - before_ms * MS
        timeline = RequestTimeline(request_id=request_id, recv_ns=at_ns, parsed_ns=at_ns, tokenized_ns=at_ns)
        timeline.max_tokens = 9
        flight.on_start(timeline)
    flight.on_step(make_step(num_waiting=2, start_ns=now_ns, tokens_ns=now_ns + 1), Advanced())
    return flight


def test_requests_wait_in_the_order_of_the_report_and_the_others_are_computed() -> None:
    estimate = StartEstimate(1.0, 0.5, 1.5, 9)
    flight = queue_of({"early": 300, "patient": 200, "urgent": 100}, {"urgent": None, "patient": estimate})
    listed = flight.requests()
    assert (listed["num_waiting"], listed["is_place_exact"]) == (2, False)
    assert {one["id"]: (one["stage"], one["place"]) for one in listed["requests"]} == {
        "early": ("prefilling", None),
        "patient": ("waiting", 1),
        "urgent": ("waiting", 0),
    }
    for request_id, num_before, shown in (("urgent", 0, None), ("patient", 1, msgspec.structs.asdict(estimate))):
        told = flight.request(request_id)
        assert told is not None
        assert told["stage"] == "waiting"
        assert (told["waiting"]["num_before"], told["waiting"]["is_place_exact"]) == (num_before, False)
        assert told["waiting"]["estimate"] == shown
    told = flight.request("early")
    assert told is not None
    assert (told["stage"], told["waiting"]) == ("prefilling", None)
