"""What every test may use, and the rule that under ROSEINFER_REQUIRE_ALL=1 nothing is skipped."""

import os
import shutil
from collections.abc import Generator
from typing import TypeVar

import pytest

Report = TypeVar("Report", pytest.TestReport, pytest.CollectReport)


def requires_all() -> bool:
    """The environment promises every tool: a test that cannot run has failed."""
    return os.environ.get("ROSEINFER_REQUIRE_ALL") == "1"


def require_tool(name: str) -> str:
    """The path of a program that the test needs; without it the test is skipped, or fails where nothing may be."""
    path = shutil.which(name)
    if path is None:
        reason = f"{name} is not installed; .ci/run installs what the tests need"
        if requires_all():
            pytest.fail(reason)
        pytest.skip(reason)
    return path


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
