"""`roseinfer bench streaming` and `bench scheduler`: starts the engine, makes the runs, and writes the reports.

`streaming` streams requests on a schedule and reports every part of their latency. `scheduler` submits a batch at once
and reports prefill and decode apart, with latency where it exists.
"""

import argparse
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from roseinfer import __version__
from roseinfer.bench.report import Pool, say
from roseinfer.bench.seeds import report
from roseinfer.bench.seeds.runs import Run, Schedule, StepLog, run_offline, run_online
from roseinfer.cli.output_files import check_outputs
from roseinfer.cli.progress import Progress, show_loading
from roseinfer.config.options import Config
from roseinfer.config.sources import LoadedConfig
from roseinfer.llm.arguments import Prompt
from roseinfer.llm.llm import LLM
from roseinfer.messages import SamplingParams

Measure = Callable[[Sequence[Prompt], str], Run]  # of prompts and a cache salt
Pools = Callable[[Run], Sequence[Pool]]


@dataclass(frozen=True, slots=True)
class Session:
    """A running engine and the workload that the flags ask for."""

    arguments: argparse.Namespace
    llm: LLM
    log: StepLog
    texts: list[str]
    prompts: list[list[int]]  # the same, tokenised

    def check_capacity(self) -> None:
        """Warn when the KV cache may not hold what is planned: then preemptions are measured too."""
        info, active = self.llm.info, self.llm.config.scheduler.max_active_seqs
        assert active is not None, "with_all_active set it"
        planned = num_blocks_for(self.prompts, self.arguments.max_new_tokens, info.block_size, active)
        if planned > info.num_blocks:
            sys.stderr.write(
                f"warning: the workload may take {planned} KV blocks and the cache has {info.num_blocks}, so requests "
                "may preempt each other; cache.* says how large it is\n"
            )

    def measure(
        self, prompts: Sequence[Prompt], measure: Measure, lines_of: Callable[[Run], Sequence[str]], pools_of: Pools
    ) -> int:
        """Make warm-up runs, then measured ones, each reported at its end; at last their spread and the JSON.

        Returns the exit code.
        """
        arguments = self.arguments
        for i in range(1, arguments.warmup_runs + 1):
            say(f"=== warmup {i}/{arguments.warmup_runs} ===")
            self._run(f"warmup {i}/{arguments.warmup_runs}", prompts, measure)
        runs = []
        for i in range(1, arguments.repeat_runs + 1):
            if arguments.repeat_runs > 1:
                say(f"=== run {i}/{arguments.repeat_runs} ===")
            runs.append(self._run(f"run {i}/{arguments.repeat_runs}", prompts, measure))
            say(*lines_of(runs[-1]))
        if len(runs) > 1:
            say(*report.spread_lines(runs, pools_of))
        if arguments.json is not None:
            self._write_json(arguments.json, runs, pools_of)
        return 0

    def _run(self, name: str, prompts: Sequence[Prompt], measure: Measure) -> Run:
        # A fresh salt is a fresh prefix cache: nothing that an earlier run computed can be hit.
        salt = "" if self.arguments.no_reset_prefix_cache else name
        with Progress(name, total=len(prompts) * self.arguments.max_new_tokens) as progress:
            self.log.clear(progress)
            return replace(measure(prompts, salt), steps=self.log.steps)

    @property
    def captures_graphs(self) -> bool:
        """Steps are replayed as CUDA graphs, whenever these are captured."""
        return self.llm.config.runner.cuda_graphs != "off" and self.llm.info.device == "cuda"

    def header(self) -> dict[str, Any]:
        """What both reports begin with."""
        return {"Model": self.llm.config.model.path, "Device": self.llm.info.device}

    def setting(self) -> dict[str, Any]:
        """The engine and the host, without which no two reports can be compared."""
        info, config = self.llm.info, self.llm.config
        threads = f"{info.num_threads} thread{'s' * (info.num_threads > 1)}, " if info.num_threads else ""
        runner = config.runner
        launches = ""
        if info.device == "cuda":
            depth = runner.pipeline_depth_on(info.device)
            launches = f"graphs {runner.cuda_graphs}, {runner.staging} staging, pipeline depth {depth}, "
        return {
            "Engine": f"{info.dtype}, {info.attention} attention, {launches}"
            f"{config.engine.transport} transport, {info.num_blocks} blocks of {info.block_size}, "
            f"at most {config.scheduler.max_active_seqs} active",
            "Host": f"{platform.machine()}, {threads}Python {platform.python_version()}, "
            f"torch {version('torch')}, roseinfer {__version__}",
        }

    def _write_json(self, file: Path, runs: Sequence[Run], pools_of: Pools) -> None:
        arguments = vars(self.arguments)
        options = {key: value for key, value in arguments.items() if isinstance(value, str | int | float | list)}
        settings = {**self.header(), **self.setting(), "arguments": options, "config": asdict(self.llm.config)}
        report.write_json(file, settings, runs, pools_of)


