"""Queues work on a device: copies, events, CUDA graphs of decode steps, and profiles of what ran.

The staging of a step and its graphs are written against `Stream`, so that tests can put a device of their own behind it
that is late, counts, or refuses what a capture refuses.
"""

from bisect import bisect_left
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch.autograd import profiler

from roseinfer.engine.core.batch import Watch
from roseinfer.engine.core.stopwatch import unwatched

TRACE_NAME = "trace.json"

_NUM_WARM_RUNS = 2  # the first compiles kernels and finds algorithms; the second runs as the captured one will


class Event(Protocol):
    """A mark in a stream."""

    def record(self) -> None:
        """Mark what has been queued so far, in place of the mark before."""

    def synchronize(self) -> None:
        """Sleep until everything before the mark is done; return at once if there is no mark yet."""


class Graph(Protocol):
    """Work that was recorded once."""

    def replay(self) -> None:
        """Queue it again, on the same memory."""


class Stream:
    """Where a runner queues its work. This one is the CPU's: it queues nothing, and a call returns when it is done."""

    device = torch.device("cpu")
    is_host = True  # the device computes in the host's memory

    def new_host_tensor(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Zeros [size] in host memory that copies go from or to."""
        return torch.zeros(size, dtype=dtype)

    def new_device_tensor(self, host: torch.Tensor) -> torch.Tensor:
        """Zeros on the device for copies of `host`: the same memory if `is_host`."""
        return host

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy between host and device. The host's side is in use until an event after it has passed."""
        if target.data_ptr() != source.data_ptr():
            target.copy_(source)

    def new_event(self) -> Event:
        return _PastEvent()

    def capture(self, work: Callable[[], None]) -> Graph:
        """Record `work`, which reads nothing back from the device and may be run more than once. Not on a CPU."""
        raise NotImplementedError


class _PastEvent:
    """The `Event` of a device that is never behind."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


class CudaStream(Stream):
    """The current stream of a GPU, and one beside it for captures, whose graphs share one pool of memory."""

    is_host = False

    def __init__(self, device: torch.device, *, is_pinned: bool) -> None:
        self.device = device
        self._is_pinned = is_pinned  # pageable memory is copied twice, and no copy from it is asynchronous
        self._capture_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def new_host_tensor(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype, pin_memory=self._is_pinned)

    def new_device_tensor(self, host: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(host, device=self.device)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def new_event(self) -> Event:
        """A blocking event: a thread that waits for it sleeps, since a spinning one would take the front end's core."""
        event: Event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        return event

    def capture(self, work: Callable[[], None]) -> Graph:
        self._capture_stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._capture_stream):
            for _ in range(_NUM_WARM_RUNS):
                work()
        graph = torch.cuda.CUDAGraph()
        # Other threads may go on using the device: only what this one does meanwhile could not be part of a graph.
        with torch.cuda.graph(graph, self._pool, self._capture_stream, capture_error_mode="thread_local"):
            work()
        torch.cuda.current_stream(self.device).wait_stream(self._capture_stream)
        return graph


def to_device(array: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """A few numbers on the device: on a CPU the array itself, on a GPU a queued copy out of torch's pinned memory."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


class TorchProfiler:
    """The engine's `Profiler`: traces operators and, on a GPU, kernels and copies, for Perfetto and Chrome.

    It records one trace at a time, with neither shapes nor stacks, which cost more. It uses the profiler below
    `torch.profiler`, whose first start imports a compiler and would cost a step a second. On a GPU it also marks the
    capture range of Nsight Systems (`--capture-range=cudaProfilerApi`).
    """

    def __init__(self, device: str) -> None:
        self._is_cuda = device == "cuda"
        self._profile: profiler.profile | None = None

    def start(self) -> None:
        if self._is_cuda:
            torch.cuda.synchronize()  # work launched earlier is not part of the trace
            torch.cuda.profiler.start()  # type: ignore[no-untyped-call]
        self._profile = profiler.profile(use_device="cuda" if self._is_cuda else None, use_kineto=True)
        self._profile.__enter__()  # type: ignore[no-untyped-call]

    def stop(self, directory: Path) -> None:
        profile, self._profile = self._profile, None
        assert profile is not None, "stop without start"
        profile.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        if self._is_cuda:
            torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        profile.export_chrome_trace(str(directory / TRACE_NAME))  # type: ignore[no-untyped-call]


def graph_sizes(max_rows: int) -> tuple[int, ...]:
    """Rows of the graphs for steps of up to `max_rows` rows: at most 7 rows are filled up to 64, 15 up to 256."""
    steps = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max_rows, 64)]
    return (*(size for size in steps if size < max_rows), max_rows)


class CudaGraphs:
    """The graphs of decode steps, one for each padded number of rows, captured at start-up or when first needed.

    A step that is queued operation by operation costs the host more than a small model costs the GPU. So the whole step
    is replayed with one call; a step with fewer rows than its graph is filled up with rows of no request.
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
