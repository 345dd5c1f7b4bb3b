"""Queues work on a device: copies, events, captures of CUDA graphs, and profiles of what ran.

The staging of a step and its graphs are written against `Stream`, so that tests can put a device of their own behind it
that is late, counts, or refuses what a capture refuses.
"""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch.autograd import profiler

TRACE_NAME = "trace.json"

_WORD_BYTES = 4
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
        """Record `work`, which reads nothing back from the device and may be run more than once. Not on a CPU.

        Raises torch.OutOfMemoryError; what has been queued by then may still run.
        """
        raise NotImplementedError

    def free_bytes(self) -> int:
        """Free bytes of the device's memory, after torch's cache has been emptied."""
        return sys.maxsize  # a host captures nothing, so this limits nothing


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

    def free_bytes(self) -> int:
        torch.cuda.synchronize(self.device)  # memory of work that is still queued could not be given back
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self.device)[0]


def to_device(array: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """A few numbers on the device: on a CPU the array itself, on a GPU a queued copy out of torch's pinned memory."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def fetched_together(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Tensors of a GPU on the host, complete when an event after their one copy has passed; torch keeps the memory."""
    # The widest types first, so that each tensor begins at a multiple of its item size.
    order = sorted(range(len(tensors)), key=lambda index: -tensors[index].itemsize)
    flat = [tensors[index].contiguous().view(-1).view(torch.uint8) for index in order]
    parts = torch.split(torch.cat(flat).to("cpu", non_blocking=True), [len(part) for part in flat])
    on_host = {index: part.view(tensors[index].dtype) for index, part in zip(order, parts, strict=True)}
    return [on_host[index].view(tensor.shape) for index, tensor in enumerate(tensors)]


class Outbox:
    """Numbers for tables on a device that travel together: with the next step, or in one copy of their own.

    On a CPU they are used at once.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pending: list[tuple[Callable[..., object], tuple[npt.NDArray[np.generic], ...]]] = []
        self.num_words = 0  # of 32 bits, which wait

    def put(self, use: Callable[..., object], *arrays: npt.NDArray[np.generic]) -> None:
        """Call `use` with these arrays, as tensors on the device, when they have been sent; before what is put later.

        They are flat, of whole words, and are not changed afterwards.
        """
        if self._device.type == "cpu":
            use(*map(torch.from_numpy, arrays))
            return
        self._pending.append((use, arrays))
        self.num_words += sum(map(_even_words, arrays))

    def write(self, words: npt.NDArray[np.int32]) -> None:
        """Lay out what waits in `num_words` words."""
        at = 0
        for _, arrays in self._pending:
            for array in arrays:
                words[at : at + array.nbytes // _WORD_BYTES] = array.view(np.int32)
                at += _even_words(array)

    def use(self, words: torch.Tensor) -> None:
        """Use what `write` laid out, whose copy to these words on the device is queued. Nothing waits any more."""
        pending, self._pending, self.num_words = self._pending, [], 0
        at = 0
        for use, arrays in pending:
            tensors = []
            for array in arrays:
                own = words[at : at + array.nbytes // _WORD_BYTES]
                tensors.append(own.view(torch.from_numpy(array[:0]).dtype))
                at += _even_words(array)
            use(*tensors)

    def flush(self) -> None:
        """Send what waits now."""
        if self.num_words:
            words = np.zeros(self.num_words, np.int32)
            self.write(words)
            self.use(to_device(words, self._device))


def _even_words(array: npt.NDArray[np.generic]) -> int:
    """So that 64 bits begin at a multiple of theirs."""
    return -(-array.nbytes // (2 * _WORD_BYTES)) * 2


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
        """Raises OSError where the trace cannot be written."""
        profile, self._profile = self._profile, None
        assert profile is not None, "stop without start"
        profile.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        if self._is_cuda:
            torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        trace = directory / TRACE_NAME
        profile.export_chrome_trace(str(trace))  # type: ignore[no-untyped-call]
        if not trace.exists():  # of a failure, as on a full disk, torch only writes a line to standard error
            trace.with_name(f"{TRACE_NAME}.tmp").unlink(missing_ok=True)
            raise OSError(f"torch could not write {TRACE_NAME}, and its line in the log says why")
