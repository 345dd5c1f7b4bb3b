"""Turns API keys, of a file and of the environment, into a check of the `Authorization` header. Knows no routes."""

import base64
import binascii
import hashlib
import hmac
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from roseinfer.errors import ConfigError
from roseinfer.runtime.file_watch import WatchedFiles

# Not an option: the tree of options is printed, recorded and sent to the engine, and a key belongs in none of these.
KEYS_VARIABLE = "ROSEINFER_API_KEYS"
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


class ApiKey(NamedTuple):
    """A key and what it is called in the log."""

    name: str
    key: str


def read_keys(path: Path, param: str = "server.api_key_file") -> list[str]:
    """At least one key, without their names; see `parse_keys`. Raises ConfigError."""
    return [key for _, key in _read(path, param)]


def _read(path: Path, param: str) -> list[ApiKey]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"The API key file {path} cannot be read: {reason}.", param=param) from None
    keys = parse_keys(lines, param)
    if not keys:
        raise ConfigError(f"The API key file holds no key: {path}.", param=param)
    return keys


def parse_keys(lines: Iterable[str], param: str) -> list[ApiKey]:
    """A key a line, after its name if it has one; blank lines and lines that begin with `#` are ignored.

    A key without a name is called by eight digits of a digest of its digest. Raises ConfigError naming no key.
    """
    keys: list[ApiKey] = []
    for number, line in enumerate(lines, 1):
        parts = line.split()
        if not parts or parts[0].startswith("#"):
            continue
        if len(parts) > 2 or (len(parts) == 2 and not _NAME.fullmatch(parts[0])):
            raise ConfigError(
                f"Line {number}: expected a key, or a name of letters, digits, dots, dashes and underscores and a key.",
                param=param,
            )
        key = parts[-1]
        name = parts[0] if len(parts) == 2 else f"key-{hashlib.sha256(_digest(key)).hexdigest()[:8]}"
        if name in {known.name for known in keys}:
            raise ConfigError(f"Line {number}: the name {name} comes twice.", param=param)
        keys.append(ApiKey(name, key))
    return keys


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


class Caller(NamedTuple):
    """Whose key a request came with."""

    name: str
    cache_salt: str  # under which this key's prefixes are cached: an HMAC of its digest, so it does not tell the key


class ApiKeys:
    """The keys that are good now, as SHA-256 digests: of equal length, so that comparing tells nothing about a key."""

    def __init__(self, fixed: Sequence[ApiKey], path: Path | None = None) -> None:
        """Keys that stay, and a file of keys that may change. Raises ConfigError when it cannot be used."""
        self.path = path
        self.files = WatchedFiles([] if path is None else [path])
        self._fixed = fixed
        self._digests = self.read()

    @classmethod
    def configured(cls, path: str | None, more: str) -> "ApiKeys | None":
        """The keys of the file and more, between semicolons, from the environment; None without any.

        Raises ConfigError.
        """
        fixed = parse_keys(more.split(";"), KEYS_VARIABLE)
        return cls(fixed, None if path is None else Path(path)) if fixed or path is not None else None

    def read(self) -> "Digests":
        """What is good now that the file may have changed. Raises ConfigError. Reads a file: not on the event loop."""
        return _digests([*self._fixed, *(_read(self.path, "server.api_key_file") if self.path else ())])

    def take(self, digests: "Digests") -> None:
        """From now on these are good, and no others."""
        self._digests = digests

    def caller(self, authorization: str) -> Caller | None:
        """Whose key the header carries; None when it is none of the keys.

        Every key is compared, also after a match, so the time taken does not depend on which one it was.
        """
        scheme, _, key = authorization.partition(" ")
        digest = _digest(key.strip())
        matches = [name for name, known in self._digests if hmac.compare_digest(digest, known)]
        if scheme.lower() != "bearer" or not matches:
            return None
        return Caller(matches[0], hmac.digest(digest, b"prefix cache salt", "sha256").hex()[:32])

    def knows(self, authorization: str) -> bool:
        """Whether the header carries one of the keys, as Bearer or, as browsers send it, as the password of Basic."""
        scheme, _, value = authorization.partition(" ")
        if scheme.lower() == "basic":
            try:
                pair = base64.b64decode(value.strip(), validate=True).decode("utf-8", "surrogateescape")
            except (binascii.Error, ValueError):
                return False
            authorization = f"Bearer {pair.partition(':')[2]}"
        return self.caller(authorization) is not None


Digests = list[tuple[str, bytes]]
"""Names of keys, and the digests of the keys."""


def _digests(keys: Iterable[ApiKey]) -> Digests:
    return [(name, _digest(key)) for name, key in keys]
