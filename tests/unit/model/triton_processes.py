"""Processes in which Triton interprets its kernels, or compiles them for a GPU that is not there.

Which of the two is decided when Triton is imported, so a test cannot have it in its own process.
"""

import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import numpy as np
import pytest
import torch

from benchmarks.gpu.absent_gpu import AbsentGpu
from tests.unit.model.fake_device import launched

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class Worker:
    """A process of its own, in which functions of test modules are called."""

    def __init__(self, executor: ProcessPoolExecutor) -> None:
        self._executor = executor

    def call(
        self, function: Callable[Parameters, Result], *arguments: Parameters.args, **named: Parameters.kwargs
    ) -> Result:
        return self._executor.submit(function, *arguments, **named).result()


def started(environment: dict[str, str], prepare: Callable[[], None]) -> Iterator[Worker]:
    """A process that begins with `prepare`, which it must be able to find by its name."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), prepare) as executor:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            executor.submit(os.getpid).result()  # the process has started, with this environment
        yield Worker(executor)


def _prepare_interpreter() -> None:
    """Triton 3.4 to 3.9 made to run with NumPy 2.4, faster, and with products whose order does not show.

    A launch can be recorded in a graph.
    """
    from triton.runtime import interpreter

    torch.set_num_threads(1)
    patch_tensor, patch_language = interpreter._patch_lang_tensor, interpreter._patch_lang
    launch = interpreter.GridExecutor.__call__
    scopes: dict[str, Any] = {}

    def patched_tensor(tensor: Any, *scope: Any) -> None:
        """Up to Triton 3.5 there is no scope, and what is patched stays."""
        patch_tensor(tensor, *scope)
        put = scope[0].set_attr if scope else setattr
        put(tensor, "__index__", lambda self: int(self.handle.data.item()))  # for bounds of loops

    def patched_language(function: Any) -> Any:
        """Once for each module with kernels, not again whenever one of its functions is called."""
        if function.__module__ not in scopes:
            scopes[function.__module__] = patch_language(function)
        return scopes[function.__module__]

    def create_dot(self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
        """In double precision, where the order is lost in rounding: a GPU's rows do not depend on their place."""
        product = a.data.astype(np.float64) @ b.data.astype(np.float64)
        return interpreter.TensorHandle((product + d.data).astype(d.data.dtype), d.dtype.scalar)

    def noted(self: Any, *arguments: Any, **named: Any) -> None:
        launched(partial(launch, self, *arguments, **named))

    interpreter.GridExecutor.__call__ = noted
    builder = interpreter.InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store

    def with_mask(mask: Any) -> Any:
        """Triton 3.9 takes no mask in which a number was broadcast, as `program_id == 0` is."""
        return interpreter.TensorHandle(mask.data.astype(np.bool_), mask.dtype)

    builder.create_masked_load = lambda self, pointers, mask, *more: load(self, pointers, with_mask(mask), *more)
    builder.create_masked_store = lambda self, pointers, values, mask, *more: store(
        self, pointers, values, with_mask(mask), *more
    )
    interpreter._patch_lang_tensor = patched_tensor
    interpreter._patch_lang = patched_language
    if hasattr(interpreter, "_LangPatchScope"):
        interpreter._LangPatchScope.restore = lambda self: None
    builder.create_dot = create_dot


def interpreter_process() -> Iterator[Worker]:
    """For a fixture: kernels run on the CPU."""
    yield from started({"TRITON_INTERPRET": "1"}, _prepare_interpreter)


ABSENT_GPU = AbsentGpu(90)  # of a process that compiles
compiled: list[Any] = []


def ptxas_for(capability: int) -> str:
    """The assembler that Triton takes for a GPU; up to 3.4 it has one for all."""
    from triton.backends.nvidia.compiler import get_ptxas

    return str(get_ptxas(*[capability][: len(signature(get_ptxas).parameters)]).path)


def _prepare_compiler() -> None:
    import triton
    from triton.runtime.jit import JITFunction

    triton.runtime.driver.set_active(ABSENT_GPU)
    run = JITFunction.run

    def compile_only(self: Any, *arguments: Any, grid: Any, warmup: bool, **named: Any) -> None:
        compiled.append(run(self, *arguments, grid=grid, warmup=True, **named))

    JITFunction.run = compile_only


def compiler_process(cache_dir: Path) -> Iterator[Worker]:
    """For a fixture: kernels that are launched end up in `compiled`, for a GPU of `ABSENT_GPU.capability`."""
    yield from started({"TRITON_CACHE_DIR": str(cache_dir)}, _prepare_compiler)
