"""Measures what a machine's memory and matrix units allow: read bandwidth, GEMM peaks, and a decode step's roof.

    python -m benchmarks.roofs [--device cpu] [--quick] [--out FILE]

A decode step reads every weight once and the KV cache of every sequence once, and multiplies each weight by each row:

    roof = max(weight bytes / bandwidth, GEMM FLOPs / peak) + KV bytes / bandwidth

Reading weights and multiplying by them overlap, so the slower of the two counts; attention is another pass. The
bandwidth is that of the best of several ways to read an array, at a size near the bytes that the step reads: a large
shared cache holds a part of a small model and nothing of a big one. Neighbours on the host halve it for seconds, so
parts that hold a step against it read it in turn with the steps (`read_rate`). The peak is the best median over several
shapes and ways to multiply. Both are what plain torch reaches here, with as many threads as the engine uses. On a GPU
the bandwidth is that of a copy, its bytes counted twice (read and written), and the peak that of large products in
bfloat16.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from benchmarks.machine import Sitting, part_parser
from benchmarks.random_gpt2 import NUM_LAYERS, VOCAB_SIZE, WIDTH
from roseinfer.runtime import memory

PRECISIONS = ("float32", "bfloat16", "int8")
WEIGHT_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}  # of one weight; int8's scales and biases are a thousandth
KV_BYTES = {"float32": 4, "bfloat16": 2, "int8": 2}  # of one number in the cache: int8 is of the linears only
_LAYER = ((WIDTH, 3 * WIDTH), (WIDTH, WIDTH), (WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH))
# (inputs, outputs) that a decode step multiplies by, in order.
STEP_LINEARS = (*_LAYER * NUM_LAYERS, (WIDTH, VOCAB_SIZE))
STEP_WEIGHTS = sum(inputs * outputs for inputs, outputs in STEP_LINEARS)
READ_MIB = (118, 236, 472, 1416)  # the weights in int8, bfloat16 and float32, and more than any cache holds
GEMM_SHAPES = ((512, 768, 3072), (1024, 1024, 1024), (2048, 2048, 2048), (4096, 768, 3072))  # rows, inputs, outputs
STEP_ROWS = (1, 8, 64)
GPU_COPY_BYTES = (2**28, 2**32)  # more than any cache, and enough that a launch does not count
GPU_GEMM_SIDES = (4096, 8192)


def roof_ms(precision: str, batch: int, context: int, bandwidth: float, peak: float) -> float:
    """The formula above. `bandwidth` in bytes/s, `peak` in operations/s, a multiply-add being two."""
    weights_s = STEP_WEIGHTS * WEIGHT_BYTES[precision] / bandwidth
    multiply_s = 2 * STEP_WEIGHTS * batch / peak
    return (max(weights_s, multiply_s) + kv_bytes(precision, batch, context) / bandwidth) * 1e3


def kv_bytes(precision: str, batch: int, context: int) -> int:
    """Keys and values of `context` tokens in each of `batch` sequences."""
    return batch * context * NUM_LAYERS * 2 * WIDTH * KV_BYTES[precision]


def step_bytes(precision: str, batch: int, context: int) -> int:
    """All that one decode step has to read."""
    return STEP_WEIGHTS * WEIGHT_BYTES[precision] + kv_bytes(precision, batch, context)


def nearest_mib(num_bytes: float, sizes: Iterable[float] = READ_MIB) -> float:
    """Of sizes in MiB, the one that is nearest in ratio."""
    return min(sizes, key=lambda mib: abs(math.log(num_bytes / (mib * 2**20))))


def roof_of(measured: Mapping[str, Any], precision: str, batch: int, context: int) -> float:
    """The roof in milliseconds, from what `measure_gpu` returned."""
    bandwidths = {float(mib): rate for mib, rate in measured["bandwidth"].items()}
    bandwidth = bandwidths[nearest_mib(step_bytes(precision, batch, context), bandwidths)]
    return roof_ms(precision, batch, context, bandwidth, measured["peak"][precision])


def median_s(call: Callable[[], object], budget_s: float, wait: Callable[[], None] = lambda: None) -> float:
    """Median duration of calls, at least three, until the budget is spent; the first is not counted.

    `wait` returns when the device has done what a call has launched.
    """
    call()
    durations: list[float] = []
    end = time.perf_counter() + budget_s
    while len(durations) < 3 or time.perf_counter() < end:
        wait()
        began = time.perf_counter()
        call()
        wait()
        durations.append(time.perf_counter() - began)
    return statistics.median(durations)


def read_patterns(num_bytes: int) -> dict[str, Callable[[], object]]:
    """Ways to read one array of a number of bytes once."""
    import torch

    array = torch.rand(num_bytes // 4 // 16384 * 16384)
    rows = array.view(-1, 4096)
    vector = torch.rand(4096)
    streams = array.view(16, -1)
    integers = array.view(torch.int32)
    return {
        "sum": array.sum,
        "matrix-vector": lambda: torch.mv(rows, vector),
        "dot with itself": lambda: torch.dot(array, array),
        "16 streams": lambda: streams.sum(1),
        "largest integer": integers.amax,
    }


def read_rate(num_bytes: int) -> Callable[[], float]:
    """Returns what reads an array once in each way, and says at how many bytes/s the best one did."""
    reads = list(read_patterns(num_bytes).values())

    def rate() -> float:
        times = []
        for read in reads:
            began = time.perf_counter()
            read()
            times.append(time.perf_counter() - began)
        return num_bytes / min(times)

    return rate


def measure_bandwidth(budget_s: float, sizes: Sequence[int] = READ_MIB) -> tuple[dict[str, float], dict[str, str]]:
    """Bytes/s by MiB, and which pattern reached it."""
    bandwidths, best = {}, {}
    for mib in sizes:
        rates = {name: mib * 2**20 / median_s(read, budget_s) for name, read in read_patterns(mib * 2**20).items()}
        best[str(mib)] = max(rates, key=lambda name: rates[name])
        bandwidths[str(mib)] = rates[best[str(mib)]]
        say(f"read {mib} MiB: " + ", ".join(f"{name} {rate / 1e9:.1f}" for name, rate in rates.items()) + " GB/s")
    return bandwidths, best


def linear(precision: str, inputs: int, outputs: int) -> Callable[[Any], object]:
    """One linear in the form that torch multiplies fastest: packed for oneDNN, or int8 through `_int_mm`."""
    import torch

    if precision == "int8":
        weight = torch.randint(-127, 127, (outputs + -outputs % 16, inputs), dtype=torch.int8)
        return lambda rows: torch._int_mm(rows, weight.T)  # noqa: SLF001
    weight = torch.randn(outputs, inputs).to(getattr(torch, precision))
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return lambda rows: torch.nn.functional.linear(rows, weight)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, 64)  # noqa: SLF001
    return lambda rows: torch.ops.mkldnn._linear_pointwise(rows, packed, None, "none", [], "")  # noqa: SLF001


def rows_of(precision: str, num_rows: int, width: int) -> Any:
    import torch

    if precision == "int8":
        return torch.randint(-127, 127, (num_rows, width), dtype=torch.int8)
    return torch.randn(num_rows, width).to(getattr(torch, precision))


def measure_peak(precision: str, budget_s: float) -> tuple[float, str]:
    """Operations/s, and the shape that reached it."""
    import torch

    rates = {}
    for num_rows, inputs, outputs in GEMM_SHAPES:
        rows = rows_of(precision, num_rows, inputs)
        shape = f"{num_rows} × {inputs} × {outputs}"
        packed = linear(precision, inputs, outputs)
        rates[shape] = 2 * num_rows * inputs * outputs / median_s(partial(packed, rows), budget_s)
        if precision != "int8":
            other = rows_of(precision, inputs, outputs)
            plain = median_s(partial(torch.mm, rows, other), budget_s)
            rates[f"{shape}, not packed"] = 2 * num_rows * inputs * outputs / plain
    best = max(rates, key=lambda name: rates[name])
    say(f"{precision} GEMM: " + ", ".join(f"{name} {rate / 1e9:.0f}" for name, rate in rates.items()) + " GFLOP/s")
    return rates[best], best


def measure_step_gemms(precision: str, budget_s: float) -> dict[str, float]:
    """Milliseconds of all linears of a step, each layer with weights of its own, by rows: torch's own, nothing else."""
    linears = [(inputs, linear(precision, inputs, outputs)) for inputs, outputs in STEP_LINEARS]
    times = {}
    for num_rows in STEP_ROWS:
        rows = {width: rows_of(precision, num_rows, width) for width in (WIDTH, 4 * WIDTH)}

        def sweep(rows: dict[int, Any] = rows) -> None:
            for width, multiply in linears:
                multiply(rows[width])

        times[str(num_rows)] = median_s(sweep, budget_s) * 1e3
    say(f"{precision} GEMMs of a step: " + ", ".join(f"{rows} rows {ms:.1f} ms" for rows, ms in times.items()))
    return times


