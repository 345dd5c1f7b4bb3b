"""Logits into logits that heed what was said before: biases, and penalties on tokens seen. Knows no text and no draw.

In the order of transformers' processors and vLLM's: the bias of `logit_bias` is added; a token of prompt or completion
has its logit divided by `repetition_penalty`, or multiplied where it is negative (CTRL, arXiv:1909.05858, §4.1); a
token that was generated c > 0 times loses c · `frequency_penalty` + `presence_penalty` (OpenAI's API reference).
"""

from dataclasses import dataclass

import numpy as np
import torch

from roseinfer.engine.core.batch import Int32Array, SlotBinding
from roseinfer.messages import SamplingParams
from roseinfer.model.device_stream import sent


@dataclass(frozen=True, slots=True)
class _Owner:
    """What one slot's owner asks for, and its tokens on the device."""

    params: SamplingParams
    num_prompt_tokens: int
    token_ids: torch.Tensor  # int64 [prompt and completion at its longest]; written as tokens are drawn
    bias_ids: torch.Tensor  # int64
    biases: torch.Tensor  # float32


class Penalties:
    """`LogitsEdit`: everything that is added to, taken from or multiplied with single logits.

    Each slot's tokens are kept on the device, where a drawn one is known before the host has seen it: so the counts
    are right with a step in flight.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._counts = torch.zeros(0, device=device)  # of tokens in rows; zeros but while they are used
        self._owners: dict[int, _Owner] = {}

    def bind(self, binding: SlotBinding) -> bool:
        """See LogitsEdit."""
        self._owners.pop(binding.slot, None)
        params = binding.params
        if not params.edits_logits:
            return False
        known = np.zeros(0, np.int64)
        if params.has_penalties:
            assert binding.token_ids is not None, "penalties need the tokens that are known"
            known = np.zeros(binding.num_prompt_tokens + params.max_tokens, np.int64)
            known[: len(binding.token_ids)] = binding.token_ids
        self._owners[binding.slot] = _Owner(
            params,
            binding.num_prompt_tokens,
            sent(known, self._device),
            sent(np.array(list(params.logit_bias), np.int64), self._device),
            sent(np.array(list(params.logit_bias.values()), np.float32), self._device),
        )
        return True

    def apply(self, logits: torch.Tensor, slots: Int32Array, positions: Int32Array) -> None:
        """See LogitsEdit."""
        owners = [self._owners[slot] for slot in slots.tolist()]
        for row, owner in enumerate(owners):
            if len(owner.bias_ids):
                logits[row].index_add_(0, owner.bias_ids, owner.biases)
        if any(owner.params.has_penalties for owner in owners):
            self._penalise(logits, owners, positions)

    def _penalise(self, logits: torch.Tensor, owners: list[_Owner], positions: Int32Array) -> None:
        """All rows at once, entry by entry: one for each known token of each row. Equal entries get equal values."""
        vocab_size = logits.shape[1]
        lengths = [p if owner.params.has_penalties else 0 for owner, p in zip(owners, positions.tolist(), strict=True)]
        entries = torch.cat([owner.token_ids[:length] for owner, length in zip(owners, lengths, strict=True)])
        entries += self._spread([row * vocab_size for row in range(len(owners))], lengths, np.int64)
        is_generated = np.concatenate(
            [np.arange(length) >= owner.num_prompt_tokens for owner, length in zip(owners, lengths, strict=True)]
        )
        if len(self._counts) < logits.numel():
            self._counts = torch.zeros(logits.numel(), device=self._device)
        self._counts.index_add_(0, entries, sent(is_generated.astype(np.float32), self._device))
        count = self._counts[entries]
        self._counts[entries] = 0.0
        asked = [owner.params for owner in owners]
        repetition = self._spread([params.repetition_penalty for params in asked], lengths, np.float32)
        flat = logits.view(-1)
        values = flat[entries]
        values = torch.where(values > 0, values / repetition, values * repetition)
        values -= count * self._spread([params.frequency_penalty for params in asked], lengths, np.float32)
        values -= (count > 0) * self._spread([params.presence_penalty for params in asked], lengths, np.float32)
        flat[entries] = values

    def _spread(self, of_rows: list[float] | list[int], lengths: list[int], dtype: type[np.generic]) -> torch.Tensor:
        """Each row's number once for each of its entries."""
        return sent(np.repeat(np.array(of_rows, dtype), lengths), self._device)

    def note(self, tokens: torch.Tensor, slots: Int32Array, positions: Int32Array) -> None:
        """See LogitsEdit."""
        for token, slot, position in zip(tokens, slots.tolist(), positions.tolist(), strict=True):
            if (owner := self._owners[slot]).params.has_penalties:
                owner.token_ids[position] = token
