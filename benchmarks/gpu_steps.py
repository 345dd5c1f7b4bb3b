"""Decode steps on a GPU, the engine's ablations in turn with transformers, into milliseconds. Knows nothing of HTTP.

    python -m benchmarks.gpu_steps [--device cuda] [--quick] [--model DIR] [--out FILE]

As `benchmarks/decode_step.py`, with its turns and its way to count: engines that differ in one option each, all in
bfloat16, and transformers in bfloat16 on the same GPU. All of them share the GPU's memory, so each KV pool is bounded.
"""

import argparse
import sys
from contextlib import ExitStack
from pathlib import Path

from benchmarks import protocol
from benchmarks.decode_step import Plan, measure_case, start_subjects
from benchmarks.machine import Sitting
from benchmarks.random_gpt2 import default_directory, make

CASES = ((1, 64), (8, 64), (64, 64), (64, 512), (256, 64), (256, 512))  # batch, context
QUICK_CASES = ((1, 16), (2, 16))
PLAN = Plan(7, 16, 4)
QUICK_PLAN = Plan(2, 2, 1)
REFERENCE = "transformers bfloat16"
SETTINGS = {  # what differs from a configuration of defaults
    "captured graphs": {},
    "no graphs": {"runner.cuda_graphs": "off"},
    "pageable staging": {"runner.staging": "pageable"},
    "pipeline depth 1": {"runner.pipeline_depth": "1"},
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="two small cases, two short turns")
    parser.add_argument("--model", type=Path, default=default_directory(), metavar="DIR", help="default: %(default)s")
    parser.add_argument("--out", type=Path, default=Path("build/bench-gpu/steps.json"), metavar="FILE")
    arguments = parser.parse_args()
    sitting = Sitting("steps", ["python", "-m", "benchmarks.gpu_steps", *sys.argv[1:]])
    cases, plan = (QUICK_CASES, QUICK_PLAN) if arguments.quick else (CASES, PLAN)
    batch, context = (max(case[i] for case in cases) for i in (0, 1))
    model, log = make(arguments.model), arguments.out.with_suffix(".log")
    common = [str(model), "--precision", "bfloat16", "--device", arguments.device]
    sizes = ["--batch", str(batch), "--context", str(context)]
    commands = {
        name: ["engine", *common, *sizes, *(f"--option={path}={value}" for path, value in options.items())]
        for name, options in SETTINGS.items()
    }
    commands[REFERENCE] = ["transformers", *common]
    with protocol.own_session_raised() as is_raised, ExitStack() as stack:
        subjects, descriptions, failures = start_subjects(stack, commands, log)
        measured = [measure_case(subjects, *case, plan) for case in cases]
    results = {"subjects": descriptions, "failures": failures, "is_raised": is_raised, "cases": measured}
    sitting.write(arguments.out, results)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
