"""Turns tokenizer_config.json into the special tokens and the wishes it states. Knows no vocabulary, no template."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from roseinfer.errors import ConfigError


@dataclass(frozen=True, slots=True)
class TokenizerConfig:
    """What a checkpoint says of its tokenizer beside the vocabulary."""

    special_tokens: Mapping[str, str] = field(default_factory=dict)  # text by name: `bos_token`, `eos_token`, ...
    adds_bos: bool | None = None  # before a text; None: as the post-processor of tokenizer.json does
    adds_eos: bool = False  # after a text; counts where `adds_bos` is not None
    chat_template: object = None  # as it stands there, unchecked

    @classmethod
    def load(cls, directory: Path) -> "TokenizerConfig":
        """Read what there is of the file. Raises ConfigError when it is no JSON object."""
        config = read_json(directory / "tokenizer_config.json")
        named = read_json(directory / "special_tokens_map.json") | config  # older checkpoints name them there
        adds_bos = config.get("add_bos_token")
        return cls(
            special_tokens={name: text for name in named if (text := _token_text(name, named[name])) is not None},
            adds_bos=adds_bos if isinstance(adds_bos, bool) else None,
            adds_eos=config.get("add_eos_token") is True,
            chat_template=config.get("chat_template"),
        )


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file of the checkpoint; an empty one where there is no file. Raises ConfigError for another."""
    if not path.is_file():
        return {}
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except ValueError as error:
        raise ConfigError(f"{path.name} cannot be read: {error}.", param="model.path") from None


def _token_text(name: str, value: object) -> str | None:
    """The text of a `*_token` entry, which is a string or an object with `content`; None for other entries."""
    if not name.endswith("_token"):
        return None
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None
