"""The runner of parts: each part has a module, a page's section and only options that its module has."""

import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks import report, suite
from benchmarks.decode_step import ABLATIONS, commands_of
from benchmarks.machine import part_parser


@pytest.mark.parametrize("name", suite.SUITES)
def test_every_part_has_a_module_and_a_place_in_the_report(name: str) -> None:
    parts = suite.SUITES[name]
    assert set(parts) == set(report.PARTS[name])
    assert all(find_spec(part.module) for part in parts.values())


def test_a_part_gets_the_options_that_it_has() -> None:
    parsed = suite.parser_of().parse_args(["gpu", "--quick", "--device", "cpu", "--model", "M"])
    command = suite.command_of(suite.SUITES["gpu"]["decode"], Path("x.json"), parsed)
    expected = ["--out", "x.json", "--ablations", "--quick", "--model", "M", "--device", "cpu"]
    assert command == [sys.executable, "-m", "benchmarks.decode_step", *expected]


def test_a_part_that_does_not_end_in_time_is_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    failures = (
        suite.run_part("slow", command, 0.2, tmp_path / "log"),
        suite.run_part("wrong", [sys.executable, "-c", "0/0"], 30, tmp_path / "log"),
    )
    assert [failure.rpartition(" after ")[0] for failure in failures] == ["ended", "FAILED"]
    assert all(str(tmp_path) in line for line in capsys.readouterr().out.splitlines() if " after " in line)
    assert not any(str(tmp_path) in failure for failure in failures), "a page has no paths of the machine"
    assert not suite.run_part("quick", [sys.executable, "-c", ""], 30, tmp_path / "log")


def test_the_first_hour_is_one() -> None:
    parts = suite.SUITES["gpu"]
    assert sum(part.timeout_s for part in parts.values()) < 3600
    page = (Path(suite.__file__).parents[1] / "docs" / "benchmarks" / "README.md").read_text()
    told = re.findall(r"^\| (\w+) \|.*\| ([\d.]+) min \|$", page.partition("| limit |")[2], re.MULTILINE)
    assert {name: float(minutes) * 60 for name, minutes in told} == {
        name: part.timeout_s for name, part in parts.items()
    }


def test_the_page_names_a_part_that_fails_and_the_next_one_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = suite.Part("benchmarks.gpu.no_such_module", 30)
    monkeypatch.setitem(suite.SUITES["gpu"], "tests", broken)
    words = ["gpu", "--device", "cpu", "--quick", "--parts", "tests,sanitizer", "--model", "src/roseinfer/demo"]
    monkeypatch.setattr(sys, "argv", ["suite", *words, "--dir", str(tmp_path)])
    assert suite.main() == 1
    text = (tmp_path / "report.md").read_text()
    assert "- **tests FAILED after" in text
    assert "## Attention tests under compute-sanitizer" in text


def test_without_a_gpu_nothing_is_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "has_gpu", lambda: False)
    monkeypatch.setattr(suite, "make", None)
    monkeypatch.setattr(sys, "argv", ["suite", "gpu"])
    with pytest.raises(SystemExit, match="torch finds no GPU here, or is built without CUDA"):
        suite.main()


def test_all_that_is_missing_is_named_at_once() -> None:
    """And what is needed is there where tests run."""
    assert suite.absent(["torch>=2", "no-such-thing[a]>=1", "triton>=3; platform_system == 'Linux'", "nor_this"]) == [
        "no-such-thing",
        "nor_this",
    ]
    words = " ".join(suite.needed())
    assert all(f"{name}>" in words for name in ("torch", "transformers", "jinja2", "triton", "pytest", "hypothesis"))
    assert suite.absent(suite.needed()) == []


def test_the_limit_of_the_tests_is_over_before_their_time() -> None:
    """So that what has run until then is written."""
    for part in suite.SUITES["gpu"].values():
        if part.module == "benchmarks.gpu.checks":
            assert float(part.flags[part.flags.index("--limit-s") + 1]) <= part.timeout_s - 30


def test_a_python_without_torch_is_refused_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # an import of it fails
    monkeypatch.setattr(sys, "argv", ["suite", "gpu"])
    with pytest.raises(SystemExit, match=r"has no torch: name with PYTHON one of 3\.11 or newer that has torch"):
        suite.main()


def test_ablations_differ_in_one_option_each() -> None:
    parser = part_parser(None, "x.json", quick="less", device="cuda")
    parser.set_defaults(ablations=True, precisions="float32,int8")
    commands = commands_of(parser.parse_args(["--quick"]), Path("M"))
    assert list(commands) == [*ABLATIONS, "transformers bfloat16"]
    assert [words.count("--option") for words in commands.values()] == [2, 3, 3, 3, 0], "beside type and device"
