"""Lays out a step's integers and sends them to the device: token ids, positions, slots, and the block table.

A GPU keeps a copy of the block table. A step brings the entries that are new: those of blocks its tokens begin, and
after a slot got a new owner all up to its last token. The table has one row more than the scheduler's, and the cache
one block more, for the rows that fill up a CUDA graph: they read and write there, and touch no slot of a request.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from roseinfer.engine.core.batch import Int32Array, ScheduledBatch, Watch
from roseinfer.engine.core.stopwatch import unwatched
from roseinfer.model.attention.base import DeviceTokens, PackedTokens
from roseinfer.model.device_stream import Event, Stream

IntArray = npt.NDArray[np.integer[Any]]

_WORD_BYTES = 4
_LAST_DECODE_FIELD = "query_starts"  # of `StagingSizes.layout`


@dataclass(frozen=True, slots=True)
class Arena:
    """Host memory of one step in flight."""

    words: torch.Tensor  # int32
    fields: dict[str, IntArray]
    event: Event  # passes when the last copy out of it is done


class Arenas:
    """The host's arenas and the device's one, with the same fields in the same order and free words behind them.

    A step's integers lie in one piece of memory and go to the device as one copy. There are two arenas of host memory,
    so that a step can be written while the one before is being copied; an arena is written again only after the copy
    that read it. On a CPU there is one, and the device's fields are that memory itself.
    """

    def __init__(self, stream: Stream, layout: np.dtype[np.void], num_free_words: int = 0) -> None:
        self._stream = stream
        assert layout.fields is not None
        self._fields = {name: (field[0], field[1]) for name, field in layout.fields.items()}
        self.num_field_words = layout.itemsize // _WORD_BYTES
        num_arenas = 1 if stream.is_host else 2
        self._arenas = [self._new_arena(self.num_field_words + num_free_words) for _ in range(num_arenas)]
        self._turn = 0
        self.num_sent_bytes = 0  # of the last arena
        field, offset = self._fields[_LAST_DECODE_FIELD]
        self.num_decode_words = (offset + field.itemsize) // _WORD_BYTES  # up to the end of what a decode step needs
        self.words = stream.new_device_tensor(self._arenas[0].words)
        self.fields = self._views(self.words)  # never move: a CUDA graph may read them

    def _new_arena(self, num_words: int) -> Arena:
        words = self._stream.new_host_tensor(num_words, torch.int32)
        fields = {name: view.numpy() for name, view in self._views(words).items()}
        return Arena(words, fields, self._stream.new_event())

    def _views(self, words: torch.Tensor) -> dict[str, torch.Tensor]:
        views = {}
        for name, (field, offset) in self._fields.items():
            view = words[offset // _WORD_BYTES : (offset + field.itemsize) // _WORD_BYTES]
            views[name] = view.view(torch.int64) if field.base == np.int64 else view
        return views

    def begin(self, watch: Watch = unwatched) -> Arena:
        """The next arena, once the last copy out of it is done."""
        arena = self._arenas[self._turn]
        self._turn = (self._turn + 1) % len(self._arenas)
        self.num_sent_bytes = 0
        if not self._stream.is_host:
            with watch("h2d"):
                arena.event.synchronize()
        return arena

    def send(self, arena: Arena, num_words: int, watch: Watch = unwatched) -> None:
        """Queue the copy of the arena's first words."""
        with watch("h2d"):
            self._stream.copy(self.words[:num_words], arena.words[:num_words])
            arena.event.record()
        self.num_sent_bytes = num_words * self.words.itemsize


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

    def layout(self) -> np.dtype[np.void]:
        """The fields of a step: those that index tensors are int64, those that attention kernels read are int32."""
        fields: list[tuple[str, type[np.generic], int]] = [
            # A graph of decode rows reads these.
            ("slot_indices", np.int64, self.max_rows),
            ("row_positions", np.int64, self.max_rows),  # of the row's one token
            ("next_positions", np.int64, self.max_rows),  # of the token to be sampled
            ("last_entries", np.int64, self.max_rows),  # index in the block table for the row's token
            ("last_blocks", np.int32, self.max_rows),  # that block
            ("slots", np.int32, self.max_rows),
            ("starts", np.int32, self.max_rows),
            ("query_starts", np.int32, self.max_rows + 1),
            # All other steps read these too.
            ("token_ids", np.int64, self.max_tokens),
            ("token_positions", np.int64, self.max_tokens),
            ("sampled_tokens", np.int64, self.max_rows),  # index of the last token of each row that samples
            ("sampled_slots", np.int64, self.max_rows),
        ]
        return np.dtype(fields, align=True)


