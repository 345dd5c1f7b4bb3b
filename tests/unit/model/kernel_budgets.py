"""What ptxas gives each Triton kernel of a model's layers and of sampling, for GPUs that are not there.

    python -m tests.unit.model.kernel_budgets        # writes kernel_budgets.json again

A budget is of one build: registers of a thread, bytes that it spills, shared memory and warps of a program, and how
wide its loads from global memory are, as `16*4 2*1` for four of 16 bytes and one of 2. It depends on the versions of
Triton and of ptxas, which comes with it. For a process of its own: Triton is told that there is a GPU.
"""

import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import torch

from benchmarks.gpu.absent_gpu import AbsentGpu
from benchmarks.gpu.kernels import LayerKernels
from benchmarks.gpu.performance_model import MODELS
from roseinfer.model.sampling.edit_table import EditTable
from roseinfer.model.sampling.logprobs import SCORE_WIDTH
from roseinfer.model.sampling.slot_table import SamplingTable

FILE = Path(__file__).with_suffix(".json")
CAPABILITIES = (80, 89, 90, 100)
CONTEXT = 2048
NUM_SLOTS = 64
VOCABULARIES = sorted({model.vocab_size for model in MODELS.values()})
SHARED_BYTES = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10}  # of a program, at most
_CPU = torch.device("cpu")


class Budget(msgspec.Struct, frozen=True):
    """Of one build of a kernel."""

    registers: int
    spilled: int
    shared: int
    warps: int
    loads: str


Budgets = dict[str, Budget]  # by call and kernel


def budgets_of(capability: int, name: str) -> Budgets:
    """The budgets of a model's kernels: a step of 1 row that decodes, one of 64, and one with prompts."""
    import triton

    triton.runtime.driver.set_active(AbsentGpu(capability))
    layer = LayerKernels(MODELS[name], NUM_SLOTS, CONTEXT, _CPU)
    calls: dict[str, Callable[[], object]] = {
        "1 row": layer.decoding(1),
        "64 rows": layer.decoding(64),
        "prompts": layer.prompts([128, 64]),
        **layer.rest(64),
    }
    return _compiled(calls.items())


def budgets_of_sampling(capability: int, vocab_size: int) -> Budgets:
    """The budgets of what draws the tokens of 64 rows, with their edits and log-probabilities."""
    import triton

    from roseinfer.model.triton_kernels.sampling import choose

    triton.runtime.driver.set_active(AbsentGpu(capability))
    table = SamplingTable(NUM_SLOTS + 1, vocab_size, _CPU)
    edits = EditTable(NUM_SLOTS + 1, vocab_size, CONTEXT, _CPU)
    slots = torch.zeros(NUM_SLOTS, dtype=torch.int64)
    numbers = torch.zeros(NUM_SLOTS, SCORE_WIDTH, dtype=torch.float64)
    logits = torch.zeros(NUM_SLOTS, -(-vocab_size // 64) * 64)[:, :vocab_size]  # as a head leaves them on a GPU
    return _compiled([("sampling", lambda: choose(logits, slots, slots, table, edits, numbers))])


def _compiled(calls: Iterable[tuple[str, Callable[[], object]]]) -> Budgets:
    import triton
    from triton.runtime.jit import JITFunction

    triton.knobs.nvidia.dump_ptxas_log = True
    triton.knobs.compilation.always_compile = True
    found: Budgets = {}
    label, run, met = "", JITFunction.run, set[str]()

    def compile_only(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        if kernel.__name__ not in met:
            kernel.device_caches.clear()  # of other models
            met.add(kernel.__name__)
        with redirect_stdout(StringIO()) as log:
            built = run(kernel, *arguments, grid=grid, warmup=True, **options)
        if log.getvalue():  # else it was compiled for another call
            found[f"{label}: {kernel.__name__}"] = _budget(built, log.getvalue())

    JITFunction.run = compile_only
    with TemporaryDirectory() as directory:
        triton.knobs.cache.dir = directory
        for label, call in calls:  # noqa: B007 - `compile_only` reads it
            call()
    JITFunction.run = run
    return found


def _budget(built: Any, log: str) -> Budget:
    [registers] = re.findall(r"Used (\d+) registers", log)
    [spilled] = re.findall(r"(\d+) bytes spill stores", log)
    metadata = built.metadata
    return Budget(int(registers), int(spilled), metadata.shared, metadata.num_warps, _loads(built.asm["ptx"]))


def _loads(ptx: str) -> str:
    """Numbers of loads by their width in bytes, the widest first."""
    widths = Counter[int]()
    for line in ptx.splitlines():
        if match := re.search(r"ld\.global\S*?(?:\.v(\d))?\.b(\d+) ", line):
            widths[int(match[1] or 1) * int(match[2]) // 8] += 1
        elif match := re.search(r"cp\.async\.c[ag]\.\S+ \[.*?\], \[.*?\], (\w+)", line):
            widths[int(match[1], 0)] += 1
    return " ".join(f"{width}*{count}" for width, count in sorted(widths.items(), reverse=True))


def read() -> tuple[str, dict[str, Budgets]]:
    """The version of Triton that the file was written with, and budgets by GPU and model or vocabulary."""
    content = json.loads(FILE.read_text())
    return content["triton"], msgspec.convert(content["budgets"], dict[str, Budgets])


def main() -> None:
    import triton

    budgets = {}
    for capability in CAPABILITIES:
        for name in MODELS:
            budgets[f"sm_{capability}, {name}"] = msgspec.to_builtins(budgets_of(capability, name))
            print(f"sm_{capability}, {name}", file=sys.stderr, flush=True)
        for vocab_size in VOCABULARIES:
            place = f"sm_{capability}, {vocab_size} logits"
            budgets[place] = msgspec.to_builtins(budgets_of_sampling(capability, vocab_size))
            print(place, file=sys.stderr, flush=True)
    lines = [f'"triton": "{triton.__version__}", "budgets": {{']
    for place, of_model in budgets.items():
        rows = [f"  {json.dumps(kernel)}: {json.dumps(budget)}" for kernel, budget in of_model.items()]
        lines.append(f"{json.dumps(place)}: {{\n" + ",\n".join(rows) + "\n},")
    FILE.write_text("{" + "\n".join(lines).removesuffix(",") + "\n}}\n")


if __name__ == "__main__":
    main()
