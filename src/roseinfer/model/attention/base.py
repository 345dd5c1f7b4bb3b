"""The seam between a model and the way its attention is computed. Knows nothing about either side."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from roseinfer.engine.batch import Int32Array

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(layer, q [tokens, heads, head_dim], k and v [tokens, kv_heads, head_dim]) -> [tokens, heads * head_dim].

Each token attends to the tokens of its sequence at positions up to its own: those in the KV cache, and those of this
call, which are written to the cache first. The result has the dtype of q.
"""


@dataclass(frozen=True, slots=True)
class PackedTokens:
    """The tokens of one step, sequence after sequence, without padding.

    The last token may be repeated, to round their number up; each repetition computes and writes the same.
    """

    slots: Int32Array  # [tokens] row of the block table
    positions: Int32Array  # [tokens] absolute position in the sequence, ascending within it
    block_table: Int32Array  # [slots, max_blocks] block ids, valid up to each slot's last token here


class AttentionBackend(Protocol):
    """One way to compute attention over the paged KV cache."""

    @property
    def name(self) -> str: ...

    def prepare(self, tokens: PackedTokens) -> Attend:
        """Build the step's indices once; what is returned serves all layers of this step, until the next call."""
