"""Measures decode steps of the engine in turn with transformers: at each precision, or with one option changed each.

    python -m benchmarks.decode_step [--quick] [--model DIR] [--out FILE]
    python -m benchmarks.decode_step --ablations --device cuda [--quick] [--model DIR] [--out FILE]

All subjects are loaded, each in its own process; only one works at a time. For each batch and context every subject
brings that many sequences there, and then they take turns (A B C D A B C D …), a few steps each. The first step of a
turn is not counted: the subject before has filled the caches with its own weights. Contexts grow by a token a step and
start so that the middle step has the context of the row. On a CPU the memory's bandwidth, which bounds a step
(`benchmarks/roofs.py`), is measured before each turn. Ablations, and transformers beside them, are in bfloat16; they
share a GPU's memory, so each KV pool is bounded.
"""

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import protocol, roofs
from benchmarks.engine_options import PRECISIONS, engine_command, precision_options
from benchmarks.figures import Spread
from benchmarks.machine import Sitting, part_parser
from benchmarks.peers import libraries
from benchmarks.protocol import PeerFailed, Worker
from benchmarks.random_gpt2 import make
from roseinfer.runtime import memory

CASES = ((1, 64), (1, 512), (8, 64), (8, 512), (64, 64), (64, 512))  # batch, context
QUICK_CASES = ((1, 64), (64, 64))
ABLATION_CASES = ((1, 64), (8, 64), (64, 64), (64, 512), (256, 64), (256, 512))
QUICK_ABLATION_CASES = ((1, 16), (2, 16))
ABLATIONS = {  # what differs from a configuration of defaults
    "captured graphs": {},
    "no graphs": {"runner.cuda_graphs": "off"},
    "pageable staging": {"runner.staging": "pageable"},
    "pipeline depth 0": {"runner.pipeline_depth": "0"},
}
NUM_UNCOUNTED = 1


class Plan(NamedTuple):
    """How often and how long subjects take turns in one case."""

    num_turns: int
    engine_steps: int
    reference_steps: int

    def steps(self, name: str) -> int:
        """In one turn, the uncounted first one included."""
        return NUM_UNCOUNTED + (self.reference_steps if name.startswith("transformers") else self.engine_steps)


def plan_of(batch: int, context: int, arguments: argparse.Namespace) -> Plan:
    """Enough steps for a median, few enough that the largest case takes half a minute."""
    if arguments.quick:
        return Plan(2, 2 if arguments.ablations else 4, 1)
    if arguments.ablations:
        return Plan(7, 16, 4)
    return Plan(5, 6, 2) if batch * context > 16_384 else Plan(7, 8, 4)


def measure_case(
    subjects: dict[str, Worker], batch: int, context: int, plan: Plan, reads: Mapping[str, Callable[[], float]]
) -> dict[str, Any]:
    """Returns a row for each subject: median and spread of the turns' medians, of a step and the engine's phases.

    Those that have a `read` have each turn's bandwidth, in bytes/s, and its step, in milliseconds, too.
    """
    turns: dict[str, list[dict[str, list[float]]]] = {name: [] for name in subjects}
    bandwidths: dict[str, list[float]] = {name: [] for name in reads}
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
            if name in reads:
                bandwidths[name].append(reads[name]())
            turns[name].append(ask(name, "run", num_steps=plan.steps(name)))
    rows: dict[str, Any] = {}
    for name in subjects:
        ask(name, "release")
        if name in failures:
            rows[name] = {"error": failures[name]}
            continue
        rows[name] = {part: asdict(over_turns([turn[part] for turn in turns[name]])) for part in turns[name][0]}
        if name in reads:
            steps = [over_turns([turn["step"]]).median for turn in turns[name]]
            rows[name]["turns"] = list(zip(bandwidths[name], steps, strict=True))
        print(f"  batch {batch}, context {context}, {name}: {rows[name]['step']['median']:.2f} ms", flush=True)
    return {"batch": batch, "context": context, "subjects": rows}


