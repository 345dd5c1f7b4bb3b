"""Measures how long a server takes until it is ready, and the memory it takes meanwhile, by the path of its model.

    python -m benchmarks.costs.start [--quick] [--rounds 3] [--precisions float32,bfloat16,int8,int4]
        [--paths native,transformers] [--model DIR] [--out FILE]

The checkpoint is `random_qwen3`'s, read from the system's cache. In each round every precision and path starts
`roseinfer serve` twice, with a KV pool of 256 MiB: first with an empty cache of packed weights, which it fills, then
with that. `transformers` serves the same file by the modelling code of transformers, as if there were no file of ours.
Printed are the medians: seconds from the start of the process until `/readyz` says 200; processor seconds of all
processes; and the peak of their proportional set sizes together, looked at ten times a second until the cache is
written. `engine` is the engine's own peak (VmHWM), in which pages of mapped files count; `beside weights` is what it
has beside the packed weights, which are as large as their file, and beside the KV pool.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

from benchmarks.engine_options import PRECISIONS, precision_options, require_kernels
from benchmarks.figures import Spread
from benchmarks.machine import ROOT, Sitting, part_parser
from benchmarks.protocol import family_mb, family_of
from benchmarks.random_qwen3 import default_directory, make
from benchmarks.servers import resident_mb
from roseinfer.bench.load.launcher import LaunchFailed, Server, free_port, serve_command

PATHS = ("native", "transformers")
STARTS = ("first", "second")
POOL_MIB = 256
OPTIONS = {"cache.cpu_memory_mib": str(POOL_MIB), "model.max_model_len": "1024"}
TIMEOUT_S = 300.0
_PATCHED = ("serve", "engine")  # commands of roseinfer that `run_patched` runs
Figures = dict[str, float]


def main() -> int:
    if sys.argv[1:2] and sys.argv[1] in _PATCHED:
        return run_patched(sys.argv[1:])
    parser = part_parser(__doc__, "bench/start.json", quick="one round")
    parser.add_argument("--model", type=Path, default=default_directory(), metavar="DIR", help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=3)
    precisions = ",".join((*PRECISIONS, "int4"))
    parser.add_argument("--precisions", default=precisions, metavar="P,P", help="default: %(default)s")
    parser.add_argument("--paths", default=",".join(PATHS), metavar="P,P", help="default: %(default)s")
    args = parser.parse_args()
    require_kernels()
    sitting, model = Sitting("start"), make(args.model)
    taken: dict[str, list[Figures]] = {}
    for _ in range(1 if args.quick else args.rounds):
        for precision in args.precisions.split(","):
            for path in args.paths.split(","):
                with tempfile.TemporaryDirectory() as cache:
                    for start in STARTS:
                        _read_all(model)
                        figures = measure(model, precision, path, Path(cache))
                        taken.setdefault(f"{precision}, {path}, {start}", []).append(figures)
    print("\n| | ready, s | of that weights | and warm-up | processor, s | all, MB | engine, MB | beside weights, MB |")
    print("|---|---|---|---|---|---|---|---|")
    for name, rounds in taken.items():
        print(f"| {name} | " + " | ".join(_cell([figures[key] for figures in rounds]) for key in rounds[0]) + " |")
    sitting.write(args.out, taken)
    return 0


def _cell(values: list[float]) -> str:
    return Spread.of(values).text(".1f" if max(values) < 200 else ".0f")


def _read_all(model: Path) -> None:
    """So that the disk is warm."""
    for file in model.glob("*.safetensors"):
        with file.open("rb", buffering=0) as stream:
            while stream.read(16 << 20):
                pass


def measure(model: Path, precision: str, path: str, cache: Path) -> Figures:
    """One start of a server. Raises LaunchFailed."""
    options = {**OPTIONS, **precision_options(precision), "model.packed_cache": str(cache)}
    flags = ["--model", str(model), *(word for key, value in options.items() for word in (_flag(key), value))]
    port = free_port()
    command = serve_command(port, 0, flags)
    if path == "transformers":
        command = [sys.executable, "-m", "benchmarks.costs.start", *command[command.index("serve") :]]
    with tempfile.NamedTemporaryFile(suffix=".log") as log:
        began = time.monotonic()
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}/src:{ROOT}"}
        server = Server(command, port, Path(log.name), environment=environment)
        try:
            peak = 0.0
            while not server.is_ready():
                if server.process.poll() is not None or time.monotonic() > began + TIMEOUT_S:
                    raise LaunchFailed(server.log()[-600:])
                peak = max(peak, _proportional_mb(server.pid))
                time.sleep(0.1)
            ready_s = time.monotonic() - began
            peak = max(peak, _proportional_mb(server.pid))
            while not (packed := list(cache.glob("*.packed"))) or "startup_s" not in server.log():
                if time.monotonic() > began + TIMEOUT_S:
                    raise LaunchFailed(f"no weights were kept, or no line says *ready on*: {server.log()[-600:]}")
                peak = max(peak, _proportional_mb(server.pid))
                time.sleep(0.1)
            processor_s = sum(map(_processor_seconds, family_of(server.pid)))
            while not (stages := _stages(server.log())):  # logged just after `/readyz` says 200
                time.sleep(0.1)
            figures = {"ready_s": ready_s, "weights_s": stages["weights"], "warmup_s": stages["warmup"]}
            figures |= {"processor_s": processor_s, "all_mb": peak}
            engine_mb = resident_mb(server.engine_pid(), "VmHWM")
            weights_mb = packed[0].stat().st_size / 1e6
            return figures | {"engine_mb": engine_mb, "beside_mb": engine_mb - weights_mb - POOL_MIB * 2**20 / 1e6}
        finally:
            server.stop()


def _stages(log: str) -> dict[str, float]:
    """The seconds of each stage of the start, from the line that says *ready on*; empty before it."""
    records = (json.loads(line) for line in log.splitlines() if line.endswith("}"))
    facts: dict[str, float] = next((record["startup_s"] for record in records if "startup_s" in record), {})
    return facts


def _flag(path: str) -> str:
    return f"--{path.replace('_', '-')}"


def _proportional_mb(pid: int) -> float:
    """Resident memory of the process and its descendants, in which a shared page counts once."""
    return family_mb(pid, "smaps_rollup", "Pss")


def _processor_seconds(pid: int) -> float:
    """Of the process, and of its children that have ended."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def run_patched(arguments: Sequence[str]) -> int:
    """A command of roseinfer, in which no family has a file of its own."""
    from roseinfer.cli.main import main as run
    from roseinfer.engine.link import transport

    if arguments[0] == "engine":
        from roseinfer.model.families import registry

        registry.FAMILIES.clear()  # what a user has no option for
    engine = ("-m", "benchmarks.costs.start", "engine", "--fd")
    with mock.patch.object(transport.ProcessTransport.__init__, "__defaults__", (engine,)):
        return run(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
