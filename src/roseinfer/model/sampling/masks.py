"""Masks over the vocabulary into logits of minus infinity. Knows bits, and nothing of what they are for."""

import numpy as np
import torch

from roseinfer.engine.core.batch import Int32Array, SlotBinding
from roseinfer.engine.core.constraint import MaskArray, TokenMasks
from roseinfer.model.device_stream import sent


class Masked:
    """`LogitsEdit` of rows with a grammar: what it does not allow is not drawn. The last of the edits."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._places = torch.arange(8, dtype=torch.uint8, device=device)
        self._bits: MaskArray = np.zeros((0, 0), np.uint32)
        self._rows: dict[int, int] = {}  # of the bits, by slot

    def stage(self, masks: TokenMasks | None) -> None:
        """The masks of the rows that are drawn next."""
        if masks is not None:
            self._bits = masks.bits()
            self._rows = {slot: row for row, slot in enumerate(masks.constraints)}

    def bind(self, binding: SlotBinding) -> bool:
        """See LogitsEdit."""
        return binding.params.grammar is not None

    def apply(self, logits: torch.Tensor, slots: Int32Array, _positions: Int32Array) -> None:
        """See LogitsEdit."""
        bits = self._bits[[self._rows[slot] for slot in slots.tolist()]]
        packed = sent(bits.view(np.uint8), self._device)
        unpacked = packed.unsqueeze(-1).bitwise_right_shift(self._places).bitwise_and_(1).view(len(slots), -1)
        logits.masked_fill_(unpacked[:, : logits.shape[1]] == 0, -torch.inf)

    def note(self, tokens: torch.Tensor, slots: Int32Array, positions: Int32Array) -> None:
        """See LogitsEdit. The engine tells the grammars, once it has read the tokens."""
