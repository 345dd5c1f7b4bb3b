"""`roseinfer top`: asks a server every second and shows a screen of what it is doing, until q is pressed."""

import argparse
import contextlib
import os
import select
import sys
import time
import urllib.parse
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from roseinfer.config.flags import url_of
from roseinfer.config.sources import LoadedConfig
from roseinfer.errors import ConfigError, InvalidRequest
from roseinfer.explain.command import read_key
from roseinfer.explain.evidence import get
from roseinfer.explain.explanation import ms
from roseinfer.observe.metrics import scrape
from roseinfer.observe.metrics.scrape import Page

_TIMEOUT_S = 5.0
NUM_HEAD_LINES = 10  # above the requests
_BAR_WIDTH = 20
_MOST_CAUSES = 3
_ORDER = ["prefilling", "decoding", "waiting", "tokenizing", "receiving", "finishing"]
_PLAIN_SIZE = (80, 24)  # where there is no terminal


class LiveRequest(msgspec.Struct, frozen=True):
    """One request in flight, as `/debug/requests` lists it."""

    id: str
    stage: str
    age_ms: float
    num_prompt_tokens: int
    num_generated_tokens: int
    max_tokens: int
    place: int | None = None  # how many wait before it


class LiveStep(msgspec.Struct, frozen=True):
    """One engine step, as `/debug/steps` lists it."""

    step_id: int
    start_ns: int
    end_ns: int
    kind: str
    num_decode_seqs: int
    num_prefill_tokens: int
    blocked_by: str


class Sample(msgspec.Struct, frozen=True):
    """What a server answered at one moment."""

    at_s: float  # on this host's monotonic clock
    page: Page
    requests: list[LiveRequest]
    steps: list[LiveStep]  # the newest ones, oldest first
    blocker: str  # why the first waiting request waits; empty when none does
    is_place_exact: bool = True  # of the requests that wait


class _Requests(msgspec.Struct):
    requests: list[LiveRequest]
    is_place_exact: bool = True


class _Steps(msgspec.Struct):
    steps: list[LiveStep]


class _Waiting(msgspec.Struct):
    sentence: str
    option: str | None = None
    value: int | None = None


class _Request(msgspec.Struct):
    waiting: _Waiting | None


