"""`roseinfer kernels`: what it prints, its exit codes, and where the cache is."""

import os
from pathlib import Path

import pytest

from roseinfer.cli.main import main
from roseinfer.config.options import options
from roseinfer.model.kernels import library
from roseinfer.model.kernels.library import LEVELS, find_built
from tests.conftest import require_tool

NAMES_HERE = [level.name for level in library.levels_of(library.machine())]


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CXX", "XDG_CACHE_HOME", *(option.variable for option in options().values())):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def has_compiler() -> None:
    require_tool("g++")


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One source that compiles at once, in the place of ours."""
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "init.cpp").write_text('extern "C" int roseinfer_init() { return 0; }\n')
    monkeypatch.setattr(library, "SOURCE_DIR", folder)
    return folder


def test_build_makes_the_named_levels_once(
    sources: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], has_compiler: None
) -> None:
    flags = ["--runner.kernels-dir", str(tmp_path / "out"), "--level", "avx2", "--level", "avx512"]
    for told in ("built", "already built"):
        assert main(["kernels", "build", *flags]) == 0
        lines = capsys.readouterr().out.splitlines()
        paths = {name: find_built(LEVELS[name], tmp_path / "out") for name in ("avx2", "avx512")}
        assert lines == [f"{name}: {told}: {path}" for name, path in paths.items()]
    assert main(["kernels", "build", *flags[:2], "--level", "all"]) == 0
    assert [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()] == NAMES_HERE


def test_a_home_that_is_not_there_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kernels", "list", "--runner.kernels-dir", "~no-such-user/x"]) == 2
    told = "roseinfer: runner.kernels_dir (from --runner.kernels-dir): There is no home directory for ~no-such-user/x."
    assert capsys.readouterr().err == f"{told}\n"
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 7)  # whom no list of users has
    assert main(["kernels", "list"]) == 2
    assert capsys.readouterr().err.startswith(
        "roseinfer: runner.kernels_dir: This user has no home directory: set HOME"
    )


def test_a_compiler_that_cannot_be_run_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    compiler = tmp_path / "cxx"
    compiler.write_bytes(b"no program")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    flags = ["--runner.kernels-dir", str(tmp_path / "out"), "--level", NAMES_HERE[0]]
    assert main(["kernels", "build", *flags]) == 2
    assert capsys.readouterr().err == f"roseinfer: {compiler} cannot be run: Exec format error\n"


def test_a_file_that_does_not_compile_ends_the_build(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As Ctrl-C does: what has not begun by then is not compiled, which takes a minute with our sources."""
    for number in range(50):
        (sources / f"{number}.cpp").touch()
    compiler, calls = tmp_path / "cxx", tmp_path / "calls"
    compiler.write_text(
        f"#!/bin/sh\ncase $1 in -dumpmachine|--version) echo {library.machine()}-linux;;\n"
        f"*) echo >> {calls}; sleep 0.02; echo error: no >&2; exit 1;; esac\n"
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    assert main(["kernels", "build", "--runner.kernels-dir", str(tmp_path / "out"), "--level", NAMES_HERE[0]]) == 2
    assert capsys.readouterr().err == "roseinfer: cxx did not compile the kernels: error: no\n"
    assert len(calls.read_text()) < 25


def test_build_takes_the_highest_level_of_the_processor(
    sources: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], has_compiler: None
) -> None:
    """A processor without any level is told so: it has to be named which other machine the build is for."""
    expected = library.levels_here()[-1:]
    code = main(["kernels", "build", "--runner.kernels-dir", str(tmp_path / "out")])
    out, err = capsys.readouterr()
    if expected:
        assert (code, out.partition(":")[0]) == (0, expected[0].name)
    else:
        assert (code, out) == (2, "")
        assert "--level" in err


def test_list_shows_what_is_here_and_what_is_built(
    sources: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], has_compiler: None
) -> None:
    flags = ["--runner.kernels-dir", str(tmp_path / "out")]
    assert main(["kernels", "build", *flags, "--level", "avx512"]) == 0
    capsys.readouterr()
    assert main(["kernels", "list", *flags]) == 0
    told = capsys.readouterr().out.splitlines()
    lines = dict(zip(NAMES_HERE, told[: len(NAMES_HERE)], strict=True))
    flags_here = library.processor_flags()
    for name, line in lines.items():
        lacking = LEVELS[name].lacking(flags_here)
        has = f"this processor lacks {', '.join(lacking)}  " if lacking else "this processor has it  "
        assert line.split(maxsplit=1)[0] == name
        assert has in line
        assert line.endswith(str(find_built(LEVELS[name], tmp_path / "out") or "not built"))
    assert lines["avx512"].endswith(".so")


