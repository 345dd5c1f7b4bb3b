"""Keeps logit edits in tables on the device, by slot, which the sampling kernels apply when they read logits.

A slot has a word for each token of the vocabulary: how often the token was generated, whether it is known at all,
whether it is barred at first, and which of the slot's biases it gets. A kernel that draws a token counts it there, so
no step sends anything. What the changes are is described in logit_edits.py.
"""

from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from roseinfer.engine.core.batch import MAX_STEP_DRAFTS, Int32Array, SlotBinding
from roseinfer.engine.core.constraint import TokenMasks
from roseinfer.model.device_stream import Outbox
from roseinfer.model.sampling.slot_table import Int64Array

# A word from its lowest bit: 20 bits of a count, a bit each of known and barred, 10 bits of the number of a bias.
COUNT = (1 << 20) - 1
KNOWN = 1 << 20
BARRED = 1 << 21
BIAS_SHIFT = 22
MAX_BIASES = (1 << 10) - 1  # of one slot; 0 is none

# Bits of a slot's `kinds`: something changes its logits, among that a mask; a token that is drawn is counted.
CHANGES, COUNTS, IS_MASKED = 1, 2, 4

# What else a kernel reads of a slot.
EDIT = np.dtype([("kinds", np.int32), ("presence", np.float32), ("frequency", np.float32), ("repetition", np.float32)])


def edit_bytes(num_slots: int, vocab_size: int, max_model_len: int) -> int:
    """Bytes of the tables on the device, without the masks of drafted tokens."""
    words = _padded(vocab_size) + max_model_len + MAX_BIASES + 1 + EDIT.itemsize // 4
    return 4 * num_slots * (words + num_mask_words(vocab_size) + 1)


