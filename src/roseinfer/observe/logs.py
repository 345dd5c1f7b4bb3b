"""Writes the log: JSON or text lines, one for each request that ended, and summaries; never prompts or completions.

One line is one event: control characters are escaped, so nothing that a client sends can forge a line. Lines go
through a bounded queue to a thread of their own: a reader of stderr that stalls costs lines, which are counted, and no
request waits for it.
"""

import contextlib
import json
import logging
import os
import queue
import select
import time
from datetime import UTC, datetime
from logging.handlers import QueueHandler, QueueListener
from typing import TextIO

import msgspec
import numpy as np

from roseinfer.config.options import ObserveConfig
from roseinfer.observe.gaps import intervals
from roseinfer.observe.metrics.catalogue import NS_PER_S, token_gaps_s
from roseinfer.records import Advanced, LifecycleState, Observer, RequestTimeline, StepRecord

logger = logging.getLogger(__name__)
requests = logging.getLogger("roseinfer.requests")  # `roseinfer.access` is the server's: HTTP and its status

_QUEUE_LINES = 10_000
_OWN_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def _extra_fields(record: logging.LogRecord) -> dict[str, object]:
    """Returns what the caller passed as `extra`; unset values, and what a library marks as its own by `_`, left out.

    Ray puts `_ray_timestamp_ns` into every record of a process that imports it.
    """
    shown = ((name, value) for name, value in vars(record).items() if not name.startswith("_"))
    return {name: value for name, value in shown if name not in _OWN_FIELDS and value is not None}


def escape(text: str) -> str:
    """Returns the text on one line: what is not printable (line ends, terminal escapes, bidi marks) is escaped."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


_encode = msgspec.json.Encoder(enc_hook=str).encode


class JsonFormatter(logging.Formatter):
    """Formats one JSON object a line: ts, level, logger, message, then the extra fields, `request_id` among them."""

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, object] = {
            "ts": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="microseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_extra_fields(record),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        with contextlib.suppress(TypeError, ValueError):  # half of a surrogate pair, a key that is no text
            # A fifth of the time that `json` takes. It escapes control characters, but of ASCII only, and not DEL.
            line = _encode(fields)
            if line.isascii() and b"\x7f" not in line:
                return line.decode()
        return json.dumps(fields, default=str).replace("\x7f", "\\u007f")


class TextFormatter(logging.Formatter):
    """Formats a line for a person at a terminal: time, level, message, fields; a traceback follows, indented."""

    def format(self, record: logging.LogRecord) -> str:
        stamp = datetime.fromtimestamp(record.created).astimezone().strftime("%H:%M:%S.%f")[:-3]
        fields = "".join(f" {name}={_word(value)}" for name, value in _extra_fields(record).items())
        lines = [f"{stamp} {record.levelname:<7} {escape(record.getMessage())}{fields}"]
        if record.exc_info:
            lines += [f"    {escape(line)}" for line in self.formatException(record.exc_info).splitlines()]
        return "\n".join(lines)


def _word(value: object) -> str:
    text = escape(str(value))
    return json.dumps(text, ensure_ascii=False) if not text or set(text) & set(' ="') else text


class _Line(logging.LogRecord):
    """A record with nothing but its line: all that the thread needs, while copying a whole record takes 10 µs."""

    def __init__(self, text: str) -> None:
        self.msg, self.args = text, None


_Lines = queue.SimpleQueue[logging.LogRecord | None]


class _LineQueue(QueueHandler):
    """Formats a record where it is logged and queues the line; counts it as dropped instead of waiting or raising."""

    def __init__(self, lines: _Lines, num_lines: int) -> None:
        super().__init__(lines)
        self._lines = lines
        self._num_lines = num_lines
        self.num_dropped = 0

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        return _Line(self.format(record))

    def enqueue(self, record: logging.LogRecord) -> None:
        """Raises queue.Full. A queue in C has no bound of its own, and takes a line in a tenth of the time."""
        if self._lines.qsize() >= self._num_lines:
            raise queue.Full
        self._lines.put(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: ARG002, N802 - logging's name
        self.num_dropped += 1


class LogOutput(QueueListener):
    """The thread that writes queued lines to a file descriptor, and the handler that fills the queue.

    It writes to the descriptor, not to a stream: the lock of a stream or of a handler whose write has stalled would be
    waited for at exit, by `logging.shutdown` and by the interpreter's own flush.
    """

    def __init__(self, fd: int, formatter: logging.Formatter, num_lines: int = _QUEUE_LINES) -> None:
        self._lines: _Lines = queue.SimpleQueue()
        super().__init__(self._lines)
        self.handler = _LineQueue(self._lines, num_lines)
        self.handler.setFormatter(formatter)
        self._fd = fd
        self._num_unwritten = 0

    @property
    def num_dropped(self) -> int:
        """Lines lost so far: the queue was full, the record could not be formatted, or the write failed."""
        return self.handler.num_dropped + self._num_unwritten

    def handle(self, record: logging.LogRecord) -> None:
        """Writes one line. Runs in the listener's thread."""
        rest = memoryview(f"{record.getMessage()}\n".encode(errors="backslashreplace"))
        try:
            while rest:
                try:
                    rest = rest[os.write(self._fd, rest) :]
                except BlockingIOError:  # another process on the terminal or pipe made it non-blocking
                    select.select([], [self._fd], [])
        except OSError:
            self._num_unwritten += 1

    def close(self, timeout_s: float = 2.0) -> None:
        """Writes what is queued and ends the thread; what takes longer than the timeout stays unwritten. Idempotent."""
        logging.getLogger().removeHandler(self.handler)
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._lines.put(None)
        thread.join(timeout_s)


