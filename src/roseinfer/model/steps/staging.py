"""Lays out a step's integers and sends them to the device: token ids, positions, slots, and the block table.

A GPU keeps a copy of the block table. A step brings the entries that are new: those of blocks its tokens begin, and
after a slot got a new owner all up to its last token. The table has one row more than the scheduler's, and the cache
one block more, for the rows that fill up a CUDA graph: they read and write there, and touch no slot of a request.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from roseinfer.engine.core.batch import Int32Array, ScheduledBatch, Watch
from roseinfer.engine.core.stopwatch import unwatched
from roseinfer.model.attention.base import DeviceTokens, PackedTokens
from roseinfer.model.device_stream import Outbox, Stream
from roseinfer.model.sampling.edit_table import MaskArea
from roseinfer.model.steps.arenas import Arena, Arenas, DecodeFields, IntArray, Layout, StepFields
from roseinfer.model.steps.graphs import GraphSize

_ENTRY_WORDS = 3  # of a new entry of the block table: its index takes two, its block one


@dataclass(frozen=True, slots=True)
class StagingSizes:
    """The largest step, and the shape of the block table."""

    num_slots: int  # of the scheduler
    max_rows: int  # with those that fill up a graph
    max_tokens: int  # with those that round a step up
    max_model_len: int
    block_size: int
    spare_block: int  # a block of the cache that the scheduler never hands out

    @property
    def max_blocks(self) -> int:
        """The most blocks of one slot."""
        return -(-self.max_model_len // self.block_size)


@dataclass(frozen=True, slots=True)
class StagedStep:
    """One step's integers on the device. Rows and tokens that only fill up come last."""

    packed: PackedTokens
    token_ids: torch.Tensor  # int64 [tokens]; the first `num_gathered` are there after `gather`
    num_gathered: int  # in a graph, where it may be any number, that of the rows
    slots: torch.Tensor  # int64 [num_gathered]
    positions: torch.Tensor  # int64 [tokens]
    # int64 [at least num_samples, and one] index of tokens to sample from; None: all
    sampled_tokens: torch.Tensor | None
    sampled_slots: torch.Tensor  # int64 [num_samples]
    num_samples: int
    next_positions: torch.Tensor | None = None  # int64 [num_samples] of the tokens to be sampled; on a GPU
    gathered_tokens: torch.Tensor | None = None  # int64 [num_gathered] index of the tokens; None: the first ones
    gathers_into: torch.Tensor | None = None  # `token_ids`, and one more place

    def gather(self, last_tokens: torch.Tensor) -> None:
        """Put the tokens int64 [slots] that were sampled last for `slots` among the step's tokens."""
        if self.gathered_tokens is not None:
            assert self.gathers_into is not None
            self.gathers_into.index_copy_(0, self.gathered_tokens, last_tokens.index_select(0, self.slots))
        elif self.num_gathered:
            torch.index_select(last_tokens, 0, self.slots, out=self.token_ids[: self.num_gathered])


