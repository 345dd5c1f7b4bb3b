"""Writes the maps of the source from docstrings: docs/source.md, and the table of folders in docs/architecture.md."""

import ast
from pathlib import Path

from generated_files import ROOT, filled

SOURCE = ROOT / "src" / "roseinfer"


def page() -> str:
    """docs/source.md: a heading for each folder, a row for each file."""
    folders = sorted({path.parent for path in SOURCE.rglob("*.py")})
    return filled("docs/source.md", {"map of the source": "".join(map(_section, folders))})


def architecture() -> str:
    """docs/architecture.md with its table of the folders right below src/roseinfer."""
    packages = sorted(SOURCE.glob("*/__init__.py"))
    rows = "".join(f"| `{path.parent.name}/` | {_first_line(path)} |\n" for path in packages)
    return filled("docs/architecture.md", {"table of folders": f"| folder | what it does |\n|---|---|\n{rows}"})


def _section(folder: Path) -> str:
    files = sorted(path for path in folder.glob("*.py") if not path.name.startswith("__"))
    rows = "".join(f"| `{path.relative_to(SOURCE)}` | {_first_line(path)} |\n" for path in files)
    table = f"\n| file | what it does |\n|---|---|\n{rows}" if rows else ""
    return f"\n## {folder.relative_to(SOURCE.parent)}\n\n{_first_line(folder / '__init__.py')}\n{table}"


def _first_line(path: Path) -> str:
    """The first paragraph of the file's docstring, on one line."""
    paragraph = (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n\n")[0]
    return " ".join(paragraph.split()).replace("|", r"\|")