class LiveServer:
    """A client of one operations port."""

    def __init__(self, url: str, api_key: str | None) -> None:
        """Raises InvalidRequest for what is no URL."""
        found = url_of(url)
        if found is None:
            raise InvalidRequest("It is no URL such as http://127.0.0.1:8001, the operations port's.", param=url)
        self.url = found.rstrip("/")
        self._api_key = api_key

    def sample(self) -> Sample:
        """Asks once. Raises InvalidRequest if the server does not answer, or not like one of ours."""
        page = Page.parse(self._get("/metrics").decode(errors="replace"))
        at_s = time.monotonic()  # of the page, which all rates are of
        listed = self._ask("/debug/requests", _Requests)
        steps = self._ask("/debug/steps?limit=1", _Steps).steps
        return Sample(at_s, page, listed.requests, steps, self._blocker(listed.requests), listed.is_place_exact)

    def _blocker(self, requests: list[LiveRequest]) -> str:
        first = next((request for request in requests if request.place == 0), None)
        if first is None:
            return ""
        try:
            found = self._ask(f"/debug/requests/{urllib.parse.quote(first.id, safe='')}", _Request)
        except InvalidRequest:  # it may have ended by now
            return ""
        return "" if found.waiting is None else _reason_of(found.waiting)

    def _ask(self, path: str, kind: Any) -> Any:
        try:
            return msgspec.json.decode(self._get(path), type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise InvalidRequest(f"{path} says something else than expected: {error}.", param=self.url) from None

    def _get(self, path: str) -> bytes:
        try:
            return get(self.url + path, self._api_key, _TIMEOUT_S)
        except InvalidRequest as error:
            raise InvalidRequest(error.message, param=self.url) from None


def _reason_of(waiting: _Waiting) -> str:
    """Returns the limit and the reason, for which a narrow line has room."""
    reason = waiting.sentence.partition(" because ")[2] or waiting.sentence
    return reason if waiting.option is None else f"{waiting.option} = {waiting.value}: {reason}"


# --- the command ------------------------------------------------------------------------------------------------------


def run_top(arguments: argparse.Namespace, loaded: LoadedConfig) -> int:
    """Shows one server until q or Ctrl-C; with `--once` one frame. Raises InvalidRequest when it does not answer."""
    server = LiveServer(arguments.url, read_key(loaded.config))
    if arguments.once:
        _show_once(server, arguments.interval)
    elif sys.stdin.isatty() and sys.stdout.isatty():
        _show_live(server, arguments.interval, arguments.window)
    else:
        raise ConfigError("needs a terminal; --once prints one frame anywhere")
    return 0


def _show_once(server: LiveServer, interval_s: float) -> None:
    """Prints one frame from two samples: rates are differences of counters."""
    first = server.sample()
    sys.stderr.write(f"asking again in {interval_s:g} s: rates and percentiles are of what comes in between\n")
    sys.stderr.flush()
    time.sleep(interval_s)
    console = Console() if sys.stdout.isatty() else Console(width=_PLAIN_SIZE[0], height=_PLAIN_SIZE[1])
    console.print(render([first, server.sample()], Text(server.url), console.width, console.height))


def _show_live(server: LiveServer, interval_s: float, window_s: float) -> None:
    console = Console()
    samples = deque([server.sample()])
    with _keys() as pressed, Live(console=console, screen=True, auto_refresh=False) as live:
        where = _hint(server)
        while True:
            # One line less than there are: a full screen would scroll.
            live.update(render([*samples], where, console.width, console.height - 1), refresh=True)
            if pressed(interval_s) == "q":
                return
            where = _add_sample(server, samples, window_s)


def _hint(server: LiveServer) -> Text:
    return Text.assemble(server.url, ("  q leaves", "dim"))


def _add_sample(server: LiveServer, samples: deque[Sample], window_s: float) -> Text:
    """Adds a sample, drops those older than the window, and returns what to say beside it."""
    try:
        samples.append(server.sample())
    except InvalidRequest as error:
        return Text(f"{error.param} {error.message}", "bold red")
    while len(samples) > 2 and samples[1].at_s <= samples[-1].at_s - window_s:
        samples.popleft()
    return _hint(server)


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """Yields a function that waits seconds for a key; the terminal hands over keys as they come."""
    import termios
    import tty

    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)

    def pressed(timeout_s: float) -> str:
        ready, _, _ = select.select([descriptor], [], [], timeout_s)
        return os.read(descriptor, 1).decode("ascii", "replace") if ready else ""

    tty.setcbreak(descriptor)
    try:
        yield pressed
    finally:
        with contextlib.suppress(termios.error):  # the terminal may be gone
            termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


# --- the screen -------------------------------------------------------------------------------------------------------


def render(samples: Sequence[Sample], where: Text, width: int, height: int) -> RenderableType:
    """Renders samples, oldest first, at least one; `where` they come from ends the first line."""
    newest, oldest = samples[-1], samples[0]
    seconds = newest.at_s - oldest.at_s
    head = [
        _title(newest, where),
        Text(),
        _load(newest),
        _rates(newest, oldest, seconds),
        _latency("first token", "roseinfer_time_to_first_token_seconds", newest, oldest, streamed="true"),
        _latency("token gap  ", "roseinfer_inter_token_latency_seconds", newest, oldest),
        _slow_gaps(newest, oldest, seconds),
        _last_step(newest),
        _blocker(newest),
        Text(),
    ]
    for line in head:
        line.truncate(width, overflow="ellipsis")
    return Group(*head, _requests(newest, width, height - NUM_HEAD_LINES))


def _title(sample: Sample, where: Text) -> Text:
    states = sample.page.by_label("roseinfer_lifecycle_state", "state")
    state = next((name for name, value in states.items() if value == 1), "")
    return Text.assemble(("roseinfer top", "bold"), f"  {sample.page.model_name}  {state}  ").append_text(where)


