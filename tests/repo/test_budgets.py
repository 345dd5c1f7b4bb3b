"""Functions and parameter lists are short."""

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.repo.tree import name_of, python_files, tree_of

MAX_FUNCTION_LINES = 60
MAX_PARAMETERS = 8


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def num_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def num_parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    arguments = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
    return sum(argument.arg not in {"self", "cls"} for argument in arguments)


def test_functions_are_short() -> None:
    lengths = {f"{name_of(path)}:{node.name}": num_lines(node) for path in python_files() for node in functions(path)}
    assert {name: length for name, length in lengths.items() if length > MAX_FUNCTION_LINES} == {}


def test_parameter_lists_are_short() -> None:
    counts = {
        f"{name_of(path)}:{node.name}": num_parameters(node) for path in python_files() for node in functions(path)
    }
    assert {name: count for name, count in counts.items() if count > MAX_PARAMETERS} == {}
