"""Reads what a host does to a server beside giving it cores: steal, pages that come from disk, clocks of the cores."""

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

PROC, CPUS = Path("/proc"), Path("/sys/devices/system/cpu")
_MAX_CPUS = 16  # whose clocks are read: each takes the kernel some microseconds, and neighbours change theirs together
_STEAL = 8  # field of the line `cpu` of /proc/stat
_MAJOR_FAULTS = 9  # field behind the name in /proc/PID/stat


class HostFacts(NamedTuple):
    """What could be read, and 0 for the rest."""

    steal_s: float = 0.0  # since the host's start, of all cores, that a hypervisor gave to others
    major_faults: int = 0  # of the process, since its start
    lowest_hz: float = 0.0  # clock of the cores that this process may use, now
    highest_hz: float = 0.0


def read_host(pid: int, proc: Path = PROC, cpus: Path = CPUS, allowed: Iterable[int] | None = None) -> HostFacts:
    """Reads them for a process, and for `allowed` cores, or those of this one."""
    steal = _fields(proc / "stat")
    faults = _fields(proc / str(pid) / "stat", behind=")") if pid else []
    cores = sorted(os.sched_getaffinity(0) if allowed is None else allowed)[:_MAX_CPUS]
    clocks = [*_clocks(cpus, cores)]
    return HostFacts(
        int(steal[_STEAL]) / os.sysconf("SC_CLK_TCK") if len(steal) > _STEAL else 0.0,
        int(faults[_MAJOR_FAULTS]) if len(faults) > _MAJOR_FAULTS else 0,
        min(clocks, default=0.0),
        max(clocks, default=0.0),
    )


def _clocks(cpus: Path, cores: Iterable[int]) -> Iterator[float]:
    for core in cores:
        with suppress(OSError, ValueError):
            yield int((cpus / f"cpu{core}" / "cpufreq" / "scaling_cur_freq").read_bytes()) * 1e3


def _fields(path: Path, behind: str = "") -> list[str]:
    """The words of the file's first line; `behind` the last such mark, since a process's name may have spaces."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            line = file.readline()
    except OSError:
        return []
    return line.rpartition(behind)[2].split() if behind else line.split()