def _load(sample: Sample) -> Text:
    page = sample.page
    usage = page.value("roseinfer_kv_cache_usage_ratio")
    filled = round(usage * _BAR_WIDTH)
    return Text.assemble(
        ("running ", "dim"),
        f"{page.value('roseinfer_num_requests_running'):.0f}",
        ("   waiting ", "dim"),
        f"{page.value('roseinfer_num_requests_waiting'):.0f}",
        ("   KV cache ", "dim"),
        "█" * filled + "░" * (_BAR_WIDTH - filled),
        f" {usage:.0%}",
    )


def _rates(newest: Sample, oldest: Sample, seconds: float) -> Text:
    def rate(name: str) -> str:
        return f"{scrape.grown(newest.page, oldest.page, name) / seconds:.0f}" if seconds > 0 else "-"

    return Text.assemble(
        ("tokens/s  ", "dim"),
        ("generated ", "dim"),
        rate("roseinfer_generation_tokens_total"),
        ("   prompt ", "dim"),
        rate("roseinfer_prompt_tokens_total"),
        (f"   over {seconds:.3g} s", "dim"),
    )


def _latency(heading: str, name: str, newest: Sample, oldest: Sample, **labels: str) -> Text:
    histogram = scrape.between(newest.page, oldest.page, name, **labels)
    values = [histogram.quantile(quantile) for quantile in (0.5, 0.99)]
    median, tail = ("-" if value is None else ms(value) for value in values)
    return Text.assemble((f"{heading}  p50 ", "dim"), f"{median:<9}", (" p99 ", "dim"), tail)


def _slow_gaps(newest: Sample, oldest: Sample, seconds: float) -> Text:
    counts = scrape.grown_by_label(newest.page, oldest.page, "roseinfer_slow_gaps_total", "cause")
    most = sorted(counts.items(), key=lambda item: -item[1])[:_MOST_CAUSES]
    shown = ", ".join(f"{cause} {count:.0f}" for cause, count in most) or f"none in {seconds:.3g} s"
    return Text.assemble(("slow gaps    ", "dim"), shown)


def _last_step(sample: Sample) -> Text:
    if not sample.steps:
        return Text("last step    none yet", "dim")
    step = sample.steps[-1]
    return Text.assemble(
        ("last step    ", "dim"),
        f"{step.step_id}, {step.kind}, {ms((step.end_ns - step.start_ns) / 1e9)}, "
        f"{step.num_decode_seqs} decoding, {step.num_prefill_tokens} prompt tokens",
    )


def _blocker(sample: Sample) -> Text:
    return Text.assemble(("waiting for  ", "dim"), sample.blocker or "nothing")


def _requests(sample: Sample, width: int, height: int) -> RenderableType:
    """Returns a table of at most `height` lines: requests that compute first, then those that wait, in their order."""
    table = Table(box=None, width=width, pad_edge=False, header_style="dim")
    table.add_column("request", ratio=1, min_width=4, no_wrap=True, overflow="ellipsis")
    table.add_column("stage", no_wrap=True)
    for name in ("age", "prompt", "generated"):
        table.add_column(name, justify="right", no_wrap=True)
    ordered = sorted(
        sample.requests,
        key=lambda request: ([*_ORDER, request.stage].index(request.stage), request.place or 0, -request.age_ms),
    )
    room = max(1, height - 2)
    shown = ordered if len(ordered) <= room + 1 else ordered[:room]
    for request in shown:
        table.add_row(
            Text(request.id),  # a plain string would be read as markup
            Text(request.stage + _place(request, is_exact=sample.is_place_exact)),
            f"{request.age_ms / 1e3:.1f} s",
            str(request.num_prompt_tokens),
            f"{request.num_generated_tokens}/{request.max_tokens}",
        )
    if not ordered:
        return Text("no requests in flight", "dim")
    if len(shown) == len(ordered):
        return table
    return Group(table, Text(f"and {len(ordered) - len(shown)} more", "dim"))


def _place(request: LiveRequest, *, is_exact: bool) -> str:
    if request.place is None:
        return ""
    return f", {request.place} before it" if is_exact else f", about {request.place} before it"
