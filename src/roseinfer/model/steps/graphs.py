"""CUDA graphs of whole steps: which sizes there are, the memory that they may take, and which one holds a step.

A step that is queued operation by operation costs the host more than a small model costs the GPU. So the whole step,
sampling included, is replayed with one call; a step with fewer rows or tokens than its graph is filled up with those of
no request.
"""

import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import NamedTuple

import torch

from roseinfer.engine.core.batch import Watch
from roseinfer.model.device_stream import Graph, Stream

_MAX_TOKENS = 1024  # what a graph saves does not grow with the tokens; its memory and what it fills up do
_SHARE = 0.5  # of the GPU's memory that is free when the first graph is captured; the rest is for steps without a graph

_log = logging.getLogger(__name__)


class GraphSize(NamedTuple):
    """The shape of a graph's steps."""

    num_tokens: int
    num_rows: int
    is_decode: bool = False  # each row has one token, the one that was sampled last for its slot

    def __str__(self) -> str:
        return f"{self.num_rows} rows" if self.is_decode else f"{self.num_tokens} tokens in {self.num_rows} rows"


def decode_graph_sizes(max_rows: int) -> tuple[int, ...]:
    """Rows of the graphs for decode steps of up to `max_rows`: at most 7 rows are filled up to 64, 15 up to 256."""
    steps = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max_rows, 64)]
    return (*(size for size in steps if size < max_rows), max_rows)


def prompt_graph_sizes(max_tokens: int, max_rows: int) -> tuple[tuple[int, int], ...]:
    """Tokens and rows of the graphs for all other steps.

    Up to 512 at most 63 tokens are filled up, which a GPU computes almost for nothing while it reads the weights. A row
    costs little more than its logits, so that there are few numbers of rows.
    """
    limit = min(max_tokens, _MAX_TOKENS)
    steps = [16, 32, *range(64, 512, 64), *range(512, _MAX_TOKENS, 128)]
    tokens = [*(count for count in steps if count < limit), limit]
    rows = [*(count for count in (8, 64) if count < max_rows), max_rows]
    return tuple(sorted({(count, min(count, num_rows)) for count in tokens for num_rows in rows}))


class CudaGraphs:
    """The graphs, one for each size, captured at start-up or when first needed, as far as memory allows.

    `fill(size)` sends a step of no request to where `work(size)` reads a step's integers: a capture runs the work
    several times, on that.
    """

    def __init__(
        self,
        stream: Stream,
        sizes: Sequence[GraphSize],
        fill: Callable[[GraphSize], None],
        work: Callable[[GraphSize], None],
    ) -> None:
        self._stream = stream
        self._fill = fill
        self._work = work
        self._sizes = {
            is_decode: sorted(size for size in sizes if size.is_decode == is_decode) for is_decode in (True, False)
        }
        self._graphs: dict[GraphSize, Graph] = {}
        self._found: tuple[object, GraphSize | None] = (None, None)  # what `size_for` was asked last, and its answer
        self.num_bytes = 0  # of the device's memory that the graphs take
        self.max_bytes: int | None = None  # that they may take; known from the first capture on

    def sizes(self, *, is_decode: bool) -> list[GraphSize]:
        """The sizes that steps are run in: at first all, and when memory is spent those that were captured."""
        return self._sizes[is_decode]

    def size_for(self, num_tokens: int, num_rows: int, watch: Watch, *, is_decode: bool = False) -> GraphSize | None:
        """The size with the fewest tokens that holds a step, captured if it was not; None if no graph does."""
        asked = num_tokens, num_rows, is_decode
        if asked == self._found[0]:  # as in most steps that decode
            return self._found[1]
        sizes = self._sizes[is_decode]
        for size in islice(sizes, bisect_left(sizes, (num_tokens, num_rows)), None):
            if size.num_rows < num_rows:
                continue
            if size not in self._graphs:
                with watch("capture"):
                    if not self._capture(size):
                        return self.size_for(num_tokens, num_rows, watch, is_decode=is_decode)
            self._found = asked, size
            return size
        return None

    def replay(self, size: GraphSize) -> None:
        """Queue the step whose integers have been sent."""
        self._graphs[size].replay()

    def capture_all(self, on_progress: Callable[[str], None]) -> None:
        """Capture every size, as far as memory allows.

        Decode steps come first, the largest before the smaller ones, which then fit into the memory it has taken. The
        others begin with the smallest, which gain most: what memory does not suffice for are the largest.
        """
        sizes = [*reversed(self._sizes[True]), *self._sizes[False]]
        for index, size in enumerate(sizes, 1):
            on_progress(f"{size}, graph {index} of {len(sizes)}")
            if not self._capture(size):
                break
        taken, allowed = self.num_bytes >> 20, (self.max_bytes or 0) >> 20
        _log.info("%d CUDA graphs take %d MiB, of %d that they may take", len(self._graphs), taken, allowed)

    def _capture(self, size: GraphSize) -> bool:
        """Capture a size. If that takes more memory than is left for graphs, it and all others are given up."""
        free = self._stream.free_bytes()
        if self.max_bytes is None:
            self.max_bytes = int(free * _SHARE)
        self._fill(size)
        try:
            graph = self._stream.capture(partial(self._work, size))
        except torch.OutOfMemoryError:  # what was free may be less than one step, or have been taken by others since
            graph = None
        num_bytes = self.num_bytes + max(0, free - self._stream.free_bytes())
        if graph is None or num_bytes > self.max_bytes:
            for is_decode, sizes in self._sizes.items():
                self._sizes[is_decode] = [size for size in sizes if size in self._graphs]
            _log.warning("no memory is left for a CUDA graph of %s: steps without a graph are slower", size)
            return False
        self.num_bytes = num_bytes
        self._graphs[size] = graph
        return True
