"""What every test may use; the rule that under ROSEINFER_REQUIRE_ALL=1 nothing is skipped; who is tried twice."""

import fcntl
import gc
import os
import shutil
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import NoReturn, TypeVar

import pytest
from hypothesis import HealthCheck, settings

from roseinfer.errors import ConfigError
from roseinfer.model.kernels.library import (
    LEVELS,
    Level,
    build_kernels,
    find_built,
    find_compiler,
    kernels_directory,
    machine,
)

# Sockets, processes and clocks: a machine that stands still for a second can fail what is right.
_TESTS = Path(__file__).parent
_REAL_CLOCKS = ("deploy", "e2e", "integration", "chart/test_start.py", "benchmarks/stress")
ON_REAL_CLOCKS = {_TESTS / name for name in _REAL_CLOCKS}

# Building the image takes longest and cannot be divided. The file would be the last one, with nothing beside it.
_LONGEST = ("deploy", "e2e", "integration", "unit/text/answers/test_tool_calls_cost.py")
LONGEST_FIRST = {_TESTS / name: rank for rank, name in enumerate(_LONGEST)}

# A thread that has nothing to do sleeps. By default it spins, which with more threads than cores, as where two workers
# test, is most of what tests would compute. Read when a library of OpenMP is loaded: here, before torch is.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# No property of ours is a matter of time, and a busy machine is no fault of a test.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

Report = TypeVar("Report", pytest.TestReport, pytest.CollectReport)


def requires_all() -> bool:
    """The environment promises every tool: a test that cannot run has failed."""
    return os.environ.get("ROSEINFER_REQUIRE_ALL") == "1"


def require_tool(name: str) -> str:
    """The path of a program that the test needs; without it the test is skipped, or fails where nothing may be."""
    path = shutil.which(name)
    if path is None:
        go_without(f"{name} is not installed; .ci/run installs what the tests need")
    return path


def require_path(path: Path, made_by: str = ".ci/run") -> Path:
    """The same for what is made in build/."""
    if not path.exists():
        go_without(f"there is no {path}; `{made_by}` sets it up")
    return path


def go_without(reason: str) -> NoReturn:
    if requires_all():
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def kernels_dir(pytestconfig: pytest.Config) -> Path:
    """Where tests have kernels compiled: beside pytest's own cache, so that the next session finds them."""
    return pytestconfig.cache.mkdir("kernels")


BuiltKernels = Callable[[str], Path]


@pytest.fixture
def only_our_collections() -> Iterator[None]:
    """The collector runs only when the test calls it."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(scope="session")
def built_kernels(kernels_dir: Path) -> BuiltKernels:
    """Level -> the directory that holds its kernels, compiled once for all sessions until the sources change."""
    refusals: dict[str, ConfigError] = {}  # of sources that do not compile, so that not every test tries it again

    def build(level: str) -> Path:
        if level in refusals:
            raise refusals[level]
        try:
            with (kernels_dir / "lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)  # another worker may want the same, and compiling takes all cores
                _take_over(LEVELS[level], kernels_dir)
                build_kernels(LEVELS[level], kernels_dir, find_compiler(compiler_of(LEVELS[level].machine)))
        except ConfigError as error:
            refusals[level] = error
            raise
        return kernels_dir

    return build


def compiler_of(target: str) -> str:
    """The path of a compiler for an architecture."""
    return require_tool("g++" if target == machine() else f"{target}-linux-gnu-g++")


def _take_over(level: Level, kernels_dir: Path) -> None:
    """What `make setup` has compiled need not be compiled again; the name tells sources, flags and compiler."""
    made = find_built(level, kernels_directory(None))
    if made is not None and not (kernels_dir / made.name).exists():
        copy = kernels_dir / "copy"
        shutil.copyfile(made, copy)
        copy.replace(kernels_dir / made.name)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Retries a test on a real clock once; begins with what takes longest, so that workers end together."""
    for item in items:
        if {item.path, item.path.parent} & ON_REAL_CLOCKS:
            item.add_marker(pytest.mark.flaky(reruns=1))
    items.sort(key=lambda item: min(LONGEST_FIRST.get(path, len(_LONGEST)) for path in (item.path, item.path.parent)))


def _refuse_skip(report: Report) -> Report:
    if report.skipped and requires_all() and not hasattr(report, "wasxfail"):
        told = report.longrepr
        reason = told[2] if isinstance(told, tuple) else told
        report.outcome = "failed"
        report.longrepr = f"under ROSEINFER_REQUIRE_ALL=1 nothing may be skipped; {reason}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    return _refuse_skip((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    return _refuse_skip((yield))
