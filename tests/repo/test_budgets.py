"""Nothing is too long to be seen at once: files, functions, parameter lists."""

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.repo.tree import name_of, python_files, tree_of

MAX_FILE_LINES = 350
MAX_FUNCTION_LINES = 60
MAX_PARAMETERS = 8

# A longer file is named here and says why it is one, in a comment that begins like this.
LONG_FILES = {"observe/catalogue.py", "config_sections.py", "engine/scheduler.py"} | {"tests/unit/server/harness.py"}
EXPLANATION = "# Over 350 lines because "


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def num_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def num_parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    arguments = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
    return sum(argument.arg not in {"self", "cls"} for argument in arguments)


def test_a_file_is_short_or_says_why_it_is_not() -> None:
    lengths = {name_of(path): len(path.read_text().splitlines()) for path in python_files()}
    assert {
        name: length for name, length in lengths.items() if length > MAX_FILE_LINES and name not in LONG_FILES
    } == {}
    assert all(lengths.get(name, 0) > MAX_FILE_LINES for name in LONG_FILES), "a file became short again: unlist it"
    for path in python_files():
        if name_of(path) in LONG_FILES:
            reasons = [line for line in path.read_text().splitlines() if line.startswith(EXPLANATION)]
            assert reasons, f"{name_of(path)} does not say why it is long"


def test_functions_are_short() -> None:
    lengths = {f"{name_of(path)}:{node.name}": num_lines(node) for path in python_files() for node in functions(path)}
    assert {name: length for name, length in lengths.items() if length > MAX_FUNCTION_LINES} == {}


def test_parameter_lists_are_short() -> None:
    counts = {
        f"{name_of(path)}:{node.name}": num_parameters(node) for path in python_files() for node in functions(path)
    }
    assert {name: count for name, count in counts.items() if count > MAX_PARAMETERS} == {}
