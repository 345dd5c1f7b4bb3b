"""The timeline page in a real browser: loads alone, tells the cause of a clicked gap, obeys keys, fits a phone."""

import math
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from itertools import combinations
from pathlib import Path

import msgspec
import pytest

from roseinfer.config.options import Config, ObserveConfig
from roseinfer.observe.gaps.causes import Cause
from roseinfer.observe.recorder.flight import Flight
from roseinfer.records import Advanced, FinishReason
from roseinfer.server.ops import debug
from tests.conftest import require_tool
from tests.e2e.chromium import Browser, browsing, running_chromium
from tests.unit.observe.facts import MS
from tests.unit.observe.flights import add_waiting, make_flight
from tests.unit.server.harness import ScriptedEngine, answering, ops_app, serving

pytestmark = pytest.mark.e2e

MARKUP_ID = "<img src=x onerror=alert(1)>-{}"


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running_chromium(require_tool("chromium"), tmp_path_factory.mktemp("chromium")) as devtools_url:
        yield devtools_url


@asynccontextmanager
async def operations(
    flight: Flight, *, ops_host: str = "127.0.0.1", keys: list[str] | None = None
) -> AsyncIterator[str]:
    """The URL of an operations port that answers from a flight."""
    routes = debug.routes(flight)
    async with (
        serving(ScriptedEngine(), keys=keys, ops_host=ops_host) as server,
        answering(ops_app(server.service, routes)) as (url, _),
    ):
        yield url


@asynccontextmanager
async def page(flight: Flight, devtools_url: str, width: int = 1280) -> AsyncIterator[Browser]:
    """The page with its first data; at the end nothing may have gone wrong, and no other host been asked."""
    async with operations(flight) as url, browsing(devtools_url) as browser:
        await browser.prefer(reduced_motion="reduce")
        await browser.open(f"{url}/debug/timeline", width)
        await browser.wait_for("globalThis.timeline && timeline.data.extent && true")
        await browser.press("f")
        yield browser
        assert browser.complaints == []
        assert browser.hosts == {url.removeprefix("http://")}


async def settle(browser: Browser) -> None:
    await browser.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


async def position_of_widest(browser: Browser) -> tuple[float, float]:
    x, y = await browser.evaluate(
        "(() => { const box = document.getElementById('chart').getBoundingClientRect();"
        " const [x, y] = timeline.chart.positionOf(timeline.data.widest); return [box.left + x, box.top + y]; })()"
    )
    return x, y


CAUSE = "document.getElementById('cause')?.textContent ?? ''"
SELECTED = "timeline.chart.selected ? timeline.chart.selected.end : 0"
SPAN = "timeline.chart.end - timeline.chart.start"
UNNAMED = (
    "[...document.querySelectorAll('button, a, input, canvas[tabindex], svg')]"
    ".filter((one) => !(one.ariaLabel || one.labels?.length || one.textContent.trim())).length"
)
STATUS = "document.getElementById('status-text').textContent"
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


async def test_a_click_on_the_widest_gap_shows_its_cause(chromium: str) -> None:
    async with page(make_flight(), chromium) as browser:
        await settle(browser)
        await browser.click(*await position_of_widest(browser))
        assert await browser.evaluate(CAUSE) == "prefill of request long-prompt: 38.0 of 40.4 ms"
        detail = await browser.evaluate("document.getElementById('detail').innerText")
        for words in ("scheduler.target_itl_ms", "decoding rows", "500 of 1 request", "stream-"):
            assert words in detail
        shares = await browser.evaluate(
            "[...document.querySelectorAll('.bar span')].map((s) => parseFloat(s.style.width))"
        )
        assert sum(shares) == pytest.approx(100, abs=0.1)
        figures = await browser.evaluate("document.getElementById('figures').innerText")
        for words in ("TTFT", "ITL", "TPOT", "Queue wait", "p50", "p99"):
            assert words in figures


