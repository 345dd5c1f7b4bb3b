"""Waits for a core, from the kernel's files: whose they are, how much of them a quota took, and what a look costs."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from roseinfer.runtime.cpu_waits import NOTHING, CpuWaits, LoopWaits, Waited, computing_threads

MS = 1_000_000


class Kernel:
    """The files of some threads and of one control group."""

    def __init__(self, directory: Path) -> None:
        self.tasks, self.group = directory / "task", directory / "group"
        self.group.mkdir(parents=True)
        self.own = threading.get_native_id()
        self.set_throttled(0)

    def set_thread(self, thread: int, *, ran: float = 0.0, waited: float = 0.0) -> None:
        (self.tasks / str(thread)).mkdir(parents=True, exist_ok=True)
        (self.tasks / str(thread) / "schedstat").write_text(f"{int(ran * MS)} {int(waited * MS)} 7\n")

    def set_throttled(self, ms: float) -> None:
        (self.group / "cpu.stat").write_text(f"nr_throttled 1\nthrottled_usec {int(ms * 1000)}\n")

    def waits(self, *threads: int) -> CpuWaits:
        return CpuWaits(threads, self.tasks, [self.group])


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


def test_a_wait_of_the_loop_ends_when_it_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuWaits, "look", lambda _, now_ns: Waited(4 * MS, 3 * MS) if now_ns == 100 * MS else NOTHING)
    now_ns, heard = 90 * MS, list[tuple[int, int, int]]()
    waits = LoopWaits(lambda: now_ns)
    waits.listeners.append(lambda *wait: heard.append(wait))
    with waits.selector() as selector:
        selector.select(0)
        now_ns = 100 * MS
        waits.look()
    assert heard == [(93 * MS, 97 * MS, 100 * MS)]
