"""Reads the CPU quota of this process's control groups, of version 1 and 2, and how long it stopped them."""

from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


def cpu_groups(root: Path = ROOT, membership: Path = MEMBERSHIP) -> list[Path]:
    """The directories of the groups whose CPU quota this process shares, its own first; none where there are none.

    A container sees its own group as the root of the hierarchy, whatever name the host has for it.
    """
    try:
        lines = membership.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    groups: list[Path] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        mount = root / controllers
        if not mount.is_dir():
            mount = root / "cpu"
        own = mount / path.lstrip("/")
        groups += [group for group in (own, *own.parents) if group.is_relative_to(mount)]
    return [group for group in dict.fromkeys(groups) if (group / "cpu.stat").is_file()]


def cpu_quota(groups: list[Path]) -> float | None:
    """The cores that the strictest quota allows; None without one."""
    return min(filter(None, map(_quota_of, groups)), default=None)


def _quota_of(group: Path) -> float | None:
    try:
        if (group / "cpu.max").is_file():
            quota, period = (group / "cpu.max").read_text(encoding="ascii").split()
        else:
            quota = (group / "cpu.cfs_quota_us").read_text(encoding="ascii").strip()
            period = (group / "cpu.cfs_period_us").read_text(encoding="ascii")
        return None if quota in {"max", "-1"} else int(quota) / int(period)
    except (OSError, ValueError):
        return None


def throttled_ns(stat: bytes) -> int:
    """How long the quota stopped a group, from its `cpu.stat`: over all processors, as of the last end of a stop."""
    return next(_throttled(stat), 0)


def _throttled(stat: bytes) -> Iterator[int]:
    for line in stat.splitlines():
        name, _, value = line.partition(b" ")
        if name == b"throttled_time":
            yield int(value)
        elif name == b"throttled_usec":
            yield int(value) * 1000