async def test_an_answer_in_one_piece_has_no_time_to_first_token(chromium: str) -> None:
    flight = make_flight()
    flight.in_flight[1].is_streamed = False  # written when all of it is made
    async with page(flight, chromium) as browser:
        assert await browser.evaluate("timeline.data.distributions()[0].values.length") == 6


async def test_who_had_ended_is_not_behind_a_later_gap(chromium: str) -> None:
    behind = "timeline.data.prefilledIn(gap).map((one) => one.id)"
    async with page(make_flight(), chromium) as browser:
        before, after = await browser.evaluate(
            f"(() => {{ const gap = timeline.data.widest, before = {behind}, [long] = timeline.data.prefilledIn(gap);"
            " long.first_token_ns = null; long.end_ns = timeline.data.steps[0].start_ns;"
            f" return [before, {behind}]; }})()"
        )
        assert (before, after) == (["long-prompt"], [])


async def test_keys_and_pointer(chromium: str) -> None:
    async with page(make_flight(), chromium) as browser:
        await browser.press("n")
        first = await browser.evaluate(SELECTED)
        assert "prefill of request long-prompt" in await browser.evaluate(CAUSE)
        await browser.press("w")
        await browser.evaluate("document.getElementById('chart').focus()")
        chosen = await browser.evaluate(SELECTED)
        await browser.press("ArrowLeft")
        assert 0 < await browser.evaluate(SELECTED) < chosen
        await browser.press("ArrowRight")
        assert await browser.evaluate(SELECTED) == chosen
        assert first == chosen, "all streams waited for the same step"
        lane = await browser.evaluate("timeline.chart.selected.request.lane")
        await browser.press("ArrowDown")
        assert await browser.evaluate("timeline.chart.selected.request.lane") == lane + 1
        span = await browser.evaluate(SPAN)
        await browser.press("+")
        assert await browser.evaluate(SPAN) < span
        x, y = await position_of_widest(browser)
        span = await browser.evaluate(SPAN)
        await browser.wheel(x, y, -120)
        await browser.wait_for(f"{SPAN} < {span}")
        start = await browser.evaluate("timeline.chart.start")
        await browser.drag(x, y, -100)
        assert await browser.evaluate("timeline.chart.start") > start
        await browser.press("Escape")
        assert await browser.evaluate(SELECTED) == 0
        await browser.press("?")
        assert await browser.evaluate("document.getElementById('help').open")


async def test_a_click_on_a_waiting_request_shows_why_it_waits(chromium: str) -> None:
    flight = make_flight()
    add_waiting(flight)
    async with page(flight, chromium) as browser:
        await browser.press("+")
        x, y = await browser.evaluate(
            "(() => { const box = document.getElementById('chart').getBoundingClientRect(), { chart, data } = timeline;"
            " const one = [...data.requests.values()].find((one) => one.id === 'patient'), end = data.extent[1];"
            " chart.show(one.recv_ns - 1e6, end + 1e6); chart.draw();"
            " return [box.left + chart.x((one.recv_ns + end) / 2), box.top + chart.y(one.lane) + chart.row / 2]; })()"
        )
        await browser.click(x, y)
        await browser.wait_for("document.getElementById('detail').innerText.includes('all 64 places')")
        detail = await browser.evaluate("document.getElementById('detail').innerText")
        assert "patient: waiting" in detail
        assert "0 before it" in detail


async def test_focus_goes_through_the_controls_to_the_chart(chromium: str) -> None:
    async with page(make_flight(), chromium) as browser:
        await browser.evaluate("document.body.focus()")
        seen = []
        for _ in range(16):
            await browser.press("Tab")
            seen.append(await browser.evaluate("document.activeElement.id || document.activeElement.textContent"))
        order = ["pause", "next-slow", "widest", "zoom-in", "fit", "file", "help-button", "chart"]
        assert [name for name in seen if name in order] == order
        assert await browser.evaluate(UNNAMED) == 0


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_it_fits(chromium: str, width: int, scheme: str) -> None:
    async with page(make_flight(), chromium, width) as browser:
        await browser.prefer(color_scheme=scheme, reduced_motion="reduce")
        await browser.press("w")
        await settle(browser)
        assert await browser.evaluate(OVERFLOW) <= 0
        background = await browser.evaluate("getComputedStyle(document.documentElement).backgroundColor")
        assert (background == "rgb(247, 246, 248)") == (scheme == "light")


