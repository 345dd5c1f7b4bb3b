"""The CPU quota of control groups of both versions, from files as the kernel writes them."""

from pathlib import Path

import pytest

from roseinfer.runtime.cgroup import cpu_groups, cpu_quota, throttled_ns

V1_STAT = "nr_periods 26\nnr_throttled 21\nthrottled_time 561101761\n"
V2_STAT = "usage_usec 10\nnr_periods 26\nnr_throttled 21\nthrottled_usec 561101\n"


def write(directory: Path, **files: str) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (directory / name.replace("__", ".")).write_text(content)
    return directory


def membership(tmp_path: Path, *lines: str) -> Path:
    return write(tmp_path, membership="".join(f"{line}\n" for line in lines)) / "membership"


def test_the_strictest_of_nested_groups_counts(tmp_path: Path) -> None:
    root = tmp_path / "fs"
    write(root, cpu__stat=V2_STAT)
    pod = write(root / "pod", cpu__stat=V2_STAT, cpu__max="150000 100000\n")
    own = write(pod / "container", cpu__stat=V2_STAT, cpu__max="max 100000\n")
    groups = cpu_groups(root, membership(tmp_path, "0::/pod/container"))
    assert groups == [own, pod, root]
    assert cpu_quota(groups) == 1.5


@pytest.mark.parametrize("controllers", ["cpu", "cpu,cpuacct"])
def test_version_one_has_a_hierarchy_for_the_controller(tmp_path: Path, controllers: str) -> None:
    root = tmp_path / "fs"
    mount = write(root / controllers, cpu__stat=V1_STAT, cpu__cfs_quota_us="-1\n", cpu__cfs_period_us="100000\n")
    own = write(mount / "job", cpu__stat=V1_STAT, cpu__cfs_quota_us="30000\n", cpu__cfs_period_us="100000\n")
    groups = cpu_groups(root, membership(tmp_path, "4:memory:/other", f"1:{controllers}:/job", "0::/"))
    assert groups == [own, mount]
    assert cpu_quota(groups) == 0.3


def test_a_container_finds_its_own_group_at_the_root(tmp_path: Path) -> None:
    root = write(tmp_path / "fs", cpu__stat=V2_STAT, cpu__max="50000 100000\n")
    groups = cpu_groups(root, membership(tmp_path, "0::/kubepods/as/the/host/names/it"))
    assert groups == [root]
    assert cpu_quota(groups) == 0.5


def test_a_system_without_groups_has_no_quota(tmp_path: Path) -> None:
    assert cpu_groups(tmp_path, tmp_path / "missing") == []
    assert cpu_quota([]) is None
    assert cpu_quota([write(tmp_path / "odd", cpu__max="what\n")]) is None


def test_both_versions_say_how_long_a_group_was_stopped() -> None:
    assert throttled_ns(V1_STAT.encode()) == 561_101_761
    assert throttled_ns(V2_STAT.encode()) == 561_101_000
    assert throttled_ns(b"nr_periods 0\n") == 0
