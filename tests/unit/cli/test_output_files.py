"""Files that cannot be written are told before a load is run, and those that can be are left alone until then."""

import os
import shlex
from pathlib import Path

import pytest

from roseinfer.cli import main as cli
from roseinfer.cli.output_files import check_folder, check_outputs
from roseinfer.errors import ConfigError

NOBODY = "http://127.0.0.1:9"


@pytest.mark.parametrize(
    ("command", "flag"),
    [
        (f"serve --url {NOBODY}", "--json"),
        (f"serve --url {NOBODY}", "--recording"),
        (f"serve --url {NOBODY} --sweep 5 --slo-ttft-ms 9", "--json"),
        (f"compare {NOBODY} http://127.0.0.1:10", "--json"),
        ("streaming --hf-model-id none", "--json"),
        ("scheduler --hf-model-id none", "--json"),
        ("simulate --cost-model none", "--json"),
        ("simulate --cost-model none", "--recording"),
        ("simulate --cost-model none", "--decision-log"),
    ],
)
def test_it_is_refused_before_anything_is_asked_or_loaded(
    command: str, flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "no" / "file"
    assert cli.main(["bench", *shlex.split(command), flag, str(file)]) == cli.EXIT_USAGE
    assert capsys.readouterr().err == f"roseinfer: {flag}: {file} cannot be written: No such file or directory\n"


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written: Is a directory") as caught:
        check_outputs(json=tmp_path)
    assert caught.value.param == "--json"


def test_two_flags_do_not_have_one_file(tmp_path: Path) -> None:
    """The second would take the place of the first, without a word."""
    (tmp_path / "link").symlink_to(tmp_path / "file")
    with pytest.raises(ConfigError, match="link is the file of --json too") as caught:
        check_outputs(json=tmp_path / "file", recording=tmp_path / "link")
    assert caught.value.param == "--recording"
    check_outputs(json=Path("/dev/null"), recording=Path("/dev/null"))


def test_what_can_be_written_is_left_as_it_was(tmp_path: Path) -> None:
    old, new, target = tmp_path / "old", tmp_path / "new", tmp_path / "target"
    old.write_bytes(b"an older one")
    check_outputs(json=old, recording=new)
    assert old.read_bytes() == b"an older one"
    assert not new.exists()
    new.symlink_to(target)
    check_outputs(json=new, recording=None)
    assert new.is_symlink()


def test_a_pipe_is_not_opened_twice(tmp_path: Path) -> None:
    """It would stand still until somebody reads, who would then see the end of it."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    check_outputs(json=pipe)


def test_a_folder_that_cannot_be_made_is_refused_before_anything_is_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "runs"
    assert cli.main(["bench", "compare", NOBODY, "http://127.0.0.1:10", "--keep", str(folder)]) == cli.EXIT_USAGE
    assert capsys.readouterr().err == f"roseinfer: --keep: {folder} cannot be written: Not a directory\n"


def test_a_folder_is_left_as_it_was_or_not_made_yet(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "001.json").write_bytes(b"an older one")
    check_folder("keep", tmp_path / "old")
    check_folder("keep", tmp_path / "new" / "runs")
    check_folder("keep", None)
    assert [path.relative_to(tmp_path).as_posix() for path in sorted(tmp_path.rglob("*"))] == ["old", "old/001.json"]
