"""What grammars must know of tokenizer.json: which tokens are control, and how the others are spelled.

A token is control where the vocabulary marks it special, or where it ends a sequence: an answer never contains its
name. Every other token is text, whatever it looks like: `<tool_call>` and `<think>` of Qwen3 are added tokens that an
answer contains as they are written.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import msgspec

from roseinfer.text.answers.tool_formats import CALL_TAGS

MAX_TOKEN_CHARS = 255
# A name for a control token that no text contains: it begins with a code point that Unicode reserves for no character.
_HIDDEN = "\ufdd0{}"
# What a Lark grammar is made of, as far as it matters here: comments, literals and expressions may look like names.
_LARK_PARTS = re.compile(r'(?:#|//)[^\n]*|"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/|(?P<name><[^<>\s]+>)')


class _Words(msgspec.Struct, frozen=True):
    vocab: dict[str, int] | list[tuple[str, float]] = {}

    def texts(self) -> list[str]:
        return list(self.vocab) if isinstance(self.vocab, dict) else [word for word, _ in self.vocab]


@dataclass(frozen=True, slots=True)
class TokenizerFile:
    """What must be known of tokenizer.json."""

    control: dict[int, str]  # the names of the added tokens that no answer contains
    text_ids: dict[str, int]  # the added tokens that an answer may contain, by their text
    spelling_control: str  # the file with control tokens hidden: their names are tokenised as any text is

    @classmethod
    def read(cls, source: str, eos_token_ids: Collection[int]) -> "TokenizerFile":
        """Raises ValueError where a token is too long: beyond the library's tree, or it keeps it busy for minutes."""
        parts = msgspec.json.decode(source, type=dict[str, msgspec.Raw])
        model = msgspec.json.decode(parts.get("model", b"{}"), type=_Words)
        added = msgspec.json.decode(parts.get("added_tokens", b"[]"), type=list[dict[str, Any]] | None) or []
        words = model.texts()
        longest = max(map(len, (*words, *(token["content"] for token in added))), default=0)
        if longest > MAX_TOKEN_CHARS:
            raise ValueError(
                f"a token has {longest:,} characters, and {MAX_TOKEN_CHARS} are the most a grammar can use"
            )
        control = {token["id"]: token["content"] for token in added if _is_control(token, eos_token_ids)}
        of_model = {*words} & {*control.values()}
        kept: list[dict[str, Any]] = []
        for token in added:
            if token["id"] not in control:
                # A token that takes the blanks around it would not spell the text that it was made of.
                kept.append(token | {"lstrip": False, "rstrip": False})
            elif token["content"] not in of_model:  # a token of the model has its id from there; others count theirs
                kept.append(token | {"content": _HIDDEN.format(token["id"])})
        parts["added_tokens"] = msgspec.Raw(msgspec.json.encode(kept))
        text_ids = {token["content"]: token["id"] for token in added if token["id"] not in control}
        return cls(control, text_ids, msgspec.json.encode(parts).decode())

    def with_ids(self, lark: str) -> str:
        """Replaces names of tokens that are text, such as `<think>`, by ids, in the same columns where they fit."""

        def replace(found: re.Match[str]) -> str:
            token_id = self.text_ids.get(found["name"] or "")
            return found[0] if token_id is None else f"<[{token_id}]>".ljust(len(found[0]))

        return _LARK_PARTS.sub(replace, lark)


def _is_control(token: dict[str, Any], eos_token_ids: Collection[int]) -> bool:
    """Some vocabularies mark the tags of calls as special (Hermes 3), but an answer with calls contains them."""
    return token["id"] in eos_token_ids or (bool(token.get("special")) and token["content"] not in CALL_TAGS)
