"""What grammars must know of tokenizer.json: which tokens are control, and how the others are spelled.

A token is control where the vocabulary marks it special, or where it ends a sequence: an answer never contains its
name. Every other token is text, whatever it looks like: `<tool_call>` and `<think>` of Qwen3 are added tokens that an
answer contains as they are written.
"""

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import msgspec

from roseinfer.text.answers.tool_formats import CALL_TAGS
from roseinfer.text.tokenizer.vocabulary import byte_spelling

MAX_TOKEN_CHARS = 255
# A name for a control token that no text contains: it begins with a code point that Unicode reserves for no character.
_HIDDEN = "\ufdd0{}"
# What a Lark grammar is made of, as far as it matters here: comments, literals and expressions may look like names.
_LARK_PARTS = re.compile(r'(?:#|//)[^\n]*|"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/|(?P<name><[^<>\s]+>)')


class _Words(msgspec.Struct, frozen=True):
    vocab: dict[str, int] | list[tuple[str, float]] = {}

    def texts(self) -> list[str]:
        return list(self.vocab) if isinstance(self.vocab, dict) else [word for word, _ in self.vocab]

    def ids(self) -> Collection[int]:
        return self.vocab.values() if isinstance(self.vocab, dict) else range(len(self.vocab))


@dataclass(frozen=True, slots=True)
class TokenizerFile:
    """What must be known of tokenizer.json."""

    control: dict[int, str]  # the names of the added tokens that no answer contains
    text_ids: dict[str, int]  # the added tokens that an answer may contain, by their text
    num_ids: int
    spell: Callable[[str], bytes]  # a piece of the vocabulary
    # The file with control tokens hidden, whose names are tokenised as any text is, and without a blank before a text.
    spelling_control: bytes

    @classmethod
    def read(cls, source: str, eos_token_ids: Collection[int]) -> "TokenizerFile":
        """Raises ValueError where tokens spell no bytes, or one is too long.

        It would be beyond the library's tree, or keep it busy for minutes.
        """
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
        for name in ("normalizer", "pre_tokenizer"):
            step = _adding_no_blank(msgspec.json.decode(parts.get(name, b"null"), type=dict[str, Any] | None))
            parts[name] = msgspec.Raw(msgspec.json.encode(step))
        text_ids = {token["content"]: token["id"] for token in added if token["id"] not in control}
        num_ids = 1 + max((*model.ids(), *control, *text_ids.values()), default=-1)
        spell = byte_spelling(msgspec.json.decode(parts.get("decoder", b"null"), type=dict[str, Any] | None))
        if spell is None:
            raise ValueError("its tokens are words and not bytes")
        return cls(control, text_ids, num_ids, spell, msgspec.json.encode(parts))

    def with_ids(self, lark: str) -> str:
        """Replaces names of tokens that are text, such as `<think>`, by ids, in the same columns where they fit."""

        def replace(found: re.Match[str]) -> str:
            token_id = self.text_ids.get(found["name"] or "")
            return found[0] if token_id is None else f"<[{token_id}]>".ljust(len(found[0]))

        return _LARK_PARTS.sub(replace, lark)


def _adding_no_blank(step: dict[str, Any] | None) -> dict[str, Any] | None:
    """A normalizer or pre-tokenizer without the blank that SentencePiece puts before a text: others stand before it."""
    if step is None or step["type"] == "Prepend":
        return None
    for parts in ("normalizers", "pretokenizers"):
        if parts in step:
            return step | {parts: [part for part in map(_adding_no_blank, step[parts]) if part is not None]}
    blanks = {"add_prefix_space": False, "prepend_scheme": "never"}
    return step | {name: value for name, value in blanks.items() if name in step}


def _is_control(token: dict[str, Any], eos_token_ids: Collection[int]) -> bool:
    """Some vocabularies mark the tags of calls as special (Hermes 3), but an answer with calls contains them."""
    return token["id"] in eos_token_ids or (bool(token.get("special")) and token["content"] not in CALL_TAGS)
