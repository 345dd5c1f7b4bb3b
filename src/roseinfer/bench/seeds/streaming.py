"""`roseinfer bench streaming`: requests on a schedule, each streamed; every part of their latency."""

import argparse
from collections.abc import Sequence

from roseinfer.bench.report import say
from roseinfer.bench.seeds import report, session, workload
from roseinfer.bench.seeds.runs import Run, Schedule, run_online
from roseinfer.config.sources import LoadedConfig
from roseinfer.llm.llm import Prompt


def run(arguments: argparse.Namespace, loaded: LoadedConfig) -> int:
    """Print the report. Returns the exit code."""
    interval = round(arguments.submit_interval_ms * 1e6)
    schedule = Schedule(interval, is_absolute=arguments.submit_schedule == "absolute")
    params = workload.params_of(arguments)
    options = {"tokenize_workers": arguments.tokenize_workers, "max_inflight": arguments.max_inflight_requests}
    with session.start(arguments, loaded, **options) as bench:
        llm = bench.llm
        prompts: list[Prompt] = [*bench.prompts] if arguments.pretok else [*bench.texts]
        header = {
            **bench.header(),
            "Pretok": arguments.pretok,
            "Tokenize workers": arguments.tokenize_workers,
            "Stream interval": llm.config.server.stream_interval,
            "Paged attention": True,  # always, with the flag and without
            "CUDA Graph": bench.captures_graphs,
            "NVTX": llm.config.observe.nvtx,
            "Requests": arguments.num_requests,
        }
        submission = f"{arguments.submit_interval_ms:.3f} ms / {arguments.submit_schedule}"

        def measure(prompts: Sequence[Prompt], salt: str) -> Run:
            return run_online(llm, prompts, params, schedule, salt)

        def report_run(run: Run) -> None:
            lines = report.streaming_lines(run, header, submission) + report.own_lines(run, bench.setting())
            say(*lines)

        bench.measure(prompts, measure, report_run, lambda run: report.streaming_pools(run) + report.own_pools(run))
    return 0
