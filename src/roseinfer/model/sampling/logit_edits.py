"""Edits of logits that requests ask for: logit_bias, penalties on tokens seen, and masks of grammars.

Few rows want one, so the others pay nothing: a row that does is copied to float32, changed with torch operators on any
device, and drawn from by the same backend as all. The model's own logits stay as they are, for log-probabilities. On a
GPU with Triton this is for the few rows that the kernels do not change themselves (edit_table.py).

The order is that of transformers' processors and vLLM's: the bias of `logit_bias` is added; a token of prompt or
completion has its logit divided by `repetition_penalty`, or multiplied where it is negative (CTRL, arXiv:1909.05858,
section 4.1); a token that was generated c > 0 times loses c * `frequency_penalty` + `presence_penalty` (OpenAI's API
reference); last, what a grammar does not allow is set to minus infinity.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from roseinfer.engine.core.batch import Int32Array, SlotBinding
from roseinfer.engine.core.constraint import MaskArray, TokenMasks
from roseinfer.messages import SamplingParams
from roseinfer.model.device import Scratch, sparse_zeros
from roseinfer.model.device_stream import Outbox, to_device
from roseinfer.model.sampling.slot_table import Int64Array

GROUP = 32  # rows that are changed at a time, which bounds the memory of copies
_NO_ROWS: Int64Array = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class _Owner:
    """The parameters of one slot's owner, and its tokens on the device."""

    params: SamplingParams
    num_prompt_tokens: int
    token_ids: torch.Tensor  # [prompt and completion at its longest]; written as tokens are drawn
    bias_ids: Int64Array
    biases: npt.NDArray[np.float32]


class Penalties:
    """Adds `logit_bias` and subtracts the penalties.

    Each slot's tokens are kept on the device, where a drawn one is known before the host has seen it: so the counts
    are right with a step in flight. A drafted token stands in its place until the row before it has drawn one: so a row
    counts what it would count alone, if the drafted tokens before it hold.
    """

    def __init__(self, device: torch.device, history: torch.Tensor | None = None, outbox: Outbox | None = None) -> None:
        """`history`: see `LogitsEdits`."""
        self._outbox = outbox or Outbox(device)
        self._device = device
        self._history = history
        self._counts = torch.zeros(0, device=device)  # of tokens in rows; zeros but while they are used
        self._owners: dict[int, _Owner] = {}

    def bind(self, binding: SlotBinding) -> bool:
        self._owners.pop(binding.slot, None)
        params = binding.params
        if not params.edits_logits:
            return False
        bias_ids = np.array(list(params.logit_bias), np.int64)
        biases = np.array(list(params.logit_bias.values()), np.float32)
        tokens = self._tokens_of(binding)
        self._owners[binding.slot] = _Owner(params, binding.num_prompt_tokens, tokens, bias_ids, biases)
        return True

    def _tokens_of(self, binding: SlotBinding) -> torch.Tensor:
        """Memory for all tokens of the owner, with those that are known."""
        known = binding.token_ids
        if not binding.params.has_penalties:
            return torch.zeros(0, dtype=torch.int64, device=self._device)
        assert known is not None, "penalties need the tokens that are known"
        if self._history is not None:
            tokens = self._history[binding.slot]
        else:
            size = binding.num_prompt_tokens + binding.params.max_tokens
            tokens = torch.zeros(size, dtype=torch.int64, device=self._device)
        self._outbox.put(tokens[: len(known)].copy_, known.astype(np.int32))
        return tokens

    def apply(self, logits: torch.Tensor, slots: Int32Array, positions: Int32Array) -> None:
        owners = [self._owners[slot] for slot in slots.tolist()]
        for row, owner in enumerate(owners):
            if len(owner.bias_ids):
                ids, biases = to_device(owner.bias_ids, self._device), to_device(owner.biases, self._device)
                logits[row].index_add_(0, ids, biases)
        if any(owner.params.has_penalties for owner in owners):
            self._penalise(logits, owners, positions)

    def _penalise(self, logits: torch.Tensor, owners: list[_Owner], positions: Int32Array) -> None:
        """Penalise all rows at once, with an entry for each known token of each row; equal entries get equal values."""
        vocab_size = logits.shape[1]
        lengths = [p if owner.params.has_penalties else 0 for owner, p in zip(owners, positions.tolist(), strict=True)]
        entries = torch.cat([owner.token_ids[:length] for owner, length in zip(owners, lengths, strict=True)]).long()
        entries += self._spread([row * vocab_size for row in range(len(owners))], lengths, np.int64)
        is_generated = np.concatenate(
            [np.arange(length) >= owner.num_prompt_tokens for owner, length in zip(owners, lengths, strict=True)]
        )
        if not len(self._counts):  # once for the largest group, which a warm-up of one row takes
            self._counts = sparse_zeros(GROUP * vocab_size, self._device)
        self._counts.index_add_(0, entries, to_device(is_generated.astype(np.float32), self._device))
        count = self._counts[entries]
        self._counts.index_fill_(0, entries, 0.0)  # an assignment through an index would wait for the device
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
        return to_device(np.repeat(np.array(of_rows, dtype), lengths), self._device)

    def note_tokens(self, tokens: torch.Tensor, slots: Int32Array, positions: Int32Array) -> None:
        for token, slot, position in zip(tokens, slots.tolist(), positions.tolist(), strict=True):
            if (owner := self._owners[slot]).params.has_penalties:
                owner.token_ids[position] = token


