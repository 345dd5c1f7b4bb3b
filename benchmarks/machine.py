"""The circumstances that every result records: processor, memory, versions, commit, load; and a part's command line."""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.random_gpt2 import default_directory

ROOT = Path(__file__).parents[1]
_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8")  # those that kernels choose by


def part_parser(
    description: str | None, out: str, *, quick: str = "", device: str = "", model: bool = False
) -> argparse.ArgumentParser:
    """The options that parts have in common; `quick` is the help of `--quick`, `device` the default of `--device`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    if quick:
        parser.add_argument("--quick", action="store_true", help=quick)
    if device:
        parser.add_argument("--device", choices=("cpu", "cuda"), default=device, help="default: %(default)s")
    if model:
        parser.add_argument(
            "--model", type=Path, default=default_directory(), metavar="DIR", help="default: %(default)s"
        )
    parser.add_argument("--out", type=Path, default=Path("build") / out, metavar="FILE", help="default: %(default)s")
    return parser


def describe() -> dict[str, Any]:
    return {
        "cpu": _cpu_model(),
        "cpu_flags": [flag for flag in _FLAGS if flag in _cpuinfo("flags").split()],
        "num_cores": len(os.sched_getaffinity(0)),
        "l3": _l3(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "packages": {name: version_of(name) for name in ("roseinfer", "torch", "transformers", "numpy", "aiohttp")},
        "commit": commit(),
    }


def version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def commit() -> str:
    """The checkout's commit, with `+changes` when files differ from it."""
    try:
        head = _git("rev-parse", "--short=12", "HEAD")
        return head + ("+changes" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


class Sitting:
    """One run of a part: when it began, its command, and the processor time that a hypervisor took meanwhile."""

    def __init__(self, part: str) -> None:
        self._part = part
        self._command = " ".join(["python", *sys.orig_argv[1:]])
        self._began = datetime.now(UTC)
        self._clock = time.monotonic()
        self._load = os.getloadavg()[0]
        self._stolen = _stolen_seconds()

    def write(self, file: Path, results: Mapping[str, Any]) -> None:
        """Write `results` and the circumstances as JSON."""
        elapsed = time.monotonic() - self._clock
        stolen = _stolen_seconds() - self._stolen
        content = {
            "part": self._part,
            "command": self._command,
            "date": self._began.strftime("%Y-%m-%d %H:%M UTC"),
            "elapsed_s": round(elapsed, 1),
            "load_before": round(self._load, 2),
            "stolen_share": round(stolen / (elapsed * (os.cpu_count() or 1)), 4),
            "machine": describe(),
            "results": results,
        }
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(content, indent=1) + "\n")


def _git(*arguments: str) -> str:
    command = ["git", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()  # noqa: S603


def _cpuinfo(field: str) -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() == field), "")


def _cpu_model() -> str:
    """Name, family and model: hypervisors give different processors one name."""
    name = _cpuinfo("model name") or platform.processor() or platform.machine()
    return f"{name}, family {_cpuinfo('cpu family')} model {_cpuinfo('model')}"


def _l3() -> str:
    try:
        return Path("/sys/devices/system/cpu/cpu0/cache/index3/size").read_text().strip()
    except OSError:
        return "unknown"


def _stolen_seconds() -> float:
    """Time that the hypervisor gave to others while this machine wanted to run, summed over processors."""
    fields = Path("/proc/stat").read_text().splitlines()[0].split()
    return int(fields[8]) / os.sysconf("SC_CLK_TCK")
