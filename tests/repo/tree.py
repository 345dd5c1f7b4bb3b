"""Turns the repository into lists of files and syntax trees for the rules beside it. Knows no rule."""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "roseinfer"
TOP_FOLDERS = ("src", "tests", "tools", "docs", ".ci", "benchmarks", "loadtest", "deploy", "dashboards")
TEXT_SUFFIXES = {"", ".py", ".md", ".toml", ".txt", ".yaml", ".yml", ".json", ".sh", ".cpp", ".html", ".js", ".css"}
MAX_TEXT_BYTES = 200_000  # larger ones are data: a vocabulary, a trace


def is_ours(path: Path) -> bool:
    return path.is_file() and "__pycache__" not in path.parts and path.name != ".git"  # a file in a worktree


@cache
def files() -> tuple[Path, ...]:
    """Every file of the project: those in the root, and those in its folders."""
    nested = (path for name in TOP_FOLDERS for path in (ROOT / name).rglob("*"))
    return tuple(sorted(path for path in (*ROOT.iterdir(), *nested) if is_ours(path)))


def text_files() -> list[Path]:
    return [path for path in files() if path.suffix in TEXT_SUFFIXES and path.stat().st_size <= MAX_TEXT_BYTES]


def markdown_files() -> list[Path]:
    return [path for path in files() if path.suffix == ".md"]


def python_files(folder: Path = ROOT) -> list[Path]:
    return [path for path in files() if path.suffix == ".py" and path.is_relative_to(folder)]


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def name_of(path: Path) -> str:
    """The path as a person says it: below src/roseinfer, or below the root."""
    return str(path.relative_to(SOURCE if path.is_relative_to(SOURCE) else ROOT))


def definitions(path: Path) -> set[str]:
    """Everything that the file defines: `function`, `Class`, `Class.method`, `Class.field`, `CONSTANT`."""
    names: set[str] = set()

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            match node:
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                    names.add(prefix + name)
                case ast.ClassDef(name=name):
                    names.add(prefix + name)
                    visit(node.body, f"{prefix}{name}.")
                case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                    names.add(prefix + name)
                case _:
                    pass

    visit(tree_of(path).body, "")
    return names
