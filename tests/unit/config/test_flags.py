"""What a person types for a server, or for a file, into what is meant."""

from pathlib import Path

import pytest

from roseinfer.config.flags import url_of, url_or_path


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("http://one/", "http://one/"),
        ("https://one:8000/v1", "https://one:8000/v1"),
        ("one-host:8000", "http://one-host:8000"),
        ("127.0.0.1:8000/v1", "http://127.0.0.1:8000/v1"),
        ("[::1]:8000", "http://[::1]:8000"),
        ("one", None),
        ("ftp://one:8000", None),
        ("a/b:80", None),
        ("one:port", None),
    ],
)
def test_a_host_and_a_port_are_a_url(text: str, url: str | None) -> None:
    assert url_of(text) == url


def test_a_file_that_is_called_like_a_host_and_a_port_is_that_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert url_or_path("one:80") == "http://one:80"
    Path("one:80").touch()
    assert url_or_path("one:80") == "one:80"
