"""Records the calls of a decode step, and replays them without the Python between them.

The first step with a number of rows runs as it is written, and each call of a kernel and each operator of torch is
noted, with the addresses that it was given. Later ones with as many rows repeat what was noted, on the same memory:
kernels that follow each other are one call into compiled code. It is for models whose steps differ in nothing but the
numbers in their arrays, as a CUDA graph is.
"""

import ctypes
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from roseinfer.model.attention.base import Attend
from roseinfer.model.families.causal_lm import CausalLM
from roseinfer.model.kernels.library import Kernels

_NUM_ARGUMENTS = 6  # of a kernel, as in kernels/cpp/replay.cpp
_ALIGNMENT = 64
_FEW_ROWS = 8  # whose logits a recording has too: 5 MB of a vocabulary of 152,000
_MOST_OPERATORS = 20_000  # in all recordings, each of which takes one to two kilobytes
_BY_REFERENCE = type(ctypes.byref(ctypes.c_int()))
_CONVERSIONS = {"to", "_to_copy", "clone", "contiguous"}  # operators that copy their first argument
_ALLOCATIONS = (torch.ops.aten.empty.memory_format, torch.ops.aten.new_empty.default)


class _Call(ctypes.Structure):
    """`RecordedCall` of kernels/cpp/replay.cpp."""

    _fields_ = (("kernel", ctypes.c_void_p), ("arguments", ctypes.c_int64 * _NUM_ARGUMENTS))


class SharedMemory:
    """Memory for the tensors of recordings, which never run at once.

    A piece is lent until the tensor that has it is gone: repetitions use it in the same order. All pieces are kept,
    since recordings know their addresses.
    """

    def __init__(self) -> None:
        self._pieces: list[npt.NDArray[np.uint8]] = []
        self._lent: dict[int, weakref.ref[npt.NDArray[np.uint8]]] = {}  # by index
        self._by_address: dict[int, torch.UntypedStorage] = {}  # the same pieces, for tensors that borrow none

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor with arbitrary numbers, at least one, in the smallest piece that is free, or in a new one."""
        num_bytes = int(np.prod(shape)) * dtype.itemsize
        free = [index for index in range(len(self._pieces)) if self._is_free(index) and self._size(index) >= num_bytes]
        if free:
            index = min(free, key=self._size)
        else:
            index = len(self._pieces)
            whole = np.empty(num_bytes + _ALIGNMENT, np.uint8)
            self._pieces.append(whole[-whole.ctypes.data % _ALIGNMENT :][:num_bytes])
            storage = torch.frombuffer(self._pieces[index], dtype=torch.uint8).untyped_storage()
            self._by_address[storage.data_ptr()] = storage
        lent = self._pieces[index][:num_bytes]
        self._lent[index] = weakref.ref(lent)  # which the tensor's storage keeps, and views of it too
        return torch.frombuffer(lent, dtype=dtype).view(*shape)

    def moved(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of a tensor, of at least one number, with the same strides."""
        length = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        return self.empty((length,), tensor.dtype).as_strided(tensor.shape, tensor.stride()).copy_(tensor)

    def address_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor where this one is, which does not keep its piece from being lent again."""
        storage = self._by_address.get(_storage_address(tensor))
        if storage is None:
            return tensor
        place = torch.empty(0, dtype=tensor.dtype)
        return place.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())

    def _is_free(self, index: int) -> bool:
        return self._lent[index]() is None

    def _size(self, index: int) -> int:
        return len(self._pieces[index])


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes kernels and operators while a step runs."""

    def __init__(self, memory: SharedMemory, kernels: Kernels) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_repeatable = True  # nothing was read back, which the next step could read otherwise
        self.alive: list[object] = []  # what addresses in `parts` point to
        self.parts: list[Callable[[], object]] = []
        self.num_operators = 0
        self._memory = memory
        self._replay = kernels.function("roseinfer_replay", ctypes.c_void_p, ctypes.c_int64)
        self._calls: list[_Call] = []  # since the last operator

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: torch would import its compiler to keep it out of here, which takes 74 MB, and 142 with Triton."""
        return False

    def add_call(self, function: Any, arguments: tuple[Any, ...]) -> None:
        """Note the call of a kernel."""
        words = [word for word in map(_word, arguments) if word is not None]
        if len(words) < len(arguments) or len(words) > _NUM_ARGUMENTS:
            self.is_repeatable = False
            return
        self._calls.append(_Call(ctypes.cast(function, ctypes.c_void_p), (ctypes.c_int64 * _NUM_ARGUMENTS)(*words)))
        self.alive.append(arguments)

    def end_calls(self) -> None:
        """Make one part of the kernels since the last operator."""
        if self._calls:
            calls = (_Call * len(self._calls))(*self._calls)
            self.alive.append(calls)
            self.parts.append(partial(self._replay, ctypes.addressof(calls), len(calls)))
            self._calls = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _ALLOCATIONS:
            like, shape = (args[0], args[1]) if len(args) > 1 else (None, args[0])
            dtype = kwargs.get("dtype") or (torch.get_default_dtype() if like is None else like.dtype)
            if np.prod(shape):
                return self._memory.empty(shape, dtype)
        result = func(*args, **kwargs)
        is_new = not func._schema.is_mutable  # noqa: SLF001
        if is_new and _is_view(result, (args, kwargs)):
            return result
        self.end_calls()
        if not isinstance(result, torch.Tensor):
            self.is_repeatable = False
            return result
        args, kwargs = tree_map_only(torch.Tensor, self._memory.address_of, (args, kwargs))
        repeat: Callable[[], object] = partial(func, *args, **kwargs)
        if is_new and result.numel():
            result = self._memory.moved(result)
            repeat = _repeat_into(self._memory.address_of(result), func, args, kwargs)
        self.parts.append(repeat)
        self.num_operators += 1
        return result


def _is_view(result: object, arguments: object) -> bool:
    """Whether all of a result lies in memory of the arguments.

    The operator does not say: `to` and `reshape` are views where they need not copy, and in inference mode they come
    as they are.
    """
    given = {_storage_address(tensor) for tensor in tree_leaves(arguments) if isinstance(tensor, torch.Tensor)}
    made = [tensor for tensor in tree_leaves(result) if isinstance(tensor, torch.Tensor)]
    return bool(made) and all(_storage_address(tensor) in given for tensor in made)


def _storage_address(tensor: torch.Tensor) -> int:
    """Where a tensor's memory begins; 0 for a weight that is packed for oneDNN, which has no address."""
    return 0 if tensor.is_mkldnn else tensor.untyped_storage().data_ptr()


