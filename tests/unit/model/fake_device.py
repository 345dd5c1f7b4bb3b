"""A GPU that is none: a stream that is late, and graphs that replay what they recorded. For tests.

`LateStream` keeps host and device apart although both are the CPU's memory: a copy happens when somebody waits for an
event after it, and not before. `RecordedGraph` holds the operators, and the launches of interpreted Triton kernels,
that ran during the capture, with the tensors and numbers that they were given; whatever the host does to Python objects
afterwards has no effect on a replay, as on a GPU. Asking for a number on the host is refused during a capture, as by
CUDA.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten

from roseinfer.model.device_stream import Graph, Stream

NUM_WARM_RUNS = 2

_HOST_READS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal"}


class LateEvent:
    """A mark in a `LateStream`."""

    def __init__(self, stream: "LateStream") -> None:
        self._stream = stream
        self._mark = 0
        self.num_waits = 0

    def record(self) -> None:
        self._mark = self._stream.num_queued

    def synchronize(self) -> None:
        self.num_waits += 1
        self._stream.run_until(self._mark)


class LateStream(Stream):
    """`Stream` of a device that does nothing until somebody waits, or, with `is_late=False`, everything at once."""

    is_host = False
    device = torch.device("cpu")

    def __init__(self, *, is_late: bool = False) -> None:
        self._is_late = is_late
        self._queue: list[Callable[[], object]] = []
        self._num_done = 0
        self.num_allocations = 0  # of host or device memory
        self.copied_words: list[int] = []  # of each copy
        self.num_captures = 0
        self.graphs: list[RecordedGraph] = []
        self.num_free_bytes = 1 << 30
        self.graph_bytes = 1 << 20  # that a capture takes

    @property
    def num_queued(self) -> int:
        return self._num_done + len(self._queue)

    @property
    def num_pending(self) -> int:
        return len(self._queue)

    def new_host_tensor(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        self.num_allocations += 1
        return torch.zeros(size, dtype=dtype)

    def new_device_tensor(self, host: torch.Tensor) -> torch.Tensor:
        self.num_allocations += 1
        return torch.zeros_like(host)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.copied_words.append(source.numel())
        self.queue(lambda: target.copy_(source))

    def queue(self, work: Callable[[], object]) -> None:
        self._queue.append(work)
        if not self._is_late:
            self.run_until(self.num_queued)

    def new_event(self) -> LateEvent:
        return LateEvent(self)

    def run_until(self, mark: int) -> None:
        while self._queue and self._num_done < mark:
            self._queue.pop(0)()
            self._num_done += 1

    def capture(self, work: Callable[[], None]) -> Graph:
        self.num_captures += 1
        self.num_free_bytes -= self.graph_bytes
        for _ in range(NUM_WARM_RUNS):
            work()
        self.graphs.append(RecordedGraph(work))
        return self.graphs[-1]

    def free_bytes(self) -> int:
        return self.num_free_bytes


class RecordedGraph:
    """The operators and launches of one run of `work`."""

    recording: "RecordedGraph | None" = None  # the one that is being captured

    def __init__(self, work: Callable[[], None]) -> None:
        self._parts: list[Callable[[], None]] = []
        self.num_launches = 0  # of kernels that are interpreted
        self.num_replays = 0
        RecordedGraph.recording = self
        try:
            with _Recorder(self._parts):
                work()
        finally:
            RecordedGraph.recording = None

    def add_launch(self, launch: Callable[[], None]) -> None:
        self._parts.append(launch)
        self.num_launches += 1

    def forget(self) -> None:
        """Do nothing in the next replays."""
        self._parts.clear()

    @torch.inference_mode()  # as the recorded work ran
    def replay(self) -> None:
        self.num_replays += 1
        for part in self._parts:
            part()


def launched(launch: Callable[[], None]) -> None:
    """Launch a kernel that Triton interprets: it is no operator, though the interpreter makes use of some."""
    with _disable_current_modes():
        launch()
    if RecordedGraph.recording is not None:
        RecordedGraph.recording.add_launch(launch)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, operators: list[Callable[[], None]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._operators = operators

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function._schema.name in _HOST_READS:
            raise RuntimeError(f"operation not permitted when stream is capturing: {function._schema.name}")
        results = function(*args, **kwargs)
        outputs = [leaf for leaf in tree_flatten(results)[0] if isinstance(leaf, torch.Tensor)]
        inputs = {leaf.untyped_storage().data_ptr() for leaf in tree_flatten((args, kwargs))[0] if _is_tensor(leaf)}
        fresh = [output.untyped_storage().data_ptr() not in inputs for output in outputs]

        def again() -> None:
            repeated = [leaf for leaf in tree_flatten(function(*args, **kwargs))[0] if _is_tensor(leaf)]
            for output, value, is_fresh in zip(outputs, repeated, fresh, strict=True):
                if is_fresh:  # a view or a result in place is where it was
                    output.copy_(value)

        self._operators.append(again)
        return results


def _is_tensor(leaf: object) -> bool:
    return isinstance(leaf, torch.Tensor)
