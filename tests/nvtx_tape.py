"""The tool that tests attach to NVTX in Nsight's place: built from `nvtx_recorder.c`, and what it wrote, read again."""

import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from tests.conftest import require_tool

SOURCE = Path(__file__).with_name("nvtx_recorder.c")


def build_recorder(directory: Path) -> Path:
    """The library for NVTX_INJECTION64_PATH; it writes to the file that NVTX_RECORDER_FILE names."""
    library = directory / "recorder.so"
    command = [require_tool("gcc"), "-Wall", "-Werror", "-shared", "-fPIC", "-o", str(library), str(SOURCE)]
    subprocess.run(command, check=True)
    return library


@dataclass
class Range:
    """One range: its name, the step it says, and the ranges in it."""

    name: str
    category: str
    step_id: int
    children: list["Range"] = field(default_factory=list)

    def within(self, name: str) -> list["Range"]:
        """All ranges of this name in it, however deep."""
        found = [self] if self.name == name else []
        return found + [inner for child in self.children for inner in child.within(name)]


class Tape:
    """What the recorder wrote."""

    def __init__(self, text: str) -> None:
        self.domains: dict[int, str] = {}
        self.strings: dict[int, str] = {}
        self.categories: dict[int, str] = {}
        self.ranges: list[Range] = []  # outermost, of the domain `roseinfer`
        self._open: list[Range] = []
        for line in text.splitlines():
            kind, *words = line.split(" ")
            getattr(self, f"_{kind}")(*words)
        assert self._open == []

    def _domain(self, number: str, name: str) -> None:
        self.domains[int(number)] = name

    def _string(self, number: str, name: str) -> None:
        self.strings[int(number)] = name

    def _category(self, number: str, name: str) -> None:
        self.categories[int(number)] = name

    def _push(self, domain: str, string: str, category: str, payload: str) -> None:
        if self.domains.get(int(domain)) == "roseinfer":
            name = self.strings[int(string)]  # a string that is not registered would be missing here
            found = Range(name, self.categories[int(category)], int(payload))
            (self._open[-1].children if self._open else self.ranges).append(found)
            self._open.append(found)

    def _pop(self, domain: str) -> None:
        if self.domains.get(int(domain)) == "roseinfer":
            self._open.pop()
