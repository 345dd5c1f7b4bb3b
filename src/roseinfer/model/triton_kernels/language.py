"""What all Triton kernels here share: the decorator, constants and types.

With TRITON_INTERPRET=1 in the environment before this module is imported, kernels run on the CPU, in numpy, one
program after the other: slow, and the same arithmetic.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, Protocol, cast

import torch
import triton
import triton.language as tl

IS_INTERPRETED: bool = triton.knobs.runtime.interpret

LOG2_E = 1.4426950408889634  # exp(x) = exp2(x * LOG2_E), and only exp2 is one instruction

LOWEST = tl.constexpr(-1e30)  # a maximum of nothing; finite, so that the difference of two of them is a number
SPILLING_SUMS = 64 * 256  # of a program: with four warps ptxas spills registers from here on (docs/log.md)

Pointer = Any  # a torch.Tensor where a kernel is launched, the address of its first element inside
Constant = Any  # known when a kernel is compiled

_DOT_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


class Kernel(Protocol):
    """A function for the device. Launched as `kernel[grid](...)`; called as a function from another kernel."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]: ...

    def __call__(self, *arguments: Any, **named: Any) -> Any: ...


def kernel(*varying: str) -> Callable[[Callable[..., Any]], Kernel]:
    """Compile the function at its first launch, and again for each new combination of constants.

    Triton compiles again, for seconds amid a stream, when an integer becomes 1 or a multiple of 16, unless the
    parameter is named as `varying`, which numbers in a tuple cannot be.
    """

    def compiled(function: Callable[..., Any]) -> Kernel:
        return cast(Kernel, triton.jit(function, do_not_specialize=varying))

    return compiled


@lru_cache(maxsize=None, typed=True)  # 0 is not False
def constant(value: Any) -> Constant:
    """A field of a tuple that is known when the kernel is compiled. Equal values give one object, found quickly."""
    return tl.constexpr(value)


def dot_dtype(dtype: torch.dtype) -> Constant:
    """The type in which tiles of this type are multiplied: their own, where that is possible."""
    # The interpreter keeps bfloat16 as bare bits and would multiply those.
    return tl.float32 if IS_INTERPRETED else _DOT_DTYPES[dtype]
