"""Runs all benchmarks of the CPU, or of a GPU, each part in a process of its own, and writes their page.

    python -m benchmarks.suite [cpu] [--quick] [--resume] [--peers DIR] [--out FILE]          (`make bench`)
    python -m benchmarks.suite gpu [--quick] [--parts roofs,decode] [--device cuda]            (`make first-hour`)

On two cores with all peers set up: models 1 minute once, roofs 1, decode 4, served 12, peers 7, linears and start 3,
speculation and mixed 8, qwen3 20, so about 56 minutes; without peers about 29. `--quick` is a check of the benchmarks
and not of the engine: 5 minutes. On a GPU the limits of the parts come to less than an hour; what they take is not
known yet. There nothing is fetched and nothing installed: the Python that runs this has torch, Triton and the packages
of `pyproject.toml`, or finds them by PYTHONPATH. `make bench-gpu` leaves out the tests. `gpu --device cpu --quick`
shows that its scripts work.

A part that fails, or does not end in its time, is named on the page beside what it has measured, and the next one
begins. A finished part leaves DIR/PART.json, and the page is made of those that are there; `--resume` runs only the
others.
"""

import argparse
import re
import sys
import time
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import NamedTuple

_OTHER_PYTHON = "name with PYTHON one of 3.11 or newer that has torch and the packages of pyproject.toml"


def absent(requirements: Iterable[str]) -> list[str]:
    """Those of these packages that this Python does not have in any version."""
    names = [re.split(r"[^A-Za-z0-9_-]", requirement)[0] for requirement in requirements]
    return [name for name in names if not _is_there(name)]


def _is_there(name: str) -> bool:
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True


def needed() -> list[str]:
    """What the program requires, also on a GPU, and the tests that need one."""
    import tomllib  # which a Python before 3.11 does not have

    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    of_extra = project["optional-dependencies"]
    of_tests = [each for each in of_extra["test"] if each.startswith(("pytest>", "hypothesis>"))]
    return [*project["dependencies"], *of_extra["cuda"], *of_tests]


try:
    # All that is missing at once, and before the first part: what the last one misses would be found an hour later.
    if missing := absent(needed()):
        raise SystemExit(f"{sys.executable} has no {', '.join(missing)}: {_OTHER_PYTHON}")
    from benchmarks import protocol, report
    from benchmarks.random_gpt2 import default_directory, make
    from benchmarks.served import DEFAULT_PEERS
except ImportError as error:
    raise SystemExit(f"{sys.executable} has no {error.name}: {_OTHER_PYTHON}") from None


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
        "linears": Part("benchmarks.costs.linears", 300, (), ("--forms", "int8 of bfloat16,int4 of bfloat16")),
        "start": Part("benchmarks.costs.start", 900, (), ("--precisions", "float32,int8,int4")),
        "speculation": Part("benchmarks.costs.speculation", 480),
        "mixed": Part("benchmarks.costs.mixed_load", 480, ("model",)),
        "qwen3": Part("benchmarks.qwen3", 2400, ("peers",)),
    },
    "gpu": {
        "tests": Part("benchmarks.gpu.checks", 540, ("device",), ("--limit-s", "500")),
        "sanitizer": Part("benchmarks.gpu.checks", 360, ("device",), ("--sanitizer", "--limit-s", "320")),
        "roofs": Part("benchmarks.roofs", 90, ("device",)),
        # The parts behind it run with its finds.
        "search": Part("benchmarks.gpu.search", 420, ("device",), ("--write",)),
        "block_info": Part("benchmarks.costs.block_info", 60),
        "streams": Part("benchmarks.gpu.streams", 720, ("model", "device")),
        "decode": Part("benchmarks.decode_step", 480, ("model", "device"), ("--ablations",)),
        "bursts": Part("benchmarks.gpu.bursts", 360, ("model", "device")),
        "served": Part("benchmarks.served", 540, ("model", "device", "peers"), ("--precisions", "bfloat16")),
    },
}
DIRECTORIES = {"cpu": Path("build/bench"), "gpu": Path("build/bench-gpu")}


def command_of(part: Part, file: Path, arguments: argparse.Namespace) -> list[str]:
    command = [sys.executable, "-m", part.module, "--out", str(file), *part.flags]
    command += ["--quick"] if arguments.quick else []
    return command + [word for name in part.options for word in (f"--{name}", str(getattr(arguments, name)))]


def run_part(name: str, command: Sequence[str], timeout_s: float, log: Path) -> str:
    """Run a part and print what it prints; after its time it is ended. Returns how it failed, or nothing.

    The log's path is printed and not returned: what is returned goes onto a page.
    """
    began = time.monotonic()
    print(f"=== {name} ===", flush=True)
    is_done = protocol.run(command, log, timeout_s, stdout=None)
    took = time.monotonic() - began
    failure = "" if is_done else f"{'ended' if took >= timeout_s else 'FAILED'} after {took:.0f} s"
    print(f"=== {name} {f'{failure}, see {log}' if failure else f'is done after {took:.0f} s'} ===", flush=True)
    return failure


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
    if arguments.suite == "gpu" and arguments.device == "cuda" and not has_gpu():
        raise SystemExit("torch finds no GPU here, or is built without CUDA; --device cpu checks the scripts")
    print(f"model: {make(arguments.model)}", flush=True)
    files = {name: directory / f"{name}.json" for name in chosen}
    to_run = [name for name, file in files.items() if not (arguments.resume and file.is_file())]
    for name in to_run:
        files[name].unlink(missing_ok=True)
    failures = {}
    for name in to_run:
        command = command_of(parts[name], files[name], arguments)
        failures[name] = run_part(name, command, parts[name].timeout_s, files[name].with_suffix(".log"))
    failures = {name: failure for name, failure in failures.items() if failure}
    is_check = arguments.quick or (arguments.suite == "gpu" and arguments.device == "cpu")
    out = arguments.out or (directory / "report.md" if is_check else None)
    report.write(arguments.suite, directory, out, failures)
    for name in failures:  # what it has left is on the page; another run begins it anew
        if files[name].is_file():
            files[name].rename(files[name].with_suffix(".part.json"))
    return 1 if failures else 0


def has_gpu() -> bool:
    try:
        import torch
    except ModuleNotFoundError as error:
        raise SystemExit(f"{sys.executable} has no {error.name}: {_OTHER_PYTHON}") from None
    return torch.cuda.is_available()


if __name__ == "__main__":
    raise SystemExit(main())
