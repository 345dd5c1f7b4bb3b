"""Samples the next token of each row from its logits, and its log-probabilities if its request wants them.

Torch, the compiled kernels and Triton are backends with the same promise: a row's token depends on its logits, its
parameters and one random number, never on the other rows.
"""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Protocol

import numpy as np
import torch

from roseinfer.engine.core.batch import NO_TOKEN, OWN_FAULT, Int32Array, SlotBinding
from roseinfer.engine.core.constraint import TokenMasks
from roseinfer.model.device_stream import Outbox, to_device
from roseinfer.model.kernels.library import Kernels
from roseinfer.model.sampling.edit_table import EditTable
from roseinfer.model.sampling.logit_edits import GROUP, LogitsEdits
from roseinfer.model.sampling.logprobs import LogprobRows, Logprobs
from roseinfer.model.sampling.native import NativeSampling
from roseinfer.model.sampling.slot_table import TRUNCATED, Int64Array, SamplingTable
from roseinfer.model.sampling.torch import TorchSampling


class SamplingBackend(Protocol):
    """One way to compute tokens and log-probabilities of logits [rows, vocab_size], float32 or bfloat16."""

    def tokens(self, logits: torch.Tensor, slots: Int32Array, positions: Int32Array) -> torch.Tensor:
        """The next token of each row [rows] int64 on the device, by the parameters of its slot in the table.

        `NO_TOKEN` for a row whose largest logit is not finite: it holds a NaN or +inf, or nothing above -inf.
        """

    def tokens_of_edited(self, logits: torch.Tensor, slots: Int32Array, positions: Int32Array) -> torch.Tensor:
        """As `tokens`, without the edits that a backend makes itself."""

    def logprobs(self, logits: torch.Tensor, tokens: torch.Tensor, rows: Int64Array, counts: Int32Array) -> LogprobRows:
        """Log-softmax of the raw logits of some rows: of their tokens, and of the likeliest `counts` [len(rows)]."""

    def score(
        self, logits: torch.Tensor, tokens: torch.Tensor, counts: Int32Array, same: Sequence[torch.Tensor]
    ) -> LogprobRows:
        """As `logprobs` of all rows, without a copy to the device: `same` are there the rows of `rows_by_count`."""

    def last_logprobs(self, counts: Int32Array) -> Logprobs | None:
        """Those that `tokens` and `choose` left of the rows they drew last; None of a backend that leaves none.

        They are for the rows whose count [rows] is not negative, and valid until the backend draws again.
        """

    def choose(self, logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """As `tokens`, of what is on the device, without waiting. In torch the limits of rows do not count."""


class Sampler:
    """Chooses the next token of each row by the parameters of the row's slot."""

    def __init__(
        self,
        num_slots: int,
        vocab_size: int,
        device: torch.device,
        kernels: Kernels | None = None,
        max_model_len: int = 0,
        outbox: Outbox | None = None,
        masks: torch.Tensor | None = None,
    ) -> None:
        """`max_model_len` sizes the history of each slot on a GPU with Triton.

        The giver of an `outbox` and of `masks` (see `EditTable`) sends what was put there, and the masks of the rows,
        before a graph is replayed; `sample` sends what still waits, and its rows' masks.
        """
        self._outbox = outbox or Outbox(device)
        self._masks = masks
        self._table = SamplingTable(num_slots, vocab_size, device, self._outbox)
        self._device = device
        self._edit_table: EditTable | None = None
        if device.type == "cuda" and find_spec("triton") is not None:
            self._use_triton(max_model_len)
        else:
            self._backend: SamplingBackend = (
                NativeSampling(self._table, kernels)
                if device.type == "cpu" and kernels is not None
                else TorchSampling(self._table, device)
            )
            self._edits = LogitsEdits(num_slots, device, outbox=self._outbox)

    def _use_triton(self, max_model_len: int) -> None:
        from roseinfer.model.sampling.triton import TritonSampling  # imports triton, which a CPU may lack

        num_slots, vocab_size = len(self._table.host), self._table.vocab_size
        self._edit_table = EditTable(num_slots, vocab_size, max_model_len, self._device, self._outbox, self._masks)
        self._backend = TritonSampling(self._table, self._device, self._edit_table)
        self._edits = LogitsEdits(num_slots, self._device, self._edit_table.history, self._outbox)

    def bind(self, binding: SlotBinding) -> None:
        """Use the parameters of the slot's new owner from now on."""
        self._table.bind(binding)
        self._edits.bind(binding)
        if self._edit_table is not None:
            self._edit_table.bind(binding, self._table.barred_ids_of(binding.slot))

    def sample(
        self,
        logits: torch.Tensor,
        slots: Int32Array,
        positions: Int32Array,
        masks: TokenMasks | None = None,
        drafted: Int32Array | None = None,
        on_device: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, Logprobs | None]:
        """Logits [rows, vocab_size] and the positions of the tokens to draw -> ids [rows] int64 on the device.

        Logits of barred tokens are overwritten for a while. `masks` are those of every row with a grammar; `drafted`
        [rows] are the tokens at the positions before, or negative where those are known. `on_device` are slots and
        positions again, if they are there already. A row whose largest logit is not finite has `NO_TOKEN` if the model
        computed it so, `OWN_FAULT` if its edits did.
        """
        self._outbox.flush()
        self._stage_masks(masks)
        if drafted is not None:
            rows = np.flatnonzero(drafted >= 0)
            tokens = to_device(drafted[rows].astype(np.int64), self._device)
            self._edits.note_tokens(tokens, slots[rows], positions[rows] - 1)
        edited = self._edited_rows(slots, drafted)
        with self._barred(logits, edited, slots, positions):
            if not len(edited) and self._edit_table is not None and on_device is not None:
                self.refresh(slots, positions)
                tokens = self._backend.choose(logits, *on_device)
            else:
                tokens = self._tokens(logits, edited, slots, positions)
        if not self._table.num_with_logprobs:
            return tokens, None
        counts = self._table.host["num_logprobs"][slots]
        rows = np.flatnonzero(counts >= 0)
        if not len(rows):
            return tokens, None
        if not len(edited) and (left := self._backend.last_logprobs(counts)) is not None:
            return tokens, left
        return tokens, self._backend.logprobs(logits, tokens.clamp(min=0), rows, counts[rows])

    def score(
        self, logits: torch.Tensor, token_ids: torch.Tensor, counts: Int32Array, same: Sequence[torch.Tensor]
    ) -> LogprobRows:
        """Log-softmax of logits [rows, vocab_size] at ids [rows] int64 on the device, and of the likeliest `counts`.

        `same` are the rows of `rows_by_count`, on the device too.
        """
        return self._backend.score(logits, token_ids, counts, same)

    def _edited_rows(self, slots: Int32Array, drafted: Int32Array | None) -> Int64Array:
        """Rows whose logits are edited in torch: all with edits, or with Triton those that its kernels cannot edit."""
        rows = self._edits.rows(slots)
        if self._edit_table is None or not len(rows):
            return rows
        is_here = ~self._edit_table.is_held[slots]
        if drafted is not None:
            is_here |= np.isin(slots, slots[drafted >= 0])
        return rows[is_here[rows]]

    def _tokens(
        self, logits: torch.Tensor, edited: Int64Array, slots: Int32Array, positions: Int32Array
    ) -> torch.Tensor:
        """The next token of each row; rows with edits are drawn from a copy."""
        if not len(edited):
            self.refresh(slots, positions)
            return self._backend.tokens(logits, slots, positions)
        tokens = self._tokens_of_others(logits, edited, slots, positions)
        for rows in np.split(edited, range(GROUP, len(edited), GROUP)):
            of_rows, where = slots[rows], positions[rows]
            changed = self._edits.edited(logits, rows, of_rows, where)
            drawn = self._backend.tokens_of_edited(changed, of_rows, where)
            self._edits.note_tokens(drawn.clamp(min=0), of_rows, where)  # NO_TOKEN is no index
            on_device = to_device(rows, self._device)
            tokens[on_device] = self._attributed(drawn, logits, on_device)
        if self._edit_table is not None:
            self._edit_table.note_stale(slots[edited])
        return tokens

    def _tokens_of_others(
        self, logits: torch.Tensor, edited: Int64Array, slots: Int32Array, positions: Int32Array
    ) -> torch.Tensor:
        """Tokens [rows], of which those of the edited rows are still to be drawn."""
        tokens = torch.empty(len(slots), dtype=torch.int64, device=self._device)
        others = np.delete(np.arange(len(slots)), edited)
        if not len(others):
            return tokens
        if self._edit_table is None:  # cheaper than a copy of the others' logits
            return self._backend.tokens(logits, slots, positions)
        self.refresh(slots[others], positions[others])
        on_device = to_device(others, self._device)
        drawn = self._backend.tokens(logits.index_select(0, on_device), slots[others], positions[others])
        return tokens.index_copy_(0, on_device, drawn)

    def _stage_masks(self, masks: TokenMasks | None) -> None:
        self._edits.masks.stage(masks)
        if masks is not None and self._edit_table is not None:
            self._edit_table.send_masks(masks)

    def refresh(self, slots: Int32Array, positions: Int32Array) -> None:
        """Count what the kernels have not, before a graph with these rows is replayed."""
        if self._edit_table is not None:
            self._edit_table.refresh(slots, positions)

    def _attributed(self, drawn: torch.Tensor, logits: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """The tokens of edited rows, with `OWN_FAULT` for rows that failed although the model's logits are finite."""
        if self._device.type == "cpu" and not bool((drawn == NO_TOKEN).any()):  # elsewhere it would wait for the device
            return drawn
        was_sound = logits[rows].amax(-1).isfinite()
        return torch.where((drawn == NO_TOKEN) & was_sound, OWN_FAULT, drawn)

    @contextmanager
    def _barred(
        self, logits: torch.Tensor, edited: Int64Array, slots: Int32Array, positions: Int32Array
    ) -> Generator[None]:
        """Set eos and stop tokens to -inf in the rows that may not stop yet; restore them at the end.

        Where kernels do that, only in those rows that are edited here.
        """
        barred = self._table.barred(slots, positions)
        if barred is not None and self._edit_table is not None:
            is_here = np.isin(barred[0], edited)
            barred = barred[0][is_here], barred[1][is_here]
        if barred is None or not len(barred[0]):
            yield
            return
        at = to_device(barred[0], self._device), to_device(barred[1], self._device)
        before = logits[at]
        logits.index_put_(at, logits.new_full((), -torch.inf))  # a number of the host would be waited for
        yield
        logits.index_put_(at, before)

    def can_capture(self, slots: Int32Array, positions: Int32Array | None = None) -> bool:
        """Whether `sample_captured` samples what `sample` does.

        Without Triton's kernels no row may want log-probabilities, bar or edit, nor have top-k, top-p or min-p; without
        `positions`, those of the tokens to draw, a slot that may not stop yet counts as barring for ever.
        """
        if len(self._edited_rows(slots, None)):
            return False
        if self._edit_table is not None:
            return True
        rows = self._table.host[slots]
        is_barred = rows["barred_before"] > (0 if positions is None else positions)
        return not bool(((rows["need"] == TRUNCATED) | (rows["num_logprobs"] >= 0) | is_barred).any())

    def sample_captured(self, logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """`sample` for a CUDA graph, which reads the slots' parameters when it is replayed. Nothing waits here."""
        return self._backend.choose(logits, slots, positions)

    def captured_logprobs(self, slots: Int32Array) -> Logprobs | None:
        """What `sample_captured` left of these rows, valid until the next step."""
        if not self._table.num_with_logprobs:
            return None
        counts = self._table.host["num_logprobs"][slots]
        return self._backend.last_logprobs(counts) if (counts >= 0).any() else None
