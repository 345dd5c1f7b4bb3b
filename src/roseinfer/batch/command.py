"""Runs `roseinfer batch`: reads a file of requests, keeps the engine full, and reports how far it is."""

import asyncio
import codecs
import os
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path

from roseinfer.batch.journal import Journal
from roseinfer.batch.lines import Answer, LineEngine, custom_id_of, digest_of, parse_line, refuse
from roseinfer.bench.report import Pool, say
from roseinfer.cli.progress import Progress, show_loading
from roseinfer.config.options import Config
from roseinfer.errors import ConfigError, EngineError, InvalidRequest
from roseinfer.observe.gaps import intervals
from roseinfer.records import RequestTimeline
from roseinfer.runtime.interrupts import run_until_signal
from roseinfer.runtime.niceness import FRONT_END_NICENESS, be_nicer

_REPORT_INTERVAL_S = 2.0


def run(file: Path, output: Path, config: Config, answer: "AnswerAll | None" = None) -> int:
    """Answer the lines that have no answer yet, by an engine here unless `answer` has others.

    Returns the exit code. Raises ConfigError or EngineError.
    """
    num_lines = sum(1 for _ in read_lines(file))
    config = for_throughput(config)
    with Journal(output, _answers_of(config)) as journal:
        tally = Tally(num_before=journal.num_answers)
        if journal.num_answers:
            check_input(file, journal)
            say(f"going on: {journal.num_answers} of {num_lines} lines are answered already, in {journal.path}")
        try:
            (answer or answer_here)(file, num_lines, journal, config, tally)
        except (SystemExit, KeyboardInterrupt, EngineError):  # the first is a signal's
            say(f"stopped: {journal.num_answers} of {num_lines} lines are answered; the same command goes on")
            raise
        errors = journal.finish()
        say(*tally.lines(journal))
    say(f"answers: {output}", *([] if errors is None else [f"errors: {errors}"]))
    return 0


def check_input(file: Path, journal: Journal) -> None:
    """Raises ConfigError unless the journal has answers to lines of this file alone, before any more are answered."""
    num_found = sum(journal.has_answer(index, digest_of(raw)) for index, raw in read_lines(file))
    if num_found < journal.num_answers:
        raise ConfigError(
            f"{journal.path} has {journal.num_answers - num_found} answers to lines that {file} has no more: the input "
            "was changed, so remove the journal to begin anew, or name another output",
            param="--input",
        )


def for_throughput(config: Config) -> Config:
    """Without a limit on the prompt tokens of a step, unless one is configured: no reader waits for the next token."""
    scheduler = config.scheduler
    if scheduler.target_itl_ms is not None or scheduler.max_prefill_tokens is not None:
        return config
    return replace(config, scheduler=replace(scheduler, max_prefill_tokens=scheduler.limits.max_num_batched_tokens))


def _answers_of(config: Config) -> str:
    """What decides about the answers beside the lines, in words for the journal."""
    model, structured = config.model, config.structured
    named = {"revision": model.revision, "dtype": model.dtype, "quantization": model.quantization}
    further = {
        "generation_config": model.generation_config,
        "kv_cache_dtype": config.cache.dtype,
        "chat_template": config.server.chat_template,
        "tool_format": structured.tool_format,
        "reasoning_format": structured.reasoning_format,
    }
    named |= {name: value for name, value in further.items() if value != "auto"}
    return " ".join([model.path, *(f"{name}={value}" for name, value in named.items() if value is not None)])


def read_lines(file: Path) -> Iterator[tuple[int, bytes]]:
    """Yields the lines of a file that are not blank, with their numbers from 0. Raises ConfigError."""
    try:
        with file.open("rb") as lines:
            if not stat.S_ISREG(os.fstat(lines.fileno()).st_mode):
                message = f"{file} is no regular file, and is read more than once: write its lines to one first"
                raise ConfigError(message, param="--input")
            for index, line in enumerate(lines):
                if stripped := (line if index else line.removeprefix(codecs.BOM_UTF8)).strip():
                    yield index, stripped
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}", param="--input") from None


@dataclass(slots=True)
class Tally:
    """What a run has done so far."""

    num_before: int  # lines that an earlier run had answered
    num_at_once: int = 1  # lines that the engines run at a time
    began_ns: int = field(default_factory=time.monotonic_ns)
    next_report_s: float = 0.0
    num_answers: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_tokens: int = 0
    queue_ns: list[float] = field(default_factory=list)
    first_token_ns: list[float] = field(default_factory=list)
    gap_ns: list[float] = field(default_factory=list)
    duration_ns: list[float] = field(default_factory=list)

    def add(self, answer: Answer) -> None:
        self.num_answers += 1
        for timeline in answer.timelines:
            self._add_sequence(timeline)

    def _add_sequence(self, timeline: RequestTimeline) -> None:
        self.num_prompt_tokens += timeline.num_prompt_tokens
        self.num_cached_tokens += timeline.num_cached_tokens
        self.num_tokens += len(timeline.token_ns)
        for values, duration_ns in (
            (self.queue_ns, intervals.queue_wait_ns(timeline)),
            (self.first_token_ns, intervals.engine_time_to_first_token_ns(timeline)),
            (self.gap_ns, intervals.time_per_output_token_ns(timeline)),
            (self.duration_ns, intervals.request_duration_ns(timeline)),
        ):
            if duration_ns is not None:
                values.append(duration_ns)

    @property
    def elapsed_s(self) -> float:
        return (time.monotonic_ns() - self.began_ns) / 1e9

    def rates(self, num_lines: int) -> str:
        """Lines and tokens a second since the first line went to the engine, and how long the rest will take.

        There is no estimate before as many are answered as run at a time: they began together, and the first of them
        says nothing of the rate.
        """
        per_s = self.num_answers / self.elapsed_s
        left = num_lines - self.num_before - self.num_answers
        rest = f", about {_time(left / per_s)} left" if self.num_answers >= self.num_at_once else ""
        return f"{per_s:.1f} lines/s, {self.num_tokens / self.elapsed_s:,.0f} tokens/s{rest}"

    def lines(self, journal: Journal) -> Iterator[str]:
        """The summary of a run."""
        before = f", {self.num_before} of them by earlier runs" if self.num_before else ""
        yield f"lines: {journal.num_answers} answered{before}, {journal.num_errors} with errors"
        yield f"time: {_time(self.elapsed_s)}, {self.num_answers / self.elapsed_s:.1f} lines/s"
        yield f"prompt tokens: {self.num_prompt_tokens:,}, of which {self.num_cached_tokens:,} cached"
        yield f"generated tokens: {self.num_tokens:,}, {self.num_tokens / self.elapsed_s:,.1f} tokens/s"
        for name, values in (
            ("queue wait", self.queue_ns),
            ("time to first token", self.first_token_ns),
            ("time per output token", self.gap_ns),
            ("whole request", self.duration_ns),
        ):
            if values:
                yield Pool(name, values).percentiles_line()