def over_turns(turns: Sequence[Sequence[float]]) -> Spread:
    """Of each turn the median of its counted steps, in milliseconds; over turns, median and spread."""
    return Spread.of([Spread.of(turn[NUM_UNCOUNTED:]).median * 1e3 for turn in turns])


def start_subjects(
    stack: ExitStack, commands: Mapping[str, Sequence[str]], log: Path
) -> tuple[dict[str, Worker], dict[str, Any], dict[str, str]]:
    """Start the subjects. Returns those that did, what each says of itself, and why the others did not.

    One loads after the other: two that warm up at once wait for each other's threads at every barrier.
    """
    subjects: dict[str, Worker] = {}
    descriptions: dict[str, Any] = {}
    failures: dict[str, str] = {}
    for name, command in commands.items():
        worker = stack.enter_context(Worker(name, command, log))
        try:
            descriptions[name] = worker.call("describe")
            subjects[name] = worker
        except PeerFailed as error:
            failures[name] = str(error)
            print(f"  {error}", flush=True)
    return subjects, descriptions, failures


def cases_of(arguments: argparse.Namespace) -> Sequence[tuple[int, int]]:
    if arguments.ablations:
        return QUICK_ABLATION_CASES if arguments.quick else ABLATION_CASES
    return QUICK_CASES if arguments.quick else CASES


def commands_of(arguments: argparse.Namespace, model: Path) -> dict[str, list[str]]:
    """The command of each subject, by its name."""
    batch, context = (str(max(sizes)) for sizes in zip(*cases_of(arguments), strict=True))
    own = {f"roseinfer {precision}": precision_options(precision) for precision in arguments.precisions.split(",")}
    if arguments.ablations:
        own = {name: {**precision_options("bfloat16"), **options} for name, options in ABLATIONS.items()}
    device = {"runner.device": arguments.device}
    sizes = ["--steps", "--batch", batch, "--context", context]
    commands = {name: [*engine_command(model, {**device, **options}), *sizes] for name, options in own.items()}
    precision = "bfloat16" if arguments.ablations else "float32"
    rival = libraries.command_of("transformers", model, precision)
    return {**commands, f"transformers {precision}": [*rival, "--device", arguments.device]}


def reads_of(
    names: Iterable[str], batch: int, context: int, read_rate: Callable[[int], Callable[[], float]]
) -> dict[str, Callable[[], float]]:
    """What measures the bandwidth for each precision's step, at a size near the bytes that it reads."""
    reads = {}
    for name in names:
        product, _, precision = name.partition(" ")
        if product == "roseinfer":
            reads[name] = read_rate(int(roofs.nearest_mib(roofs.step_bytes(precision, batch, context))) << 20)
    return reads


def main() -> int:
    parser = part_parser(__doc__, "bench/decode.json", quick="two short turns of two cases", device="cpu", model=True)
    parser.add_argument("--precisions", default=",".join(PRECISIONS), metavar="P,P", help="default: %(default)s")
    parser.add_argument("--ablations", action="store_true", help="one option changed each, in place of each precision")
    arguments = parser.parse_args()
    memory.prefer_huge_pages()  # for what is read in this process, as an engine has it
    sitting, read_rate = Sitting("decode"), cache(roofs.read_rate)
    with protocol.own_session_raised() as is_raised, ExitStack() as stack:
        commands = commands_of(arguments, make(arguments.model))
        subjects, descriptions, failures = start_subjects(stack, commands, arguments.out.with_suffix(".log"))
        cases: list[dict[str, Any]] = []
        results = {"subjects": descriptions, "failures": failures, "is_raised": is_raised, "cases": cases}
        for case in cases_of(arguments):
            reads = reads_of(subjects, *case, read_rate) if arguments.device == "cpu" else {}
            cases.append(measure_case(subjects, *case, plan_of(*case, arguments), reads))
            sitting.write(arguments.out, results)  # what is there when the time is over is kept
    return 0 if any(name.startswith("transformers") for name in descriptions) else 1


if __name__ == "__main__":
    raise SystemExit(main())
