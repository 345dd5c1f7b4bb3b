"""How much of each slow gap that is called `event_loop` the front end's thread computed, by its own clock.

    python -m benchmarks.stress.event_loop [--streams 32] [--rounds 2] [--troubles none hog 0.6] [--out FILE]

The embedded model is served by a process whose event loop notes, before and after it waits for sockets and after each
write to a stream, the time and the processor time of its thread. So a moment that is called `event_loop` is compared
with what the thread computed then. `none` is server and client on the machine's cores as they are; a `hog`
shares a core with the front end, and a number is a CPU quota of it, as in `host_waits.py`. `computing` counts the gaps
in which at least 80 % of that part is computing.
"""

import sys
import tempfile
import time
from array import array
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.machine import Sitting, part_parser
from benchmarks.stress.host_waits import Group, generate, hog_beside, serving_in
from benchmarks.tables import print_head, print_row
from roseinfer.cli.main import main as roseinfer
from roseinfer.explain.evidence import get
from roseinfer.observe.gaps.causes import Cause
from roseinfer.observe.gaps.request_gaps import Gap, split_gaps
from roseinfer.observe.gaps.step_gaps import Segments
from roseinfer.observe.hub import Hub
from roseinfer.observe.recorder.recording import Recording
from roseinfer.runtime.cpu_waits import LoopWaits

COMPUTING = 0.8
NOTED_SERVE = (sys.executable, "-m", "benchmarks.stress.event_loop", "--serve")
Samples = npt.NDArray[np.int64]
"""Of the loop's thread: moments of the monotonic clock, and its processor time at each, `(2, num_samples)`."""


def serve(file: Path, arguments: Sequence[str]) -> int:
    """`roseinfer serve`, whose loop notes its processor time; writes what it noted when it ends."""
    noted = array("q")

    def note() -> None:
        noted.extend((time.monotonic_ns(), time.thread_time_ns()))

    def noting(method: Any) -> Any:
        def call(*values: Any, **named: Any) -> Any:
            note()
            try:
                return method(*values, **named)
            finally:
                note()

        return call

    LoopWaits.rest = noting(LoopWaits.rest)  # type: ignore[method-assign]  # before and after it waits for sockets
    Hub.on_write = noting(Hub.on_write)  # type: ignore[method-assign]
    try:
        return roseinfer(arguments)
    finally:
        np.save(file, np.frombuffer(noted, np.int64).reshape(-1, 2).T)


def share_of(gap: Gap, segments: Segments, samples: Samples) -> float:
    """Of the gap's part that is called `event_loop`, the share that the thread computed.

    Where in the while between two samples it computed is not known, so of that while no more of the part can be
    computing than the thread computed in all of it.
    """
    first, last = np.searchsorted(samples[0], [gap.start_ns, gap.end_ns]).tolist()
    moments, ran_ns = (row[max(first - 1, 0) : last + 1] for row in samples)
    ran_ns = np.diff(ran_ns)
    called_ns, at_ns = np.zeros(len(ran_ns)), gap.start_ns
    for cause, duration in segments:
        if cause is Cause.EVENT_LOOP:
            within = np.clip(moments, at_ns, at_ns + duration)
            called_ns += np.diff(within)
        at_ns += duration
    return float(np.minimum(called_ns, ran_ns).sum()) / gap.parts[Cause.EVENT_LOOP]


def measure(folder: Path, trouble: str, num_streams: int) -> tuple[Counter[Cause], list[float]]:
    """The causes of slow gaps between writes under a load, and what of each `event_loop` was computing."""
    group = Group() if trouble not in {"hog", "none"} else None
    file = folder / "samples.npy"
    try:
        with serving_in(group, folder / "log", (*NOTED_SERVE, str(file))) as server:
            generate(server, num_streams)  # what is usual
            since_ns = time.monotonic_ns()
            if group is not None:
                for pid in (server.engine_pid(), server.telemetry_pid()):
                    group.remove(pid)
                group.limit(float(trouble))
                generate(server, num_streams)
                group.remove(server.pid)
            else:
                with hog_beside(server.pid) if trouble == "hog" else nullcontext():
                    generate(server, num_streams)
            content = get(f"http://127.0.0.1:{server.ops_port}/debug/recording", "")
    finally:
        if group is not None:
            group.close()
    (folder / "recording.npz").write_bytes(content)
    recording, samples = Recording.load(folder / "recording.npz"), np.load(file)
    slow = [each for each in split_gaps(recording) if each[0].is_slow and each[0].start_ns > since_ns]
    shares = [share_of(gap, segments, samples) for gap, segments in slow if gap.cause is Cause.EVENT_LOOP]
    return Counter(gap.cause for gap, _ in slow), shares


def main(arguments: Sequence[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else arguments
    if given[:1] == ["--serve"]:
        return serve(Path(given[1]), ["serve", *given[2:]])
    parser = part_parser(__doc__, "bench/event_loop.json")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--troubles", nargs="+", default=["none"])
    args = parser.parse_args(given)
    sitting, results = Sitting("event_loop"), list[dict[str, Any]]()
    print_head("trouble", "slow gaps", "event_loop", "computing", "least", "causes")
    for trouble in [each for _ in range(args.rounds) for each in args.troubles]:
        with tempfile.TemporaryDirectory() as folder:
            causes, shares = measure(Path(folder), trouble, args.streams)
        num_computing = sum(share >= COMPUTING for share in shares)
        counts = ", ".join(f"{cause} {count}" for cause, count in causes.most_common())
        least = f"{min(shares):.0%}" if shares else ""
        print_row(trouble, causes.total(), len(shares), num_computing, least, counts)
        results.append({"trouble": trouble, "causes": {str(cause): n for cause, n in causes.items()}, "shares": shares})
    sitting.write(args.out, {"rounds": results})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
