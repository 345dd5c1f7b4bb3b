"""Runs all benchmarks of the CPU, or of a GPU, each part in a process of its own, and writes their page.

    python -m benchmarks.suite [cpu] [--quick] [--resume] [--peers DIR] [--out FILE]          (`make bench`)
    python -m benchmarks.suite gpu [--quick] [--parts roofs,decode] [--device cuda]            (`make bench-gpu`)

On two cores with all peers set up: models 1 minute once, roofs 1, decode 4, served 12, peers 7, linears and start 3,
speculation and mixed 6, qwen3 20, so about 54 minutes; without peers about 27. `--quick` is a check of the benchmarks
and not of the engine: 5 minutes. On an H200 with 16 cores about 15 minutes, estimated and not yet run: roofs 1/2,
block_info 1/10, streams 7, decode 4, bursts 3. There nothing is fetched and nothing installed: the Python that runs
this has torch, Triton and the packages of `pyproject.toml`, or finds them by PYTHONPATH. `gpu --device cpu --quick`
shows that its scripts work.

A finished part leaves DIR/PART.json, and the page is made of those that are there; `--resume` runs only the others.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks import protocol, report
from benchmarks.random_gpt2 import default_directory, make
from benchmarks.served import DEFAULT_PEERS


class Part(NamedTuple):
    """A script, the seconds after which it is ended, the options of the suite that it has too, and flags of its own."""

    module: str
    timeout_s: float
    options: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()


SUITES = {
    "cpu": {
        "roofs": Part("benchmarks.roofs", 180),
        "decode": Part("benchmarks.decode_step", 480, ("model",)),
        "served": Part("benchmarks.served", 1500, ("model", "peers")),
        "peers": Part("benchmarks.api_peers", 900, ("model", "peers")),
        "linears": Part("benchmarks.costs.linears", 300, (), ("--forms", "int8,int4")),
        "start": Part("benchmarks.costs.start", 900, (), ("--precisions", "float32,int8,int4")),
        "speculation": Part("benchmarks.costs.speculation", 480),
        "mixed": Part("benchmarks.costs.mixed_load", 480, ("model",)),
        "qwen3": Part("benchmarks.qwen3", 2400, ("peers",)),
    },
    "gpu": {
        "roofs": Part("benchmarks.roofs", 120, ("device",)),
        "block_info": Part("benchmarks.costs.block_info", 60),
        "streams": Part("benchmarks.gpu.streams", 1200, ("model", "device")),
        "decode": Part("benchmarks.decode_step", 600, ("model", "device"), ("--ablations",)),
        "bursts": Part("benchmarks.gpu.bursts", 600, ("model", "device")),
    },
}
DIRECTORIES = {"cpu": Path("build/bench"), "gpu": Path("build/bench-gpu")}


def command_of(part: Part, file: Path, arguments: argparse.Namespace) -> list[str]:
    command = [sys.executable, "-m", part.module, "--out", str(file), *part.flags]
    command += ["--quick"] if arguments.quick else []
    return command + [word for name in part.options for word in (f"--{name}", str(getattr(arguments, name)))]


def run_part(name: str, command: Sequence[str], timeout_s: float, log: Path) -> bool:
    """Run a part and print what it prints. Returns whether it succeeded; after its time it is ended."""
    began = time.monotonic()
    print(f"=== {name} ===", flush=True)
    is_done = protocol.run(command, log, timeout_s, stdout=None)
    took = time.monotonic() - began
    print(f"=== {name} {'is done' if is_done else f'FAILED, see {log},'} after {took:.0f} s ===", flush=True)
    return is_done


def parser_of() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", nargs="?", choices=tuple(SUITES), default="cpu", help="default: %(default)s")
    parser.add_argument("--quick", action="store_true", help="fewer repeats and cases; nothing to publish")
    parser.add_argument("--resume", action="store_true", help="keep the parts that are done")
    parser.add_argument("--parts", metavar="P,P", help="default: all")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="of gpu; cpu only checks the scripts")
    parser.add_argument("--model", type=Path, default=default_directory(), metavar="DIR", help="default: %(default)s")
    parser.add_argument("--peers", type=Path, default=DEFAULT_PEERS, metavar="DIR", help="default: %(default)s")
    parser.add_argument("--dir", type=Path, metavar="DIR", help="of the parts' results; default: build/bench[-gpu]")
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: in docs/benchmarks; in DIR for a check")
    return parser


def main() -> int:
    parser = parser_of()
    arguments = parser.parse_args()
    parts, directory = SUITES[arguments.suite], arguments.dir or DIRECTORIES[arguments.suite]
    chosen = arguments.parts.split(",") if arguments.parts else list(parts)
    if unknown := set(chosen) - set(parts):
        parser.error(f"--parts: {', '.join(sorted(unknown))} is none of {', '.join(parts)}")
    print(f"model: {make(arguments.model)}", flush=True)
    files = {name: directory / f"{name}.json" for name in chosen}
    to_run = [name for name, file in files.items() if not (arguments.resume and file.is_file())]
    for name in to_run:
        files[name].unlink(missing_ok=True)
    are_done = []
    for name in to_run:
        command = command_of(parts[name], files[name], arguments)
        are_done.append(run_part(name, command, parts[name].timeout_s, files[name].with_suffix(".log")))
    is_check = arguments.quick or (arguments.suite == "gpu" and arguments.device == "cpu")
    report.write(arguments.suite, directory, arguments.out or (directory / "report.md" if is_check else None))
    return 0 if all(are_done) else 1


if __name__ == "__main__":
    raise SystemExit(main())
