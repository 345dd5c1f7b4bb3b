"""Prints the size of the code: lines, files, options, the fullest folders, the engine's core and the longest function.

python tools/counts.py
"""

import ast
import subprocess
from collections import Counter
from pathlib import Path, PurePath

from roseinfer.config.options import options

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = PurePath("src/roseinfer")
FOLDERS = ("src", "benchmarks", "tools", "loadtest")


def num_lines(paths: list[PurePath]) -> int:
    return sum((ROOT / path).read_text().count("\n") for path in paths)


def longest_function(paths: list[PurePath]) -> tuple[int, str]:
    """Lines and place of the longest function."""
    return max(
        (int(node.end_lineno or 0) - node.lineno + 1, f"{path}:{node.lineno} {node.name}")
        for path in paths
        for node in ast.walk(ast.parse((ROOT / path).read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )


def main() -> None:
    listed = subprocess.run(["git", "ls-files", *FOLDERS], cwd=ROOT, capture_output=True, text=True, check=True)  # noqa: S603, S607
    files = [PurePath(line) for line in listed.stdout.splitlines()]
    programs = [path for path in files if path.suffix == ".py"]
    for folder in FOLDERS:
        mine = [path for path in programs if path.parts[0] == folder]
        print(f"{folder + '/':<24}{num_lines(mine):>8,} lines of Python in {len(mine)} files")
    print(f"{'together':<24}{num_lines(programs):>8,} lines of Python in {len(programs)} files")
    core = [path for path in programs if path.is_relative_to(PACKAGE / "engine" / "core")]
    print(f"{'engine/core/':<24}{num_lines(core):>8,} lines of Python in {len(core)} files")
    print(f"{'options':<24}{len(options()):>8,}")
    print("longest function        {:>8,} lines: {}".format(*longest_function(programs)))
    print(f"\nentries of each folder of {PACKAGE}, the fullest first")
    entries = {parent / name for path in files if path.is_relative_to(PACKAGE) for parent, name in _steps(path)}
    for parent, count in Counter(entry.parent for entry in entries).most_common():
        print(f"{count:>8}  {parent}")


def _steps(path: PurePath) -> list[tuple[PurePath, str]]:
    """Each folder on the way to the file from the package on, and what stands in it."""
    parents = [parent for parent in path.parents if parent.is_relative_to(PACKAGE)]
    return [(parent, path.relative_to(parent).parts[0]) for parent in parents]


if __name__ == "__main__":
    main()
