"""Reads API keys from a file, and from the texts of an environment variable."""

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from roseinfer.errors import ConfigError

# Not an option: the tree of options is printed, recorded and sent to the engine, and a key belongs in none of these.
KEYS_VARIABLE = "ROSEINFER_API_KEYS"
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


class ApiKey(NamedTuple):
    """A key and its name in the log."""

    name: str
    key: str

    @property
    def digest(self) -> bytes:
        return digest_of(self.key)


def digest_of(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def read_keys(path: Path, param: str = "server.api_key_file") -> list[ApiKey]:
    """At least one key; see `parse_keys`. Raises ConfigError."""
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
    """Parse a key a line, after its name if it has one; blank lines and lines that begin with `#` are ignored.

    A key without a name gets one of eight digits of a digest of its digest. Raises ConfigError, which shows no key.
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
        name = parts[0] if len(parts) == 2 else f"key-{hashlib.sha256(digest_of(key)).hexdigest()[:8]}"
        if name in {known.name for known in keys}:
            raise ConfigError(f"Line {number}: the name {name} comes twice.", param=param)
        keys.append(ApiKey(name, key))
    return keys
