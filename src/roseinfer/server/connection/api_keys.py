"""Checks the keys of requests against the configured API keys, which may change while it runs."""

import base64
import binascii
import hmac
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from roseinfer.config.api_keys import KEYS_VARIABLE, ApiKey, digest_of, parse_keys, read_keys
from roseinfer.errors import ConfigError
from roseinfer.runtime.file_watch import WatchedFiles

NO_KEY = "A valid API key is needed: `Authorization: Bearer <key>`, or `x-api-key: <key>`"

Digests = list[tuple[str, bytes]]
"""Names of keys, and the digests of the keys."""


class Caller(NamedTuple):
    """The holder of the key that a request came with."""

    name: str
    cache_salt: str  # under which this key's prefixes are cached: an HMAC of its digest, so it does not show the key


class ApiKeys:
    """The keys that are good now, as SHA-256 digests: of equal length, so that comparing shows nothing of a key."""

    def __init__(self, fixed: Sequence[ApiKey], path: Path | None = None) -> None:
        """Keys that stay, and a file of keys that may change. Raises ConfigError when it cannot be used."""
        self.path = path
        self.files = WatchedFiles([] if path is None else [path])
        self._fixed = fixed
        self._digests = self.read()

    @classmethod
    def configured(cls, path: str | None, more: str) -> "ApiKeys | None":
        """The keys of a file and of the environment, where `;` separates them; None without any. Raises ConfigError."""
        if "," in more:  # which would make one key of two
            raise ConfigError("Keys are separated by semicolons, and none has a comma.", param=KEYS_VARIABLE)
        fixed = parse_keys(more.split(";"), KEYS_VARIABLE)
        return cls(fixed, None if path is None else Path(path)) if fixed or path is not None else None

    def read(self) -> Digests:
        """The keys that are good now that the file may have changed. Raises ConfigError. Not for the event loop."""
        keys = [*self._fixed, *(read_keys(self.path) if self.path else ())]
        return [(key.name, key.digest) for key in keys]

    def replace(self, digests: Digests) -> None:
        """Accept these keys from now on, and no others."""
        self._digests = digests

    def caller(self, headers: Mapping[str, str]) -> Caller | None:
        """The caller whose key the headers carry, as OpenAI's clients send it or as Anthropic's do, or None.

        Every key is compared, also after a match, so the time it takes does not depend on the key.
        """
        scheme, _, bearer = headers.get("Authorization", "").partition(" ")
        for key in (bearer.strip() if scheme.lower() == "bearer" else "", headers.get("x-api-key", "")):
            digest = digest_of(key)
            if matches := [name for name, known in self._digests if hmac.compare_digest(digest, known)]:
                return Caller(matches[0], hmac.digest(digest, b"prefix cache salt", "sha256").hex()[:32])
        return None

    def knows(self, headers: Mapping[str, str]) -> bool:
        """Whether the headers carry one of the keys, also, as browsers send it, as the password of Basic."""
        scheme, _, value = headers.get("Authorization", "").partition(" ")
        if scheme.lower() == "basic":
            try:
                pair = base64.b64decode(value.strip(), validate=True).decode("utf-8", "surrogateescape")
            except (binascii.Error, ValueError):
                return False
            bearer = f"Bearer {pair.partition(':')[2]}"
            headers = {"Authorization": bearer, "x-api-key": headers.get("x-api-key", "")}
        return self.caller(headers) is not None