def test_list_does_not_count_on_a_build_that_is_cut_off(
    sources: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    has_compiler: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flags = ["--runner.kernels-dir", str(tmp_path / "out")]
    monkeypatch.setattr("roseinfer.cli.kernels.processor_flags", lambda: frozenset({"avx2", "fma", "f16c"}))
    assert main(["kernels", "build", *flags, "--level", "avx2"]) == 0
    path = find_built(LEVELS["avx2"], tmp_path / "out")
    assert path is not None
    path.write_bytes(path.read_bytes()[:-1])
    capsys.readouterr()
    assert main(["kernels", "list", *flags]) == 0
    told = capsys.readouterr().out
    assert f"this processor has it  damaged: {path}\n" in told
    assert "`auto` takes none" in told
    assert told.endswith("avx2 would be faster: run `roseinfer kernels build`.\n")


@pytest.mark.parametrize(
    ("flags", "built", "expected"),
    [
        ("sse2", "avx2", ["`auto` takes none: without kernels all is computed by plain torch, slower."]),
        ("avx2 fma f16c", "avx2", ["`auto` takes avx2."]),
        (
            "avx2 fma f16c avx_vnni",
            "avx2",
            ["`auto` takes avx2.", "avx2_vnni would be faster: run `roseinfer kernels build`."],
        ),
    ],
)
def test_list_shows_what_is_used_and_what_would_be_faster(
    sources: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    has_compiler: None,
    flags: str,
    built: str,
    expected: list[str],
) -> None:
    arguments = ["--runner.kernels-dir", str(tmp_path / "out")]
    assert main(["kernels", "build", *arguments, "--level", built]) == 0
    capsys.readouterr()
    monkeypatch.setattr("roseinfer.cli.kernels.processor_flags", lambda: frozenset(flags.split()))
    assert main(["kernels", "list", *arguments]) == 0
    assert capsys.readouterr().out.splitlines()[len(NAMES_HERE) :] == expected


@pytest.mark.parametrize("target", library.MACHINES)
def test_list_shows_the_levels_of_this_architecture(
    sources: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    monkeypatch.setattr("roseinfer.cli.kernels.machine", lambda: target)
    monkeypatch.setattr("roseinfer.cli.kernels.processor_flags", lambda: frozenset({"asimd"}))
    assert main(["kernels", "list", "--runner.kernels-dir", str(tmp_path / "out")]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = [level.name for level in library.levels_of(target)]
    assert [line.split(maxsplit=1)[0] for line in lines[: len(names)]] == names
    if target == "aarch64":
        assert lines[0] == "neon          this processor has it  not built"
        assert lines[1] == "neon_dotprod  this processor lacks asimddp  not built"
        assert lines[-1] == "neon would be faster: run `roseinfer kernels build`."


def test_list_where_there_are_no_kernels(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roseinfer.cli.kernels.machine", lambda: "riscv64")
    assert main(["kernels", "list"]) == 0
    told = "There are kernels for x86_64 and aarch64, and this is riscv64: plain torch serves, slower.\n"
    assert capsys.readouterr().out == told


def test_without_a_compiler_build_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["kernels", "build", "--runner.kernels-dir", str(tmp_path), "--level", "avx2"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("roseinfer: No C++ compiler is on the PATH (g++, clang++, c++)")
    assert err.count("\n") == 1


def test_the_compiler_is_the_one_in_cxx(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert main(["kernels", "build", "--runner.kernels-dir", str(tmp_path), "--level", "avx2"]) == 2
    assert "(no-such-compiler)" in capsys.readouterr().err


def test_the_cache_is_where_the_desktop_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """XDG_CACHE_HOME is a source like others: shown, and weaker than a named directory."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def shown(*flags: str) -> list[str]:
        assert main(["config", "show", *flags]) == 0
        return next(line.split() for line in capsys.readouterr().out.splitlines() if "kernels_dir:" in line)

    assert shown() == ["kernels_dir:", f'"{tmp_path}/roseinfer/kernels"', "#", "XDG_CACHE_HOME"]
    assert shown("--runner.kernels-dir", "x") == ["kernels_dir:", '"x"', "#", "--runner.kernels-dir"]
    monkeypatch.setenv("ROSEINFER_RUNNER__KERNELS_DIR", "y")
    assert shown() == ["kernels_dir:", '"y"', "#", "ROSEINFER_RUNNER__KERNELS_DIR"]