def _padded(num_words: int) -> int:
    return -(-num_words // 16) * 16


def num_mask_words(vocab_size: int) -> int:
    """Words of 32 bits of a mask, which has a bit for each token."""
    return -(-vocab_size // 32)


class MaskArea:
    """How masks of grammars lie in a piece of memory: the masks, and behind them the row of each slot's among them.

    They end where it ends, however many there are: so they travel with what lies behind, in one copy of what is used.
    """

    def __init__(self, num_slots: int, vocab_size: int) -> None:
        self._width = num_mask_words(vocab_size)
        self.first_slot = _padded((num_slots + MAX_STEP_DRAFTS) * self._width)
        self.num_words = self.first_slot + _padded(num_slots)

    def write(self, masks: TokenMasks, words: npt.NDArray[np.int32]) -> int:
        """Put masks into `num_words` words; returns where they begin. Of several of a slot the last counts."""
        bits, end = masks.bits(), self.first_slot // self._width
        first = end - len(bits)
        words[first * self._width : end * self._width] = bits.view(np.int32).ravel()
        words[[self.first_slot + slot for slot, _ in masks.rows]] = np.arange(first, end)
        return first * self._width


class EditTable:
    """The tables. A slot whose owner has more than `MAX_BIASES` biases is not held: torch edits its logits."""

    def __init__(
        self,
        num_slots: int,
        vocab_size: int,
        max_model_len: int,
        device: torch.device,
        outbox: Outbox | None = None,
        masks: torch.Tensor | None = None,
    ) -> None:
        """`masks` is memory of a `MaskArea` that others write too."""
        self._outbox = outbox or Outbox(device)
        # Rows begin at multiples of 64 bytes, or a kernel would read them word by word.
        width = _padded(vocab_size)
        self.words = torch.zeros(num_slots, width, dtype=torch.int32, device=device)[:, :vocab_size]
        self._scratch = np.zeros(vocab_size, np.int32)  # zeros but while a slot is bound
        self.biases = torch.zeros(num_slots, MAX_BIASES + 1, device=device)
        self.history = torch.zeros(num_slots, max_model_len, dtype=torch.int32, device=device)  # known tokens
        self.records = torch.zeros(num_slots, EDIT.itemsize // 4, dtype=torch.int32, device=device)
        self.mask_area = MaskArea(num_slots, vocab_size)
        if masks is None:
            masks = torch.zeros(self.mask_area.num_words, dtype=torch.int32, device=device)
        self.masks = masks
        self.is_held: npt.NDArray[np.bool_] = np.ones(num_slots, np.bool_)
        self._kinds = np.zeros(num_slots, np.int32)
        self._num_prompt_tokens = np.zeros(num_slots, np.int64)
        self._is_stale = np.zeros(num_slots, np.bool_)  # tokens were drawn that the words do not count
        self._has_stale = False
        self._vocab_size = vocab_size
        self._device = device

    def bind(self, binding: SlotBinding, barred: Int64Array) -> None:
        """Set the edits of the slot's new owner; the `barred` ids are those that it must not get at first."""
        slot, params = binding.slot, binding.params
        if not all(0 <= token_id < self._vocab_size for token_id in params.logit_bias):
            raise IndexError("logit_bias names a token that the vocabulary does not have")  # a GPU would stop for all
        is_held = len(params.logit_bias) <= MAX_BIASES
        kinds = 0
        if is_held and (params.edits_logits or len(barred) or params.grammar is not None):
            kinds = CHANGES | (COUNTS if params.has_penalties else 0) | (IS_MASKED if params.grammar else 0)
        if kinds:
            self._send(binding, barred)
        if kinds or self._kinds[slot]:
            record = np.array(
                [(kinds, params.presence_penalty, params.frequency_penalty, params.repetition_penalty)], EDIT
            )
            self._outbox.put(self.records[slot].copy_, record.view(np.int32))
        self._kinds[slot], self.is_held[slot], self._is_stale[slot] = kinds, is_held, False
        self._num_prompt_tokens[slot] = binding.num_prompt_tokens

    def _send(self, binding: SlotBinding, barred: Int64Array) -> None:
        """Replace the slot's words, of which few are not 0, and its biases."""
        params, biases, known = binding.params, binding.params.logit_bias, np.zeros(0, np.int64)
        if params.has_penalties:
            assert binding.token_ids is not None, "penalties need the tokens that are known"
            known = binding.token_ids.astype(np.int64)
        biased, numbers = np.array(list(biases), np.int64), np.array(list(biases.values()), np.float32)
        changed = np.concatenate((known, barred, biased))  # an id that comes again gets the same word again
        words = self._scratch
        words[known] = KNOWN
        np.add.at(words, known[binding.num_prompt_tokens :], 1)
        words[barred] |= BARRED
        words[biased] |= np.arange(1, len(biased) + 1, dtype=np.int32) << BIAS_SHIFT
        values = words[changed]
        words[changed] = 0
        self._outbox.put(partial(_replace, self.words[binding.slot]), changed, values)
        if biases:
            self._outbox.put(self.biases[binding.slot, 1 : len(biases) + 1].copy_, numbers)

    def send_masks(self, masks: TokenMasks) -> None:
        """Use these masks for the tokens that are drawn next, in a copy of their own."""
        words = np.zeros(self.mask_area.num_words, np.int32)
        first = self.mask_area.write(masks, words)
        _put(self.masks[first:], words[first:])

    def note_stale(self, slots: Int32Array) -> None:
        """Note that tokens of these slots were drawn, or drafted, by others than the kernels."""
        self._is_stale[slots] = self._has_stale = True

    def refresh(self, slots: Int32Array, positions: Int32Array) -> None:
        """Count the tokens of slots whose words are stale: those of their history before the positions."""
        if not self._has_stale:
            return
        for row in np.flatnonzero(self._is_stale[slots]).tolist():
            slot, num_known = int(slots[row]), int(positions[row])
            words, known = self.words[slot], self.history[slot, :num_known].long()
            generated = known[self._num_prompt_tokens[slot] :]
            words.bitwise_and_(~(COUNT | KNOWN))
            words.index_add_(0, generated, torch.ones_like(generated, dtype=torch.int32))
            is_known = torch.zeros(self._vocab_size, dtype=torch.int32, device=self._device)
            words.bitwise_or_(is_known.index_fill_(0, known, KNOWN))
            self._is_stale[slot] = False
        self._has_stale = bool(self._is_stale.any())


def _replace(row: torch.Tensor, indices: torch.Tensor, values: torch.Tensor) -> None:
    """Put values into a row that has zeros else."""
    row.zero_().scatter_(0, indices, values)


def _put(target: torch.Tensor, array: npt.NDArray[np.generic]) -> None:
    """Queue a copy to a device out of torch's pinned memory."""
    tensor = torch.from_numpy(array)
    target.copy_(tensor if target.device.type == "cpu" else tensor.pin_memory(), non_blocking=True)