async def test_the_legend_lists_what_is_on_screen_in_colours_that_differ(chromium: str) -> None:
    async with page(make_flight(), chromium) as browser:
        await settle(browser)
        legend = (await browser.evaluate("document.getElementById('legend').innerText")).splitlines()
        assert {"step", "step with prompts", "prefill", "decode", "prefill of others"} <= set(legend)
        assert not {"wait for KV blocks", "failed or cut", "garbage collection"} & set(legend), (
            "none of it is in this flight"
        )
        await browser.evaluate(
            "timeline.data.interruptions.push({...timeline.data.widest, cause: 'gc', request: null})"
        )
        await browser.press("f")
        await browser.wait_for("document.getElementById('legend').innerText.includes('garbage collection')")


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_no_two_colours_are_alike(chromium: str, scheme: str) -> None:
    phases = ["arrive", "queue", "prefill", "decode", "write", "step-prefill", "step-decode", "bad"]
    names = [f"--{phase}" for phase in phases] + [f"--c-{cause}" for cause in Cause]
    async with page(make_flight(), chromium) as browser:
        await browser.prefer(color_scheme=scheme, reduced_motion="reduce")
        told = await browser.evaluate(
            f"(() => {{ const style = getComputedStyle(document.documentElement);"
            f" return {names}.map((name) => style.getPropertyValue(name).trim()); }})()"
        )
    colours = {name: [int(code[at : at + 2], 16) for at in (1, 3, 5)] for name, code in zip(names, told, strict=True)}
    alike = [pair for pair in combinations(names, 2) if math.dist(colours[pair[0]], colours[pair[1]]) < 30]
    assert alike == []


@pytest.mark.parametrize("width", [390, 1400])
async def test_each_slow_gap_is_a_line_with_its_whole_cause(chromium: str, width: int) -> None:
    lines = (
        "[...document.querySelectorAll('.slow-list button')].map((one) => {"
        " const [, , cause, who] = one.children, range = document.createRange(); range.selectNodeContents(cause);"
        " return [range.getClientRects().length, cause.scrollWidth - cause.clientWidth, who.clientWidth > 20]; })"
    )
    async with page(make_flight(), chromium, width) as browser:
        await browser.evaluate(
            "for (const one of timeline.data.requests.values()) one.id = 'completion-7f3c9a-' + one.id; 0"
        )
        await browser.press("n")
        await settle(browser)
        found = await browser.evaluate(lines)
    assert len(found) > 3
    assert all(one == [1, 0, True] for one in found), found


async def test_a_lane_without_a_visible_request_names_its_neighbours(chromium: str) -> None:
    async with page(make_flight(), chromium) as browser:
        left, right = await browser.evaluate(
            "(() => { const { chart, data } = timeline, [start, end] = data.extent;"
            " const first = [...data.requests.values()].find((one) => one.id === 'stream-0');"
            " const texts = () => [...chart.absent.values()].map((one) => one.text);"
            " first.end_ns = first.first_token_ns; chart.show(end - 1e6, end); chart.draw(); const left = texts();"
            " chart.show(start, start + 1e6); chart.draw(); return [left, texts()]; })()"
        )
    assert left == ["‹ stream-0"]
    assert {"› stream-5", "› long-prompt"} <= set(right)


async def test_a_lane_whose_requests_are_all_forgotten_is_closed(chromium: str) -> None:
    async with page(make_flight(), chromium) as browser:
        lanes = await browser.evaluate(
            "(() => { const { data } = timeline, one = { ...data.steps.at(-1) };"
            " const first = [...data.requests.values()].find((one) => one.id === 'stream-0'); first.end_ns = 1;"
            " while (data.steps.length <= 4200) data.steps.push(one);"
            " data.merge({ meta: data.meta, next: data.next, now_ns: data.now, step_fields: [], steps: [],"
            " requests: [], gaps: [], interruptions: [] });"
            " return [...data.requests.values()].map((one) => one.lane).sort((a, b) => a - b); })()"
        )
    assert lanes == list(range(len(lanes)))
    assert len(lanes) == 6


