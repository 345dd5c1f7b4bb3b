"""Answers the lines of batches on a Ray cluster, by actors that hold an engine each.

`answer_lines` does so for a dataset, and `answer_all` for `roseinfer batch --ray-engines`: there the journal and the
files are those of the command on one machine. A line's answer depends on the line alone, so it does not matter which
engine gives it, or how often: an actor replaces an engine that has died, and Ray an actor, and the lines that were with
them are answered again.
"""

import asyncio
import logging
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import ray
from ray._private import ray_constants

from roseinfer.batch.command import Tally, for_throughput, report, unanswered
from roseinfer.batch.journal import Journal
from roseinfer.batch.lines import Answer, LineEngine, digest_of
from roseinfer.cli.progress import Progress
from roseinfer.config.options import Config
from roseinfer.errors import ConfigError, EngineError, EngineFailed, RoseinferError
from roseinfer.ray.resources import resources_of
from roseinfer.records import RequestTimeline
from roseinfer.runtime.loop_thread import LoopThread

NUM_CALLS = 2  # of an actor at a time: while the last lines of one are answered, the other keeps the engine full
MAX_ENGINES = 3  # that lines may end before they are given up

# Ray's words, as of 2.60; if it says another, nothing is started.
_NO_CLUSTER = "Could not find any running Ray instance"

_log = logging.getLogger(__name__)


def answer_lines(
    dataset: "ray.data.Dataset",
    config: Config,
    *,
    engines: int | tuple[int, int] = 1,
    column: str = "line",
    has_timelines: bool = False,
    **remote: Any,
) -> "ray.data.Dataset":
    """Answer the lines in a column of a dataset, text or bytes; adds the columns `answer` and `is_error`.

    `engines` is their number, or the least and the most of them, between which Ray scales. Each asks for a GPU, or on
    CPUs for `runner.num_threads` cores, unless `remote` says otherwise: what `map_batches` hands on to its actors.
    """
    config = for_throughput(config)
    least, most = (engines, engines) if isinstance(engines, int) else engines
    pool = ray.data.ActorPoolStrategy(
        min_size=least,
        max_size=most,
        max_tasks_in_flight_per_actor=2 * NUM_CALLS,
        max_concurrent_calls_per_actor=NUM_CALLS,
        enable_true_multi_threading=True,
    )
    return dataset.map_batches(
        LineActor,
        fn_constructor_kwargs={"config": config, "column": column, "has_timelines": has_timelines},
        batch_size=num_lines_of_call(config),
        batch_format="pyarrow",
        compute=pool,
        **(resources_of(config) | remote),
    )


def num_lines_of_call(config: Config) -> int:
    """Twice as many as the engine runs at once, as `roseinfer batch` has them under way."""
    return 2 * config.scheduler.limits.max_active_seqs


class LineActor:
    """Answers batches of lines by an engine of its own: a class for `map_batches` with the format `pyarrow`.

    With `has_timelines` a third column has what `timelines_of` reads.
    """

    def __init__(self, config: Config, column: str = "line", *, has_timelines: bool = False) -> None:
        self._config = config
        self._column = column
        self._has_timelines = has_timelines
        self._loop = LoopThread("lines")
        self._engine = LineEngine(config)
        self._replacing = asyncio.Lock()
        self._refusal: RoseinferError | None = None
        try:
            self._loop.call(self._engine.start())
        except RoseinferError as error:  # Ray would start another, and wrap the sentence into a traceback
            self._refusal = error

    def __call__(self, batch: pa.Table) -> pa.Table:
        """Raises ConfigError or EngineError where the engine could not start, or the lines have ended several."""
        if self._refusal is not None:
            raise self._refusal
        answers = self._loop.call(self._answer(batch[self._column].to_pylist()))
        batch = batch.append_column("answer", pa.array([answer.line for answer in answers], pa.binary()))
        batch = batch.append_column("is_error", pa.array([answer.is_error for answer in answers], pa.bool_()))
        if self._has_timelines:
            timelines = [_encode(answer.timelines) for answer in answers]
            batch = batch.append_column("timelines", pa.array(timelines, pa.binary()))
        return batch

    async def _answer(self, lines: Sequence[str | bytes]) -> list[Answer]:
        raw = [line.encode() if isinstance(line, str) else line for line in lines]
        for num_before in range(MAX_ENGINES):
            engine = self._engine
            try:
                return await asyncio.gather(*map(engine.answer, raw))
            except EngineError:
                if num_before + 1 == MAX_ENGINES:
                    raise
                _log.exception("the engine has died; another one answers its lines again")
                await self._replace(engine)
        raise AssertionError("unreachable")

    async def _replace(self, dead: LineEngine) -> None:
        """Start another engine, unless another call has done so."""
        async with self._replacing:
            if self._engine is dead:
                await dead.close()
                self._engine = LineEngine(self._config)
                await self._engine.start()


