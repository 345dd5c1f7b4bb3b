"""Turns what a program gave as prompts into a list of them. Knows no tokenizer and no model."""

from collections.abc import Iterable, Sequence
from typing import Any

from roseinfer.config import shown
from roseinfer.errors import InvalidRequest

Prompt = str | Sequence[int]


def as_prompts(given: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One text or one list of token ids is a list of one. Raises InvalidRequest for what holds no prompts."""
    if isinstance(given, str):
        return [given]
    if isinstance(given, bytes | bytearray) or not isinstance(given, Iterable):
        raise InvalidRequest(
            f"`prompts`: expected a text, a list of token ids, or a list of these; got {shown(given)}.", param="prompts"
        )
    items: list[Any] = list(given)
    return [items] if items and isinstance(items[0], int) else items


def as_token_ids(given: Sequence[int], name: str) -> list[int]:
    """Raises InvalidRequest for what is no list, calling it `name`; what stands in the list is not looked at."""
    if isinstance(given, bytes | bytearray) or not isinstance(given, Iterable):
        raise InvalidRequest(f"`{name}`: expected a text or a list of token ids; got {shown(given)}.", param=name)
    return list(given)
