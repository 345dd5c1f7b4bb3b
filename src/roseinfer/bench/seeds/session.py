"""Runs a benchmark of the engine: starts it, warms it up, makes the measured runs, and writes the reports."""

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
from roseinfer.bench.seeds import report, workload
from roseinfer.bench.seeds.runs import Run, StepLog
from roseinfer.cli.output_files import check_outputs
from roseinfer.cli.progress import Progress, show_loading
from roseinfer.config.sources import LoadedConfig
from roseinfer.llm.llm import LLM, Prompt

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
        assert active is not None, "workload.with_all_active set it"
        planned = workload.num_blocks_for(self.prompts, self.arguments.max_new_tokens, info.block_size, active)
        if planned > info.num_blocks:
            sys.stderr.write(
                f"warning: the workload may take {planned} KV blocks and the cache has {info.num_blocks}, so requests "
                "may preempt each other; cache.* says how large it is\n"
            )

    def measure(
        self, prompts: Sequence[Prompt], measure: Measure, report_run: Callable[[Run], None], pools_of: Pools
    ) -> None:
        """Make warm-up runs, then measured ones, each reported at its end; at last their spread and the JSON."""
        arguments = self.arguments
        for i in range(1, arguments.warmup_runs + 1):
            say(f"=== warmup {i}/{arguments.warmup_runs} ===")
            self._run(f"warmup {i}/{arguments.warmup_runs}", prompts, measure)
        runs = []
        for i in range(1, arguments.repeat_runs + 1):
            if arguments.repeat_runs > 1:
                say(f"=== run {i}/{arguments.repeat_runs} ===")
            runs.append(self._run(f"run {i}/{arguments.repeat_runs}", prompts, measure))
            report_run(runs[-1])
        if len(runs) > 1:
            say(*report.spread_lines(runs, pools_of))
        if arguments.json is not None:
            self._write_json(arguments.json, runs, pools_of)

    def _run(self, name: str, prompts: Sequence[Prompt], measure: Measure) -> Run:
        # A fresh salt is a fresh prefix cache: nothing that an earlier run computed can be hit.
        salt = "" if self.arguments.no_reset_prefix_cache else name
        with Progress(name, total=len(prompts) * self.arguments.max_new_tokens) as progress:
            self.log.clear(progress)
            return replace(measure(prompts, salt), steps=self.log.steps)

    @property
    def captures_graphs(self) -> bool:
        """Decode steps are replayed as CUDA graphs, whenever they are captured."""
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
            launches = (
                f"graphs {runner.cuda_graphs}, {runner.staging} staging, pipeline depth {runner.pipeline_depth}, "
            )
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
    texts = workload.prompts_of(arguments)
    config = workload.with_all_active(loaded, len(texts))
    log = StepLog()
    with show_loading(config.model.path) as on_progress:
        llm = LLM(config=config, observers=[log], on_progress=on_progress, **options)
    with llm:
        session = Session(arguments, llm, log, texts, [llm.encode(text) for text in texts])
        if config.runner.cuda_graphs != "off" and not session.captures_graphs:
            sys.stderr.write(f"warning: --cuda-graph has no effect on the device {llm.info.device}\n")
        session.check_capacity()
        yield session
