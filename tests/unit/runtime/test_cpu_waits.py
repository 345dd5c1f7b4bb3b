"""Waits for a core, from the kernel's files: whose they are, how much of them a quota took, and what a look costs."""

import asyncio
import selectors
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from roseinfer.runtime import cpu_waits
from roseinfer.runtime.cpu_waits import NOTHING, CpuWaits, LoopWaits, Stop, Waited, computing_threads

MS = 1_000_000


class Kernel:
    """The files of some threads and of one control group."""

    def __init__(self, directory: Path) -> None:
        self.tasks, self.group = directory / "task", directory / "group"
        self.group.mkdir(parents=True)
        self.own = threading.get_native_id()
        self.read_at = 0.0  # when the files have been read, in milliseconds
        self.set_throttled(0)

    def set_thread(self, thread: int, *, ran: float = 0.0, waited: float = 0.0) -> None:
        (self.tasks / str(thread)).mkdir(parents=True, exist_ok=True)
        (self.tasks / str(thread) / "schedstat").write_text(f"{int(ran * MS)} {int(waited * MS)} 7\n")

    def set_throttled(self, ms: float) -> None:
        (self.group / "cpu.stat").write_text(f"nr_throttled 1\nthrottled_usec {int(ms * 1000)}\n")

    def waits(self, *threads: int) -> CpuWaits:
        return CpuWaits(threads, self.tasks, [self.group], clock=lambda: int(self.read_at * MS))


@pytest.fixture
def kernel(tmp_path: Path) -> Kernel:
    kernel = Kernel(tmp_path)
    kernel.set_thread(kernel.own)
    return kernel


def test_a_quota_takes_its_part_of_a_wait_and_others_the_rest(kernel: Kernel) -> None:
    waits = kernel.waits()
    assert waits.look(10 * MS) == NOTHING
    kernel.set_thread(kernel.own, waited=30)
    kernel.set_throttled(20)
    assert waits.look(50 * MS) == Waited(20 * MS, 10 * MS)
    assert waits.look(60 * MS) == NOTHING, "it is counted once"


def test_a_group_is_stopped_on_several_processors_and_a_thread_on_one(kernel: Kernel) -> None:
    waits = kernel.waits()
    kernel.set_thread(kernel.own, waited=30)
    kernel.set_throttled(60)
    assert waits.look(50 * MS) == Waited(30 * MS, 0)


def test_a_stop_that_hit_others_is_not_charged_to_a_later_wait(kernel: Kernel) -> None:
    waits = kernel.waits()
    kernel.set_throttled(40)
    assert waits.look(50 * MS) == NOTHING
    kernel.set_thread(kernel.own, waited=5)
    assert waits.look(52 * MS) == Waited(0, 5 * MS)


def test_a_stop_between_the_moment_and_the_reading_belongs_to_the_next_look_and_no_later_one(kernel: Kernel) -> None:
    waits = kernel.waits()
    kernel.set_thread(kernel.own, waited=65)
    kernel.set_throttled(58)
    kernel.read_at = 110
    assert waits.look(50 * MS) == Waited(0, 5 * MS)
    assert waits.look(112 * MS, 61 * MS) == Waited(58 * MS, 2 * MS)
    assert waits.look(175 * MS, 60 * MS) == NOTHING


def test_a_stop_on_the_way_out_of_a_reading_is_counted_once(kernel: Kernel) -> None:
    def stopped() -> int:
        kernel.set_thread(kernel.own, waited=60)
        return 111 * MS

    waits = CpuWaits((), kernel.tasks, [kernel.group], clock=stopped)
    assert waits.look(50 * MS) == NOTHING
    assert waits.look(112 * MS, 61 * MS) == Waited(0, 60 * MS)
    assert waits.look(114 * MS) == NOTHING


def test_threads_that_compute_together_wait_as_long_as_one_of_them(kernel: Kernel) -> None:
    kernel.set_thread(12, waited=100)
    waits = kernel.waits(12)
    kernel.set_thread(kernel.own, waited=3)
    kernel.set_thread(12, waited=108)
    assert waits.look(50 * MS) == Waited(0, 8 * MS)


