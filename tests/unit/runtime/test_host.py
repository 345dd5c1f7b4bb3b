"""What the host does to a server, from files as the kernel writes them and from this machine's own."""

import os
from pathlib import Path

from roseinfer.runtime.host import HostFacts, read_host

STAT = "cpu  10 20 30 40 50 60 70 {steal} 0 0\ncpu0 1 1 1 1 1 1 1 99999 0 0\n"
PROCESS = "7 (a name) with) S 1 7 7 0 -1 4194560 1000 0 {faults} 0 5 5 0 0 20 0 1 0 1 1 1"


def test_steal_faults_and_clocks_are_read_from_their_places(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "stat").write_text(STAT.format(steal=250))
    (tmp_path / "7" / "stat").write_text(PROCESS.format(faults=42))
    for core, kilohertz in ((0, 1_200_000), (2, 3_400_000), (5, 800_000)):
        (tmp_path / f"cpu{core}" / "cpufreq").mkdir(parents=True)
        (tmp_path / f"cpu{core}" / "cpufreq" / "scaling_cur_freq").write_text(f"{kilohertz}\n")
    found = read_host(7, tmp_path, tmp_path, allowed=[2, 0, 9])
    assert found == HostFacts(250 / os.sysconf("SC_CLK_TCK"), 42, 1.2e9, 3.4e9)


def test_what_cannot_be_read_is_not_reported(tmp_path: Path) -> None:
    assert read_host(7, tmp_path, tmp_path) == HostFacts()


def test_this_process_has_had_its_pages_from_somewhere() -> None:
    assert 0 <= read_host(os.getpid()).major_faults < 1_000_000