def _repeat_into(to: torch.Tensor, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], object]:
    """The operator with its result in a tensor that has it now.

    Torch's own function with `out` takes half of the time of the operator and a copy; it is used where it gives the
    same bits now.
    """
    name = func._schema.name.removeprefix("aten::")  # noqa: SLF001
    if name in _CONVERSIONS:
        return partial(to.copy_, args[0])
    result = to.clone()
    try:
        direct = partial(getattr(torch, name), *args, **kwargs, out=to)
        direct()
        if torch.equal(to, result):
            return direct
    except (AttributeError, RuntimeError, TypeError):  # torch has no such function, no `out`, or other arguments
        pass
    to.copy_(result)
    return partial(_copy_of, partial(func, *args, **kwargs), to)


def _copy_of(repeat: Callable[[], torch.Tensor], to: torch.Tensor) -> torch.Tensor:
    return to.copy_(repeat())


def _word(argument: Any) -> int | None:
    """An argument of a kernel as the integer that it is, or the address of what it points to; None for others."""
    if isinstance(argument, _BY_REFERENCE):
        return ctypes.addressof(argument._obj)  # type: ignore[attr-defined]  # noqa: SLF001
    return int(argument or 0) if argument is None or isinstance(argument, int) else None


@dataclass(frozen=True, slots=True)
class _Recording:
    parts: list[Callable[[], object]]
    inputs: tuple[int, int]  # the addresses of token ids and positions
    result: torch.Tensor
    alive: list[object] = field(repr=False)


class Replays:
    """A model's decode steps, replayed where they can be."""

    def __init__(self, model: CausalLM, kernels: Kernels) -> None:
        self._model = model
        self._kernels = kernels
        self._memory = SharedMemory()
        self._recordings: dict[int, _Recording | None] = {}  # by number of rows; None: it is not repeated
        self._num_operators = 0

    def has_seen(self, num_rows: int) -> bool:
        """Whether a step with that number of rows has run before: the first one is recorded."""
        return num_rows in self._recordings

    def logits(self, token_ids: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Logits [rows, vocab_size] of token ids and positions [rows], valid until the next call.

        `attend` must be of a backend whose calls serve later steps too.
        """
        num_rows = len(token_ids)
        if not self.has_seen(num_rows):
            rows = self._record(token_ids, positions, attend)
        else:
            recording = self._recordings[num_rows]
            if recording is None or recording.inputs != (token_ids.data_ptr(), positions.data_ptr()):
                return self._model.logits(self._model.forward(token_ids, positions, attend))
            for part in recording.parts:
                part()
            rows = recording.result
        return rows if num_rows <= _FEW_ROWS else self._model.logits(rows)

    def _record(self, token_ids: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Run the step: logits of a few rows, hidden rows of more."""
        recorder = _Recorder(self._memory, self._kernels)
        room = self._memory.empty((_FEW_ROWS, self._model.vocab_size), torch.float32)
        with recorder, self._kernels.noting(recorder.add_call):
            result = self._model.forward(token_ids, positions, attend)
            del room  # which no layer has taken: one piece is for the logits of all recordings
            if len(token_ids) <= _FEW_ROWS:
                result = self._model.logits(result)
        recorder.end_calls()
        result = self._memory.address_of(result)
        num_operators, recording = self._num_operators + recorder.num_operators, None
        if recorder.is_repeatable and num_operators <= _MOST_OPERATORS:
            self._num_operators = num_operators
            inputs = token_ids.data_ptr(), positions.data_ptr()
            recording = _Recording(recorder.parts, inputs, result, [*recorder.alive, token_ids, positions, attend])
        self._recordings[len(token_ids)] = recording
        return result