async def test_requests_without_steps_are_forgotten_too(chromium: str) -> None:
    """Refused ones, on a page that is open for days."""
    async with page(make_flight(), chromium) as browser:
        found = await browser.evaluate(
            "(() => { const { data } = timeline, one = [...data.requests.values()].at(-1), end_ns = data.now;"
            " const refused = Array.from({ length: 20100 }, (_, at) => ({ ...one, serial: 1000 + at, recv_ns: end_ns,"
            " end_ns, token_ns: [], gaps: [], slow: [] }));"
            " const running = [...data.requests.values()].filter((one) => one.end_ns === null);"
            " data.merge({ meta: data.meta, next: data.next, now_ns: end_ns, step_fields: [], steps: [],"
            " requests: [...running, ...refused], gaps: [], interruptions: [] });"
            " return [data.requests.size, running.every((one) => data.requests.has(one.serial)),"
            " data.requests.has(21099)]; })()"
        )
    assert found == [20000, True, True]


async def test_an_id_with_markup_is_text(chromium: str) -> None:
    async with page(make_flight(stream_id=MARKUP_ID), chromium) as browser:
        await browser.press("w")
        assert "<img src=x onerror=alert(1)>-" in await browser.evaluate("document.body.innerText")
        assert await browser.evaluate("document.querySelectorAll('img').length") == 0


async def test_it_is_live_until_it_is_paused(chromium: str) -> None:
    flight = make_flight()
    async with page(flight, chromium) as browser:
        num_steps = await browser.evaluate("timeline.data.steps.length")
        last = flight.last_step
        assert last is not None
        flight.on_step(msgspec.structs.replace(last, step_id=last.step_id + 1), Advanced())
        await browser.wait_for(f"timeline.data.steps.length === {num_steps + 1}")
        await browser.evaluate("document.getElementById('pause').click()")
        flight.on_step(msgspec.structs.replace(last, step_id=last.step_id + 2), Advanced())
        await browser.evaluate("timeline.poll()")
        assert await browser.evaluate("timeline.data.steps.length") == num_steps + 1
        assert await browser.evaluate(STATUS) == "paused"


async def test_a_request_that_ended_while_the_page_was_paused_runs_no_more(chromium: str) -> None:
    async with page(make_flight(), chromium) as browser:
        await browser.evaluate("document.getElementById('pause').click()")
        seen, ended, lanes = await browser.evaluate(
            "(() => { const { data } = timeline, seen = data.now, running = [...data.requests.values()].slice(1);"
            " data.merge({ meta: data.meta, next: data.next, now_ns: seen + 1e9, step_fields: [], steps: [],"
            " requests: [running[0]], gaps: [], interruptions: [] });"
            " return [seen, running.map((one) => one.end_ns), data.lanes]; })()"
        )
        assert ended == [None, *[seen] * 5], "all that the answer did not have"
        assert lanes.count(seen) == 5, "whose lanes are free"
        await settle(browser)
        assert "failed or cut" not in await browser.evaluate("document.getElementById('legend').innerText")


async def test_after_a_restart_of_the_server_the_page_begins_anew(chromium: str) -> None:
    """Also where it held a view, whose moments are of another clock."""
    async with page(make_flight(), chromium) as browser:
        await browser.press("w")
        await browser.evaluate("timeline.data.meta.run = 'another'")
        await browser.wait_for("timeline.state.isFollowing && timeline.data.extent && true")
        assert await browser.evaluate(SELECTED) == 0
        assert await browser.evaluate("document.getElementById('detail').innerText.startsWith('Click a gap')")
        assert await browser.evaluate("timeline.chart.end > timeline.data.extent[1]")


