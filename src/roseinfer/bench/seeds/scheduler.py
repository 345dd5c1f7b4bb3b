"""`roseinfer bench scheduler`: a batch of requests at once; prefill and decode apart, latency only where it exists."""

import argparse
from collections.abc import Sequence

from roseinfer.bench.report import Pool, say
from roseinfer.bench.seeds import report, session, workload
from roseinfer.bench.seeds.runs import Run, Schedule, run_offline, run_online
from roseinfer.config.sources import LoadedConfig
from roseinfer.llm.llm import Prompt


def run(arguments: argparse.Namespace, loaded: LoadedConfig) -> int:
    """Print the report. Returns the exit code."""
    is_online = arguments.mode == "online"
    params = workload.params_of(arguments)
    with session.start(arguments, loaded) as bench:
        llm = bench.llm
        header = {
            "Mode": arguments.mode,
            **bench.header(),
            "Max batch size": llm.config.scheduler.max_num_seqs,
            "Requests": arguments.num_requests,
        }

        def measure(prompts: Sequence[Prompt], salt: str) -> Run:
            if is_online:
                return run_online(llm, prompts, params, Schedule(0), salt)
            return run_offline(llm, prompts, params, salt)

        def pools_of(run: Run) -> list[Pool]:
            return report.scheduler_pools(run) if is_online else []

        bench.measure(
            bench.prompts,
            measure,
            lambda run: say(*report.scheduler_lines(run, header, is_online=is_online)),
            pools_of,
        )
    return 0
