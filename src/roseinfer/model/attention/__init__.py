"""The attention backends by name, and which one `auto` takes. Adding one is a file and a line here."""

from collections.abc import Callable

from roseinfer.model.attention.base import Attend, AttentionBackend, PackedTokens
from roseinfer.model.attention.reference import ReferenceAttention
from roseinfer.model.kv_cache import KVCache

__all__ = ["Attend", "AttentionBackend", "PackedTokens", "choose_attention"]

_BACKENDS: dict[str, Callable[[KVCache, int], AttentionBackend]] = {"reference": ReferenceAttention}


def choose_attention(name: str, cache: KVCache, num_heads: int) -> AttentionBackend:
    """The backend called `name` in the configuration, over `cache`, for `num_heads` query heads."""
    return _BACKENDS["reference" if name == "auto" else name](cache, num_heads)
