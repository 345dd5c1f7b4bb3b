"""Kernels of Arm on another processor: qemu runs them, and has the pages of this process's memory that they touch.

So a test of a kernel holds for Arm too, with the numbers that this processor's kernels and torch are given.
"""

import ctypes
import hashlib
import os
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from roseinfer.model.kernels.library import LEVELS, Kernels, machine
from tests.conftest import compiler_of, require_tool

_MACHINE = "aarch64"
_ROOT = "/usr/aarch64-linux-gnu"  # of the libraries that the cross-compiler links to
_PROCESSORS = {"neon": "cortex-a57", "neon_dotprod": "neoverse-n1", "neon_i8mm": "max"}  # lacks what the level does
_OTHER_BIT = 1 << 45
_DONE, _WANTS_PAGES, _HAS_CHANGED = range(3)
_FLOATS = (ctypes.c_float,)

EMULATED_LEVELS = [level.name for level in LEVELS.values() if level.machine == _MACHINE != machine()]


class _Request(ctypes.Structure):
    """`Request` of emulated_kernels.cpp."""

    _fields_ = (
        ("name", ctypes.c_char * 64),
        ("integers", ctypes.c_int64 * 16),
        ("floats", ctypes.c_float * 2),
        ("num_threads", ctypes.c_int32),
        ("is_call", ctypes.c_int32),
    )


class _Message(ctypes.Structure):
    """`Message` of emulated_kernels.cpp."""

    _fields_ = (("answer", ctypes.c_uint64), ("address", ctypes.c_uint64), ("size", ctypes.c_uint64))


class EmulatedKernels(Kernels):
    """The functions of one shared object, in a process of qemu."""

    def __init__(self, level: str, path: Path) -> None:
        self.level = level
        self._process = _started(level, path)
        self._memory = os.open("/proc/self/mem", os.O_RDWR)

    def has(self, name: str) -> bool:
        return self._ask(_Request(name=name.encode()))

    def function(self, name: str, *argtypes: Any) -> Callable[..., None]:
        assert self.has(name)

        def call(*arguments: Any) -> None:
            request = _Request(name=name.encode(), num_threads=torch.get_num_threads(), is_call=1)
            alive: list[Any] = []
            integers: list[int] = []
            floats: list[float] = []
            for argtype, argument in zip(argtypes, arguments, strict=True):
                if argtype in _FLOATS:
                    floats.append(argument)
                elif argtype in (ctypes.c_int32, ctypes.c_int64):
                    integers.append(int(argument))
                else:
                    pointee = _emulated(argument)
                    alive.append(pointee)
                    integers.append(_translated(pointee if isinstance(pointee, int) else ctypes.addressof(pointee)))
            request.integers[: len(integers)] = integers
            request.floats[: len(floats)] = floats
            self._ask(request)

        return call

    def _ask(self, request: _Request) -> bool:
        self._write(bytes(request))
        while True:
            message = _Message.from_buffer_copy(self._read(ctypes.sizeof(_Message)))
            if message.answer == _DONE:
                return bool(message.size)
            if message.answer == _HAS_CHANGED:
                os.pwrite(self._memory, self._read(message.size), message.address)
            else:
                self._write(self._pages(message.address, message.size))

    def _pages(self, address: int, size: int) -> bytes:
        """What these addresses hold, up to the first page that is not there, after its size."""
        try:
            held = os.pread(self._memory, size, address)
        except OSError:
            held = b""
        return len(held).to_bytes(8, "little") + held

    def _write(self, data: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(data)
        self._process.stdin.flush()

    def _read(self, size: int) -> bytes:
        assert self._process.stdout is not None
        data = self._process.stdout.read(size)
        assert len(data) == size, "the emulated process has ended"
        return data


def _emulated(argument: Any) -> Any:
    """What a pointer points to: an address, or an object of ctypes, whose own pointers are translated."""
    if argument is None or isinstance(argument, int):
        return argument or 0
    pointee = getattr(argument, "_obj", argument)  # of a `byref`
    if not isinstance(pointee, ctypes.Structure):
        return pointee
    copy = type(pointee).from_buffer_copy(pointee)
    for name, kind, *_ in type(pointee)._fields_:
        if kind is ctypes.c_void_p:
            setattr(copy, name, _translated(getattr(pointee, name) or 0))
    return copy


def _translated(address: int) -> int:
    return address ^ _OTHER_BIT if address else 0


@cache
def _started(level: str, path: Path) -> "subprocess.Popen[bytes]":
    """One for all tests; it ends when its input does."""
    command = [_program(path.parent), str(path)]
    emulator = [require_tool("qemu-aarch64"), "-cpu", _PROCESSORS[level], "-L", _ROOT]
    return subprocess.Popen([*emulator, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=-1)


def _program(directory: Path) -> str:
    source = Path(__file__).with_suffix(".cpp")
    name = f"emulated-{hashlib.sha256(source.read_bytes()).hexdigest()[:16]}"
    if not (directory / name).exists():
        command = [compiler_of(_MACHINE), "-std=c++17", "-O2", "-fopenmp", str(source), "-o"]
        with tempfile.TemporaryDirectory(dir=directory) as work:
            subprocess.run([*command, f"{work}/program"], check=True)
            os.replace(f"{work}/program", directory / name)
    return str(directory / name)
