"""What a GPU's memory and matrix units allow, and what it is. Prints and writes; knows no engine.

    python -m benchmarks.gpu_roofs [--device cuda] [--quick] [--out FILE]

Bandwidth is that of a copy, its bytes counted twice (read and written); the peak is that of large products in bfloat16.
The roof of a decode step is the formula of `benchmarks/roofs.py`. On a CPU the script only shows that it runs.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.machine import Sitting

COPY_BYTES = (2**28, 2**32)  # more than any cache, and enough that a launch does not count
GEMM_SIDES = (4096, 8192)


def synchronised(device: str) -> Callable[[], None]:
    import torch

    return torch.cuda.synchronize if device == "cuda" else lambda: None


def median_s(call: Callable[[], object], wait: Callable[[], None], num_repeats: int) -> float:
    """Median of one call and the wait for it, after one that is not counted."""
    durations = []
    for _ in range(num_repeats + 1):
        wait()
        began = time.perf_counter()
        call()
        wait()
        durations.append(time.perf_counter() - began)
    return statistics.median(durations[1:])


def measure(device: str, *, is_quick: bool) -> dict[str, Any]:
    import torch

    wait = synchronised(device)
    scale = 64 if is_quick else 1
    num_repeats = 3 if is_quick else 20
    bandwidth = {}
    for num_bytes in (size // scale for size in COPY_BYTES):
        source = torch.empty(num_bytes // 2, dtype=torch.bfloat16, device=device).normal_()
        target = torch.empty_like(source)
        bandwidth[str(num_bytes // 2**20)] = 2 * num_bytes / median_s(partial(target.copy_, source), wait, num_repeats)
    peak = 0.0
    for side in (side // (8 if is_quick else 1) for side in GEMM_SIDES):
        one, other = (torch.randn(side, side, device=device).to(torch.bfloat16) for _ in range(2))
        peak = max(peak, 2 * side**3 / median_s(partial(torch.mm, one, other), wait, num_repeats))
    return {"bandwidth": bandwidth, "peak": {"bfloat16": peak}, "gpu": describe(device)}


def describe(device: str) -> dict[str, Any]:
    import torch

    if device != "cuda":
        return {"name": "cpu", "torch": torch.__version__}
    properties = torch.cuda.get_device_properties(0)
    return {
        "name": properties.name,
        "memory_gib": round(properties.total_memory / 2**30),
        "num_multiprocessors": properties.multi_processor_count,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="small arrays, three repeats")
    parser.add_argument("--out", type=Path, default=Path("build/bench-gpu/roofs.json"), metavar="FILE")
    arguments = parser.parse_args()
    sitting = Sitting("roofs", ["python", "-m", "benchmarks.gpu_roofs", *sys.argv[1:]])
    measured = measure(arguments.device, is_quick=arguments.quick)
    rates = ", ".join(f"{rate / 1e9:.0f}" for rate in measured["bandwidth"].values())
    print(f"  {measured['gpu']['name']}: copy {rates} GB/s, bfloat16 {measured['peak']['bfloat16'] / 1e12:.1f} TFLOP/s")
    sitting.write(arguments.out, measured)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
