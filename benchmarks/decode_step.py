"""A decode step of the engine at each precision, in turn with transformers, into milliseconds. Knows nothing of HTTP.

    python -m benchmarks.decode_step [--quick] [--model DIR] [--out FILE]

All subjects are loaded, each in its own process; only one works at a time. For each batch and context every subject
brings that many sequences there, and then they take turns (A B C D A B C D …), a few steps each. The first step of a
turn is not counted: the subject before has filled the caches with its own weights. Contexts grow by a token a step and
start so that the middle step has the context of the row.
"""

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import protocol
from benchmarks.engine_options import PRECISIONS
from benchmarks.figures import Spread
from benchmarks.machine import Sitting
from benchmarks.protocol import PeerFailed, Worker
from benchmarks.random_gpt2 import default_directory, make

REFERENCE = "transformers float32"
CASES = ((1, 64), (1, 512), (8, 64), (8, 512), (64, 64), (64, 512))  # batch, context
NUM_UNCOUNTED = 1


class Plan(NamedTuple):
    """How often and how long subjects take turns in one case."""

    num_turns: int
    engine_steps: int
    reference_steps: int

    def steps(self, name: str) -> int:
        """In one turn, the uncounted first one included."""
        return NUM_UNCOUNTED + (self.reference_steps if name.startswith("transformers") else self.engine_steps)


def plan_of(batch: int, context: int, *, is_quick: bool) -> Plan:
    """Enough steps for a median, few enough that the largest case takes half a minute."""
    if is_quick:
        return Plan(2, 4, 1)
    if batch * context > 16_384:
        return Plan(5, 6, 2)
    return Plan(7, 8, 4)


def measure_case(subjects: dict[str, Worker], batch: int, context: int, plan: Plan) -> dict[str, Any]:
    """One row for each subject that got through: median and spread of the turns' medians, phases of the engine."""
    turns: dict[str, list[dict[str, list[float]]]] = {name: [] for name in subjects}
    failures: dict[str, str] = {}

    def ask(name: str, call: str, **numbers: int) -> Any:
        if name not in failures:
            try:
                return subjects[name].call(call, **numbers)
            except PeerFailed as error:
                failures[name] = str(error)
        return None

    for name in subjects:
        num_steps = plan.num_turns * plan.steps(name)
        ask(name, "prepare", batch=batch, context=max(2, context - num_steps // 2), num_steps=num_steps)
    for _ in range(plan.num_turns):
        for name in subjects:
            turns[name].append(ask(name, "run", num_steps=plan.steps(name)))
    rows: dict[str, Any] = {}
    for name in subjects:
        ask(name, "release")
        if name in failures:
            rows[name] = {"error": failures[name]}
            continue
        rows[name] = {part: asdict(over_turns([turn[part] for turn in turns[name]])) for part in turns[name][0]}
        print(f"  batch {batch}, context {context}, {name}: {rows[name]['step']['median']:.2f} ms", flush=True)
    return {"batch": batch, "context": context, "subjects": rows}


def over_turns(turns: Sequence[Sequence[float]]) -> Spread:
    """Of each turn the median of its counted steps, in milliseconds; over turns, median and spread."""
    return Spread.of([Spread.of(turn[NUM_UNCOUNTED:]).median * 1e3 for turn in turns])


def start_subjects(
    stack: ExitStack, commands: Mapping[str, Sequence[str]], log: Path
) -> tuple[dict[str, Worker], dict[str, Any], dict[str, str]]:
    """The subjects that could start, what each says of itself, and why the others could not.

    One loads after the other: two that warm up at once wait for each other's threads at every barrier.
    """
    subjects: dict[str, Worker] = {}
    descriptions: dict[str, Any] = {}
    failures: dict[str, str] = {}
    for name, command in commands.items():
        worker = stack.enter_context(
            Worker(name, [sys.executable, "-m", "benchmarks.peers.decode_workers", *command], log)
        )
        try:
            descriptions[name] = worker.call("describe")
            subjects[name] = worker
        except PeerFailed as error:
            failures[name] = str(error)
            print(f"  {error}", flush=True)
    return subjects, descriptions, failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two short turns, of batch 1 and 64 at context 64")
    parser.add_argument("--model", type=Path, default=default_directory(), metavar="DIR", help="default: %(default)s")
    parser.add_argument("--precisions", default=",".join(PRECISIONS), metavar="P,P", help="default: %(default)s")
    parser.add_argument("--out", type=Path, default=Path("build/bench/decode.json"), metavar="FILE")
    arguments = parser.parse_args()
    sitting = Sitting("decode", ["python", "-m", "benchmarks.decode_step", *sys.argv[1:]])
    began = time.monotonic()
    with protocol.own_session_raised() as is_raised, ExitStack() as stack:
        log = arguments.out.with_suffix(".log")
        model = str(make(arguments.model))
        commands = {
            f"roseinfer {name}": ["engine", model, "--precision", name] for name in arguments.precisions.split(",")
        }
        commands[REFERENCE] = ["transformers", model]
        subjects, descriptions, failures = start_subjects(stack, commands, log)
        cases = [
            measure_case(subjects, batch, context, plan_of(batch, context, is_quick=arguments.quick))
            for batch, context in CASES
            if not arguments.quick or (batch != 8 and context == 64)
        ]
    print(f"  {time.monotonic() - began:.0f} s", flush=True)
    sitting.write(
        arguments.out, {"subjects": descriptions, "failures": failures, "is_raised": is_raised, "cases": cases}
    )
    return 0 if REFERENCE in descriptions else 1


if __name__ == "__main__":
    raise SystemExit(main())