class InputStaging:
    """Sends steps to the device, and keeps the device's block table. One thread uses it."""

    def __init__(
        self,
        stream: Stream,
        sizes: StagingSizes,
        padded_rows: Callable[[int], int],
        mask_area: MaskArea | None = None,
    ) -> None:
        """`padded_rows`: see Placement. Masks of the rows of graphs lie in `mask_area`, before the step's fields."""
        self._is_host = stream.is_host
        self._mask_area = mask_area
        self._sizes = sizes
        self._padded_rows = padded_rows
        self.spare_slot = sizes.num_slots
        max_entries = 0 if stream.is_host else sizes.num_slots * sizes.max_blocks
        num_mask_words = 0 if mask_area is None else mask_area.num_words
        num_words = Layout(sizes.max_rows, sizes.max_tokens, num_mask_words).num_words
        self.arenas = Arenas(stream, num_words + _ENTRY_WORDS * max_entries, num_mask_words)
        self.masks = self.arenas.words[:num_mask_words]
        self.outbox = Outbox(stream.device)  # what is put here travels with the next step
        num_table_rows = 0 if stream.is_host else sizes.num_slots + 1  # on a CPU the scheduler's own table serves
        self.block_table = torch.zeros(num_table_rows, sizes.max_blocks, dtype=torch.int32, device=stream.device)
        self._no_slots: Int32Array = np.zeros(0, np.int32)
        self._one, self._block_size = np.array(1), np.array(sizes.block_size)
        # On a CPU, if all rows of the last step decoded: the batch's slots, and the step, which the next one is too if
        # nothing but its positions differs.
        self._last_decode: tuple[Int32Array, StagedStep] | None = None
        self._is_unsent = np.zeros(sizes.num_slots, np.bool_)
        self._counting = np.arange(max(sizes.max_rows, sizes.max_tokens) + 1, dtype=np.int32)

    def bind(self, slot: int) -> None:
        """Note that the slot has a new owner, none of whose blocks the device knows."""
        self._is_unsent[slot] = True

    def _fields(self, num_rows: int, num_tokens: int) -> StepFields:
        """The fields of a step. A CPU, for which nothing is copied, has all steps at one place."""
        if self._is_host:
            return self.arenas.fields(self._sizes.max_rows, self._sizes.max_tokens)
        return self.arenas.fields(num_rows, num_tokens)

    # --- steps that are queued operation by operation ---

    def stage(self, batch: ScheduledBatch, watch: Watch = unwatched) -> StagedStep:
        """Send a batch. The result is valid until the next step is staged."""
        arena = self.arenas.begin(watch)
        arena.decode = None
        fields = self._fields(self._padded_rows(batch.num_rows), self._padded_rows(batch.num_tokens))
        host = fields.host[arena.index]
        is_decode = batch.num_device_rows == batch.num_rows
        step = self._pack_decode(batch, fields, host) if is_decode else self._pack(batch, fields, host)
        if not self._is_host:
            self._put_rows(batch, host, step.packed.query_starts)
            self._send_with_entries(batch, arena, fields, fields.layout.step_words.start, watch)
        return step

    def _pack_decode(self, batch: ScheduledBatch, fields: StepFields, host: dict[str, IntArray]) -> StagedStep:
        """Rows that have one token each and sample: rows, tokens and samples are the same."""
        num_rows = batch.num_rows
        num_tokens = self._padded_rows(num_rows)
        slots, positions = _repeat_last(batch.slots, num_tokens), _repeat_last(batch.starts, num_tokens)
        host["token_positions"][:num_tokens] = positions
        last_slots, last = self._last_decode or (None, None)
        if last is not None and last_slots is batch.slots and last.packed.block_table is batch.block_table:
            last.packed.positions[:] = positions
            return last
        host["slot_indices"][:num_tokens] = slots
        packed = self._packed(batch, fields, slots, positions.copy(), self._counting[: num_rows + 1])
        step = self._decode_step(packed, fields, num_tokens, num_rows)
        self._last_decode = (batch.slots, step) if self._is_host else None
        return step

    def _decode_step(self, packed: PackedTokens, fields: StepFields, num_tokens: int, num_rows: int) -> StagedStep:
        slots = fields.device["slot_indices"][:num_tokens]
        return StagedStep(
            packed=packed,
            token_ids=fields.device["token_ids"][:num_tokens],
            num_gathered=num_tokens,
            slots=slots,
            positions=fields.device["token_positions"][:num_tokens],
            sampled_tokens=None,
            sampled_slots=slots[:num_rows],
            num_samples=num_rows,
            next_positions=None if self._is_host else fields.device["next_positions"][:num_rows],
        )

    def _pack(self, batch: ScheduledBatch, fields: StepFields, host: dict[str, IntArray]) -> StagedStep:
        num_tokens, num_samples = self._padded_rows(batch.num_tokens), int(np.count_nonzero(batch.samples))
        num_sampled = self._padded_rows(max(num_samples, 1))  # kernels take no empty tensors
        query_starts, row_of_token, positions = self._put_tokens(batch, host, num_tokens, num_sampled)
        if batch.num_rows > 1 and (batch.slots[1:] == batch.slots[:-1]).any():  # attention takes a draft's rows as one
            query_starts = query_starts[np.flatnonzero(np.append(np.diff(batch.slots, prepend=-1) != 0, True))]
        device = fields.device
        return StagedStep(
            packed=self._packed(batch, fields, batch.slots[row_of_token], positions, query_starts),
            token_ids=device["token_ids"][:num_tokens],
            num_gathered=batch.num_device_rows,
            slots=device["slot_indices"][: batch.num_device_rows],
            positions=device["token_positions"][:num_tokens],
            sampled_tokens=device["sampled_tokens"][:num_sampled],
            sampled_slots=device["sampled_slots"][:num_samples],
            num_samples=num_samples,
            next_positions=None if self._is_host else device["next_positions"][:num_samples],
        )

    def _put_tokens(
        self, batch: ScheduledBatch, host: dict[str, IntArray], num_tokens: int, num_sampled: int
    ) -> tuple[Int32Array, Int32Array, Int32Array]:
        """Write what a batch computes, the last token repeated up to `num_tokens`, and what it samples, likewise.

        Returns the index of each row's first token, and of each token its row and its position.
        """
        num_rows, num_gathered = batch.num_rows, batch.num_device_rows
        self._last_decode = None
        query_starts = np.zeros(num_rows + 1, np.int32)
        np.cumsum(batch.num_new_tokens, out=query_starts[1:])
        row_of_token = _repeat_last(np.repeat(self._counting[:num_rows], batch.num_new_tokens), num_tokens)
        index = _repeat_last(self._counting[: batch.num_tokens], num_tokens)
        positions: Int32Array = index + (batch.starts - query_starts[:-1])[row_of_token]
        host["slot_indices"][:num_gathered] = batch.slots[:num_gathered]
        host["token_ids"][num_gathered:num_tokens] = _repeat_last(batch.token_ids, num_tokens - num_gathered)
        host["token_positions"][:num_tokens] = positions
        sampling_rows = np.flatnonzero(batch.samples)
        last_tokens = query_starts[1:][sampling_rows] - 1
        host["sampled_tokens"][:num_sampled] = _repeat_last(last_tokens, num_sampled) if len(sampling_rows) else 0
        host["sampled_slots"][: len(sampling_rows)] = batch.slots[sampling_rows]
        return query_starts, row_of_token, positions

    def _packed(
        self,
        batch: ScheduledBatch,
        fields: StepFields,
        slots: Int32Array,
        positions: Int32Array,
        query_starts: Int32Array,
    ) -> PackedTokens:
        is_decode = batch.num_device_rows == batch.num_rows
        max_query_len = 1 if is_decode else int(np.diff(query_starts).max())
        # A GPU's kernel for rows of one token is compiled for ranges of `max_context_len`. It is run with one of them,
        # that of the graphs. A prompt of which one token is left is such a row too.
        return PackedTokens(
            slots=slots,
            positions=positions,
            query_starts=query_starts,
            block_table=batch.block_table,
            max_query_len=max_query_len,
            max_context_len=self._sizes.max_model_len
            if max_query_len == 1
            else int((batch.starts + batch.num_new_tokens).max()),
            device=None if self._is_host else self._device_tokens(fields, batch.num_rows),
        )

    def _device_tokens(self, fields: StepFields, num_rows: int) -> DeviceTokens:
        return DeviceTokens(
            slots=fields.device["slots"][:num_rows],
            starts=fields.device["starts"][:num_rows],
            query_starts=fields.device["query_starts"][: num_rows + 1],
            block_table=self.block_table,
            table_stride=self.block_table.stride(0),
        )

    def _put_rows(self, batch: ScheduledBatch, host: dict[str, IntArray], query_starts: Int32Array) -> None:
        """Write what attention, and then the sampler, on a GPU read."""
        host["slots"][: batch.num_rows] = batch.slots
        host["starts"][: batch.num_rows] = batch.starts
        host["query_starts"][: batch.num_rows + 1] = query_starts
        ends = (batch.starts + batch.num_new_tokens)[batch.samples]
        host["next_positions"][: len(ends)] = ends

    def _send_with_entries(
        self, batch: ScheduledBatch, arena: Arena, fields: StepFields, start: int, watch: Watch
    ) -> None:
        """Send everything from the word `start` on in one copy; put the new entries into the device's block table."""
        entries, blocks = self._new_entries(batch)
        first, count = fields.layout.num_words, len(entries)
        host_entries, host_blocks = _entries(arena.words, first, count)
        host_entries.numpy()[:] = entries
        host_blocks.numpy()[:] = blocks
        self.arenas.send(arena, slice(start, first + _ENTRY_WORDS * count), watch, self.outbox)
        if count:
            self.block_table.view(-1).scatter_(0, *_entries(self.arenas.words, first, count))

    def _new_entries(self, batch: ScheduledBatch) -> tuple[npt.NDArray[np.int64], Int32Array]:
        """Entries of the block table that the rows need and the device does not have: their indices, and the blocks.

        The entry of a token that is not the first of its block is there, since the token before needed it too.
        """
        size, slots = self._sizes.block_size, batch.slots
        num_blocks = -(-(batch.starts + batch.num_new_tokens) // size)
        first = np.where(self._is_unsent[slots], 0, -(-batch.starts // size))
        counts = np.maximum(num_blocks - first, 0)
        ends = np.cumsum(counts)
        rows = np.repeat(slots.astype(np.int64), counts)
        columns = np.arange(ends[-1]) + np.repeat(first - (ends - counts), counts)
        self._is_unsent[slots] = False
        return rows * self._sizes.max_blocks + columns, batch.block_table[rows, columns]

    # --- steps that a graph holds ---

    def _with_masks(self, batch: ScheduledBatch | None, arena: Arena, words: slice) -> slice:
        """The words to send: with the masks of the batch's rows, if it has any, which are written now.

        The graph draws the tokens, so its masks cannot be computed while it runs, as those of other steps are.
        """
        if batch is None or batch.masks is None or self._mask_area is None:
            return words
        return slice(self._mask_area.write(batch.masks, arena.words[: self._mask_area.num_words].numpy()), words.stop)

    def stage_decode(self, batch: ScheduledBatch | None, num_rows: int, watch: Watch = unwatched) -> None:
        """Send rows that decode, filled up to `num_rows`, to where `decode_step(num_rows)` reads them.

        None means no rows but those that fill up.
        """
        arena = self.arenas.begin(watch)
        fields = self._fields(num_rows, num_rows)
        slots, decode = self._no_slots if batch is None else batch.slots, arena.decode
        if decode is None or decode.slots is not slots or decode.fields is not fields:
            decode = arena.decode = self._put_slots(slots, fields, fields.host[arena.index])
        if batch is not None:
            self._put_positions(batch, decode)
        words = self._with_masks(batch, arena, fields.layout.decode_words)
        self.arenas.send(arena, words, watch, self.outbox)

    def _put_slots(self, slots: Int32Array, fields: StepFields, host: dict[str, IntArray]) -> DecodeFields:
        """Write what stays while these slots decode, and whole rows to fill up."""
        num_used, max_blocks = len(slots), self._sizes.max_blocks
        host["slot_indices"][:num_used] = slots
        host["slot_indices"][num_used:] = self.spare_slot
        host["slots"][:] = host["slot_indices"]
        host["query_starts"][:] = self._counting[: len(host["query_starts"])]
        of_spare_rows = {
            "token_positions": 0,
            "starts": 0,
            "next_positions": 1,
            "last_entries": self.spare_slot * max_blocks,
            "last_blocks": self._sizes.spare_block,
        }
        if num_used < len(host["slots"]):
            for name, value in of_spare_rows.items():
                host[name][num_used:] = value
        first_entries = host["slot_indices"][:num_used] * max_blocks
        return DecodeFields(fields, slots, first_entries, *(host[name][:num_used] for name in of_spare_rows))

    def _put_positions(self, batch: ScheduledBatch, decode: DecodeFields) -> None:
        """Write the rows' positions, and the entry of the block table that each row's token needs.

        A graph on a fast GPU leaves the host some 60 microseconds a step: indices are made once, in the type that numpy
        indexes with, the table is read by one of them, and no number is converted to an array.
        """
        positions, table = decode.positions, batch.block_table
        positions[:] = decode.starts[:] = batch.starts
        np.add(positions, self._one, decode.next_positions)
        columns = positions // self._block_size
        entries = np.add(decode.first_entries, columns, decode.last_entries)
        if table.shape[1] == self._sizes.max_blocks:
            table.take(entries, None, decode.last_blocks, "clip")  # which alone writes there directly; none is outside
        else:
            decode.last_blocks[:] = table[batch.slots, columns]

    def decode_step(self, num_rows: int) -> StagedStep:
        """The step that `stage_decode` sends, at addresses that never change."""
        fields = self._fields(num_rows, num_rows)
        return self._decode_step(self._packed_for_graph(fields, num_rows, num_rows, 1), fields, num_rows, num_rows)

    def put_last_blocks(self, num_rows: int) -> None:
        """Put the blocks that `stage_decode` sent into the device's block table. Part of the graph."""
        device = self._fields(num_rows, num_rows).device
        self.block_table.view(-1).scatter_(0, device["last_entries"], device["last_blocks"])

    def stage_prompts(self, batch: ScheduledBatch | None, size: GraphSize, watch: Watch = unwatched) -> None:
        """Send rows of which some do not decode, filled up to `size`, to where `prompt_step(size)` reads them.

        Rows that fill up have no tokens, and tokens that fill up no row: attention leaves both alone. What the former
        sample is the spare slot's. None means no other rows.
        """
        arena = self.arenas.begin(watch)
        arena.decode = None
        fields = self._fields(size.num_rows, size.num_tokens)
        host = fields.host[arena.index]
        num_rows = num_tokens = num_gathered = num_samples = 0
        if batch is not None:
            num_rows, num_tokens, num_gathered = batch.num_rows, batch.num_tokens, batch.num_device_rows
            query_starts, _, _ = self._put_tokens(batch, host, size.num_tokens, size.num_rows)
            self._put_rows(batch, host, query_starts)
            num_samples = int(np.count_nonzero(batch.samples))
        else:
            for name in ("token_ids", "token_positions", "sampled_tokens"):
                host[name][:] = 0
        host["slots"][num_rows:] = self.spare_slot
        host["starts"][num_rows:] = 0
        host["query_starts"][num_rows:] = num_tokens
        host["slot_indices"][num_gathered:] = self.spare_slot
        host["gathered_tokens"][:num_gathered] = self._counting[:num_gathered]
        host["gathered_tokens"][num_gathered:] = size.num_tokens
        host["sampled_slots"][num_samples:] = self.spare_slot
        host["next_positions"][num_samples:] = 1
        if batch is None:
            self.arenas.send(arena, fields.layout.step_words, watch, self.outbox)
        else:
            words = self._with_masks(batch, arena, fields.layout.step_words)
            self._send_with_entries(batch, arena, fields, words.start, watch)

    def prompt_step(self, size: GraphSize) -> StagedStep:
        """The step that `stage_prompts` sends, at addresses that never change."""
        fields = self._fields(size.num_rows, size.num_tokens)
        device = fields.device
        return StagedStep(
            packed=self._packed_for_graph(fields, size.num_rows, size.num_tokens, size.num_tokens),
            token_ids=device["token_ids"][: size.num_tokens],
            num_gathered=size.num_rows,
            slots=device["slot_indices"],
            positions=device["token_positions"],
            sampled_tokens=device["sampled_tokens"],
            sampled_slots=device["sampled_slots"],
            num_samples=size.num_rows,
            next_positions=device["next_positions"],
            gathered_tokens=device["gathered_tokens"],
            gathers_into=device["token_ids"],
        )

    def _packed_for_graph(self, fields: StepFields, num_rows: int, num_tokens: int, max_query_len: int) -> PackedTokens:
        """Its host arrays are placeholders."""
        return PackedTokens(
            slots=np.full(num_tokens, self.spare_slot, np.int32),
            positions=np.zeros(num_tokens, np.int32),
            query_starts=self._counting[: num_rows + 1],
            block_table=np.zeros((0, self._sizes.max_blocks), np.int32),
            max_query_len=max_query_len,
            max_context_len=self._sizes.max_model_len,
            device=self._device_tokens(fields, num_rows),
            is_captured=True,
        )


def _entries(words: torch.Tensor, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The indices of `count` entries int64, and after them their blocks int32."""
    middle = first + 2 * count
    return words[first:middle].view(torch.int64), words[middle : middle + count]


def _repeat_last(array: Int32Array, length: int) -> Int32Array:
    """The array, with its last number repeated up to `length`."""
    if len(array) == length:
        return array
    longer = np.empty(length, array.dtype)
    longer[: len(array)] = array
    longer[len(array) :] = array[-1]
    return longer
