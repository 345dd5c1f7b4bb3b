"""A key file says exactly which keys are good, and may change while the server runs."""

import hmac
from pathlib import Path

import pytest

from roseinfer.config.api_keys import parse_keys
from roseinfer.errors import ConfigError
from roseinfer.server.connection.api_keys import ApiKeys


def api_keys(*keys: str) -> ApiKeys:
    return ApiKeys(parse_keys(keys, ""))


def test_blank_and_comment_lines_are_no_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\n\n  alpha  \nbeta#1\n#gamma\n")
    keys = ApiKeys([], file)
    assert keys.caller({"Authorization": "Bearer alpha"})
    assert keys.caller({"Authorization": "bearer  beta#1"})
    for wrong in ("Bearer # ours", "Bearer ", "Bearer gamma", "Bearer #gamma", "Bearer alph", "Bearer alphaa", "alpha"):
        assert keys.caller({"Authorization": wrong}) is None


def test_a_key_is_taken_from_either_header() -> None:
    keys, foreign = api_keys("mine"), "Basic dTpw"  # a proxy's
    for headers in ({"x-api-key": "mine"}, {"x-api-key": "mine", "Authorization": foreign}):
        assert keys.caller(headers) == keys.caller({"Authorization": "Bearer mine"})
        assert keys.knows(headers)
    for headers in ({"x-api-key": ""}, {"x-api-key": "Bearer mine"}, {"Authorization": "mine"}, {}):
        assert keys.caller(headers) is None
    assert keys.caller({"Authorization": "Bearer mine", "x-api-key": "another"})


def test_keys_of_the_variable_are_separated_by_semicolons_alone() -> None:
    keys = ApiKeys.configured(None, "one; team two;")
    assert keys is not None
    assert [keys.knows({"x-api-key": key}) for key in ("one", "two", "one; team two;")] == [True, True, False]
    with pytest.raises(ConfigError, match=r"^ROSEINFER_API_KEYS: Keys are separated by semicolons") as caught:
        ApiKeys.configured(None, "secret-1,secret-2")
    assert "secret" not in str(caught.value)


def test_keys_have_names(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("team-a\tsecret-1\nsecret-2\n")
    keys = ApiKeys([], file)
    first, second = keys.caller({"Authorization": "Bearer secret-1"}), keys.caller({"Authorization": "Bearer secret-2"})
    assert first is not None
    assert second is not None
    assert first.name == "team-a"
    assert second.name.startswith("key-")
    assert "secret-2" not in second.name
    assert keys.caller({"Authorization": "Bearer team-a"}) is None


def test_the_salt_is_the_keys_own_and_does_not_tell_it() -> None:
    callers = [api_keys("a", "b").caller({"Authorization": f"Bearer {key}"}) for key in "ab"]
    assert len({caller.cache_salt for caller in callers if caller}) == 2
    assert api_keys("b").caller({"Authorization": "Bearer b"}) == callers[1], (
        "the same after a restart with another file"
    )


def test_every_key_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[bytes] = []

    def comparing(given: bytes, known: bytes) -> bool:
        compared.append(known)
        return given == known

    monkeypatch.setattr(hmac, "compare_digest", comparing)
    assert api_keys("a", "b", "c").caller({"Authorization": "Bearer a"})
    assert len(compared) == 3
    assert {len(digest) for digest in compared} == {32}


def test_file_and_environment_together(tmp_path: Path) -> None:
    assert ApiKeys.configured(None, " ;") is None
    (tmp_path / "keys").write_text("three")
    keys = ApiKeys.configured(str(tmp_path / "keys"), "ops one; two;")
    assert keys is not None
    assert all(keys.caller({"Authorization": f"Bearer {key}"}) for key in ("one", "two", "three"))
    only = ApiKeys.configured(None, "ops one")
    assert only is not None
    caller = only.caller({"Authorization": "Bearer one"})
    assert caller is not None
    assert caller.name == "ops"


def test_what_the_file_holds_now_takes_the_place_of_what_it_held(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("old")
    keys = ApiKeys(parse_keys(["stays"], ""), file)
    file.write_text("new")
    assert keys.caller({"Authorization": "Bearer old"}), "not read yet"
    keys.replace(keys.read())
    assert [bool(keys.caller({"Authorization": f"Bearer {key}"})) for key in ("old", "new", "stays")] == [
        False,
        True,
        True,
    ]
    file.write_text("")
    with pytest.raises(ConfigError):
        keys.read()
    assert keys.caller({"Authorization": "Bearer new"}), "a file that cannot be used changes nothing"
