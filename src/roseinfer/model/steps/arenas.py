"""The memory that a step's integers lie in on the host and on the device: one piece each, and one copy a step."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from roseinfer.engine.core.batch import Int32Array, Watch
from roseinfer.model.device_stream import Event, Outbox, Stream

IntArray = npt.NDArray[np.integer[Any]]
IntType = np.dtype[np.integer[Any]]

_NARROW: IntType = np.dtype(np.int32)
_WIDE: IntType = np.dtype(np.int64)
_WORD_BYTES = 4
_LINE_WORDS = 16  # a field begins on a line: for pointers that are aligned otherwise Triton compiles a kernel again
_NUM_KEPT_FIELDS = 128  # sizes of steps; more than there are graphs


class Layout:
    """Where the integers of a step with this number of rows and tokens lie in an arena: equal sizes at equal places.

    Fields that index tensors are int64, those that attention kernels read are int32. New entries of the block table
    follow behind the last field.
    """

    def __init__(self, num_rows: int, num_tokens: int, begin: int = 0) -> None:
        """The first field begins at the word `begin`."""
        # Words, and the type that they are read as.
        self.places: dict[str, tuple[slice, np.dtype[np.integer[Any]]]] = {}
        self.num_words = begin  # up to the end of the last field
        # Graphs of decode rows alone bring the block of each row's token.
        self._add("last_entries", num_rows, _WIDE)  # its index in the block table
        self._add("last_blocks", num_rows, _NARROW)
        first_word = self.num_words
        self._add("slot_indices", num_rows, _WIDE)  # of the rows whose token is gathered
        self._add("next_positions", num_rows, _WIDE)  # of the tokens to be sampled; a GPU reads it
        self._add("slots", num_rows, _NARROW)
        self._add("starts", num_rows, _NARROW)
        self._add("query_starts", num_rows + 1, _NARROW)
        self._add("token_positions", num_tokens, _WIDE)
        self.decode_words = slice(begin, self.num_words)
        # Steps with other rows than those that decode have these too.
        self._add("sampled_tokens", num_rows, _WIDE)  # index of the last token of each row that samples
        self._add("sampled_slots", num_rows, _WIDE)
        self._add("gathered_tokens", num_rows, _WIDE)  # index of each gathered token; graphs alone read it
        self._add("token_ids", num_tokens + 1, _WIDE)  # a graph puts into the last what it gathers for no token
        self.step_words = slice(first_word, self.num_words)

    def _add(self, name: str, count: int, dtype: IntType) -> None:
        num_words = count * dtype.itemsize // _WORD_BYTES
        self.places[name] = slice(self.num_words, self.num_words + num_words), dtype
        self.num_words += -(-num_words // _LINE_WORDS) * _LINE_WORDS


@dataclass(frozen=True, slots=True)
class StepFields:
    """The fields of a step of some size."""

    layout: Layout
    host: list[dict[str, IntArray]]  # of each arena
    device: dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class DecodeFields:
    """What an arena has of a decode step: the fields that change while its rows stay the same, [rows] each."""

    fields: StepFields
    slots: Int32Array  # the batch's, which is not changed in place
    first_entries: IntArray  # index of each slot's first block in the block table
    positions: IntArray
    starts: IntArray
    next_positions: IntArray
    last_entries: IntArray
    last_blocks: IntArray


@dataclass(slots=True)
class Arena:
    """Host memory of one step in flight."""

    index: int
    words: torch.Tensor  # int32
    event: Event  # passes when the last copy out of it is done
    decode: DecodeFields | None = None  # None: the last step written here was another one


class Arenas:
    """The host's arenas and the device's one.

    A step's integers lie in one piece of memory and go to the device as one copy, of what the step uses. There are two
    arenas of host memory, so that a step can be written while the one before is being copied; an arena is written again
    only after the copy that read it. On a CPU there is one, and the device's words are that memory itself.
    """

    def __init__(self, stream: Stream, num_words: int, first_word: int) -> None:
        """Fields begin at `first_word`."""
        self._stream = stream
        self._first_word = first_word
        num_arenas = 1 if stream.is_host else 2
        self._arenas = [
            Arena(index, stream.new_host_tensor(num_words, torch.int32), stream.new_event())
            for index in range(num_arenas)
        ]
        self._turn = 0
        self.num_sent_bytes = 0  # of the last arena
        self.words = stream.new_device_tensor(self._arenas[0].words)  # never moves: a CUDA graph may read it
        self.fields = lru_cache(_NUM_KEPT_FIELDS)(self._new_fields)
        self._sides = lru_cache(2 * _NUM_KEPT_FIELDS)(self._new_sides)

    def _new_fields(self, num_rows: int, num_tokens: int) -> StepFields:
        """The fields of a step with this number of rows and tokens."""
        layout = Layout(num_rows, num_tokens, self._first_word)
        host = [
            {name: arena.words[words].numpy().view(dtype) for name, (words, dtype) in layout.places.items()}
            for arena in self._arenas
        ]
        device = {
            name: self.words[words].view(torch.int64 if dtype == _WIDE else torch.int32)
            for name, (words, dtype) in layout.places.items()
        }
        return StepFields(layout, host, device)

    def _new_sides(self, index: int, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The device's and the host's side of a copy of some words of an arena."""
        return self.words[start:stop], self._arenas[index].words[start:stop]

    def begin(self, watch: Watch) -> Arena:
        """The next arena, once the last copy out of it is done."""
        arena = self._arenas[self._turn]
        self._turn = (self._turn + 1) % len(self._arenas)
        self.num_sent_bytes = 0
        if not self._stream.is_host:
            with watch("h2d"):
                arena.event.synchronize()
        return arena

    def send(self, arena: Arena, words: slice, watch: Watch, outbox: Outbox) -> None:
        """Queue the copy of these words of the arena, and behind them of what waits in the outbox, which is used."""
        first = words.stop + words.stop % 2
        last = first + outbox.num_words
        is_with_them = outbox.num_words > 0 and last <= len(self.words)
        if is_with_them:
            outbox.write(arena.words[first:last].numpy())
            words = slice(words.start, last)
        with watch("h2d"):
            self._stream.copy(*self._sides(arena.index, words.start, words.stop))
            arena.event.record()
        self.num_sent_bytes = (words.stop - words.start) * _WORD_BYTES
        if is_with_them:
            outbox.use(self.words[first:last])
        else:
            outbox.flush()