def say(line: str) -> None:
    print(f"  {line}", flush=True)


def measure_cpu(budget_s: float, *, is_quick: bool) -> dict[str, Any]:
    """Everything; `budget_s` is for one single figure."""
    import torch

    torch.set_grad_enabled(False)
    bandwidths, patterns = measure_bandwidth(budget_s, READ_MIB[:1] if is_quick else READ_MIB)
    peaks = {precision: measure_peak(precision, budget_s) for precision in PRECISIONS}
    return {
        "num_threads": torch.get_num_threads(),
        "bandwidth": bandwidths,
        "bandwidth_by": patterns,
        "peak": {precision: rate for precision, (rate, _) in peaks.items()},
        "peak_by": {precision: shape for precision, (_, shape) in peaks.items()},
        "step_gemms_ms": {precision: measure_step_gemms(precision, budget_s) for precision in PRECISIONS},
    }


def measure_gpu(budget_s: float) -> dict[str, Any]:
    """Bandwidths, the peak in bfloat16, and what the GPU is."""
    import torch

    wait, bandwidth, peak = torch.cuda.synchronize, {}, 0.0
    for num_bytes in GPU_COPY_BYTES:
        source = torch.empty(num_bytes // 2, dtype=torch.bfloat16, device="cuda").normal_()
        target = torch.empty_like(source)
        bandwidth[str(num_bytes // 2**20)] = 2 * num_bytes / median_s(partial(target.copy_, source), budget_s, wait)
    for side in GPU_GEMM_SIDES:
        one, other = (torch.randn(side, side, device="cuda").to(torch.bfloat16) for _ in range(2))
        peak = max(peak, 2 * side**3 / median_s(partial(torch.mm, one, other), budget_s, wait))
    properties = torch.cuda.get_device_properties(0)
    gpu = {
        "name": properties.name,
        "memory_gib": round(properties.total_memory / 2**30),
        "num_multiprocessors": properties.multi_processor_count,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }
    say(f"{gpu['name']}: copy {', '.join(f'{rate / 1e9:.0f}' for rate in bandwidth.values())} GB/s")
    say(f"bfloat16 {peak / 1e12:.1f} TFLOP/s")
    return {"bandwidth": bandwidth, "peak": {"bfloat16": peak}, "gpu": gpu}


def main() -> int:
    parser = part_parser(
        __doc__, "bench/roofs.json", quick="a tenth of the time for each figure, and one size of memory", device="cpu"
    )
    arguments = parser.parse_args()
    memory.prefer_huge_pages()  # as an engine has it
    sitting = Sitting("roofs")
    budget_s = 0.05 if arguments.quick else 0.5
    is_cuda = arguments.device == "cuda"
    measured = measure_gpu(budget_s) if is_cuda else measure_cpu(budget_s, is_quick=arguments.quick)
    sitting.write(arguments.out, measured)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
