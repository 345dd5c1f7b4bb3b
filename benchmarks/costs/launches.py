"""Measures the time that Python takes for each launch of a Triton kernel, by `launch` and by Triton, without a GPU.

    python -m benchmarks.costs.launches [--rounds 9] [--calls 300]

The kernels of a layer of GPT-2 small and of Qwen3-0.6B are compiled for an H100 that is not there, and launched by a
driver that does nothing. `launch` and `kernel[grid](...)` take turns with the same arguments; figures are medians of
the rounds' means, with the least and the most. What the driver does for a launch comes on top of both.
"""

import argparse
import platform
from collections.abc import Callable
from time import perf_counter
from typing import Any, NamedTuple

import torch
import triton
from triton.runtime.jit import JITFunction

from benchmarks.figures import Spread
from benchmarks.gpu.absent_gpu import AbsentGpu
from benchmarks.gpu.kernels import LayerKernels
from benchmarks.gpu.performance_model import MODELS
from benchmarks.machine import describe
from roseinfer.model.triton_kernels.language import Kernel, launch

CPU = torch.device("cpu")
CONTEXT = 512
PROMPT = 128


class Launch(NamedTuple):
    """What a kernel was started with."""

    kernel: Kernel
    grid: tuple[int, int, int]
    arguments: tuple[Any, ...]
    num_warps: int


def launches_of(name: str) -> dict[str, Launch]:
    """One launch of each kernel in a step with a prompt and in one that decodes: they are compiled now."""
    layer = LayerKernels(MODELS[name], 4, CONTEXT, CPU)
    launches = dict[str, Launch]()
    run = JITFunction.run

    def noted(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        launches.setdefault(kernel.__name__, Launch(kernel, grid, arguments, options["num_warps"]))
        return run(kernel, *arguments, grid=grid, warmup=warmup, **options)

    JITFunction.run = noted
    for call in (layer.decoding(1), layer.prompts([PROMPT]), *layer.rest(PROMPT).values(), *layer.rest(4).values()):
        call()
    JITFunction.run = run
    return launches


def microseconds(call: Callable[[], object], num_calls: int) -> float:
    began = perf_counter()
    for _ in range(num_calls):
        call()
    return (perf_counter() - began) / num_calls * 1e6


def measure(one: Launch, num_rounds: int, num_calls: int) -> tuple[Spread, Spread]:
    kernel, grid, arguments, num_warps = one
    ours, tritons = [], []
    for _ in range(num_rounds):
        tritons.append(microseconds(lambda: kernel[grid](*arguments, num_warps=num_warps), num_calls))
        ours.append(microseconds(lambda: launch(kernel, grid, *arguments, num_warps=num_warps), num_calls))
    return Spread.of(tritons), Spread.of(ours)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, metavar="N", help="default: %(default)s")
    parser.add_argument("--calls", type=int, default=300, metavar="N", help="of a round; default: %(default)s")
    options = parser.parse_args()
    torch.set_num_threads(1)
    triton.runtime.driver.set_active(AbsentGpu(90))
    print(f"{describe()['cpu']}, Python {platform.python_version()}, Triton {triton.__version__}, µs a launch")
    print(f"{'model':<12} {'kernel':<14} {'kernel[grid](...)':>24} {'launch':>24}")
    for name in ("GPT-2 small", "Qwen3-0.6B"):
        for kernel, one in launches_of(name).items():
            spreads = measure(one, options.rounds, options.calls)
            columns = (f"{each.median:.1f} ({each.least:.1f} to {each.most:.1f})" for each in spreads)
            print(f"{name:<12} {kernel:<14} {' '.join(f'{text:>24}' for text in columns)}", flush=True)


if __name__ == "__main__":
    main()
