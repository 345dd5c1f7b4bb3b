"""Words and calls that the project does without, each with the reason. A rule returns the places that break it."""

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.repo.tree import ROOT, SOURCE, name_of, python_files, tree_of

# Names that say nothing, except the KV cache manager, which is the term of the field.
EMPTY_NAME = re.compile(
    r"(?i:(^|_)utils?(_|$)|utilities|helper|(?<!kv_cache_)(?<!KVCache)manager|mixin)|Util|^_?Base([A-Z_]|$)|Base$|^_?Abstract"
)

UNSAFE_MODULES = {"pickle", "cPickle", "dill", "marshal", "shelve", "cloudpickle", "joblib"}
UNSAFE_CALLS = {"eval", "exec", "torch.load", "yaml.load", "yaml.unsafe_load", "os.system"}

CATCHES_ALL = frozenset({"server/middleware.py", "engine/loop.py", "observe/hub.py"})
# Programs, and the SDK, which reads its own.
READS_ENVIRONMENT = frozenset({"cli/commands.py", "cli/main.py", "observe/otel.py", "ray/child.py", "ray/serve.py"})

SOURCES = python_files(SOURCE)
PROGRAMS = [*SOURCES, *python_files(ROOT / "tools")]


def places(paths: list[Path], breaks: Callable[[ast.AST], bool], excused: frozenset[str] = frozenset()) -> list[str]:
    """`file:line` of every node that breaks a rule, in all but the excused files."""
    return [
        f"{name_of(path)}:{getattr(node, 'lineno', 1)}"
        for path in paths
        if name_of(path) not in excused
        for node in ast.walk(tree_of(path))
        if breaks(node)
    ]


def dotted(node: ast.AST | None) -> str:
    """`torch.load` for the expression of that name; empty for anything that is not a plain name."""
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=name) if prefix := dotted(value):
            return f"{prefix}.{name}"
        case _:
            return ""


def imports(node: ast.AST) -> Iterator[str]:
    """Top-level modules that the statement imports, and the names it takes from them."""
    match node:
        case ast.Import(names=aliases):
            yield from (alias.name.split(".")[0] for alias in aliases)
        case ast.ImportFrom(module=module, names=aliases):
            yield (module or "").split(".")[0]
            yield from (alias.name for alias in aliases)


def test_names_say_something() -> None:
    def is_empty(node: ast.AST) -> bool:
        return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and bool(
            EMPTY_NAME.search(node.name)
        )

    assert places(PROGRAMS, is_empty) == []
    assert [name_of(path) for path in python_files() if EMPTY_NAME.search(path.stem)] == []


def test_nothing_executes_what_it_reads() -> None:
    """No code can come in with data: no pickle, no eval, no remote code of a model."""

    def is_unsafe(node: ast.AST) -> bool:
        return (
            not UNSAFE_MODULES.isdisjoint(imports(node))
            or (isinstance(node, ast.Call) and dotted(node.func) in UNSAFE_CALLS)
            or (
                isinstance(node, ast.keyword) and node.arg == "trust_remote_code" and ast.unparse(node.value) != "False"
            )
        )

    assert places(PROGRAMS, is_unsafe) == []


def test_an_attribute_exists_or_is_an_error() -> None:
    """A default hides the day on which the attribute was renamed."""
    assert (
        places(
            SOURCES, lambda node: isinstance(node, ast.Call) and dotted(node.func) == "getattr" and len(node.args) > 2
        )
        == []
    )


def test_no_import_is_for_type_checking_only() -> None:
    """Such an import hides a cycle instead of removing it."""
    assert places(SOURCES, lambda node: "TYPE_CHECKING" in (*imports(node), dotted(node).rpartition(".")[2])) == []


def test_the_environment_is_read_in_one_place() -> None:
    names = ("os.environ", "os.getenv")
    assert places(SOURCES, lambda node: dotted(node) in names, READS_ENVIRONMENT) == []


def test_three_places_may_catch_everything() -> None:
    """Elsewhere a handler of everything may only tidy up and raise again."""

    def catches_all(node: ast.AST) -> bool:
        if not isinstance(node, ast.ExceptHandler):
            return False
        caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
        is_wide = any(error is None or dotted(error) in {"Exception", "BaseException"} for error in caught)
        last = node.body[-1]
        return is_wide and not (isinstance(last, ast.Raise) and last.exc is None)

    assert places(SOURCES, catches_all, CATCHES_ALL) == []
    assert {place.split(":")[0] for place in places(SOURCES, catches_all)} == CATCHES_ALL


def test_every_module_says_what_it_is() -> None:
    docstrings = {name_of(path): ast.get_docstring(tree_of(path)) or "" for path in python_files()}
    assert [name for name, docstring in docstrings.items() if len(docstring.split()) < 4] == []
