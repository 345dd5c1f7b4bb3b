"""Finds a checkpoint's tokenizer.json, or has transformers convert the files that there are into one.

A checkpoint without it has a SentencePiece or tiktoken model, or a vocabulary with or without merges. The conversion
takes seconds and what it imports hundreds of megabytes, so a process of its own does it, and the result is kept in the
user's cache, named by a digest of the files and one of the result: a damaged one is made anew.
"""

import hashlib
import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from roseinfer.errors import ConfigError

NAME = "tokenizer.json"
_MODELS = ("*.model", "*.tiktoken", "vocab.json", "vocab.txt", "merges.txt", "tekken.json")
_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "config.json")
_TIMEOUT_S = 300

_log = logging.getLogger(__name__)


@contextmanager
def tokenizer_file(directory: Path) -> Iterator[Path]:
    """The checkpoint's own tokenizer.json, or a converted one, which is gone at the end if there is no cache for it.

    Raises ConfigError.
    """
    with ExitStack() as stack:
        yield _find_or_convert(directory, stack)


def _find_or_convert(directory: Path, stack: ExitStack) -> Path:
    models = find_tokenizer(directory)
    if models[0].name == NAME:
        return models[0]
    files = [*models, *(path for name in _SETTINGS if (path := directory / name).is_file())]
    source = hashlib.blake2b(version("transformers").encode(), digest_size=16)
    for path in files:
        source.update(f"\0{path.name}\0".encode() + hashlib.sha256(read_file(path)).digest())
    cache, key = _cache(), source.hexdigest()
    for kept in cache.glob(f"{key}-*.json"):
        if kept.stem == f"{key}-{_digest(kept)}":
            return kept
        kept.unlink(missing_ok=True)
    return _convert(directory, cache, key, stack)


def find_tokenizer(directory: Path) -> list[Path]:
    """The checkpoint's tokenizer.json, else the files that one is made of. Raises ConfigError if there are none."""
    own = directory / NAME
    if own.is_file():
        return [own]
    models = sorted({path for pattern in _MODELS for path in directory.glob(pattern)})
    if not models:
        _refuse(f"The checkpoint has no tokenizer: in {directory} is neither {NAME} nor any of {', '.join(_MODELS)}.")
    return models


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file of the checkpoint; empty where there is no file. Raises ConfigError."""
    if not path.is_file():
        return {}
    try:
        return msgspec.json.decode(read_file(path), type=dict[str, Any])
    except ValueError as error:
        _refuse(f"{path.name} cannot be read: {error}.")


def read_file(path: Path) -> bytes:
    """The content of a file of the checkpoint. Raises ConfigError."""
    try:
        return path.read_bytes()
    except OSError as error:  # such as one of another user
        _refuse(f"{path} cannot be read: {error.strerror}.")


def token_text(name: str, value: object) -> str | None:
    """The text of a `*_token` entry, which is a string or an object with `content`; None for other entries."""
    if not name.endswith("_token"):
        return None
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _cache() -> Path:
    try:
        return Path.home() / ".cache" / "roseinfer" / "tokenizers"
    except RuntimeError:  # a user without a home, as containers have
        return Path(os.devnull)  # where nothing is, and nothing can be written


def _digest(path: Path) -> str:
    return hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()


def _convert(directory: Path, cache: Path, key: str, stack: ExitStack) -> Path:
    """The result, in the cache, or where that cannot be written in a temporary directory of the stack."""
    _log.info("the tokenizer is converted, once", extra={"checkpoint_dir": str(directory)})
    try:
        cache.mkdir(parents=True, exist_ok=True)
        file, name = tempfile.mkstemp(".partial", dir=cache)
    except OSError:
        cache = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="roseinfer-tokenizer-")))
        file, name = tempfile.mkstemp(".partial", dir=cache)
    os.close(file)
    partial = Path(name)
    try:
        command = [sys.executable, "-m", __name__, str(directory), name]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)  # noqa: S603
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1][:500]
            _refuse(f"The tokenizer in {directory} cannot be converted to {NAME}: {reason}")
        target = cache / f"{key}-{_digest(partial)}.json"
        partial.replace(target)
    except subprocess.TimeoutExpired:
        _refuse(f"The tokenizer in {directory} was not converted to {NAME} in {_TIMEOUT_S} s.")
    finally:
        partial.unlink(missing_ok=True)
    return target


def _refuse(message: str) -> NoReturn:
    raise ConfigError(message, param="model.path")


def _main(directory: str, target: str) -> int:
    """Convert, as a process of its own; the last line of its traceback says what was wrong."""
    import sentencepiece  # noqa: F401 - transformers does; without it, it takes a model for one of tiktoken's
    import tiktoken  # noqa: F401 - likewise
    from transformers import AutoTokenizer
    from transformers.utils import logging as their_logging

    their_logging.set_verbosity_error()
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except ValueError as error:
        tokenizer = _of_named_class(Path(directory), error)
    Path(target).write_text(tokenizer.backend_tokenizer.to_str(), encoding="utf-8")
    return 0


def _of_named_class(directory: Path, error: ValueError) -> Any:
    """The tokenizer of the class that the checkpoint names, which transformers passes over for some types of models.

    phi3 and mistral are such types. Raises ValueError without a class that transformers knows.
    """
    import transformers

    file = directory / "tokenizer_config.json"
    name = str(json.loads(file.read_text(encoding="utf-8")).get("tokenizer_class")) if file.is_file() else None
    known = (name or "").removesuffix("Fast")
    named = getattr(transformers, known) if hasattr(transformers, known) else None
    is_tokenizer = isinstance(named, type) and issubclass(named, transformers.PreTrainedTokenizerBase)
    if named is None or not is_tokenizer:
        raise ValueError(
            f"transformers does not know how to read these files, and no tokenizer by the `tokenizer_class` {name}"
        ) from error
    return named.from_pretrained(directory, local_files_only=True, trust_remote_code=False)


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