def _encode(timelines: Sequence[RequestTimeline]) -> bytes:
    """What the summary of a batch is made of, without what is there for each token twice."""
    return msgspec.msgpack.encode([replace(each, arrivals=[], prefix_digests=b"") for each in timelines])


def timelines_of(encoded: bytes) -> list[RequestTimeline]:
    return msgspec.msgpack.decode(encoded, type=list[RequestTimeline])


# --- `roseinfer batch --ray-engines` ----------------------------------------------------------------------------------


def answer_all(
    file: Path, num_lines: int, journal: Journal, config: Config, tally: Tally, *, engines: tuple[int, int]
) -> None:
    """Answer all lines by engines on the cluster that is there, or one of this machine.

    Raises ConfigError or EngineError.
    """
    lines = filter(None, unanswered(file, journal, tally))
    with _cluster(), _sentences():
        refs = [ray.put(table) for table in _tables(lines, num_lines_of_call(config))]
        if not refs:  # a run was killed between its last answer and its end
            return
        dataset = answer_lines(ray.data.from_arrow_refs(refs), config, engines=engines, has_timelines=True)
        tally.began_ns, tally.num_at_once = time.monotonic_ns(), engines[0] * num_lines_of_call(config)
        with Progress(f"answering {file}", total=num_lines, done=tally.num_before) as progress:
            for batch in dataset.iter_batches(batch_size=None, batch_format="pyarrow"):
                for row in batch.to_pylist():
                    answer = Answer(row["answer"], row["is_error"], timelines_of(row["timelines"]))
                    journal.add(row["index"], digest_of(row["line"]), answer.line, is_error=answer.is_error)
                    tally.add(answer)
                report(progress, file, num_lines, tally)


def _tables(lines: Iterator[tuple[int, bytes]], num_rows: int) -> Iterator[pa.Table]:
    while rows := list(islice(lines, num_rows)):
        indices, raw = zip(*rows, strict=True)
        yield pa.table({"index": pa.array(indices, pa.int64()), "line": pa.array(raw, pa.binary())})


@contextmanager
def _cluster() -> Iterator[None]:
    """Connect to the cluster that `RAY_ADDRESS` names or that runs here; else start one that only this machine reaches.

    SIGTERM is an interrupt meanwhile.
    """
    try:
        ray.init("auto", logging_level=logging.WARNING)
    except ConnectionError as error:
        if not str(error).startswith(_NO_CLUSTER):  # but several, or one that does not answer
            raise ConfigError(str(error), param="RAY_ADDRESS") from None
        _start_here()
    before = signal.signal(signal.SIGTERM, _interrupt)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = context.print_on_execution_start = False
    logging.getLogger("ray.data").setLevel(logging.WARNING)
    logging.getLogger("ray.data._internal.progress").setLevel(logging.ERROR)  # it warns that progress bars are off
    for name in ("exceptions", "_internal.execution.streaming_executor_state"):  # they log what is raised here too
        logging.getLogger(f"ray.data.{name}").setLevel(logging.CRITICAL)
    context.raise_original_map_exception = True
    try:
        yield
    finally:
        ray.shutdown()
        signal.signal(signal.SIGTERM, before)


def _start_here() -> None:
    """Start a cluster that listens at the loopback alone, since a client that reaches one can run any program there.

    The switch is not public in Ray, which has it for systems whose firewall asks the user; checked with 2.60.
    """
    ray_constants.ENABLE_RAY_CLUSTER = False
    ray.init("local", logging_level=logging.WARNING, include_dashboard=False)


def _interrupt(_: int, __: object) -> None:
    raise KeyboardInterrupt


@contextmanager
def _sentences() -> Iterator[None]:
    """Raise the errors of actors as they were there, and Ray's own as one of ours."""
    try:
        yield
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, RoseinferError):
            raise error.cause from None
        raise
    except ray.exceptions.RayActorError as error:
        raise EngineFailed(f"Ray could not keep an actor: {error}") from error
