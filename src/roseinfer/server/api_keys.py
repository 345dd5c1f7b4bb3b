"""Turns a file of API keys into a check of the `Authorization` header. Knows no routes."""

import base64
import binascii
import hashlib
import hmac
from pathlib import Path

from roseinfer.errors import ConfigError


def read_keys(path: Path, param: str = "server.api_key_file") -> list[str]:
    """At least one key, one a line; blank lines and lines that begin with `#` are ignored. Raises ConfigError."""
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"The API key file cannot be read: {error}.", param=param) from None
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise ConfigError(f"The API key file holds no key: {path}.", param=param)
    return keys


class ApiKeys:
    """The configured keys, as SHA-256 digests: of equal length, so that comparing tells nothing about a key."""

    def __init__(self, keys: list[str]) -> None:
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    @classmethod
    def load(cls, path: Path) -> "ApiKeys":
        """See `read_keys`."""
        return cls(read_keys(path))

    def cache_salt(self, authorization: str) -> str | None:
        """None when the header carries none of the keys; else the salt under which this key's prefixes are cached.

        Every key is compared, also after a match, so the time taken does not depend on which one it was.
        """
        scheme, _, key = authorization.partition(" ")
        digest = hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).digest()
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        if scheme.lower() != "bearer" or not any(matches):
            return None
        return hmac.digest(digest, b"prefix cache salt", "sha256").hex()[:32]

    def knows(self, authorization: str) -> bool:
        """Whether the header carries one of the keys, as Bearer or, as browsers send it, as the password of Basic."""
        scheme, _, value = authorization.partition(" ")
        if scheme.lower() == "basic":
            try:
                pair = base64.b64decode(value.strip(), validate=True).decode("utf-8", "surrogateescape")
            except (binascii.Error, ValueError):
                return False
            authorization = f"Bearer {pair.partition(':')[2]}"
        return self.cache_salt(authorization) is not None
