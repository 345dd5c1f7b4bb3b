"""Nothing in the package runs code that came with data: no pickle, no eval, no code of a model's repository."""

import ast
from collections.abc import Iterator

import pytest

from tests.repo.tree import ROOT

FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
FORBIDDEN_CALLS = {
    "eval",
    "exec",
    "compile",
    "__import__",
    "torch.load",
    "yaml.load",
    "yaml.unsafe_load",
    "yaml.full_load",
}
FORBIDDEN_WORDS = {"trust_remote_code", "allow_pickle", "auto_map", "weights_only"}
SAFE_VALUES = {("allow_pickle", False), ("trust_remote_code", False)}
FOLDERS = ("src", "tools", "benchmarks", "loadtest", "deploy")
IMPORTERS = {"importlib.import_module", "import_module"}  # of a name that is known beforehand, and no forbidden one


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def dangers(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                yield from (f"import {name.name}" for name in names if name.name.split(".")[0] in FORBIDDEN_MODULES)
            case ast.ImportFrom(module=str() as module) if module.split(".")[0] in FORBIDDEN_MODULES:
                yield f"from {module}"
            case ast.ImportFrom(module=str() as module, names=names):
                full = (f"{module}.{name.name}" for name in names)
                yield from (
                    f"from {module} import" for name in full if name.removeprefix("builtins.") in FORBIDDEN_CALLS
                )
            case ast.Call(func=function, keywords=keywords):
                if dotted(function).removeprefix("builtins.") in FORBIDDEN_CALLS:
                    yield f"{dotted(function)}()"
                if dotted(function) in IMPORTERS and names_danger(node.args):
                    yield f"{dotted(function)}()"
                for keyword in keywords:
                    value = keyword.value.value if isinstance(keyword.value, ast.Constant) else None
                    if keyword.arg in FORBIDDEN_WORDS and (keyword.arg, value) not in SAFE_VALUES:
                        yield f"{keyword.arg}="
            case ast.Constant(value=str() as text) if text in FORBIDDEN_WORDS:
                yield f'"{text}"'


def names_danger(arguments: list[ast.expr]) -> bool:
    names = [argument.value for argument in arguments if isinstance(argument, ast.Constant)]
    return any(str(name).split(".")[0] in FORBIDDEN_MODULES for name in names)


def test_nothing_that_came_with_data_is_run() -> None:
    found = {
        f"{path.relative_to(ROOT)}: {danger}"
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
        for danger in dangers(path.read_text(encoding="utf-8"))
    }
    assert found == set()


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from dill import loads",
        "import joblib.numpy_pickle",
        "import os, marshal",
        "import pickle as harmless",
        "from torch import load",
        "from yaml import load as read",
        "from builtins import eval as calculate",
        "builtins.exec(text)",
        "importlib.import_module('pickle')",
        "compile(text, '', 'exec')",
        "__import__(name)",
        "yaml.unsafe_load(text)",
        "getattr(config, 'trust_remote_code')",
        "torch.load(path, weights_only=True)",
        "eval('1')",
        "exec(text)",
        "torch.load(path)",
        "yaml.load(text, Loader=x)",
        "f(trust_remote_code=True)",
        "np.load(path, allow_pickle=True)",
        "f(trust_remote_code=flag)",
        "config['auto_map']",
    ],
)
def test_each_danger_would_be_seen(source: str) -> None:
    assert list(dangers(source))


@pytest.mark.parametrize("source", ["np.load(path, allow_pickle=False)", "msgspec.json.decode(text)", "model.eval()"])
def test_what_is_safe_is_left_alone(source: str) -> None:
    assert not list(dangers(source))
