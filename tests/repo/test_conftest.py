"""ROSEINFER_REQUIRE_ALL=1 turns every way of skipping into a failure; without it, skips stay skips."""

from pathlib import Path

import pytest

CONFTEST = Path(__file__).parents[1] / "conftest.py"
CASES = """
import pytest
from conftest import require_tool

def test_calls_skip():
    pytest.skip("no such thing here")

@pytest.mark.skip(reason="marked")
def test_is_marked():
    raise AssertionError

def test_needs_a_tool():
    require_tool("a-program-that-nobody-has")

def test_has_its_tool():
    assert require_tool("sh").endswith("/sh")

@pytest.mark.xfail(reason="known")
def test_fails_as_known():
    raise AssertionError
"""


@pytest.fixture
def suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makeconftest(CONFTEST.read_text())
    pytester.makepyfile(test_cases=CASES)
    return pytester


def run(suite: pytest.Pytester) -> pytest.RunResult:
    return suite.runpytest_inprocess("-p", "no:cacheprovider")


def test_without_the_variable_a_skip_is_a_skip(suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ROSEINFER_REQUIRE_ALL", raising=False)
    run(suite).assert_outcomes(passed=1, skipped=3, xfailed=1)


def test_with_the_variable_a_skip_is_a_failure(suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROSEINFER_REQUIRE_ALL", "1")
    result = run(suite)
    result.assert_outcomes(passed=1, failed=2, errors=1, xfailed=1)
    result.stdout.fnmatch_lines(["*a-program-that-nobody-has is not installed*"])


def test_with_the_variable_a_skipped_module_is_a_failure(
    pytester: pytest.Pytester, suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROSEINFER_REQUIRE_ALL", "1")
    pytester.makepyfile(test_module="import pytest\npytest.importorskip('a_module_that_nobody_has')")
    run(suite).assert_outcomes(errors=1)
