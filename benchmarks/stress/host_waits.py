"""Takes the cores from the engine and from the front end in turn, and counts the causes that slow gaps then have.

    python -m benchmarks.stress.host_waits [--streams 16] [--quotas 0.3 0.6 0.9] [--out FILE]

The embedded model is served by a process of its own. A quota, in cores, is put on one of the two processes by a
control group of version 1 or 2, which only root may make; a busy process shares one core with it instead where it says
`hog`; `none` is the same load with neither. Slow gaps are those of the engine where the engine is meant, and otherwise
those of the wire.

A process of the first priority reads meanwhile, three times a millisecond, how long the main threads of both processes
were without a core, and how long the quota stopped the group. A gap is `affected` in which the one that is meant had no
core for at least half of it; `named` are those of them whose cause is `cpu_throttled` or `cpu_wait`; `baseless` are
slow gaps with such a cause in which neither process was without a core and no quota stopped anything.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from benchmarks.http_client import prepared
from benchmarks.machine import Sitting, part_parser
from benchmarks.tables import print_head, print_row
from roseinfer.bench.load.client import LoadClient
from roseinfer.bench.load.endpoint import Endpoint
from roseinfer.bench.load.launcher import Server, free_port
from roseinfer.explain.evidence import get
from roseinfer.observe.gaps.causes import Cause
from roseinfer.observe.gaps.request_gaps import Gap, gaps_of
from roseinfer.observe.recorder.recording import Recording
from roseinfer.runtime.cgroup import ROOT, throttled_ns

MAX_TOKENS = 900
PERIOD_US = 100_000
WATCH_EVERY_S = 0.0003
AFFECTED = 0.5  # of a gap, in which the process had no core
SERVE = (sys.executable, "-m", "roseinfer", "serve")
NAMED = {Cause.CPU_THROTTLED, Cause.CPU_WAIT}


class Group:
    """A control group for the CPU. Raises OSError where none may be made."""

    def __init__(self, root: Path = ROOT) -> None:
        self._is_v1 = not (root / "cgroup.controllers").is_file()
        self._parent = root / "cpu" if self._is_v1 else root
        if not self._is_v1:
            (root / "cgroup.subtree_control").write_text("+cpu")
        self._directory = self._parent / f"roseinfer-{os.getpid()}"
        self._directory.mkdir()

    @property
    def stat(self) -> Path:
        return self._directory / "cpu.stat"

    def add(self, pid: int) -> None:
        (self._directory / "cgroup.procs").write_text(str(pid))

    def remove(self, pid: int) -> None:
        (self._parent / "cgroup.procs").write_text(str(pid))

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Puts this process into it meanwhile; what it starts stays there."""
        self.add(os.getpid())
        try:
            yield
        finally:
            self.remove(os.getpid())

    def limit(self, cores: float) -> None:
        quota = round(cores * PERIOD_US)
        if self._is_v1:
            (self._directory / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (self._directory / "cpu.cfs_quota_us").write_text(str(quota))
        else:
            (self._directory / "cpu.max").write_text(f"{quota} {PERIOD_US}")

    def close(self) -> None:
        """Raises OSError while a process is in it."""
        self._directory.rmdir()


@contextmanager
def serving_in(group: Group | None, log: Path, program: Sequence[str] = SERVE) -> Iterator[Server]:
    """A server that is ready, started in the group, so that it looks for waits there."""
    port, ops_port = free_port(), free_port()
    command = [*program, "--port", str(port), "--ops-port", str(ops_port), "--runner.num-threads", "1"]
    with nullcontext() if group is None else group.entered():
        server = Server(command, port, log, ops_port=ops_port)
    try:
        server.wait_ready()
        yield server
    finally:
        server.stop()


@contextmanager
def hog_beside(pid: int) -> Iterator[None]:
    """A process that computes on the one core that this one gets."""
    core = min(os.sched_getaffinity(0))
    for thread in os.listdir(f"/proc/{pid}/task"):
        os.sched_setaffinity(int(thread), {core})
    program = f"import os; os.sched_setaffinity(0, {{{core}}})\nwhile True: pass"
    hog = subprocess.Popen([sys.executable, "-c", program], start_new_session=True)  # noqa: S603
    try:
        yield
    finally:
        hog.kill()
        hog.wait()


def generate(server: Server, num_streams: int) -> None:
    """A number of streams at once, to their ends."""
    requests = [prepared(f"Stream {index}", MAX_TOKENS, temperature=1) for index in range(num_streams)]
    LoadClient(Endpoint(server.url), timeout_s=120).run(requests)


def watch(file: Path, stat: Path, pids: Sequence[str]) -> int:
    """Writes, when SIGTERM comes, what the kernel counted at each moment for the group and for each main thread."""
    stopped, rows = list[int](), array("q")
    signal.signal(signal.SIGTERM, lambda number, _: stopped.append(number))
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # not the hog's core: each waking cuts a turn of it short
    with suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    threads = [os.open(f"/proc/{pid}/schedstat", os.O_RDONLY) for pid in pids]
    group = os.open(stat, os.O_RDONLY) if stat.is_file() else None
    print("watching", flush=True)
    while not stopped:
        quota_ns = 0 if group is None else throttled_ns(os.pread(group, 512, 0))
        delays_ns = [int(os.pread(thread, 128, 0).split()[1]) for thread in threads]
        rows.extend((time.monotonic_ns(), quota_ns, *delays_ns))
        time.sleep(WATCH_EVERY_S)
    np.save(file, np.frombuffer(rows, np.int64).reshape(-1, 2 + len(threads)).T)
    return 0


@contextmanager
def watching(file: Path, group: Group | None, pids: Sequence[int]) -> Iterator[None]:
    command = [sys.executable, "-m", "benchmarks.stress.host_waits", "--watch", str(file)]
    command += [str(group.stat if group is not None else os.devnull), *map(str, pids)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as watcher:  # noqa: S603
        assert watcher.stdout is not None
        watcher.stdout.readline()  # it has imported
        try:
            yield
        finally:
            watcher.terminate()


class Stops:
    """When something that the kernel counts was stopped. It counts a stop when it is over."""

    def __init__(self, moments: npt.NDArray[np.int64], counted_ns: npt.NDArray[np.int64]) -> None:
        lengths = np.diff(counted_ns)
        (at,) = np.nonzero(lengths)
        self._seen, self._before, self._lengths = moments[1:][at], moments[:-1][at], lengths[at]

    def within(self, gap: Gap) -> int:
        """The nanoseconds of the gap that were a stop for certain: one ended between two readings."""
        starts, ends = self._seen - self._lengths, self._before
        return int(np.maximum(0, np.minimum(ends, gap.end_ns) - np.maximum(starts, gap.start_ns)).sum())

    def touch(self, gap: Gap) -> bool:
        """One may have been in the gap."""
        return bool(np.any((self._before - self._lengths < gap.end_ns) & (self._seen > gap.start_ns)))


class Judged(NamedTuple):
    """A slow gap, beside what the kernel counted."""

    cause: Cause
    is_affected: bool
    is_baseless: bool


def judged(server: Server, since_ns: int, counted: npt.NDArray[np.int64], *, is_engine: bool) -> list[Judged]:
    """The slow gaps that began since then."""
    content = get(f"http://127.0.0.1:{server.ops_port}/debug/recording", "")
    with tempfile.NamedTemporaryFile(suffix=".npz") as file:
        file.write(content)
        file.flush()
        recording = Recording.load(Path(file.name))
    gaps = gaps_of(recording, "engine" if is_engine else "wire")
    stops = [Stops(counted[0], each) for each in counted[1:]]  # by the quota, of the engine, of the front end
    meant = stops[1] if is_engine else stops[2]
    return [
        Judged(
            gap.cause,
            meant.within(gap) >= AFFECTED * gap.duration_ns,
            gap.cause in NAMED and not any(each.touch(gap) for each in stops),
        )
        for gap in gaps
        if gap.is_slow and gap.start_ns > since_ns
    ]


def measure(log: Path, victim: str, trouble: str, num_streams: int) -> list[Judged]:
    """The slow gaps while the victim, `engine` or `front end`, has a quota, a hog beside it, or nothing."""
    group = Group() if trouble not in {"hog", "none"} else None
    file = log.with_suffix(".npy")
    try:
        with serving_in(group, log) as server:
            generate(server, num_streams)  # what is usual
            pids = {"engine": server.engine_pid(), "front end": server.pid, "telemetry": server.telemetry_pid()}
            with watching(file, group, [pids["engine"], pids["front end"]]):
                since_ns = time.monotonic_ns()
                if group is not None:
                    for name, pid in pids.items():
                        if name != victim:
                            group.remove(pid)
                    group.limit(float(trouble))
                with hog_beside(pids[victim]) if trouble == "hog" else nullcontext():
                    generate(server, num_streams)
                if group is not None:
                    for pid in pids.values():
                        group.remove(pid)
            return judged(server, since_ns, np.load(file), is_engine=victim == "engine")
    finally:
        if group is not None:
            group.close()


def main(arguments: Sequence[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else arguments
    if given[:1] == ["--watch"]:
        return watch(Path(given[1]), Path(given[2]), given[3:])
    parser = part_parser(__doc__, "bench/host_waits.json")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--quotas", type=float, nargs="+", default=[0.3, 0.6, 0.9])
    args = parser.parse_args(given)
    sitting, results = Sitting("host_waits"), {}
    log = args.out.with_suffix(".log")
    log.parent.mkdir(parents=True, exist_ok=True)
    print_head("victim", "trouble", "slow gaps", "affected", "named", "baseless", "causes of affected", "of others")
    for victim in ("engine", "front end"):
        for trouble in ("none", "hog", *map(str, args.quotas)):
            gaps = measure(log, victim, trouble, args.streams)
            causes = [Counter(gap.cause for gap in gaps if gap.is_affected is each) for each in (True, False)]
            named, num_affected = sum(causes[0][cause] for cause in NAMED), causes[0].total()
            share = f"{named / num_affected:.1%}" if num_affected else ""
            num_baseless = sum(gap.is_baseless for gap in gaps)
            counts = [", ".join(f"{cause} {count}" for cause, count in each.most_common()) for each in causes]
            print_row(victim, trouble, len(gaps), num_affected, share, num_baseless, *counts)
            affected, others = ({str(cause): count for cause, count in each.items()} for each in causes)
            results[f"{victim}, {trouble}"] = {"affected": affected, "others": others, "baseless": num_baseless}
    sitting.write(args.out, results)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
