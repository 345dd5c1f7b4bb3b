"""CUDA without a GPU: tensors on it have shapes and no numbers, and what a step asks of the GPU is noted.

A model is loaded and its steps run as on a GPU, on torch's fake tensors: an operator or a kernel that is given tensors
of host and device together fails, and each launch, copy and wait is noted with its place in the source. A wait is what
makes the host stand still until the device has done what was queued before: a number that is read back, a mask as an
index, a copy that is not asynchronous, an event of the step before. A race is memory that the host has written, or
read, before the copy that uses it must have run.

All of it is for a process of its own, since torch and Triton are told that there is a GPU (`cuda_process`).
"""

import ctypes
import hashlib
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, Literal, NamedTuple

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

import roseinfer
from roseinfer.config.options import Config, ModelConfig, RunnerConfig, SchedulerConfig
from roseinfer.engine.core.batch import ScheduledBatch, Watch
from roseinfer.engine.core.stopwatch import unwatched
from roseinfer.model import runner as runner_module
from roseinfer.model.device_stream import Event, Graph, Stream
from roseinfer.model.runner import load_runner
from roseinfer.model.steps.results import LaunchedBatch
from roseinfer.model.weights.checkpoint import Checkpoint
from tests.conftest import require_tool
from tests.unit.model.happens_before import Copies
from tests.unit.model.triton_processes import ABSENT_GPU, Worker, started

CUDA = torch.device("cuda")

_GUARD = Path(__file__).with_name("cuda_guard.cpp")
_MEMORY_BYTES = 80 << 30
_NUM_PROCESSORS = 132
_NUM_WARM_RUNS = 2
_STAND_INS: dict[torch.dtype, float | bool] = {torch.bool: True, torch.float32: 1.0, torch.float64: 1.0}
_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"}
_ALLOCATING = ("empty", "new_empty", "_unsafe_view", "lift_fresh")  # begin the names of what launches nothing
_SOURCES = (Path(roseinfer.__file__).parent, Path(__file__).parents[2])  # a note names the last function of these
_OWN = {Path(__file__), Path(__file__).with_name("happens_before.py")}  # but for these

_UNPINNED = "a copy of memory that is not pinned"  # it may wait, or not

NoteKind = Literal["triton", "torch", "graph", "in", "out", "wait", "race"]


class Note(NamedTuple):
    """One thing that was asked of the device, and the function that asked."""

    kind: NoteKind
    what: str
    function: str  # as `model/steps/arenas.py:Arenas.send`
    line: int

    def __str__(self) -> str:
        file, _, name = self.function.rpartition(":")
        return f"{self.kind}: {self.what} at {file}:{self.line} in {name}"


class Work(NamedTuple):
    """What a step asks of a GPU. An operator of torch counts as one launch, whatever it is made of."""

    nodes: int = 0  # of the graph that it replays
    triton: int = 0
    torch: int = 0
    copies_in: int = 0
    copies_out: int = 0
    waits: tuple[str, ...] = ()  # the functions that wait

    def __repr__(self) -> str:
        """As it stands in a table."""
        told = [f"{name}={value!r}" for name, value in self._asdict().items() if value != self._field_defaults[name]]
        return f"Work({', '.join(told)})"

    @classmethod
    def of(cls, notes: Sequence[Note]) -> "Work":
        counts = {kind: sum(note.kind == kind for note in notes) for kind in ("triton", "torch", "in", "out")}
        nodes = sum(int(note.what) for note in notes if note.kind == "graph")
        waits = sorted({note.function for note in notes if note.kind == "wait"})
        return cls(nodes, counts["triton"], counts["torch"], counts["in"], counts["out"], tuple(waits))


