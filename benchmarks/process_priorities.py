"""Threads of the engine and weight of the front end, in turn, on the served workload W2, into tokens/s and latencies.

    python -m benchmarks.process_priorities [--model DIR] [--precision bfloat16] [--threads 1,2] [--nice 0,5,-5]

Front end and engine share the processors, and the engine's threads wait for each other many times in a step. So it may
pay to let the engine go first, or to leave the front end a core. The two are sessions of their own, which Linux weighs
against each other (autogroup); `--nice` is how much nicer than the engine the front end is. Without the right to give a
session more weight, a front end that is to have more than the engine gets as much.
"""

import argparse
import os
import sys
from contextlib import ExitStack
from dataclasses import replace
from itertools import product
from pathlib import Path

from benchmarks import protocol, rotation
from benchmarks.engine_options import PRECISIONS
from benchmarks.machine import Sitting
from benchmarks.random_gpt2 import default_directory, make
from benchmarks.rotation import Limits
from benchmarks.served import ServedEntrant
from benchmarks.servers import Server, ServerPlan, roseinfer_plan

NUM_REPEATS = 3
BUDGET_S = 240.0
LOWEST_NICE, HIGHEST_NICE = -20, 19


class WeighedServer(Server):
    """A server whose front end is nicer than its engine."""

    def __init__(self, plan: ServerPlan, log: Path, front_end_nice: int) -> None:
        self._front_end_nice = front_end_nice
        super().__init__(plan, log)

    def resume(self) -> None:
        """Let it go on, with these weights."""
        super().resume()
        group = Path(f"/proc/{self._process.pid}/autogroup")
        usual = int(group.read_text().split()[-1])
        nice = min(max(usual + self._front_end_nice, LOWEST_NICE), HIGHEST_NICE)
        try:
            group.write_text(str(nice))
        except OSError as error:
            print(f"  {self.name}: the front end stays at {usual}: {error.strerror}", flush=True)


def plan_of(model: Path, precision: str, num_threads: int, front_end_nice: int) -> ServerPlan:
    """A roseinfer as it is measured elsewhere, with that many threads; the name says both."""
    plan = roseinfer_plan(model, precision)
    name = f"{num_threads} threads, nice {front_end_nice:+d}"
    return replace(plan, name=name, command=(*plan.command, "--runner.num-threads", str(num_threads)))


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, metavar="DIR", help=f"default: a random GPT-2 in {default_directory()}")
    parser.add_argument("--precision", choices=PRECISIONS, default="bfloat16")
    parser.add_argument("--threads", type=numbers, default=[1, os.cpu_count() or 1], metavar="N,N")
    parser.add_argument("--nice", type=numbers, default=[0, 5, -5], metavar="N,N", help="of the front end")
    parser.add_argument("--repeats", type=int, default=NUM_REPEATS)
    parser.add_argument("--out", type=Path, default=Path("build/bench/process_priorities.json"), metavar="FILE")
    arguments = parser.parse_args()
    sitting = Sitting("process_priorities", ["python", "-m", "benchmarks.process_priorities", *sys.argv[1:]])
    model, log = arguments.model or make(default_directory()), arguments.out.with_suffix(".log")
    with protocol.own_session_raised() as is_raised, ExitStack() as stack:
        entrants = []
        for num_threads, nice in product(arguments.threads, arguments.nice):
            server = WeighedServer(plan_of(model, arguments.precision, num_threads, nice), log, nice)
            stack.enter_context(server)
            server.pause()
            entrants.append(ServedEntrant(server))
        limits = Limits(arguments.repeats, BUDGET_S)
        rows = rotation.run(entrants, rotation.words_of(model), ("W2",), limits)
    sitting.write(arguments.out, {"is_raised": is_raised, "rows": rows})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
