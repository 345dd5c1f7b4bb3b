"""Takes the cores from the engine and from the front end in turn, and counts the causes that slow gaps then have.

    python -m benchmarks.stress.host_waits [--streams 16] [--quotas 0.3 0.6 0.9] [--out FILE]

The embedded model is served by a process of its own. A quota, in cores, is put on one of the two processes by a
control group of version 1 or 2, which only root may make; a busy process shares one core with it instead where it says
`hog`; `none` is the same load with neither. Slow gaps are those of the engine where the engine is meant, and otherwise
those of the wire. `named` is the share of them whose cause is `cpu_throttled` or `cpu_wait`.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

from benchmarks.http_client import prepared
from benchmarks.machine import Sitting, part_parser
from benchmarks.tables import print_head, print_row
from roseinfer.bench.load.client import LoadClient
from roseinfer.bench.load.endpoint import Endpoint
from roseinfer.bench.load.launcher import Server, free_port, serve_command
from roseinfer.explain.evidence import get
from roseinfer.observe.gaps.causes import Cause
from roseinfer.observe.gaps.request_gaps import gaps_of
from roseinfer.observe.recorder.recording import Recording
from roseinfer.runtime.cgroup import ROOT

MAX_TOKENS = 900
PERIOD_US = 100_000
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
def serving_in(group: Group | None, log: Path) -> Iterator[Server]:
    """A server that is ready, started in the group, so that it looks for waits there."""
    port, ops_port = free_port(), free_port()
    command = serve_command(port, ops_port, ["--runner.num-threads", "1"])
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


def causes_of(server: Server, since_ns: int, *, is_engine: bool) -> Counter[Cause]:
    """How many slow gaps that ended since then have each cause."""
    content = get(f"http://127.0.0.1:{server.ops_port}/debug/recording", "")
    with tempfile.NamedTemporaryFile(suffix=".npz") as file:
        file.write(content)
        file.flush()
        recording = Recording.load(Path(file.name))
    gaps = gaps_of(recording, "engine" if is_engine else "wire")
    return Counter(gap.cause for gap in gaps if gap.is_slow and gap.start_ns > since_ns)


def measure(log: Path, victim: str, trouble: str, num_streams: int) -> Counter[Cause]:
    """The causes of slow gaps while the victim, `engine` or `front end`, has a quota, a hog beside it, or nothing."""
    group = Group() if trouble not in {"hog", "none"} else None
    try:
        with serving_in(group, log) as server:
            generate(server, num_streams)  # what is usual
            pids = {"engine": server.engine_pid(), "front end": server.pid, "telemetry": server.telemetry_pid()}
            since_ns = time.monotonic_ns()
            if group is not None:
                for name, pid in pids.items():
                    if name != victim:
                        group.remove(pid)
                group.limit(float(trouble))
                generate(server, num_streams)
                for pid in pids.values():
                    group.remove(pid)
            elif trouble == "hog":
                with hog_beside(pids[victim]):
                    generate(server, num_streams)
            else:
                generate(server, num_streams)
            return causes_of(server, since_ns, is_engine=victim == "engine")
    finally:
        if group is not None:
            group.close()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = part_parser(__doc__, "bench/host_waits.json")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--quotas", type=float, nargs="+", default=[0.3, 0.6, 0.9])
    args = parser.parse_args(arguments)
    sitting, results = Sitting("host_waits"), {}
    log = args.out.with_suffix(".log")
    log.parent.mkdir(parents=True, exist_ok=True)
    print_head("victim", "trouble", "slow gaps", "named", "causes")
    for victim in ("engine", "front end"):
        for trouble in ("none", "hog", *map(str, args.quotas)):
            causes = measure(log, victim, trouble, args.streams)
            named = sum(causes[cause] for cause in NAMED) / causes.total() if causes else 0.0
            counts = ", ".join(f"{cause} {count}" for cause, count in causes.most_common())
            print_row(victim, trouble, causes.total(), f"{named:.0%}", counts)
            results[f"{victim}, {trouble}"] = {str(cause): count for cause, count in causes.items()}
    sitting.write(args.out, results)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