async def test_a_recorder_of_few_steps_is_shown(chromium: str) -> None:
    async with page(make_flight(config=Config(observe=ObserveConfig(recorder_steps=32))), chromium) as browser:
        assert await browser.evaluate("timeline.data.steps.length") == 32
        await browser.wait_for("timeline.data.next")
        await browser.evaluate("timeline.poll()")
        assert await browser.evaluate(STATUS) == "live, view held"


async def test_why_a_file_was_not_opened_stays_until_something_else_is_chosen(chromium: str, tmp_path: Path) -> None:
    path = tmp_path / "holiday.npz"
    path.write_bytes(b"no recording")
    async with page(make_flight(), chromium) as browser:
        await browser.choose_file("#file", path)
        await browser.wait_for("document.getElementById('detail').innerText.includes('holiday.npz was not opened')")
        await browser.evaluate("timeline.poll()")
        assert "The file is no recording" in await browser.evaluate("document.getElementById('detail').innerText")
        assert await browser.evaluate(STATUS) == "live, view held"
        await browser.press("w")
        assert "no recording" not in await browser.evaluate("document.getElementById('detail').innerText")
        (refused,) = browser.complaints
        assert "400" in refused
        browser.complaints.clear()


async def test_a_request_without_a_token_shows_how_long_it_waited(chromium: str) -> None:
    flight = make_flight()
    add_waiting(flight)
    timeline = flight.in_flight[-1]
    timeline.serial, timeline.end_ns, timeline.finish_reason = 99, timeline.recv_ns + 50 * MS, FinishReason.TIMEOUT
    flight.on_finish(timeline)
    async with page(flight, chromium) as browser:
        shown = await browser.evaluate(
            "(() => { const { chart, data } = timeline, one = [...data.requests.values()].at(-1);"
            " chart.show(one.recv_ns + 1e7, one.end_ns - 1e7); chart.draw(); return [...chart.shown]; })()"
        )
        assert "--queue" in shown


async def test_times_on_the_axis_are_where_they_say(chromium: str) -> None:
    async with page(make_flight(), chromium) as browser:
        labels = await browser.evaluate(
            "(() => { const { chart, data } = timeline, context = chart.canvas.getContext('2d'), found = [];"
            " context.fillText = (text, x) => found.push([text, x]); data.meta.origin_unix_ms = 59_937.5;"
            " chart.start = 0; chart.end = 2e8; chart.draw(); delete context.fillText;"
            " return found.filter(([text]) => /^\\d+:\\d+:/.test(text)).map(([text, x]) =>"
            " [text.split(':').slice(1).map(Number), 59.9375 + (chart.time(x - 3)) / 1e9]); })()"
        )
    assert len(labels) > 3
    for (minutes, seconds), at_s in labels:
        assert 0 <= seconds < 60
        assert minutes * 60 + seconds == pytest.approx(at_s, abs=1e-3)


async def test_a_saved_recording_is_shown(chromium: str, tmp_path: Path) -> None:
    path = tmp_path / "saved.npz"
    make_flight(num_streams=3).snapshot().recording().save(path)
    async with page(make_flight(num_streams=5), chromium) as browser:
        await browser.choose_file("#file", path)
        await browser.wait_for("timeline.data.requests.size === 4")
        await browser.press("w")
        assert "prefill of request long-prompt" in await browser.evaluate(CAUSE)
        assert await browser.evaluate(STATUS) == "recording saved.npz"
        await browser.evaluate("document.getElementById('pause').click()")
        await browser.wait_for("timeline.data.requests.size === 6")
        assert await browser.evaluate(STATUS) == "live"


async def test_with_a_key_a_browser_gets_in(chromium: str) -> None:
    """The page's own requests carry what the browser was told once."""
    url_of_any = operations(make_flight(), ops_host="0.0.0.0", keys=["the-key"])  # noqa: S104 - what it is about
    async with url_of_any as url, browsing(chromium) as browser:
        await browser.open(url.replace("//", "//me:the-key@") + "/debug/timeline")
        await browser.wait_for("globalThis.timeline && timeline.data.steps.length === 126")
        assert browser.complaints == []