@dataclass(frozen=True, slots=True)
class StagedStep:
    """One step's integers on the device. Rows and tokens that only fill up come last."""

    packed: PackedTokens
    token_ids: torch.Tensor  # int64 [tokens]; the first `num_gathered` are still to be gathered from the slots
    num_gathered: int
    slots: torch.Tensor  # int64 [num_gathered]
    positions: torch.Tensor  # int64 [tokens]
    sampled_tokens: torch.Tensor | None  # int64 [at least num_samples] index of tokens to sample from; None: all
    sampled_slots: torch.Tensor  # int64 [num_samples]
    num_samples: int


class InputStaging:
    """Sends steps to the device, and keeps the device's block table. One thread uses it."""

    def __init__(self, stream: Stream, sizes: StagingSizes, padded_rows: Callable[[int], int]) -> None:
        """`padded_rows`: see Placement."""
        self._is_host = stream.is_host
        self._sizes = sizes
        self._padded_rows = padded_rows
        self.spare_slot = sizes.num_slots
        max_entries = 0 if stream.is_host else sizes.num_slots * sizes.max_blocks
        self.arenas = Arenas(stream, sizes.layout(), 3 * max_entries)  # an entry's place is two words, its block one
        self._device = self.arenas.fields
        num_table_rows = 0 if stream.is_host else sizes.num_slots + 1  # on a CPU the scheduler's own table serves
        self.block_table = torch.zeros(num_table_rows, sizes.max_blocks, dtype=torch.int32, device=stream.device)
        self._is_unsent = np.zeros(sizes.num_slots, np.bool_)
        self._counting = np.arange(max(sizes.max_rows, sizes.max_tokens) + 1, dtype=np.int32)

    def bind(self, slot: int) -> None:
        """Note that the slot has a new owner, none of whose blocks the device knows."""
        self._is_unsent[slot] = True

    def stage(self, batch: ScheduledBatch, watch: Watch = unwatched) -> StagedStep:
        """Send a batch. The result is valid until the next step is staged."""
        arena = self.arenas.begin(watch)
        if batch.num_device_rows == batch.num_rows:
            step = self._pack_decode(batch, arena.fields)
        else:
            step = self._pack(batch, arena.fields)
        if not self._is_host:
            arena.fields["slots"][: batch.num_rows] = batch.slots
            arena.fields["starts"][: batch.num_rows] = batch.starts
            arena.fields["query_starts"][: batch.num_rows + 1] = step.packed.query_starts
            self._send_with_entries(batch, arena, watch)
        return step

    def _pack_decode(self, batch: ScheduledBatch, host: dict[str, IntArray]) -> StagedStep:
        """Rows that have one token each and sample: rows, tokens and samples are the same."""
        num_rows = batch.num_rows
        num_tokens = self._padded_rows(num_rows)
        slots, positions = _repeat_last(batch.slots, num_tokens), _repeat_last(batch.starts, num_tokens)
        host["slot_indices"][:num_tokens] = slots
        host["token_positions"][:num_tokens] = positions
        packed = self._packed(batch, slots, positions, self._counting[: num_rows + 1])
        return self._decode_step(packed, self._device["token_positions"][:num_tokens], num_rows)

    def _decode_step(self, packed: PackedTokens, positions: torch.Tensor, num_rows: int) -> StagedStep:
        num_tokens = len(positions)
        slots = self._device["slot_indices"][:num_tokens]
        return StagedStep(
            packed=packed,
            token_ids=self._device["token_ids"][:num_tokens],
            num_gathered=num_tokens,
            slots=slots,
            positions=positions,
            sampled_tokens=None,
            sampled_slots=slots[:num_rows],
            num_samples=num_rows,
        )

    def _pack(self, batch: ScheduledBatch, host: dict[str, IntArray]) -> StagedStep:
        num_rows, num_gathered = batch.num_rows, batch.num_device_rows
        num_tokens = self._padded_rows(batch.num_tokens)
        query_starts = np.zeros(num_rows + 1, np.int32)
        np.cumsum(batch.num_new_tokens, out=query_starts[1:])
        row_of_token = _repeat_last(np.repeat(self._counting[:num_rows], batch.num_new_tokens), num_tokens)
        index = _repeat_last(self._counting[: batch.num_tokens], num_tokens)
        positions: Int32Array = index + (batch.starts - query_starts[:-1])[row_of_token]
        host["slot_indices"][:num_gathered] = batch.slots[:num_gathered]
        host["token_ids"][num_gathered:num_tokens] = _repeat_last(batch.token_ids, num_tokens - num_gathered)
        host["token_positions"][:num_tokens] = positions
        sampling_rows = np.flatnonzero(batch.samples)
        num_samples = len(sampling_rows)
        num_sampled = self._padded_rows(num_samples) if num_samples else 0
        host["sampled_tokens"][:num_sampled] = _repeat_last(query_starts[1:][sampling_rows] - 1, num_sampled)
        host["sampled_slots"][:num_samples] = batch.slots[sampling_rows]
        if num_rows > 1 and (batch.slots[1:] == batch.slots[:-1]).any():  # attention takes rows of a draft as one
            query_starts = query_starts[np.flatnonzero(np.append(np.diff(batch.slots, prepend=-1) != 0, True))]
        return StagedStep(
            packed=self._packed(batch, batch.slots[row_of_token], positions, query_starts),
            token_ids=self._device["token_ids"][:num_tokens],
            num_gathered=num_gathered,
            slots=self._device["slot_indices"][:num_gathered],
            positions=self._device["token_positions"][:num_tokens],
            sampled_tokens=self._device["sampled_tokens"][:num_sampled],
            sampled_slots=self._device["sampled_slots"][:num_samples],
            num_samples=num_samples,
        )

    def _packed(
        self, batch: ScheduledBatch, slots: Int32Array, positions: Int32Array, query_starts: Int32Array
    ) -> PackedTokens:
        is_decode = batch.num_device_rows == batch.num_rows
        max_query_len = 1 if is_decode else int(np.diff(query_starts).max())
        # A GPU's kernel for rows of one token is compiled for ranges of `max_context_len`. It is run with one of them,
        # that of the graphs. A prompt of which one token is left is such a row too.
        has_one_range = max_query_len == 1 and not self._is_host
        return PackedTokens(
            slots=slots,
            positions=positions,
            query_starts=query_starts,
            block_table=batch.block_table,
            max_query_len=max_query_len,
            max_context_len=self._sizes.max_model_len
            if has_one_range
            else int((batch.starts + batch.num_new_tokens).max()),
            device=None if self._is_host else self._device_tokens(batch.num_rows),
        )

    def _device_tokens(self, num_rows: int) -> DeviceTokens:
        return DeviceTokens(
            slots=self._device["slots"][:num_rows],
            starts=self._device["starts"][:num_rows],
            query_starts=self._device["query_starts"][: num_rows + 1],
            block_table=self.block_table,
            table_stride=self.block_table.stride(0),
        )

    def _send_with_entries(self, batch: ScheduledBatch, arena: Arena, watch: Watch) -> None:
        """Send everything in one copy, and put the new entries into the device's block table."""
        entries, blocks = self._new_entries(batch)
        first, count = self.arenas.num_field_words, len(entries)
        host_entries, host_blocks = _entries(arena.words, first, count)
        host_entries.numpy()[:] = entries
        host_blocks.numpy()[:] = blocks
        self.arenas.send(arena, first + 3 * count, watch)
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

    def stage_decode(self, batch: ScheduledBatch | None, num_rows: int, watch: Watch = unwatched) -> None:
        """Send rows that decode, filled up to `num_rows`, to where `decode_step(num_rows)` reads them.

        None means no rows but those that fill up.
        """
        arena = self.arenas.begin(watch)
        host, max_blocks = arena.fields, self._sizes.max_blocks
        num_used = 0 if batch is None else batch.num_rows
        if batch is not None:
            columns = batch.starts // self._sizes.block_size
            host["slots"][:num_used] = batch.slots
            host["starts"][:num_used] = batch.starts
            host["last_entries"][:num_used] = batch.slots.astype(np.int64) * max_blocks + columns
            host["last_blocks"][:num_used] = batch.block_table[batch.slots, columns]
        host["slots"][num_used:num_rows] = self.spare_slot
        host["starts"][num_used:num_rows] = 0
        host["last_entries"][num_used:num_rows] = self.spare_slot * max_blocks
        host["last_blocks"][num_used:num_rows] = self._sizes.spare_block
        host["slot_indices"][:num_rows] = host["slots"][:num_rows]
        host["row_positions"][:num_rows] = host["starts"][:num_rows]
        host["next_positions"][:num_rows] = host["starts"][:num_rows] + 1
        host["query_starts"][: num_rows + 1] = self._counting[: num_rows + 1]
        self.arenas.send(arena, self.arenas.num_decode_words, watch)

    def decode_step(self, num_rows: int) -> StagedStep:
        """The step that `stage_decode` sends, at addresses that never change. Its host arrays are placeholders."""
        packed = PackedTokens(
            slots=np.full(num_rows, self.spare_slot, np.int32),
            positions=np.zeros(num_rows, np.int32),
            query_starts=self._counting[: num_rows + 1],
            block_table=np.zeros((0, self._sizes.max_blocks), np.int32),
            max_query_len=1,
            max_context_len=self._sizes.max_model_len,
            device=self._device_tokens(num_rows),
        )
        return self._decode_step(packed, self._device["row_positions"][:num_rows], num_rows)

    def put_last_blocks(self, num_rows: int) -> None:
        """Put the blocks that `stage_decode` sent into the device's block table. Part of the graph."""
        entries, blocks = self._device["last_entries"][:num_rows], self._device["last_blocks"][:num_rows]
        self.block_table.view(-1).scatter_(0, entries, blocks)

    def next_positions(self, num_rows: int) -> torch.Tensor:
        """The positions of the tokens that the rows of `stage_decode` sample: int64 [num_rows]."""
        return self._device["next_positions"][:num_rows]


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
