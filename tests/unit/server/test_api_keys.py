"""A key file says exactly which keys are good."""

import hmac
from pathlib import Path

import pytest

from roseinfer.errors import ConfigError
from roseinfer.server.api_keys import ApiKeys


def test_blank_and_comment_lines_are_no_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\n\n  alpha  \nbeta#1\n#gamma\n")
    keys = ApiKeys.load(file)
    assert keys.cache_salt("Bearer alpha")
    assert keys.cache_salt("bearer  beta#1")
    for wrong in ("Bearer # ours", "Bearer ", "Bearer gamma", "Bearer #gamma", "Bearer alph", "Bearer alphaa", "alpha"):
        assert keys.cache_salt(wrong) is None


def test_the_salt_is_the_keys_own_and_does_not_tell_it() -> None:
    salts = [ApiKeys(["a", "b"]).cache_salt(f"Bearer {key}") for key in "ab"]
    assert len(set(salts)) == 2
    assert ApiKeys(["b"]).cache_salt("Bearer b") == salts[1], "the same after a restart with another file"


def test_every_key_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[bytes] = []

    def comparing(given: bytes, known: bytes) -> bool:
        compared.append(known)
        return given == known

    monkeypatch.setattr(hmac, "compare_digest", comparing)
    assert ApiKeys(["a", "b", "c"]).cache_salt("Bearer a")
    assert len(compared) == 3


@pytest.mark.parametrize("content", [b"", b"\n\n", b"# nothing\n", b"\xff\xfe"])
def test_a_file_without_a_key_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "keys").write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        ApiKeys.load(tmp_path / "keys")
    assert caught.value.param == "server.api_key_file"


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        ApiKeys.load(tmp_path / "keys")
    assert caught.value.param == "server.api_key_file"