def test_short_waits_and_looks_in_quick_succession_say_nothing(kernel: Kernel) -> None:
    waits = kernel.waits()
    kernel.set_thread(kernel.own, waited=0.4)
    assert waits.look(50 * MS) == NOTHING
    kernel.set_thread(kernel.own, waited=9)
    assert waits.look(50 * MS + MS // 2) == NOTHING
    assert waits.look(52 * MS) == Waited(0, int(8.6 * MS)), "it is not lost"


def test_a_system_that_counts_nothing_says_nothing(tmp_path: Path) -> None:
    assert CpuWaits((), tmp_path, []).look(50 * MS) == NOTHING


def test_closed_it_says_nothing(kernel: Kernel) -> None:
    waits = kernel.waits()
    waits.close()
    kernel.set_thread(kernel.own, waited=9)
    assert waits.look(50 * MS) == NOTHING


def test_threads_that_computed_are_found_by_their_processor_time(kernel: Kernel) -> None:
    for thread, ran in ((kernel.own, 100), (11, 90), (12, 5), (13, 95)):
        kernel.set_thread(thread, ran=ran)
    assert computing_threads(kernel.tasks) == [11, 13]
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(computing_threads, kernel.tasks).result() == [], "it is not the engine's own process"
    assert computing_threads(kernel.tasks / "missing") == []


class Loop:
    """A watched loop by clocks that the test sets, in milliseconds, and what it heard."""

    def __init__(self, kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
        self.kernel, self.now, self.computed, self.heard = kernel, 90.0, 40.0, list[Stop]()
        make = partial(CpuWaits, (), kernel.tasks, [kernel.group])
        monkeypatch.setattr(cpu_waits, "CpuWaits", make)
        self.waits = LoopWaits(lambda: int(self.now * MS), lambda: int(self.computed * MS))
        self.waits.listeners.append(self.heard.append)
        self.selector = self.waits.selector()

    def pass_by(self, ms: float, *, computing: float = 0.0, waited: float = 0.0, throttled: float = 0.0) -> None:
        """Time in which the thread also computed, and had no core."""
        self.now, self.computed = self.now + ms, self.computed + computing
        self.kernel.set_thread(self.kernel.own, waited=waited)
        self.kernel.set_throttled(throttled)


@pytest.fixture
def loop(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> Iterator[Loop]:
    loop = Loop(kernel, monkeypatch)
    with loop.selector:
        yield loop


def test_a_stop_of_the_loop_ends_when_it_is_seen_and_has_its_reasons_apart(loop: Loop) -> None:
    loop.pass_by(12, computing=3, waited=7, throttled=4)
    loop.waits.glance(102 * MS)
    assert loop.heard == [Stop(93 * MS, 95 * MS, 99 * MS, 102 * MS)]
    loop.pass_by(1.5, computing=1.45, waited=7, throttled=4)
    loop.waits.glance(int(103.5 * MS))
    assert len(loop.heard) == 1, "it computed"


def test_a_lock_whose_holder_a_quota_stopped_is_the_quotas(loop: Loop) -> None:
    """The loop's thread waits for the interpreter, which another thread of its process has."""
    loop.pass_by(60, computing=1, throttled=58)
    loop.waits.glance(150 * MS)
    assert loop.heard == [Stop(91 * MS, 92 * MS, 150 * MS, 150 * MS)]


def test_waiting_for_sockets_is_no_stop_and_waking_late_is_one(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    waking = {"waited": 0.0}

    def select(*_: object) -> list[object]:
        loop.pass_by(20, computing=0.02, **waking)
        return []

    monkeypatch.setattr(selectors.DefaultSelector, "select", select)
    loop.selector.select(1)
    assert loop.heard == []
    waking["waited"] = 3.0
    loop.selector.select(1)
    assert loop.heard == [Stop(127 * MS, 127 * MS, 127 * MS, 130 * MS)]


def test_what_a_message_lacked_while_the_loop_rested_is_its_senders(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It rests from 90 to 110 ms, wakes 3 ms late, and reads a message that was stamped at 95, when it was not sent."""

    def select(*_: object) -> list[object]:
        loop.pass_by(20, computing=0.02, waited=3)
        return []

    monkeypatch.setattr(selectors.DefaultSelector, "select", select)
    loop.selector.select(1)
    loop.heard.clear()
    loop.waits.note_message(106 * MS + MS // 2)
    assert loop.heard == [], "as late as messages are"
    loop.waits.note_message(95 * MS)
    assert loop.heard == [Stop(95 * MS, 107 * MS, 107 * MS, 107 * MS)]


def test_a_loop_that_was_stopped_in_a_rest_says_so_though_it_hands_on_what_it_read_in_its_next_turn(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An asyncio stream wakes its reader one turn after the bytes have come, and that turn asks for sockets too."""
    turns_ms = iter((200.0, 0.1, 30.0))

    def select(*_: object) -> list[object]:
        loop.pass_by(next(turns_ms), computing=0.02)
        return []

    monkeypatch.setattr(selectors.DefaultSelector, "select", select)
    loop.selector.select(None)
    loop.selector.select(0)
    for sent_ms in (91, 92, 150):
        loop.waits.note_message(sent_ms * MS)
    assert loop.heard == [Stop(91 * MS, 290 * MS, 290 * MS, 290 * MS)], "one stop, however many messages waited"
    loop.heard.clear()
    loop.selector.select(0)
    loop.waits.glance(int(loop.now * MS))
    [stop] = loop.heard
    assert stop.end_ns - stop.start_ns >= 29 * MS, "nor is it a rest when it only asks"


def test_it_does_not_look_again_within_a_millisecond(loop: Loop) -> None:
    loop.pass_by(0.9)
    loop.waits.glance(int(90.9 * MS))
    loop.pass_by(0.2)
    loop.waits.glance(int(91.1 * MS))
    assert loop.heard == [Stop(90 * MS, int(91.1 * MS), int(91.1 * MS), int(91.1 * MS))]


def test_of_a_real_loop_a_call_that_blocks_is_a_stop_and_computing_and_resting_are_none() -> None:
    """Whatever else the machine does: what it takes from the thread is a wait for a core."""
    stops, waits = list[Stop](), LoopWaits()
    waits.listeners.append(stops.append)

    async def stopped_ms(work: Callable[[], object]) -> float:
        await asyncio.sleep(0.002)
        stops.clear()
        asyncio.get_running_loop().call_soon(work)
        await asyncio.sleep(0.002)
        return sum(stop.throttled_ns - stop.start_ns for stop in stops) / MS

    def compute() -> None:
        end_s = time.thread_time() + 0.03
        while time.thread_time() < end_s:
            pass

    async def scenario() -> None:
        assert await stopped_ms(lambda: time.sleep(0.03)) >= 29
        assert await stopped_ms(compute) < 6
        stops.clear()
        await asyncio.sleep(0.03)
        assert sum(stop.throttled_ns - stop.start_ns for stop in stops) < 6 * MS

    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(waits.selector())) as runner:
        runner.run(scenario())