class Tape(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs operators of the host as they are and those of the device on fake tensors, and notes the latter."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.notes: list[Note] = []
        self.num_steps = 0
        self.is_launching = self.is_capturing = False
        self.copies = Copies(partial(self.note, "race"))
        self.num_fetched = 0  # the number that a copy into memory of the host's own brings
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._pinned: dict[int, torch.Tensor] = {}  # by address; alive, so that no other memory has it

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: torch would import its compiler to keep it out of here, which takes seconds."""
        return False

    @contextmanager
    def running(self) -> Generator[None]:
        """Tensors on CUDA are fake ones meanwhile."""
        with self._fake, self:
            yield

    def note(self, kind: NoteKind, what: str) -> None:
        function, line = _place(sys._getframe(1))
        note = Note(kind, what, function, line)
        if self.is_capturing and kind in {"in", "out", "wait"}:
            raise RuntimeError(f"operation not permitted when stream is capturing: {note}")
        self.notes.append(note)
        if kind == "wait" and what != _UNPINNED:
            self.copies.learn(self.copies.time)
        elif kind != "race":
            self.copies.look()

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of it in memory that copies can be queued from."""
        pinned = tensor.clone()
        self._pinned[pinned.data_ptr()] = pinned
        return pinned

    def _is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._pinned

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not any(map(_is_of_cuda, tree_leaves((args, kwargs)))):
            with unset_fake_temporarily():
                return function(*args, **kwargs)
        if function.namespace == "prim":  # asks for a tensor's shape or device
            return function(*args, **kwargs)
        if function._can_decompose():  # no operator, but a function of some
            with self:
                return function.decompose(*args, **kwargs)
        return self._on_device(function, args, kwargs)

    def _on_device(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = function._schema.name.removeprefix("aten::")
        run = partial(self._run, function, args, kwargs)
        if name == "_to_copy" and kwargs.get("device", args[0].device).type != args[0].device.type:
            return self._copied(run, None, args[0], kwargs.get("non_blocking"))
        if name == "copy_" and args[0].device.type != args[1].device.type:
            return self._copied(run, args[0], args[1], args[2] if len(args) > 2 else kwargs.get("non_blocking"))
        if name == "_local_scalar_dense":
            self.note("wait", "a number is read back")
            return _STAND_INS.get(args[0].dtype, 1)
        if name in _INDEXING:
            args = self._indexed(*args)
        if not name.startswith(_ALLOCATING) and not _is_view(function):
            self.note("torch", name)
        return self._run(function, args, kwargs)

    def _run(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """On fake tensors."""

        def faked(leaf: object) -> object:
            if isinstance(leaf, torch.Tensor) and not isinstance(leaf, FakeTensor):
                return self._fake.from_tensor(leaf)
            return leaf

        args, kwargs = tree_map(faked, (args, kwargs))
        return function(*args, **kwargs)

    def _copied(
        self, copy: Callable[[], torch.Tensor], target: torch.Tensor | None, source: torch.Tensor, is_async: bool | None
    ) -> torch.Tensor:
        """A copy between host and device, for which a target is made if it is None."""
        is_in = source.device.type == "cpu"
        host = source if is_in else target
        self.note("in" if is_in else "out", f"{source.numel() * source.itemsize} bytes")
        if not is_async:
            self.note("wait", "a copy that is not asynchronous")
        elif host is not None and not self._is_pinned(host):
            self.note("wait", _UNPINNED)
        elif is_in:
            with unset_fake_temporarily():
                self.copies.read(source, self.notes[-1].function)
        if is_in:
            return copy()
        with unset_fake_temporarily():
            if target is None:  # torch makes one that is pinned
                target = torch.zeros(tuple(source.shape), dtype=source.dtype)
            self.num_fetched += 1
            self.copies.write(target, torch.full_like(target, self.num_fetched), self.notes[-1].function)
            return target

    def _indexed(self, tensor: torch.Tensor, indices: Sequence[torch.Tensor | None], *values: Any) -> tuple[Any, ...]:
        """The arguments of an operator that indexes, with what the device would have been asked for."""
        known: list[torch.Tensor | None] = []
        for index in indices:
            if index is not None and index.dtype in {torch.bool, torch.uint8}:
                self.note("wait", "a mask as an index")  # as if it were true throughout
                known += [tensor.new_empty(index.numel(), dtype=torch.int64)] * index.dim()
                continue
            if index is not None and index.device.type == "cpu" and tensor.device.type != "cpu":
                self.note("wait", "an index that is on the host")
            known.append(index)
        if values and values[0].device.type == "cpu":
            self.note("wait", "a number on the host, put through an index")
            values = (tensor.new_empty(values[0].shape), *values[1:])
        return tensor, known, *values


def _place(frame: FrameType | None) -> tuple[str, int]:
    """The function that asked, and the line."""
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        for root in _SOURCES:
            if path not in _OWN and path.is_relative_to(root):
                return f"{path.relative_to(root)}:{frame.f_code.co_qualname}", frame.f_lineno
        frame = frame.f_back
    raise AssertionError("no function of ours has asked")


def _is_of_cuda(leaf: object) -> bool:
    device = leaf.device if isinstance(leaf, torch.Tensor) else leaf
    return isinstance(device, torch.device) and device.type == "cuda"


def _is_view(function: Any) -> bool:
    """Whether an operator makes tensors of memory that it was given."""
    return any(made.alias_info is not None and not made.alias_info.is_write for made in function._schema.returns)


TAPE = Tape()


class FakeEvent:
    """A launch may wait for steps before the last one, since the host has read their tokens, and for no other."""

    def __init__(self) -> None:
        self._step: int | None = None
        self._time = 0

    def record(self) -> None:
        self._step, self._time = TAPE.num_steps, TAPE.copies.time

    def synchronize(self) -> None:
        if TAPE.is_launching and self._step is not None and self._step > TAPE.num_steps - 2:
            TAPE.note("wait", "an event of this step or of the one before")
        TAPE.copies.learn(self._time)


class _Graph:
    def __init__(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes

    def replay(self) -> None:
        TAPE.note("graph", str(self._num_nodes))


class FakeCudaStream(Stream):
    """Stands in for `CudaStream` where there is no GPU."""

    is_host = False
    device = CUDA

    def __init__(self, device: torch.device, *, is_pinned: bool) -> None:
        self._is_pinned = is_pinned

    def new_host_tensor(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        tensor = torch.zeros(size, dtype=dtype)
        return TAPE.pin(tensor) if self._is_pinned else tensor

    def new_device_tensor(self, host: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(host, device=CUDA)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def new_event(self) -> Event:
        return FakeEvent()

    def free_bytes(self) -> int:
        return _MEMORY_BYTES

    def capture(self, work: Callable[[], None]) -> Graph:
        for _ in range(_NUM_WARM_RUNS):
            work()
        before, TAPE.notes, TAPE.is_capturing = TAPE.notes, [], True
        try:
            work()
            return _Graph(len(TAPE.notes))
        finally:
            TAPE.notes, TAPE.is_capturing = before, False


class FakeGpu:
    """A model on it."""

    def __init__(self, directory: Path, num_slots: int, **options: Any) -> None:
        """Further arguments are options of `RunnerConfig`."""
        config = Config(
            model=ModelConfig(path=str(directory)),
            runner=RunnerConfig(**{"device": "cuda", "attention": "triton", "cuda_graphs": "lazy"} | options),
            scheduler=SchedulerConfig(max_num_seqs=num_slots),
        )
        with TAPE.running():
            self.runner = load_runner(config, num_slots, lambda *_: None)

    def launch(self, batch: ScheduledBatch, _: Watch = unwatched) -> LaunchedBatch:
        TAPE.num_steps += 1
        TAPE.is_launching = True
        try:
            with TAPE.running():
                return self.runner.launch(batch)
        finally:
            TAPE.is_launching = False
            TAPE.copies.look()

    def notes_of(self, batches: Sequence[ScheduledBatch]) -> list[Note]:
        """Launch them in turn, none of which is waited for -> the notes of the last."""
        for batch in batches[:-1]:
            self.launch(batch)
        TAPE.notes.clear()
        self.launch(batches[-1])
        return TAPE.notes.copy()


def write_hollow_checkpoint(directory: Path, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> Path:
    """A checkpoint whose weights, bfloat16, are a hole in a file, for tests that never read them."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    header, end = dict[str, object](), 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": (start, end)}
    text = json.dumps(header).encode()
    with (directory / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(file.tell() + end)
    return directory


def cuda_process(directory: Path) -> Iterator[Worker]:
    """For a fixture: torch and Triton are told that there is a GPU. `directory` keeps what is compiled for it."""
    yield from started({}, partial(_prepare, _built_guard(directory)))


def _built_guard(directory: Path) -> Path | None:
    """A library that lets torch have tensors on CUDA, if it cannot yet."""
    if torch.version.cuda is not None:
        return None
    digest = hashlib.sha256(_GUARD.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    library, torch_directory = directory / f"cuda_guard_{digest}.so", Path(torch.__file__).parent
    if not library.exists():
        new = library.with_suffix(f".{os.getpid()}")
        command = [require_tool("g++"), "-std=c++20", "-shared", "-fPIC", f"-I{torch_directory / 'include'}"]
        subprocess.run([*command, str(_GUARD), "-o", str(new), f"-L{torch_directory / 'lib'}", "-lc10"], check=True)
        new.replace(library)
    return library


def _prepare(guard: Path | None) -> None:
    import triton
    from triton.runtime.jit import JITFunction

    if guard is not None:
        ctypes.CDLL(str(guard))
    torch.set_num_threads(1)
    patch = pytest.MonkeyPatch()  # until the process ends
    properties = SimpleNamespace(multi_processor_count=_NUM_PROCESSORS, total_memory=_MEMORY_BYTES, name="none")
    patch.setattr(torch.cuda, "is_available", lambda: True)
    patch.setattr(torch.cuda, "empty_cache", lambda: None)
    patch.setattr(torch.cuda, "synchronize", lambda _=None: TAPE.copies.learn(TAPE.copies.time))
    patch.setattr(torch.cuda, "Event", lambda **_: FakeEvent())
    patch.setattr(torch.cuda, "mem_get_info", lambda _=None: (_MEMORY_BYTES, _MEMORY_BYTES))
    patch.setattr(torch.cuda, "get_device_properties", lambda _=None: properties)
    patch.setattr(torch.Tensor, "pin_memory", lambda tensor, *_: TAPE.pin(tensor))
    # As if all memory began at an aligned address.
    patch.setattr(FakeTensor, "data_ptr", lambda tensor: tensor.storage_offset() * tensor.itemsize)
    patch.setattr(runner_module, "CudaStream", FakeCudaStream)
    read = Checkpoint.tensor

    def read_for_real(checkpoint: Checkpoint, *arguments: Any, **named: Any) -> torch.Tensor:
        with _disable_current_modes():
            return read(checkpoint, *arguments, **named)

    patch.setattr(Checkpoint, "tensor", read_for_real)
    triton.runtime.driver.set_active(ABSENT_GPU)
    patch.setattr(JITFunction, "run", _launched)


def _launched(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **named: Any) -> None:
    """In place of the launch of a Triton kernel."""
    for leaf in tree_leaves(arguments):
        assert not isinstance(leaf, torch.Tensor) or _is_of_cuda(leaf), (
            f"{kernel.fn.__name__} is given the host's memory"
        )
    TAPE.note("triton", kernel.fn.__name__)
