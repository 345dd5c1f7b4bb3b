"""Reads tokenizer.json with the tokens that files beside it add to it or describe otherwise, as transformers does.

Without them the marks of a chat template would be tokenised as any text is, and the model would see what it never saw.
"""

from pathlib import Path
from typing import Any

import msgspec

from roseinfer.errors import ConfigError
from roseinfer.text.tokenizer.files import NAME, read_file, read_json, token_text, tokenizer_file

_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_LISTS = ("additional_special_tokens", "extra_special_tokens")  # the second one may be an object by name


class _Model(msgspec.Struct):
    vocab: dict[str, int] | list[tuple[str, float]] = {}

    def ids(self) -> dict[str, int]:
        return self.vocab if isinstance(self.vocab, dict) else {word: i for i, (word, _) in enumerate(self.vocab)}


def tokenizer_json(directory: Path) -> bytes:
    """The content of a checkpoint's tokenizer.json, or of a converted one. Raises ConfigError."""
    with tokenizer_file(directory) as file:
        content = read_file(file)
    if file != directory / NAME:
        return content  # transformers made it, of the other files too
    declared, special = _declared(directory)
    try:
        parts = msgspec.json.decode(content, type=dict[str, msgspec.Raw])
        stored = msgspec.json.decode(parts.get("added_tokens", b"[]"), type=list[dict[str, Any]] | None) or []
        tokens = {token["content"]: token for token in stored}
        for text, token in declared.items():
            if old := tokens.get(text):
                tokens[text] = {**token, "id": old["id"], "special": old["special"] or token["special"]}
        if list(tokens.values()) != stored or {*declared, *special} - tokens.keys():
            vocabulary = msgspec.json.decode(parts.get("model", b"{}"), type=_Model).ids()
            named = {text: _token(text, special=True) for text in special if text in vocabulary}
            _add(tokens, named | declared, vocabulary)
            parts["added_tokens"] = msgspec.Raw(msgspec.json.encode(list(tokens.values())))
            content = msgspec.json.encode(parts)
    except (KeyError, TypeError, msgspec.MsgspecError):
        pass  # of another form, for which the tokenizer's reader has better words
    return content


def _add(tokens: dict[str, dict[str, Any]], new: dict[str, dict[str, Any]], vocabulary: dict[str, int]) -> None:
    """Add those that are not there, with the ids that the library will give them. Raises ConfigError."""
    for text, token in new.items():
        if text not in tokens:
            free = 1 + max([len(vocabulary) - 1, *(other["id"] for other in tokens.values())])
            token_id = vocabulary.get(text, free)
            if token.get("id", token_id) != token_id:
                raise ConfigError(
                    f"The token {text!r} has the id {token['id']} beside {NAME}, by which it would be {token_id}.",
                    param="model.path",
                )
            tokens[text] = token | {"id": token_id}


def _declared(directory: Path) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """The tokens that tokenizer_config.json or, of older checkpoints, added_tokens.json adds, and the special ones."""
    settings = read_json(directory / "tokenizer_config.json")
    named = read_json(directory / "special_tokens_map.json") | settings
    values = [named.get(name) for name in _NAMED]
    for group in map(named.get, _LISTS):
        values += group.values() if isinstance(group, dict) else group if isinstance(group, list) else ()
    special = [text for value in values if (text := token_text("_token", value))]
    entries = settings.get("added_tokens_decoder")
    if not isinstance(entries, dict):
        ids = read_json(directory / "added_tokens.json")
        entries = {token_id: {"content": text, "special": text in special} for text, token_id in ids.items()}
    try:
        listed = msgspec.convert(entries, dict[int, dict[str, Any]], strict=False)
        tokens = [_token(**token) | {"id": token_id} for token_id, token in sorted(listed.items())]
    except (TypeError, msgspec.ValidationError) as error:
        raise ConfigError(f"The tokens that are added to {NAME} cannot be read: {error}.", param="model.path") from None
    return {token["content"]: token for token in tokens}, special


def _token(content: object, *, special: bool = False, **flags: Any) -> dict[str, Any]:
    """Raises TypeError for a content that is no text."""
    if not isinstance(content, str):
        raise TypeError(f"the content {content!r} is no text")
    token = {"content": content, **dict.fromkeys(_FLAGS, False), "normalized": not special, "special": special}
    return token | {name: flag for name, flag in flags.items() if name in _FLAGS}
