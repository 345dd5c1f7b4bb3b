"""A step's integers on the device: what they say, how they travel, and what of the block table travels with them."""

from concurrent.futures import Future
from dataclasses import replace
from itertools import pairwise

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roseinfer.engine.core.batch import Int32Array, ScheduledBatch
from roseinfer.engine.core.constraint import Constraint, Matcher, TokenMasks
from roseinfer.messages import SamplingParams
from roseinfer.model.device_stream import Outbox, Stream
from roseinfer.model.sampling.edit_table import MaskArea
from roseinfer.model.steps.arenas import Layout
from roseinfer.model.steps.graphs import GraphSize
from roseinfer.model.steps.staging import InputStaging, StagedStep, StagingSizes
from tests.unit.model.fake_device import LateStream
from tests.unit.model.sampling.test_logit_edits import Fixed

SIZES = StagingSizes(num_slots=6, max_rows=8, max_tokens=64, max_model_len=40, block_size=8, spare_block=99)
TABLE: Int32Array = np.arange(30, dtype=np.int32).reshape(6, 5) + 100


def as_it_is(num_rows: int) -> int:
    return num_rows


def next_multiple_of_four(num_rows: int) -> int:
    return -(-num_rows // 4) * 4


def make(stream: Stream) -> InputStaging:
    return InputStaging(stream, SIZES, as_it_is)


def batch_of(
    rows: list[tuple[int, int, int]],
    num_device_rows: int = 0,
    table: Int32Array = TABLE,
    samples: list[bool] | None = None,
) -> ScheduledBatch:
    """Rows of (slot, start, number of new tokens); the token at position p of slot s is 100 s + p."""
    slots, starts, counts = (np.array(column, np.int32) for column in zip(*rows, strict=True))
    tokens = [100 * slot + start + i for slot, start, count in rows[num_device_rows:] for i in range(count)]
    return ScheduledBatch(
        step_id=0,
        slots=slots,
        starts=starts,
        num_new_tokens=counts,
        samples=np.array(samples or [True] * len(rows)),
        num_device_rows=num_device_rows,
        token_ids=np.array(tokens, np.int32),
        block_table=table,
        bindings=(),
    )


def put(staging: InputStaging, batch: ScheduledBatch, size: int) -> StagedStep:
    """What a graph of `size` rows does with the batch's integers."""
    staging.stage_decode(batch, size)
    staging.put_last_blocks(size)
    return staging.decode_step(size)


def put_prompts(staging: InputStaging, batch: ScheduledBatch | None, size: GraphSize) -> StagedStep:
    """The same of a graph with prompts; the token that slot s sampled last is -s."""
    staging.stage_prompts(batch, size)
    step = staging.prompt_step(size)
    step.gather(-torch.arange(SIZES.num_slots + 1))
    return step


# --- what the integers say --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [Stream(), LateStream()], ids=["host", "device"])
def test_a_mixed_step(stream: Stream) -> None:
    step = make(stream).stage(
        batch_of([(4, 9, 1), (2, 3, 1), (1, 0, 3), (0, 6, 2)], 2, samples=[True, True, False, True])
    )
    assert step.packed.slots.tolist() == [4, 2, 1, 1, 1, 0, 0]
    assert step.packed.positions.tolist() == step.positions.tolist() == [9, 3, 0, 1, 2, 6, 7]
    assert step.packed.query_starts.tolist() == [0, 1, 2, 5, 7]
    assert (step.packed.max_query_len, step.packed.max_context_len) == (3, 10)
    assert step.num_gathered == 2
    assert step.slots.tolist() == [4, 2]
    assert step.token_ids[2:].tolist() == [100, 101, 102, 6, 7]
    assert step.sampled_tokens is not None
    assert step.sampled_tokens.tolist() == [0, 1, 6]
    assert step.sampled_slots.tolist() == [4, 2, 0]
    assert step.num_samples == 3


def test_a_step_of_decode_rows() -> None:
    step = make(Stream()).stage(batch_of([(4, 9, 1), (2, 3, 1)], 2))
    assert step.packed.slots.tolist() == step.slots.tolist() == step.sampled_slots.tolist() == [4, 2]
    assert step.packed.positions.tolist() == step.positions.tolist() == [9, 3]
    assert step.packed.query_starts.tolist() == [0, 1, 2]
    assert (step.packed.max_query_len, step.packed.max_context_len) == (1, SIZES.max_model_len)
    assert (step.num_gathered, step.num_samples, step.sampled_tokens) == (2, 2, None)


def test_rows_that_decode_on_have_the_same_step_on_a_cpu() -> None:
    staging = InputStaging(Stream(), SIZES, next_multiple_of_four)
    batch = batch_of([(4, 9, 1), (2, 3, 1)], 2)
    first = staging.stage(batch)
    on = msgspec.structs.replace(batch, starts=np.array([10, 4], np.int32))
    assert staging.stage(on) is first
    assert first.packed.positions.tolist() == first.positions.tolist() == [10, 4, 4, 4]
    assert batch.starts.tolist() == [9, 3]

    for other in (
        batch_of([(2, 3, 1), (4, 9, 1)], 2),
        msgspec.structs.replace(on, block_table=on.block_table.copy()),
        batch_of([(1, 0, 3)]),
    ):
        assert staging.stage(other) is not first
        again = staging.stage(on)
        assert again is not first
        assert again.slots.tolist() == again.packed.slots.tolist() == [4, 2, 2, 2]
        assert again.packed.positions.tolist() == again.positions.tolist() == [10, 4, 4, 4]


def test_the_last_token_travels_again_where_linears_want_more_rows() -> None:
    staging = InputStaging(Stream(), SIZES, next_multiple_of_four)
    decode = staging.stage(batch_of([(4, 9, 1), (2, 3, 1)], 2))
    assert decode.slots.tolist() == decode.packed.slots.tolist() == [4, 2, 2, 2]
    assert decode.positions.tolist() == [9, 3, 3, 3]
    assert decode.packed.query_starts.tolist() == [0, 1, 2]
    assert decode.sampled_slots.tolist() == [4, 2]
    mixed = staging.stage(batch_of([(4, 9, 1), (1, 0, 2)], 1))
    assert mixed.token_ids[1:].tolist() == [100, 101, 101]
    assert mixed.positions.tolist() == [9, 0, 1, 1]
    assert mixed.sampled_tokens is not None
    assert mixed.sampled_tokens.tolist() == [0, 2, 2, 2]
    assert mixed.num_samples == 2


def test_a_step_that_samples_nothing() -> None:
    step = make(Stream()).stage(batch_of([(1, 0, 3)], samples=[False]))
    assert step.num_samples == 0
    assert step.sampled_slots.tolist() == []


def test_a_gpu_finds_the_rows_on_the_device() -> None:
    staging = make(LateStream())
    device = staging.stage(batch_of([(4, 9, 1), (1, 0, 3)], 1)).packed.device
    assert device is not None
    assert (device.slots.tolist(), device.starts.tolist()) == ([4, 1], [9, 0])
    assert device.query_starts.tolist() == [0, 1, 4]
    assert device.block_table is staging.block_table
    integers = (device.slots, device.starts, device.query_starts, device.block_table)
    assert {tensor.dtype for tensor in integers} == {torch.int32}


@pytest.mark.parametrize("num_device_rows", [2, 1, 0])
def test_rows_of_one_token_have_one_range_on_a_gpu(num_device_rows: int) -> None:
    """Those too that are the rest of a prompt: for another range another kernel would be compiled, in a stream."""
    rows = [(4, 9, 1), (2, 3, 1)]
    packed = make(LateStream()).stage(batch_of(rows, num_device_rows)).packed
    assert (packed.max_query_len, packed.max_context_len) == (1, SIZES.max_model_len)


def test_a_cpu_reads_the_arena_itself() -> None:
    staging = make(Stream())
    step = staging.stage(batch_of([(1, 0, 3)]))
    assert step.packed.device is None
    assert step.packed.block_table is TABLE
    arena = staging.arenas._arenas[0].words
    assert arena.data_ptr() <= step.token_ids.data_ptr() < arena.data_ptr() + arena.nbytes
    assert staging.block_table.numel() == 0


# --- how they travel --------------------------------------------------------------------------------------------------


def test_a_step_is_one_copy_and_takes_no_memory() -> None:
    stream = LateStream()
    staging = make(stream)
    before = stream.num_allocations
    staging.bind(1)
    for start in range(20):
        staging.stage(batch_of([(4, start, 1), (1, 0, 3)], 1))
        staging.stage_decode(batch_of([(4, start, 1)], 1), 2)
    assert len(stream.copied_words) == 40
    assert stream.num_allocations == before


def test_a_token_brings_its_id_and_its_position() -> None:
    """Eight bytes each, and nothing else: attention finds the positions of a row's tokens by the row."""
    stream = LateStream()
    staging = make(stream)
    for count in (8, 24):
        staging.stage(batch_of([(1, 1, count - 1)]))
    small, large = stream.copied_words
    assert large - small == 16 * (2 + 2) + 3 * 2, "and two blocks more begin"


def test_what_waits_travels_with_the_step_where_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, flushed = LateStream(), list[int]()
    staging = make(stream)
    staging.outbox = outbox = Outbox(torch.device("meta"))  # a device which nothing is used at once for
    monkeypatch.setattr(outbox, "flush", lambda: flushed.append(outbox.num_words))
    sent = list[list[int]]()
    for stage in (
        lambda: staging.stage(batch_of([(4, 9, 1), (1, 0, 3)], 1)),
        lambda: staging.stage_decode(batch_of([(4, 10, 1)], 1), 2),
        lambda: staging.stage_prompts(batch_of([(4, 11, 1), (1, 3, 3)], 1), GraphSize(16, 8)),
        lambda: staging.stage_prompts(None, GraphSize(16, 8)),
    ):
        before = len(stream.copied_words)
        outbox.put(lambda *parts: sent.extend(part.tolist() for part in parts), np.array([7, 8, 9]), np.array([5]))
        stage()
        assert len(stream.copied_words) == before + 1
    assert (sent, flushed) == ([[7, 8, 9], [5]] * 4, [])
    outbox.put(print, np.zeros(10_000, np.int64))
    staging.stage_decode(batch_of([(4, 10, 1)], 1), 2)
    assert flushed == [20_000]


@pytest.mark.parametrize("rows", [[4, 2], [2]])
def test_masks_travel_before_the_fields_of_a_graph(rows: list[int]) -> None:
    """As many as there are, and what a graph reads stays where it is."""
    stream, area = LateStream(), MaskArea(SIZES.num_slots + 1, 40)
    staging = InputStaging(stream, SIZES, as_it_is, area)
    masks = TokenMasks({(slot, 10): (constraint_of({slot, 33}), 0) for slot in rows})
    for size in (GraphSize(8, 8, is_decode=True), GraphSize(16, 8)):
        plain = batch_of([(slot, 9, 1) for slot in rows], len(rows) if size.is_decode else 0)
        stage_for(staging, plain, size)
        step = staging.decode_step(8) if size.is_decode else staging.prompt_step(size)
        expected = step.slots.tolist()
        stage_for(staging, msgspec.structs.replace(plain, masks=masks), size)
        without, num_words = stream.copied_words
        assert num_words - without <= 16 * 3 + 2 * len(rows), "the row of each slot's mask, and masks of two words"
        assert step.slots.tolist() == expected
        sent = staging.masks.numpy()
        found = {slot: sent[2 * sent[area.first_slot + slot] :][:2].tolist() for slot in rows}
        assert found == {slot: [1 << slot, 2] for slot in rows}
        stream.copied_words.clear()
        staging.masks.zero_()


def stage_for(staging: InputStaging, batch: ScheduledBatch, size: GraphSize) -> None:
    if size.is_decode:
        staging.stage_decode(batch, size.num_rows)
    else:
        staging.stage_prompts(batch, size)


def constraint_of(allowed: set[int]) -> Constraint:
    matcher: Future[Matcher] = Future()
    matcher.set_result(Fixed(allowed))
    return Constraint(matcher, SamplingParams(), (), 40)


def test_a_step_sends_what_it_uses() -> None:
    """Whatever the longest step is, and the longest prompt."""
    stream = LateStream()
    sizes = replace(SIZES, max_rows=1000, max_tokens=100_000, max_model_len=10_000)
    staging = InputStaging(stream, sizes, as_it_is)
    table = np.zeros((6, sizes.max_blocks), np.int32)
    staging.stage(batch_of([(4, 9, 1), (1, 0, 3)], 1, table))
    staging.stage_decode(batch_of([(4, 10, 1)], 1, table), 2)
    staging.stage_prompts(batch_of([(4, 11, 1), (1, 3, 3)], 1, table), GraphSize(16, 8))
    assert max(stream.copied_words) <= Layout(8, 16).num_words < 500


def test_an_arena_is_written_again_only_when_its_copy_is_done() -> None:
    """Otherwise the device, which is late, would get the integers of a later step (vLLM issue 29288)."""
    stream = LateStream(is_late=True)
    staging = make(stream)
    starts = staging.decode_step(1).packed.device
    assert starts is not None
    for start in range(6):
        staging.stage_decode(batch_of([(0, 10 + start, 1)], 1), 1)
        assert stream.num_pending <= 2
    seen = []
    for mark in range(stream.num_queued - stream.num_pending, stream.num_queued + 1):
        stream.run_until(mark)
        seen.append(starts.starts.tolist())
    assert seen == [[13], [14], [15]]


def test_graphs_read_where_they_were_captured() -> None:
    staging = make(LateStream())
    captured = staging.decode_step(4)
    staging.stage(batch_of([(4, 9, 1), (1, 0, 30)], 1))
    staging.stage_decode(batch_of([(3, 17, 1), (5, 2, 1)], 2), 4)
    device = captured.packed.device
    assert device is not None
    assert captured.slots.tolist() == device.slots.tolist() == [3, 5, 6, 6]
    assert captured.positions.tolist() == device.starts.tolist() == [17, 2, 0, 0]
    assert captured.next_positions is not None
    assert captured.next_positions.tolist() == [18, 3, 1, 1]
    assert device.query_starts.tolist() == [0, 1, 2, 3, 4]


def test_rows_that_stay_the_same_say_what_others_would() -> None:
    """Only what changes of them is written again, whatever else has been in the arenas meanwhile."""
    staging, batch = make(LateStream()), batch_of([(3, 6, 1), (5, 7, 1)], 2)
    for number in range(19):
        batch = msgspec.structs.replace(batch, starts=batch.starts + 1, block_table=TABLE + 100 * number)
        if number in {3, 9}:
            staging.stage_prompts(batch_of(MIXED, 2), SIZE)
        elif number in {6, 11}:
            staging.stage(batch_of([(4, 9, 1), (1, 0, 30)], 1))
        elif number == 14:
            staging.stage_decode(None, 4)
        size, fresh = 2 if number == 17 else 4, make(LateStream())
        found = put(staging, batch, size)
        expected = put(fresh, msgspec.structs.replace(batch, slots=batch.slots.copy()), size)
        for one, other in zip(_integers(found), _integers(expected), strict=True):
            assert one.tolist() == other.tolist()
        columns = batch.starts // SIZES.block_size
        assert staging.block_table[[3, 5], columns].tolist() == fresh.block_table[[3, 5], columns].tolist()


def _integers(step: StagedStep) -> list[torch.Tensor]:
    device = step.packed.device
    assert device is not None
    assert step.next_positions is not None
    return [step.slots, step.positions, step.next_positions, device.slots, device.starts, device.query_starts]


# --- steps with prompts, in graphs ------------------------------------------------------------------------------------

SIZE = GraphSize(num_tokens=16, num_rows=6)
MIXED = [(4, 9, 1), (2, 3, 1), (1, 0, 3), (0, 6, 2)]


def test_a_mixed_step_is_filled_up_to_its_graph() -> None:
    """Rows without tokens, tokens without a row, samples for the spare slot."""
    staging = make(LateStream())
    step = put_prompts(staging, batch_of(MIXED, 2, samples=[True, True, False, True]), SIZE)
    device, spare = step.packed.device, staging.spare_slot
    assert device is not None
    assert device.slots.tolist() == [4, 2, 1, 0, spare, spare]
    assert device.starts.tolist() == [9, 3, 0, 6, 0, 0]
    assert device.query_starts.tolist() == [0, 1, 2, 5, 7, 7, 7]
    assert step.token_ids.tolist()[:7] == [-4, -2, 100, 101, 102, 6, 7]
    assert step.positions.tolist()[:7] == [9, 3, 0, 1, 2, 6, 7]
    assert len(step.token_ids) == len(step.positions) == 16
    assert step.sampled_tokens is not None
    assert step.next_positions is not None
    assert step.sampled_tokens.tolist()[:3] == [0, 1, 6]
    assert set(step.sampled_tokens.tolist()) <= set(range(7)), "of tokens that a row has"
    assert step.sampled_slots.tolist() == [4, 2, 0, spare, spare, spare]
    assert step.next_positions.tolist()[:3] == [10, 4, 8]
    assert step.num_samples == 6
    for slot, start, count in MIXED:
        num_blocks = -(-(start + count) // 8)
        first = -(-start // 8)
        assert staging.block_table[slot, first:num_blocks].tolist() == TABLE[slot, first:num_blocks].tolist()


def test_a_step_without_rows_has_no_tokens() -> None:
    """What a capture runs on: after a step of others, whose integers must not be there any more."""
    staging = make(LateStream())
    put_prompts(staging, batch_of(MIXED, 2), SIZE)
    table = staging.block_table.clone()
    step = put_prompts(staging, None, SIZE)
    assert step.packed.device is not None
    assert step.packed.device.query_starts.tolist() == [0] * 7
    for slots in (step.packed.device.slots, step.slots, step.sampled_slots):
        assert set(slots.tolist()) == {staging.spare_slot}
    assert not any(integers.any() for integers in (step.token_ids, step.positions))
    assert torch.equal(staging.block_table, table)


@pytest.mark.parametrize("size", [GraphSize(7, 4), GraphSize(8, 6), GraphSize(64, 6)])
def test_a_graph_with_prompts_reads_where_it_was_captured(size: GraphSize) -> None:
    staging = make(LateStream())
    captured = put_prompts(staging, None, size)
    other = GraphSize(32, 6)
    staging.stage(batch_of([(4, 9, 1), (1, 0, 30)], 1))
    put_prompts(staging, batch_of([(4, 9, 1), (1, 0, 30)], 1), other)
    staging.stage_prompts(batch_of(MIXED, 2), size)
    captured.gather(-torch.arange(SIZES.num_slots + 1))
    assert captured.token_ids.tolist()[:7] == [-4, -2, 100, 101, 102, 6, 7]
    assert captured.positions.tolist()[:7] == [9, 3, 0, 1, 2, 6, 7]
    assert captured.packed.device is not None
    assert captured.packed.device.query_starts.tolist() == [0, 1, 2, 5] + [7] * (size.num_rows - 3)


# --- the block table --------------------------------------------------------------------------------------------------


def test_rows_that_fill_up_name_the_spare_slot_and_its_block() -> None:
    staging = make(LateStream())
    put(staging, batch_of([(3, 17, 1)], 1), 8)
    expected = torch.zeros(7, 5, dtype=torch.int32)
    expected[3, 2] = int(TABLE[3, 2])
    expected[staging.spare_slot, 0] = SIZES.spare_block
    assert torch.equal(staging.block_table, expected)


def test_only_new_entries_travel() -> None:
    stream = LateStream()
    staging = make(stream)
    staging.bind(1)

    def num_sent(rows: list[tuple[int, int, int]]) -> int:
        staging.stage(batch_of(rows))
        layout = Layout(len(rows), sum(count for _, _, count in rows))
        return (stream.copied_words[-1] - (layout.num_words - layout.step_words.start)) // 3

    assert num_sent([(1, 16, 3)]) == 3  # a prefix of two blocks was found in the cache: they come along
    assert num_sent([(1, 19, 2)]) == 0
    assert num_sent([(1, 21, 4)]) == 1  # token 24 begins a block
    assert num_sent([(1, 25, 15)]) == 1
    assert num_sent([(1, 39, 1)]) == 0
    staging.bind(1)
    assert num_sent([(1, 39, 1)]) == 5


class Slot:
    """A slot as the scheduler has it: how much of it is computed, and whether the runner knows its owner."""

    def __init__(self) -> None:
        self.end = 0
        self.is_bound = False


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_the_device_has_the_blocks_of_every_row(data: st.DataObject) -> None:
    """Whatever mixes of prompts, chunks, found prefixes, decode rows and new owners come."""
    staging, random = make(LateStream()), np.random.default_rng(0)
    table = np.zeros((6, 5), np.int32)
    slots = [Slot() for _ in range(6)]
    for _ in range(data.draw(st.integers(1, 12))):
        rows = []
        chosen = data.draw(st.lists(st.integers(0, 5), min_size=1, unique=True))
        is_decode = data.draw(st.booleans()) and all(slots[slot].is_bound and slots[slot].end < 40 for slot in chosen)
        for slot in chosen:
            state = slots[slot]
            if not is_decode and (not state.is_bound or state.end == 40 or data.draw(st.booleans())):
                table[slot] = random.integers(1, 1000, 5)  # new blocks, for tokens that are not scheduled yet too
                staging.bind(slot)
                state.is_bound, state.end = True, 8 * data.draw(st.integers(0, 4))
            count = 1 if is_decode else data.draw(st.integers(1, min(10, 40 - state.end)))
            rows.append((slot, state.end, count))
            state.end += count
        if is_decode:
            put(staging, batch_of(rows, len(rows), table), data.draw(st.integers(len(rows), 8)))
        elif data.draw(st.booleans()):
            put_prompts(staging, batch_of(rows, table=table), GraphSize(64, 6))
        else:
            staging.stage(batch_of(rows, table=table))
        for slot, _, _ in rows:
            num_blocks = -(-slots[slot].end // 8)
            assert staging.block_table[slot, :num_blocks].tolist() == table[slot, :num_blocks].tolist()


@pytest.mark.parametrize("num_tokens", [3, 8, 61])
def test_fields_do_not_overlap_and_are_aligned_alike(num_tokens: int) -> None:
    """Whatever their length: Triton compiles a kernel for each alignment of its pointers, to 16 bytes or to less."""
    fields = make(LateStream()).arenas.fields(3, num_tokens).device.values()
    places = sorted((field.data_ptr(), field.data_ptr() + field.nbytes) for field in fields)
    assert all(end <= begin for (_, end), (begin, _) in pairwise(places))
    assert len({begin % 16 for begin, _ in places}) == 1