class GrammarMasks:
    """Sets tokens that a grammar does not allow to minus infinity. The engine advances the grammars."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._places = torch.arange(8, dtype=torch.uint8, device=device)
        self._bits: MaskArray = np.zeros((0, 0), np.uint32)
        self._rows: dict[tuple[int, int], int] = {}  # of the bits, by slot and position

    def stage(self, masks: TokenMasks | None) -> None:
        """Set the masks of the rows that are drawn next."""
        if masks is not None:
            self._bits = masks.bits()
            self._rows = {place: row for row, place in enumerate(masks.rows)}

    def bind(self, binding: SlotBinding) -> bool:
        return binding.params.grammar is not None

    def apply(self, logits: torch.Tensor, slots: Int32Array, positions: Int32Array) -> None:
        bits = self._bits[[self._rows[place] for place in zip(slots.tolist(), positions.tolist(), strict=True)]]
        packed = to_device(bits.view(np.uint8), self._device)
        unpacked = packed.unsqueeze(-1).bitwise_right_shift(self._places).bitwise_and_(1).view(len(slots), -1)
        logits.masked_fill_(unpacked[:, : logits.shape[1]] == 0, -torch.inf)


class LogitsEdits:
    """The edits of all slots, in the order in which they are made.

    Each edit's `bind` forgets the slot's last owner and returns whether the new one's rows want it; `apply` changes
    logits [rows, vocab_size] float32 in place, of one row a slot or, behind drafted tokens, of several. Positions are
    those of the tokens to be drawn, which is also the number of known or drafted tokens of each row; the last of them
    may be known on the device only.
    """

    def __init__(
        self,
        num_slots: int,
        device: torch.device,
        history: torch.Tensor | None = None,
        outbox: Outbox | None = None,
    ) -> None:
        """`history` [slots, tokens] int32 on the device, if there is one, is where known tokens are kept."""
        self.masks = GrammarMasks(device)
        self._penalties = Penalties(device, history, outbox)
        self._edits: tuple[Penalties | GrammarMasks, ...] = (self._penalties, self.masks)
        self._device = device
        self._scratch = Scratch(device)
        self._wanted: npt.NDArray[np.bool_] = np.zeros((num_slots, len(self._edits)), np.bool_)
        self._num_wanting = 0  # slots

    def bind(self, binding: SlotBinding) -> None:
        """Apply the edits that the slot's new owner wants to its rows from now on."""
        wanted = [edit.bind(binding) for edit in self._edits]  # it may raise, and then the row is as it was
        row = self._wanted[binding.slot]
        self._num_wanting += int(any(wanted)) - int(row.any())
        row[:] = wanted

    def rows(self, slots: Int32Array) -> Int64Array:
        """Indices of the rows that want any edit."""
        if not self._num_wanting:
            return _NO_ROWS
        return np.flatnonzero(self._wanted[slots].any(axis=1))

    def edited(self, logits: torch.Tensor, rows: Int64Array, slots: Int32Array, positions: Int32Array) -> torch.Tensor:
        """A changed copy of some rows of logits [all rows, vocab_size] -> float32 [len(rows), vocab_size].

        Slots and positions are those of the rows. The copy is valid until the next one.
        """
        changed = self._scratch.buffer("rows", (len(rows), logits.shape[1]))
        if logits.dtype == changed.dtype:
            torch.index_select(logits, 0, self._tensor(rows), out=changed)
        else:
            changed.copy_(logits[self._tensor(rows)])
        for edit, mine in zip(self._edits, self._wanted[slots].T, strict=True):
            if mine.all():
                edit.apply(changed, slots, positions)
            elif mine.any():
                some = self._tensor(np.flatnonzero(mine))
                part = changed[some]
                edit.apply(part, slots[mine], positions[mine])
                changed[some] = part
        return changed

    def note_tokens(self, tokens: torch.Tensor, slots: Int32Array, positions: Int32Array) -> None:
        """Keep the tokens [rows] int64, on the device, that were drawn or drafted for rows which want an edit."""
        mine = self._wanted[slots, 0]
        if mine.any():
            of_these = tokens if mine.all() else tokens[self._tensor(np.flatnonzero(mine))]
            self._penalties.note_tokens(of_these, slots[mine], positions[mine])

    def _tensor(self, array: Int64Array) -> torch.Tensor:
        return to_device(array, self._device)