def _time(seconds: float) -> str:
    """`7.1 s`, `12 min` or `3.4 h`."""
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


AnswerAll = Callable[[Path, int, Journal, Config, Tally], None]
"""Answers the lines of a file that the journal lacks; the number is of all. Raises ConfigError or EngineError."""


def answer_here(file: Path, num_lines: int, journal: Journal, config: Config, tally: Tally) -> None:
    """Answer all lines by one engine of this machine."""
    run_until_signal(answer_all(file, num_lines, journal, config, tally))


async def answer_all(file: Path, num_lines: int, journal: Journal, config: Config, tally: Tally) -> None:
    """Keep twice as many lines under way as the engine runs at once, until all are answered. Raises EngineError."""
    lines = unanswered(file, journal, tally)
    first = None
    for first in lines:
        if first is not None:
            break
        await asyncio.sleep(0)  # in which a signal is heard
    if first is None:  # a run was killed between its last answer and its end
        return
    with show_loading(config.model.path) as on_progress:
        engine = LineEngine(config, on_progress)
        await engine.start()
    be_nicer(FRONT_END_NICENESS if config.engine.transport == "process" else 0)
    try:
        await answer_with(engine, chain([first], lines), file, num_lines, journal, config, tally)
    finally:
        await engine.close()


async def answer_with(
    engine: LineEngine,
    lines: Iterator[tuple[int, bytes] | None],
    file: Path,
    num_lines: int,
    journal: Journal,
    config: Config,
    tally: Tally,
) -> None:
    """Answer lines of a file by an engine that has started. Raises EngineError."""
    tally.began_ns = time.monotonic_ns()
    tally.num_at_once = config.scheduler.limits.max_active_seqs
    try:
        with Progress(f"answering {file}", total=num_lines, done=tally.num_before) as progress:
            async with asyncio.TaskGroup() as workers:
                for _ in range(2 * config.scheduler.limits.max_active_seqs):
                    workers.create_task(
                        _work(lines, engine, journal, tally, partial(report, progress, file, num_lines))
                    )
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None


async def _work(
    lines: Iterator[tuple[int, bytes] | None],
    engine: LineEngine,
    journal: Journal,
    tally: Tally,
    report: Callable[[Tally], None],
) -> None:
    """Answer lines of an iterator that all workers share, until it is empty."""
    for line in lines:
        await asyncio.sleep(0)  # lines that wait for nothing may be many: meanwhile no signal would be heard
        if line is None:
            continue
        index, raw = line
        answer = await engine.answer(raw)
        journal.add(index, digest_of(raw), answer.line, is_error=answer.is_error)
        tally.add(answer)
        report(tally)


def report(progress: Progress, file: Path, num_lines: int, tally: Tally) -> None:
    if time.monotonic() >= tally.next_report_s:
        tally.next_report_s = time.monotonic() + _REPORT_INTERVAL_S
        progress.update(done=tally.num_before + tally.num_answers, what=f"answering {file}, {tally.rates(num_lines)}")


def unanswered(file: Path, journal: Journal, tally: Tally) -> Iterator[tuple[int, bytes] | None]:
    """Yields the lines without an answer, and None for each of the others.

    A line with no name, or with that of one before it, gets its error here.
    """
    first_with: dict[str, int] = {}
    for index, raw in read_lines(file):
        name = custom_id_of(raw)
        first = index if name is None else first_with.setdefault(name, index)
        if journal.has_answer(index, digest_of(raw)):
            yield None
            continue
        error = nameless(index, raw) if name is None else None
        if first != index:
            error = InvalidRequest(f"`custom_id`: line {first + 1} has the same.", param="custom_id")
        if error is None:
            yield index, raw
            continue
        answer = refuse(raw, error, name)
        journal.add(index, digest_of(raw), answer.line, is_error=True)
        tally.add(answer)
        yield None


def nameless(index: int, raw: bytes) -> InvalidRequest | None:
    """What is wrong with a line that has no name, with its number, by which alone it can be found."""
    try:
        parse_line(raw)
    except InvalidRequest as error:
        return InvalidRequest(f"Line {index + 1}: {error.message}", param=error.param)
    return None