@contextmanager
def start(arguments: argparse.Namespace, loaded: LoadedConfig, **options: Any) -> Iterator[Session]:
    """Start the engine; `options` go to `LLM`. Raises ConfigError first for a file that cannot be written."""
    check_outputs(json=arguments.json)
    texts = prompts_of(arguments)
    config = with_all_active(loaded, len(texts))
    log = StepLog()
    with show_loading(config.model.path) as on_progress:
        llm = LLM(config=config, observers=[log], on_progress=on_progress, **options)
    with llm:
        session = Session(arguments, llm, log, texts, [llm.encode(text) for text in texts])
        if config.runner.cuda_graphs != "off" and not session.captures_graphs:
            sys.stderr.write(f"warning: --cuda-graph has no effect on the device {llm.info.device}\n")
        session.check_capacity()
        yield session


def run(arguments: argparse.Namespace, loaded: LoadedConfig) -> int:
    """Print the report. Returns the exit code."""
    return (_run_streaming if arguments.BENCHMARK == "streaming" else _run_scheduler)(arguments, loaded)


def _run_streaming(arguments: argparse.Namespace, loaded: LoadedConfig) -> int:
    interval = round(arguments.submit_interval_ms * 1e6)
    schedule = Schedule(interval, is_absolute=arguments.submit_schedule == "absolute")
    params = params_of(arguments)
    options = {"tokenize_workers": arguments.tokenize_workers, "max_inflight": arguments.max_inflight_requests}
    with start(arguments, loaded, **options) as bench:
        llm = bench.llm
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
        return bench.measure(
            bench.prompts if arguments.pretok else bench.texts,
            lambda prompts, salt: run_online(llm, prompts, params, schedule, salt),
            lambda run: report.streaming_lines(run, header, submission) + report.own_lines(run, bench.setting()),
            lambda run: report.streaming_pools(run) + report.own_pools(run),
        )


def _run_scheduler(arguments: argparse.Namespace, loaded: LoadedConfig) -> int:
    is_online = arguments.mode == "online"
    params = params_of(arguments)
    with start(arguments, loaded) as bench:
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

        return bench.measure(
            bench.prompts,
            measure,
            lambda run: report.scheduler_lines(run, header, is_online=is_online),
            lambda run: report.scheduler_pools(run) if is_online else [],
        )


def make_prompts(base: str, num_requests: int, repeats: Sequence[int], *, is_unique: bool) -> list[str]:
    """Request i has the base prompt repeats[i % len] times, joined by spaces, and its number when it must be unique."""
    prompts = [" ".join([base] * repeats[i % len(repeats)]) for i in range(num_requests)]
    return [f"{prompt} #{i}" for i, prompt in enumerate(prompts)] if is_unique else prompts


def prompts_of(arguments: argparse.Namespace) -> list[str]:
    return make_prompts(
        arguments.prompt, arguments.num_requests, arguments.prompt_repeats, is_unique=arguments.unique_prompts
    )


def params_of(arguments: argparse.Namespace) -> SamplingParams:
    """Greedy unless `--do-sample`; then each run draws the same tokens."""
    return SamplingParams(
        temperature=arguments.temperature if arguments.do_sample else 0.0,
        top_k=arguments.top_k if arguments.do_sample else 0,
        top_p=arguments.top_p if arguments.do_sample else 1.0,
        max_tokens=arguments.max_new_tokens,
        ignore_eos=arguments.no_stop_on_eos,
        seed=0,
    )


def with_all_active(loaded: LoadedConfig, num_requests: int) -> Config:
    """The configuration, in which every request may be active at once unless an option limits that.

    The seeds had no limit there: all that were admitted hold KV, and share the rows of a decode step in turn.
    """
    config, scheduler = loaded.config, loaded.config.scheduler
    if "scheduler.max_active_seqs" in loaded.sources:
        return config
    active = max(num_requests, scheduler.max_num_seqs, scheduler.max_prefill_seqs or 0)
    return replace(config, scheduler=replace(scheduler, max_active_seqs=active))


def num_blocks_for(prompts: Sequence[Sequence[int]], max_new_tokens: int, block_size: int, max_active_seqs: int) -> int:
    """Blocks with which the planned requests never preempt each other.

    Only active sequences hold blocks, so the longest of them count; and the partial last block of each distinct prompt,
    which a prefix cache could keep beside them.
    """
    lengths = sorted(len(prompt) + max_new_tokens for prompt in prompts)
    partial = {tuple(prompt) for prompt in prompts if len(prompt) % block_size}
    return sum(-(-length // block_size) for length in lengths[-max_active_seqs:]) + len(partial)
