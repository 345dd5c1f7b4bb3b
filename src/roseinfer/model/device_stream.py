"""A device's queue of work as an object: copies, marks and graphs, in order. Knows nothing of what is computed.

The staging of a step and its CUDA graphs are written against `Stream`, so that a test can put a device of its own
behind them that is late, counts, or refuses what a capture refuses.
"""

from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

_NUM_WARM_RUNS = 2  # the first compiles kernels and finds algorithms; the second runs as the captured one will


class Event(Protocol):
    """A mark in a stream."""

    def record(self) -> None:
        """Mark what has been queued so far, in place of the mark before."""

    def synchronize(self) -> None:
        """Sleep until everything before the mark is done; at once if it is, or if there is no mark yet."""


class Graph(Protocol):
    """Work that was recorded once."""

    def replay(self) -> None:
        """Queue it again, on the same memory."""


class Stream(Protocol):
    """Where a runner queues its work."""

    @property
    def device(self) -> torch.device: ...

    @property
    def is_host(self) -> bool:
        """The device computes in the host's memory, and nothing is queued: what was asked for is done."""

    def new_host_tensor(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Zeros [size] in host memory that copies go from or to."""

    def new_device_tensor(self, host: torch.Tensor) -> torch.Tensor:
        """Zeros on the device for copies of `host`: the same memory if `is_host`."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy between host and device. The host's side is in use until an event after it has passed."""

    def new_event(self) -> Event: ...

    def capture(self, work: Callable[[], None]) -> Graph:
        """Record `work`, which asks nothing of the device and has no effect if it is run more than once."""


class HostStream:
    """A CPU."""

    device = torch.device("cpu")
    is_host = True

    def new_host_tensor(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        """See Stream."""
        return torch.zeros(size, dtype=dtype)

    def new_device_tensor(self, host: torch.Tensor) -> torch.Tensor:
        """See Stream."""
        return host

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """See Stream."""
        if target.data_ptr() != source.data_ptr():
            target.copy_(source)

    def new_event(self) -> Event:
        """See Stream."""
        return _PastEvent()

    def capture(self, work: Callable[[], None]) -> Graph:
        """See Stream."""
        return _Again(work)


class _PastEvent:
    """An event of a device that is never behind."""

    def record(self) -> None:
        """See Event."""

    def synchronize(self) -> None:
        """See Event."""


class _Again:
    """A graph of a device without graphs: the work itself."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.replay = work


class CudaStream:
    """The current stream of a GPU, and one beside it for captures, whose graphs share one pool of memory."""

    is_host = False

    def __init__(self, device: torch.device, *, is_pinned: bool) -> None:
        self.device = device
        self._is_pinned = is_pinned  # pageable memory is copied twice, and no copy from it is asynchronous
        self._capture_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def new_host_tensor(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        """See Stream."""
        return torch.zeros(size, dtype=dtype, pin_memory=self._is_pinned)

    def new_device_tensor(self, host: torch.Tensor) -> torch.Tensor:
        """See Stream."""
        return torch.zeros_like(host, device=self.device)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """See Stream."""
        target.copy_(source, non_blocking=True)

    def new_event(self) -> Event:
        """See Stream. Who waits for it sleeps: a spinning engine would take a core from the front end."""
        event: Event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        return event

    def capture(self, work: Callable[[], None]) -> Graph:
        """See Stream."""
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


def sent(array: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """A few numbers on the device: on a CPU the array itself, on a GPU a copy that is queued.

    A plain copy would make the host wait until the device has done all that it was given before. The pinned memory is
    torch's, which keeps it until the copy is done, and has it ready for the next.
    """
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def open_stream(device: torch.device, *, is_pinned: bool) -> Stream:
    """The queue of a CPU or of a GPU; `is_pinned`: host memory for copies is locked, so that they are asynchronous."""
    return HostStream() if device.type == "cpu" else CudaStream(device, is_pinned=is_pinned)