def configure(config: ObserveConfig, stream: TextIO) -> LogOutput:
    """Sends all logging of this process to the stream's file descriptor; the caller closes what is returned.

    Our own loggers speak from `config.log_level` on, those of libraries from warning on.
    """
    is_json = config.log_format == "json" or (config.log_format == "auto" and not stream.isatty())
    output = LogOutput(stream.fileno(), JsonFormatter() if is_json else TextFormatter())
    logging.lastResort = logging.NullHandler()  # a thread that outlives the log would else write lines of another form
    level = logging.getLevelNamesMapping()[config.log_level.upper()]
    root = logging.getLogger()
    root.handlers[:] = [output.handler]
    root.setLevel(max(level, logging.WARNING))
    logging.getLogger("roseinfer").setLevel(level)
    output.start()
    return output


class StateLog(Observer):
    """The observer that logs the server's states as it enters them."""

    def on_lifecycle(self, state: LifecycleState) -> None:
        words = "warming up" if state is LifecycleState.WARMUP else state.value
        logger.info("server is %s", words, extra={"state": state.value})


class Logs(Observer):
    """The observer that logs: a line for each request that ended, and a summary while there is work."""

    def __init__(self, summary_interval_s: float) -> None:
        self._interval_ns = int(summary_interval_s * NS_PER_S)
        self._start_ns = 0
        self._last_ns = 0
        self._num_tokens = 0
        self._gaps_s: list[float] = []

    def on_step(self, record: StepRecord, advanced: Advanced) -> None:
        if not self._interval_ns:
            return
        if record.start_ns - self._last_ns > self._interval_ns:  # an idle stretch would dilute the rate
            self._begin(record.start_ns)
        self._last_ns = record.end_ns
        self._num_tokens += len(advanced)
        self._gaps_s.extend(token_gaps_s(record, advanced))
        if record.end_ns - self._start_ns >= self._interval_ns:
            self._summarize(record)
            self._begin(record.end_ns)

    def on_finish(self, timeline: RequestTimeline) -> None:
        level = logging.WARNING if timeline.has_failed else logging.INFO
        if not requests.isEnabledFor(level):
            return
        fields = {
            "request_id": timeline.request_id,
            "trace_id": timeline.trace_id or None,
            "finish_reason": timeline.finish_reason,
            "error_code": timeline.error_code or None,
            "grammar_error": timeline.grammar_error or None,
            "prompt_tokens": timeline.num_prompt_tokens,
            "cached_tokens": timeline.num_cached_tokens,
            "output_tokens": len(timeline.token_ns),
            "ttft_ms": _ms(intervals.time_to_first_token_ns(timeline)),
            "tpot_ms": _ms(intervals.time_per_output_token_ns(timeline)),
            "queue_ms": _ms(intervals.queue_wait_ns(timeline)),
            "duration_ms": _ms(intervals.request_duration_ns(timeline)),
        }
        # By hand, since looking for the caller costs, and because the fact comes a little after it happened.
        record = requests.makeRecord(requests.name, level, __file__, 0, "request ended", (), None, extra=fields)
        if timeline.end_ns:
            record.created = time.time() - (time.monotonic_ns() - timeline.end_ns) / NS_PER_S
        requests.handle(record)

    def _begin(self, start_ns: int) -> None:
        self._start_ns = start_ns
        self._num_tokens = 0
        self._gaps_s = []

    def _summarize(self, record: StepRecord) -> None:
        elapsed_s = (record.end_ns - self._start_ns) / NS_PER_S
        p50_s, p99_s = (
            np.percentile(self._gaps_s, (50, 99), method="inverted_cdf").tolist() if self._gaps_s else (None, None)
        )
        fields = {
            "running": record.num_running,
            "waiting": record.num_waiting,
            "tokens_per_s": round(self._num_tokens / elapsed_s, 1),
            "kv_usage": round(record.num_used_blocks / record.num_total_blocks, 4),
            "itl_p50_ms": None if p50_s is None else round(p50_s * 1e3, 3),
            "itl_p99_ms": None if p99_s is None else round(p99_s * 1e3, 3),
        }
        logger.info("summary", extra=fields)


def _ms(interval_ns: float | None) -> float | None:
    return None if interval_ns is None else round(interval_ns / 1e6, 3)
