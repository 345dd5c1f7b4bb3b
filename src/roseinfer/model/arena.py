"""Named integers into one piece of memory that goes to the device as one copy. Knows nothing of what they mean.

There are two arenas of host memory, so that a step can be written while the one before is on its way; an arena is
written again only after the copy that read it. On a CPU there is one, and the device's fields are that memory itself.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from roseinfer.engine.core.batch import Watch
from roseinfer.model.device_stream import Event, Stream
from roseinfer.runtime.stopwatch import UNWATCHED

IntArray = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True)
class Field:
    """A vector of `size` integers, int32 or int64."""

    size: int
    is_wide: bool = False

    @property
    def num_words(self) -> int:
        """Words of four bytes; an even number, so that wide fields are where int64 may be."""
        return 2 * self.size if self.is_wide else self.size + self.size % 2


@dataclass(frozen=True, slots=True)
class Arena:
    """Host memory of one step in flight."""

    words: torch.Tensor  # int32
    fields: dict[str, IntArray]
    event: Event  # the copy that read it last is done


class Arenas:
    """The host's arenas and the device's one, with the same fields in the same order and free words behind them."""

    def __init__(self, stream: Stream, layout: dict[str, Field], num_free_words: int = 0) -> None:
        self._stream = stream
        self._ends: dict[str, int] = {}
        offset = 0
        for name, field in layout.items():
            offset += field.num_words
            self._ends[name] = offset
        self.num_field_words = offset
        num_arenas = 1 if stream.is_host else 2
        self._arenas = [self._new_arena(layout, offset + num_free_words) for _ in range(num_arenas)]
        self._turn = 0
        self.num_sent_bytes = 0  # of the arena begun last
        self.words = stream.new_device_tensor(self._arenas[0].words)
        self.fields = self._views(self.words, layout)  # never move: a CUDA graph may read them

    def _new_arena(self, layout: dict[str, Field], num_words: int) -> Arena:
        words = self._stream.new_host_tensor(num_words, torch.int32)
        fields = {name: view.numpy() for name, view in self._views(words, layout).items()}
        return Arena(words, fields, self._stream.new_event())

    def _views(self, words: torch.Tensor, layout: dict[str, Field]) -> dict[str, torch.Tensor]:
        views = {}
        for name, field in layout.items():
            begin = self._ends[name] - field.num_words
            view = words[begin : begin + field.size * (2 if field.is_wide else 1)]
            views[name] = view.view(torch.int64) if field.is_wide else view
        return views

    def begin(self, watch: Watch = UNWATCHED) -> Arena:
        """The arena whose turn it is, once the copy that read it last is done."""
        arena = self._arenas[self._turn]
        self._turn = (self._turn + 1) % len(self._arenas)
        self.num_sent_bytes = 0
        if not self._stream.is_host:
            with watch("h2d"):
                arena.event.synchronize()
        return arena

    def send(self, arena: Arena, num_words: int, watch: Watch = UNWATCHED) -> None:
        """Queue the copy of the arena's first words."""
        with watch("h2d"):
            self._stream.copy(self.words[:num_words], arena.words[:num_words])
            arena.event.record()
        self.num_sent_bytes = num_words * self.words.itemsize

    def end_of(self, name: str) -> int:
        """The number of words up to the end of a field."""
        return self._ends[name]
