"""Reads names, signatures and docstrings from Python sources and from modules written in C."""

import ast
import importlib
import inspect
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

# Tests, installed packages, programs that are no library, and Windows' twins of modules that are read anyway.
_SKIPPED = frozenset(
    {"test", "tests", "site-packages", "idlelib", "lib2to3", "turtledemo", "ensurepip", "pydoc_data"}
    | {"ntpath", "nturl2path"}
)
# Documented in C, where no syntax tree reaches.
_BUILT_IN = ("builtins", "math", "itertools", "time", "sys", "gc", "errno", "array", "binascii", "zlib", "select")


@dataclass(frozen=True, slots=True)
class Entry:
    """One documented name. `signature` is the line after `def` or `class`, without the colon; empty for a module."""

    kind: str
    name: str
    signature: str
    doc: str

    @property
    def is_public(self) -> bool:
        """Whether no part of the name starts with an underscore."""
        return not any(part.startswith("_") for part in self.name.split("."))

    @property
    def first_paragraph(self) -> str:
        """The docstring up to its first empty line, on one line."""
        return " ".join(self.doc.split("\n\n", 1)[0].split())


def standard_library() -> Iterator[tuple[str, list[Entry]]]:
    """Every module of the running interpreter's standard library that documents something, in a fixed order."""
    for name in _BUILT_IN:
        yield name, _from_module(importlib.import_module(name))
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if _SKIPPED.isdisjoint(parts) and "-" not in parts[0]:
            name = public_name(".".join(part for part in parts if part != "__init__"))
            entries = from_source(name, path.read_text(encoding="utf-8"))
            if entries:
                yield name, entries


def public_name(module: str) -> str:
    """The name a user imports: `_pydecimal` is `decimal` written in Python, `posixpath` is `os.path`."""
    return "os.path" if module == "posixpath" else re.sub(r"^_py(?=[a-z])", "", module)


def from_source(module: str, source: str) -> list[Entry]:
    """The documented module, classes, functions and methods of one source text, in the order of the text."""
    tree = ast.parse(source, filename=module)
    doc = ast.get_docstring(tree)
    head = [Entry("module", module, "", doc)] if doc else []
    return head + list(_from_body(module, tree.body))


def _from_body(prefix: str, body: list[ast.stmt]) -> Iterator[Entry]:
    for node in body:
        if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        name = f"{prefix}.{node.name}"
        kind = "class" if isinstance(node, ast.ClassDef) else "function"
        doc = ast.get_docstring(node)
        if doc:
            yield Entry(kind, name, _signature(node), doc)
        if isinstance(node, ast.ClassDef):
            yield from _from_body(name, node.body)


def _signature(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    if isinstance(node, ast.ClassDef):
        bases = ", ".join(ast.unparse(base) for base in node.bases)
        return f"{node.name}({bases})" if bases else node.name
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"{node.name}({ast.unparse(node.args)}){returns}"


def _from_module(module: ModuleType) -> list[Entry]:
    """The documented names of a module written in C, and the methods of its classes."""
    prefix = "" if module.__name__ == "builtins" else f"{module.__name__}."
    entries = [Entry("module", module.__name__, "", inspect.cleandoc(module.__doc__))] if module.__doc__ else []
    for name, value in sorted(vars(module).items()):
        if name.startswith("_") or not callable(value) or not value.__doc__:
            continue
        is_class = inspect.isclass(value)
        entries.append(_live_entry("class" if is_class else "function", prefix + name, value))
        methods = sorted(vars(value).items()) if is_class and not issubclass(value, BaseException) else []
        entries.extend(
            _live_entry("function", f"{prefix}{name}.{method}", function)
            for method, function in methods
            if not method.startswith("_") and callable(function) and function.__doc__
        )
    return entries


def _live_entry(kind: str, name: str, value: object) -> Entry:
    try:
        arguments = str(inspect.signature(value))  # type: ignore[arg-type]
    except (TypeError, ValueError):  # C code without a text signature
        arguments = ""
    if " at 0x" in arguments:  # an address would make the corpus differ from run to run
        arguments = "(...)"
    return Entry(kind, name, name.rsplit(".", 1)[-1] + arguments, inspect.cleandoc(value.__doc__ or ""))
