"""Runs the tests of `tests/gpu`, or those of its attention kernels under compute-sanitizer, and counts how they end.

    python -m benchmarks.gpu.checks [--sanitizer] [--device cuda] [--limit-s 500] [--out FILE]

What has run when the time is over is kept. Under the sanitizer torch's allocator keeps no memory, since an access
behind a tensor would fall into a neighbour's; tests of graphs and of allocations, which need that allocator, are left
out. With `--device cpu`, or without the tool, there is nothing to run, and the result says so.
"""

import os
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import protocol
from benchmarks.machine import Sitting, part_parser

PYTEST = (sys.executable, "-m", "pytest", "-c", "tests/gpu/pytest.ini", "--rootdir", ".", "-v", "--tb=short")
SANITIZER_TESTS = ("tests/gpu/test_attention.py", "-k", "not graph and not allocates")
SANITIZER_OPTIONS = ("--tool", "memcheck", "--error-exitcode", "86")
OUTCOME = re.compile(r"^(tests/gpu/\S+::.+?) (PASSED|FAILED|ERROR|SKIPPED)\b", re.MULTILINE)
ERRORS = re.compile(r"^=+ ERROR SUMMARY: ([1-9]\d* errors?)", re.MULTILINE)


def sanitizer() -> str | None:
    """Where compute-sanitizer is; None where it is not installed."""
    return shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")


def run(command: Sequence[str], log: Path, limit_s: float, environment: dict[str, str]) -> dict[str, Any]:
    """Run a command of pytest, and read from its output what has become of each test."""
    log.unlink(missing_ok=True)
    has_ended = protocol.run(command, log, limit_s, env={**os.environ, **environment})
    text = log.read_text(errors="replace")
    endings: dict[str, list[str]] = {"PASSED": [], "FAILED": [], "ERROR": [], "SKIPPED": []}
    for name, outcome in OUTCOME.findall(text):
        endings[outcome].append(name)
    failed = [*endings["FAILED"], *endings["ERROR"]]
    counts = {"num_passed": len(endings["PASSED"]), "num_skipped": len(endings["SKIPPED"]), "failed": failed}
    return {**counts, "note": "" if has_ended else why(text, log)}


def why(text: str, log: Path) -> str:
    """Why a run did not end well, from what it has printed."""
    if "no tests ran" in text or "collected 0 items" in text:  # the former is not said beside a warning
        return "no test was collected"
    errors = ERRORS.findall(text)
    return f"{errors[-1]} by compute-sanitizer; see {log.name}" if errors else f"did not end well; see {log.name}"


def main() -> int:
    parser = part_parser(__doc__, "bench-gpu/tests.json", quick="the same", device="cuda")
    parser.add_argument("--sanitizer", action="store_true", help="the attention tests, under compute-sanitizer")
    parser.add_argument("--limit-s", type=float, default=500.0, metavar="S", help="default: %(default)s")
    arguments = parser.parse_args()
    sitting = Sitting("sanitizer" if arguments.sanitizer else "tests")
    tool, log = sanitizer(), arguments.out.with_suffix(".pytest.log")
    log.parent.mkdir(parents=True, exist_ok=True)
    if arguments.sanitizer and tool is None:
        found: dict[str, Any] = {"num_passed": 0, "num_skipped": 0, "failed": [], "note": "compute-sanitizer is absent"}
        is_good = True
    else:
        under = [str(tool), *SANITIZER_OPTIONS] if arguments.sanitizer else []
        tests = SANITIZER_TESTS if arguments.sanitizer else ("tests/gpu",)
        environment = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"} if arguments.sanitizer else {}
        found = run([*under, *PYTEST, *tests], log, arguments.limit_s, environment)
        is_good = not found["note"] or (arguments.device == "cpu" and found["note"] == "no test was collected")
    print(f"  {found['num_passed']} passed, {len(found['failed'])} failed, {found['num_skipped']} skipped", flush=True)
    print(
        "".join(f"  failed: {name}\n" for name in found["failed"]) + f"  {found['note'] or 'all is well'}", flush=True
    )
    sitting.write(arguments.out, found)
    return 0 if is_good else 1


if __name__ == "__main__":
    raise SystemExit(main())
