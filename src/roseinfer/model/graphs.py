"""CUDA graphs of decode steps, one for each padded number of rows.

A step that is queued operation by operation costs the host more than a small model costs the GPU. So the whole step
is recorded, and replayed with one call; a step with fewer rows than its graph is filled up with rows of no request.
"""

from bisect import bisect_left
from collections.abc import Callable

from roseinfer.engine.core.batch import Watch
from roseinfer.engine.core.stopwatch import unwatched
from roseinfer.model.device_stream import Graph, Stream


def graph_sizes(max_rows: int) -> tuple[int, ...]:
    """Rows of the graphs for steps of up to `max_rows` rows: at most 7 rows are filled up to 64, 15 up to 256."""
    steps = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max_rows, 64)]
    return (*(size for size in steps if size < max_rows), max_rows)


class CudaGraphs:
    """The graphs, captured all before the first request or each when it is first needed.

    `fill(rows)` sends so many rows of no request to where `work(rows)` reads a step's rows: a capture runs the work
    several times, on those.
    """

    def __init__(
        self, stream: Stream, sizes: tuple[int, ...], fill: Callable[[int], None], work: Callable[[int], None]
    ) -> None:
        self._stream = stream
        self._sizes = sizes
        self._fill = fill
        self._work = work
        self._graphs: dict[int, Graph] = {}

    def size_for(self, num_rows: int, watch: Watch = unwatched) -> int:
        """Rows of the smallest graph for `num_rows`, which is captured if it was not; 0 if none is large enough."""
        index = bisect_left(self._sizes, num_rows)
        if index == len(self._sizes):
            return 0
        size = self._sizes[index]
        if size not in self._graphs:
            with watch("capture"):
                self._capture(size)
        return size

    def replay(self, size: int) -> None:
        """Queue the step whose rows have been sent."""
        self._graphs[size].replay()

    def capture_all(self, on_progress: Callable[[str], None]) -> None:
        """Capture every size, the largest first: the smaller ones then fit into the memory it has taken."""
        for index, size in enumerate(reversed(self._sizes), 1):
            on_progress(f"{size} rows, graph {index} of {len(self._sizes)}")
            self._capture(size)

    def _capture(self, size: int) -> None:
        self._fill(size)
        self._graphs[size] = self._stream.capture(lambda: self._work(size))
