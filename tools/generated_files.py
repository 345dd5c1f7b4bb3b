"""Writes generated files, or names the stale ones; the generated parts of a page stand between two comments."""

import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def filled(page: str, parts: Mapping[str, str]) -> str:
    """A page of the repository with each of its generated parts, by name, made anew."""
    text = (ROOT / page).read_text()
    for name, part in parts.items():
        begin, end = f"<!-- {name}, by `make docs` -->\n", f"<!-- end of {name} -->\n"
        before, rest = text.split(begin)
        text = f"{before}{begin}\n{part}\n{end}{rest.split(end)[1]}"
    return text


def write_or_check(files: Mapping[str, str], command: str) -> int:
    """Write what differs; with `--check` on the command line only name it. Returns the exit code."""
    stale = [name for name, text in files.items() if not (ROOT / name).exists() or (ROOT / name).read_text() != text]
    if "--check" in sys.argv[1:]:
        if stale:
            print(f"stale: {', '.join(stale)}; run `{command}`", file=sys.stderr)
        return int(bool(stale))
    for name in stale:
        (ROOT / name).parent.mkdir(parents=True, exist_ok=True)
        (ROOT / name).write_text(files[name])
        print(f"wrote {name}")
    return 0
