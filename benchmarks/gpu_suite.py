"""All benchmarks of a GPU in order, each in a process of its own, and their report. Measures nothing itself.

    PYTHON=python3 make bench-gpu [ARGS="--parts roofs,steps"]

Nothing is fetched and nothing installed: the Python that is given has torch, Triton and the packages of
`pyproject.toml`, or finds them by PYTHONPATH. On an H200 with 16 cores about 15 minutes, estimated and not yet run:
roofs 1/2, block_info 1/10, streams 7, steps 4, bursts 3. Each part leaves build/bench-gpu/PART.json, and the report is
of those that are there, so parts can be run one by one. `--device cpu --quick` shows that the scripts work.
"""

import argparse
import subprocess
import sys
from pathlib import Path

from benchmarks import protocol
from benchmarks.random_gpt2 import default_directory, make
from benchmarks.suite import run_part

MODULES = {  # and the seconds after which each is given up
    "roofs": ("benchmarks.gpu_roofs", 120),
    "block_info": ("benchmarks.costs.block_info", 60),
    "streams": ("benchmarks.gpu.streams", 1200),
    "steps": ("benchmarks.gpu_steps", 600),
    "bursts": ("benchmarks.gpu.bursts", 600),
}
TAKES_MODEL = ("streams", "steps", "bursts")


def command_of(part: str, arguments: argparse.Namespace) -> list[str]:
    module, _ = MODULES[part]
    command = [sys.executable, "-m", module, "--out", str(arguments.dir / f"{part}.json")]
    command += ["--quick"] if arguments.quick else []
    command += ["--model", str(arguments.model)] if part in TAKES_MODEL else []
    return command + (["--device", arguments.device] if part != "block_info" else [])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu only checks the scripts")
    parser.add_argument("--quick", action="store_true", help="fewer repeats and cases; nothing to publish")
    parser.add_argument("--parts", default=",".join(MODULES), metavar="P,P", help="default: %(default)s")
    parser.add_argument("--model", type=Path, default=default_directory(), metavar="DIR", help="default: %(default)s")
    parser.add_argument("--dir", type=Path, default=Path("build/bench-gpu"), metavar="DIR", help="default: %(default)s")
    arguments = parser.parse_args()
    print(f"model: {make(arguments.model)}", flush=True)
    failed = []
    for part in arguments.parts.split(","):
        (arguments.dir / f"{part}.json").unlink(missing_ok=True)
        log = arguments.dir / f"{part}.log"
        if not run_part(part, command_of(part, arguments), MODULES[part][1], log):
            failed.append(part)
    report = [sys.executable, "-m", "benchmarks.gpu_report", "--parts", str(arguments.dir)]
    if arguments.quick or arguments.device == "cpu":
        report += ["--out", str(arguments.dir / "report.md")]
    subprocess.run(report, cwd=protocol.ROOT, check=True)  # noqa: S603
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
