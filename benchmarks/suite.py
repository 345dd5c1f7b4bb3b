"""All benchmarks of the CPU in order, each in a process of its own, and their report. Measures nothing itself.

    python -m benchmarks.suite [--quick] [--resume] [--peers DIR] [--out FILE]     (`make bench` runs it)

On two cores with all peers set up: model 15 s once, roofs 1 minute, decode 4, served 12, peers 7, so about 24 minutes;
without peers about 12. `--quick` is a check of the benchmarks and not of the engine: 3 minutes. A part that is done
leaves build/bench/PART.json; with `--resume` those are kept and only the others run.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks import protocol
from benchmarks.random_gpt2 import default_directory, make
from benchmarks.served import DEFAULT_PEERS

PARTS = {  # module, and the seconds after which it is given up
    "roofs": ("benchmarks.roofs", 180),
    "decode": ("benchmarks.decode_step", 480),
    "served": ("benchmarks.served", 1500),
    "peers": ("benchmarks.api_peers", 900),
}
TAKES_MODEL = ("decode", "served", "peers")
TAKES_PEERS = ("served", "peers")


def command_of(part: str, arguments: argparse.Namespace) -> list[str]:
    module, _ = PARTS[part]
    command = [sys.executable, "-m", module, "--out", str(file_of(part, arguments))]
    command += ["--quick"] if arguments.quick else []
    command += ["--model", str(arguments.model)] if part in TAKES_MODEL else []
    return command + (["--peers", str(arguments.peers)] if part in TAKES_PEERS else [])


def file_of(part: str, arguments: argparse.Namespace) -> Path:
    return Path(arguments.parts) / f"{part}.json"


def run_part(part: str, command: Sequence[str], timeout_s: float, log: Path) -> bool:
    """Whether it is done. What it prints is printed; one that hangs is ended, and everything that it has started."""
    began = time.monotonic()
    print(f"=== {part} ===", flush=True)
    process = protocol.start(command, log, stdout=None)
    try:
        code = process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        code = -1
    finally:
        if process.poll() is None:
            protocol.stop(process)
    took = time.monotonic() - began
    print(f"=== {part} {'is done' if code == 0 else f'FAILED, see {log},'} after {took:.0f} s ===", flush=True)
    return code == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer repeats and cases; nothing to publish")
    parser.add_argument("--resume", action="store_true", help="keep the parts that are done")
    parser.add_argument("--model", type=Path, default=default_directory(), metavar="DIR", help="default: %(default)s")
    parser.add_argument("--peers", type=Path, default=DEFAULT_PEERS, metavar="DIR", help="default: %(default)s")
    parser.add_argument("--parts", type=Path, default=Path("build/bench"), metavar="DIR", help="default: %(default)s")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="default: docs/benchmarks/cpu.md; quick: the parts' DIR"
    )
    arguments = parser.parse_args()
    out = arguments.out or (arguments.parts / "cpu.md" if arguments.quick else Path("docs/benchmarks/cpu.md"))
    print(f"model: {make(arguments.model)}", flush=True)
    kept = [part for part in PARTS if arguments.resume and file_of(part, arguments).is_file()]
    for part in PARTS:
        if part not in kept:
            file_of(part, arguments).unlink(missing_ok=True)
    failed = []
    for part, (_, timeout_s) in PARTS.items():
        log = file_of(part, arguments).with_suffix(".log")
        if part not in kept and not run_part(part, command_of(part, arguments), timeout_s, log):
            failed.append(part)
    report = [sys.executable, "-m", "benchmarks.report", "--parts", str(arguments.parts), "--out", str(out)]
    subprocess.run(report, cwd=protocol.ROOT, check=True)  # noqa: S603
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
