"""A mailbox is taken from in lists that are not too long, and holds no more than a bound for who does not take."""

import asyncio

import pytest

from roseinfer.engine.link import mailbox as module
from roseinfer.engine.link.mailbox import MAX_TAKEN, Mailbox
from roseinfer.errors import EngineDead, SlowReader
from roseinfer.messages import TokenLogprobs, TokenOutput


def output(number: int, num_logprobs: int | None = None) -> TokenOutput:
    scores = None if num_logprobs is None else [TokenLogprobs(-1.0, 1, [7] * num_logprobs, [-1.0] * num_logprobs)]
    return TokenOutput("a", [number], scores)


def numbers(outputs: list[TokenOutput]) -> list[int]:
    return [output.token_ids[0] for output in outputs]


async def test_all_that_came_is_taken_in_order_and_others_have_their_turn_between_lists() -> None:
    mailbox, num_turns = Mailbox(), 0
    for number in range(2 * MAX_TAKEN + 5):
        mailbox.put_output(output(number))

    async def take_turns() -> None:
        nonlocal num_turns
        while True:
            num_turns += 1
            await asyncio.sleep(0)

    other = asyncio.create_task(take_turns())
    lists = [numbers(await mailbox.take_outputs()) for _ in range(3)]
    other.cancel()
    assert [len(taken) for taken in lists] == [MAX_TAKEN, MAX_TAKEN, 5]
    assert [number for taken in lists for number in taken] == [*range(2 * MAX_TAKEN + 5)]
    assert num_turns >= 2
    mailbox.put_output(output(1))
    assert numbers(await mailbox.take_outputs()) == [1]


async def test_an_error_comes_after_all_that_was_before_it() -> None:
    mailbox = Mailbox()
    for number in range(MAX_TAKEN + 1):
        mailbox.put_output(output(number))
    mailbox.fail(EngineDead("gone"))
    assert len(await mailbox.take_outputs()) == MAX_TAKEN
    assert numbers(await mailbox.take_outputs()) == [MAX_TAKEN]
    for _ in range(2):
        with pytest.raises(EngineDead):
            await mailbox.take_outputs()


@pytest.mark.parametrize(("num_logprobs", "size"), [(None, 1), (0, 2), (20, 22)])
async def test_what_waits_for_too_long_is_dropped_and_told(
    monkeypatch: pytest.MonkeyPatch, num_logprobs: int | None, size: int
) -> None:
    monkeypatch.setattr(module, "MAX_WAITING", 100 * size)
    read, unread = Mailbox(), Mailbox()
    for number in range(400):
        read.put_output(output(number, num_logprobs))
        unread.put_output(output(number, num_logprobs))
        if number % 50 == 49:
            assert len(await read.take_outputs()) == 50
        assert len(unread._outputs) == (number + 1 if number < 100 else 0)
    with pytest.raises(SlowReader):
        await unread.take_outputs()


async def test_what_is_left_after_a_list_counts_as_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_WAITING", MAX_TAKEN + 20)
    mailbox = Mailbox()
    for number in range(MAX_TAKEN + 15):
        mailbox.put_output(output(number))
    assert len(await mailbox.take_outputs()) == MAX_TAKEN
    for number in range(MAX_TAKEN + 5):
        mailbox.put_output(output(number))
    assert len(await mailbox.take_outputs()) == MAX_TAKEN
    assert len(await mailbox.take_outputs()) == 20
