"""What all Triton kernels here share: the decorator, the launch, constants and types.

With TRITON_INTERPRET=1 in the environment before this module is imported, kernels run on the CPU, in numpy, one
program after the other: slow, and the same arithmetic.
"""

from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from typing import Any, Protocol, TypeVar, cast

import torch
import triton
import triton.language as tl

IS_INTERPRETED: bool = triton.knobs.runtime.interpret

LOG2_E = 1.4426950408889634  # exp(x) = exp2(x * LOG2_E), and only exp2 is one instruction

LOWEST = tl.constexpr(-1e30)  # a maximum of nothing; finite, so that the difference of two of them is a number
SPILLING_SUMS = 64 * 256  # of a program: with four warps ptxas spills registers from here on (docs/log.md)

_ALIGNMENT = 16  # bytes, or a factor: Triton compiles anew for what is aligned to it
_INT_BITS = 31
_HOPPER = 90

Pointer = Any  # a torch.Tensor where a kernel is launched, the address of its first element inside
Constant = Any  # known when a kernel is compiled

_DOT_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def capability() -> int:
    """The compute capability of the GPU that kernels are compiled for: 90 is sm_90."""
    return _HOPPER if IS_INTERPRETED else int(triton.runtime.driver.active.get_current_target().arch)


def has_wide_products() -> bool:
    """Whether four warps multiply together, with operands in shared memory, which leaves them registers."""
    return capability() >= _HOPPER


class Kernel(Protocol):
    """A function for the device. Started by `launch`; called as a function from another kernel."""

    params: Sequence[Any]

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]: ...

    def __call__(self, *arguments: Any, **named: Any) -> Any: ...


def kernel(*varying: str) -> Callable[[Callable[..., Any]], Kernel]:
    """Compile the function at its first launch, and again for each new combination of constants.

    Triton compiles again, for seconds amid a stream, when an integer becomes 1 or a multiple of 16, unless the
    parameter is named as `varying`, which numbers in a tuple cannot be.
    """

    def compiled(function: Callable[..., Any]) -> Kernel:
        return cast(Kernel, triton.jit(function, do_not_specialize=varying))

    return compiled


Arguments = TypeVar("Arguments", bound=type)
_builds: dict[tuple[Any, ...], Any] = {}  # compiled kernels
_kinds: dict[tuple[Any, ...], int] = {}  # of kept tuples


def kept(arguments: Arguments) -> Arguments:
    """A class of named tuples that are given to `launch` many times, so that each is looked at once."""
    return type(arguments.__name__, (arguments, _Kept), {})  # type: ignore[return-value]


class _Kept(tuple[Any, ...]):  # noqa: SLOT001 - a dictionary keeps what was found once
    @cached_property
    def kind(self) -> int:
        return _kinds.setdefault(tuple(map(_kind, self)), len(_kinds))

    @cached_property
    def plain(self) -> tuple[Any, ...]:
        """As the class was written: Triton takes no subclasses of it."""
        plain: tuple[Any, ...] = type(self).__mro__[1](*self)
        return plain


def launch(kernel: Kernel, grid: tuple[int, int, int], *arguments: Any, num_warps: int) -> None:
    """Start `kernel` for each of the grid's programs.

    Triton finds a build by looking at every argument, in every tuple, and at the options. Here what a build depends on
    is known of a `kept` tuple, and alone looked at in others. A number that is known when a kernel is compiled is a
    field of a tuple, or global.
    """
    if IS_INTERPRETED:
        kernel[grid](*arguments, num_warps=num_warps)
        return
    key: list[Any] = [id(kernel), num_warps]
    plain: list[Any] = []
    for argument in arguments:
        if not isinstance(argument, tuple):
            key.append(_kind(argument))
            plain.append(argument)
        elif isinstance(argument, _Kept):
            key.append(argument.kind)
            plain.append(argument.plain)
        else:
            key.extend(map(_kind, argument))
            plain.append(argument)
    known = tuple(key)
    build = _builds.get(known)
    if build is not None:
        build[grid](*plain)
        return
    assert all(type(each) is not int for each, of in zip(plain, kernel.params, strict=True) if of.is_constexpr)
    build = kernel[grid](*plain, num_warps=num_warps)
    if build is not None:  # one that was launched
        _builds[known] = build


def _kind(argument: Any) -> Any:
    """What a build depends on: of a tensor its type and whether it is aligned, of an integer its width and factors."""
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.data_ptr() % _ALIGNMENT == 0
    if isinstance(argument, tl.constexpr):  # which Triton 3.4 does not hash
        return type(argument.value), argument.value
    if type(argument) is int:
        return argument if argument < _ALIGNMENT else (argument % _ALIGNMENT == 0, argument.bit_length() > _INT_BITS)
    return float if isinstance(argument, float) else argument


@lru_cache(maxsize=None, typed=True)  # 0 is not False
def constant(value: Any) -> Constant:
    """A field of a tuple that is known when the kernel is compiled. Equal values give one object, found quickly."""
    return tl.constexpr(value)


def dot_dtype(dtype: torch.dtype) -> Constant:
    """The type in which tiles of this type are multiplied: their own, where that is possible."""
    # The interpreter keeps bfloat16 as bare bits and would multiply those.
    return tl.float32 if IS_INTERPRETED else _DOT_DTYPES[dtype]
