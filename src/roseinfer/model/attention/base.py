"""What a model and an attention backend share: the tokens of a step, and the call that computes attention."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from roseinfer.engine.core.batch import Int32Array

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(layer, q [tokens, heads, head_dim], k and v [tokens, kv_heads, head_dim]) -> [tokens, heads * head_dim].

Each token attends to the tokens of its sequence at positions up to its own: those in the KV cache, and those of this
call, which are written to the cache first. The result has the dtype of q.
"""


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """The shape of a model's attention. Query head h reads key head h // (num_heads / num_kv_heads)."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float  # of the products of queries and keys
    windows: tuple[int | None, ...]  # of each layer: a token sees the last `window` positions, its own included
    softcap: float = 0.0  # scores become softcap * tanh(score / softcap) (Gemma 2, 2024); 0: they stay as they are
    # [heads] float32 of each layer: a score beside those of the keys, without a value (Xiao et al. 2023; gpt-oss)
    sinks: tuple[torch.Tensor, ...] | None = None

    @property
    def num_merged_heads(self) -> int:
        """Heads of queries, keys and values together."""
        return self.num_heads + 2 * self.num_kv_heads

    def sinks_on(self, device: torch.device) -> tuple[torch.Tensor | None, ...]:
        """The sinks of each layer on `device`, contiguous; None for a model without."""
        if self.sinks is None:
            return (None,) * len(self.windows)
        return tuple(sinks.to(device, torch.float32).contiguous() for sinks in self.sinks)

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes of one token's keys and values in all layers of a cache of this type, scales included."""
        scale_bytes = torch.float32.itemsize if dtype == torch.int8 else 0
        return 2 * len(self.windows) * self.num_kv_heads * (self.head_dim * dtype.itemsize + scale_bytes)


class DeviceTokens(NamedTuple):
    """The int32 integers of one step on a GPU, at fixed addresses under a CUDA graph, with rows that fill it up."""

    slots: torch.Tensor  # [rows] row of the block table
    starts: torch.Tensor  # [rows] position of the row's first new token
    query_starts: torch.Tensor  # [rows + 1] index of the row's first token; ends with the number of tokens
    block_table: torch.Tensor  # [slots, max_blocks]
    table_stride: int  # elements from one slot's blocks to the next slot's


@dataclass(frozen=True, slots=True)
class PackedTokens:
    """The tokens of one step, sequence after sequence, without padding.

    The last token may be repeated, to round their number up; the attention of repetitions is not read.
    """

    slots: Int32Array  # [tokens] row of the block table
    positions: Int32Array  # [tokens] absolute position in the sequence, ascending within it
    query_starts: Int32Array  # [rows + 1] index of each row's first token, then that of the first repetition
    block_table: Int32Array  # [slots, max_blocks] block ids, valid up to each slot's last token here
    max_query_len: int  # most tokens of a row
    max_context_len: int  # no token sees more positions, its own included, without regard to windows
    device: DeviceTokens | None = None  # the same on a GPU; None on a CPU
    is_captured: bool = False  # by a CUDA graph: `device` and the two maxima alone say what a replay computes


class AttentionBackend(Protocol):
    """One way to compute attention over the paged KV cache."""

    name: str
    # A step can be repeated after another `prepare`: any step by a CUDA graph (`PackedTokens.is_captured`), and one of
    # single tokens, with as many rows, by `model/steps/replay.py`.
    is_capturable: bool

    def prepare(self, tokens: PackedTokens) -> Attend:
        """Build the step's indices once; the returned function serves all layers of this step, until the next call."""
