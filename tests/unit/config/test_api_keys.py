"""A key file is a key a line, maybe behind a name; an error names the line and shows no key."""

from pathlib import Path

import pytest

from roseinfer.config.api_keys import read_keys
from roseinfer.errors import ConfigError


def test_a_key_may_have_a_name(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("# ours\n\nteam-a\tsecret-1\n  secret-2\n")
    first, second = read_keys(tmp_path / "keys")
    assert first == ("team-a", "secret-1")
    assert (second.name[:4], second.key) == ("key-", "secret-2")


@pytest.mark.parametrize(
    ("content", "said"),
    [("a b c", "Line 1"), ("ok\nnäme key", "Line 2"), ("a/b key", "Line 1"), ("x 1\nx 2", "x comes twice")],
)
def test_a_line_that_is_no_key_is_named_and_not_shown(tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / "keys").write_text(content)
    with pytest.raises(ConfigError, match=said) as caught:
        read_keys(tmp_path / "keys")
    assert "key" not in caught.value.message.split(": ")[0]


@pytest.mark.parametrize("content", [b"", b"\n\n", b"# nothing\n", b"\xff\xfe"])
def test_a_file_without_a_key_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "keys").write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read_keys(tmp_path / "keys")
    assert caught.value.param == "server.api_key_file"


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read_keys(tmp_path / "keys")
    assert caught.value.param == "server.api_key_file"


def test_a_missing_file_is_named_in_words(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r": The API key file .*none cannot be read: No such file or directory\.$"):
        read_keys(tmp_path / "none")
