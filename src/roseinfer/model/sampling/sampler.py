"""Samples the next token of each row from its logits, and its log-probabilities if its request wants them.

Torch, the compiled kernels and Triton are backends with the same promise: a row's token depends on its logits, its
parameters and one random number, never on the other rows.
"""

from collections.abc import Generator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Protocol

import numpy as np
import torch

from roseinfer.engine.core.batch import NO_TOKEN, OWN_FAULT, Int32Array, SlotBinding
from roseinfer.engine.core.constraint import TokenMasks
from roseinfer.model.device_stream import to_device
from roseinfer.model.kernels.library import Kernels
from roseinfer.model.sampling.logit_edits import GROUP, LogitsEdits
from roseinfer.model.sampling.logprobs import LogprobRows
from roseinfer.model.sampling.native import NativeSampling
from roseinfer.model.sampling.slot_table import Int64Array, SlotTable
from roseinfer.model.sampling.torch import TorchSampling


class SamplingBackend(Protocol):
    """One way to compute tokens and log-probabilities of logits [rows, vocab_size], float32 or bfloat16."""

    def tokens(self, logits: torch.Tensor, slots: Int32Array, positions: Int32Array) -> torch.Tensor:
        """The next token of each row [rows] int64 on the device, by the parameters of its slot in the table.

        `NO_TOKEN` for a row whose largest logit is not finite: it holds a NaN or +inf, or nothing above -inf.
        """

    def logprobs(self, logits: torch.Tensor, tokens: torch.Tensor, rows: Int64Array, counts: Int32Array) -> LogprobRows:
        """Log-softmax of the raw logits of some rows: of their tokens, and of the likeliest `counts` [len(rows)]."""

    def choose(self, logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """As `tokens`, for rows that are greedy or draw from all tokens, of what is on the device, without waiting."""


class Sampler:
    """Chooses the next token of each row by the parameters of the row's slot."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device, kernels: Kernels | None = None) -> None:
        self._table = SlotTable(num_slots, vocab_size, device)
        self._device = device
        self._backend = _backend_for(self._table, device, kernels)
        self._edits = LogitsEdits(num_slots, device)

    def bind(self, binding: SlotBinding) -> None:
        """Use the parameters of the slot's new owner from now on."""
        self._table.bind(binding)
        self._edits.bind(binding)

    def sample(
        self,
        logits: torch.Tensor,
        slots: Int32Array,
        positions: Int32Array,
        masks: TokenMasks | None = None,
        drafted: Int32Array | None = None,
    ) -> tuple[torch.Tensor, LogprobRows | None]:
        """Logits [rows, vocab_size] and the positions of the tokens to draw -> ids [rows] int64 on the device.

        Logits of barred tokens are overwritten for a while. `masks` are those of every row with a grammar; `drafted`
        [rows] are the tokens at the positions before, or negative where those are known. A row whose largest logit is
        not finite has `NO_TOKEN` if the model computed it so, `OWN_FAULT` if its edits did.
        """
        self._edits.masks.stage(masks)
        if drafted is not None:
            rows = np.flatnonzero(drafted >= 0)
            tokens = to_device(drafted[rows].astype(np.int64), self._device)
            self._edits.note_tokens(tokens, slots[rows], positions[rows] - 1)
        with self._barred(logits, slots, positions):
            tokens = self._tokens(logits, slots, positions)
        counts = self._table.host["num_logprobs"][slots]
        rows = np.flatnonzero(counts >= 0)
        if not len(rows):
            return tokens, None
        return tokens, self._backend.logprobs(logits, tokens.clamp(min=0), rows, counts[rows])

    def score(self, logits: torch.Tensor, token_ids: torch.Tensor, counts: Int32Array) -> LogprobRows:
        """Log-softmax of logits [rows, vocab_size] at ids [rows] int64 on the device, and of the likeliest `counts`."""
        return self._backend.logprobs(logits, token_ids, np.arange(len(counts)), counts)

    def _tokens(self, logits: torch.Tensor, slots: Int32Array, positions: Int32Array) -> torch.Tensor:
        """The next token of each row; rows with edits are drawn from a copy."""
        edited = self._edits.rows(slots)
        if not len(edited):
            return self._backend.tokens(logits, slots, positions)
        if len(edited) < len(slots):
            tokens = self._backend.tokens(logits, slots, positions)
        else:
            tokens = torch.empty(len(slots), dtype=torch.int64, device=self._device)
        for rows in np.split(edited, range(GROUP, len(edited), GROUP)):
            of_rows, where = slots[rows], positions[rows]
            drawn = self._backend.tokens(self._edits.edited(logits, rows, of_rows, where), of_rows, where)
            self._edits.note_tokens(drawn.clamp(min=0), of_rows, where)  # NO_TOKEN is no index
            on_device = to_device(rows, self._device)
            tokens[on_device] = self._attributed(drawn, logits, on_device)
        return tokens

    def _attributed(self, drawn: torch.Tensor, logits: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """The tokens of edited rows, with `OWN_FAULT` for rows that failed although the model's logits are finite."""
        if self._device.type == "cpu" and not bool((drawn == NO_TOKEN).any()):  # elsewhere it would wait for the device
            return drawn
        was_sound = logits[rows].amax(-1).isfinite()
        return torch.where((drawn == NO_TOKEN) & was_sound, OWN_FAULT, drawn)

    @contextmanager
    def _barred(self, logits: torch.Tensor, slots: Int32Array, positions: Int32Array) -> Generator[None]:
        """Set eos and stop tokens to -inf in the rows that may not stop yet; restore them at the end."""
        barred = self._table.barred(slots, positions)
        if barred is None:
            yield
            return
        rows, ids = (to_device(array, self._device) for array in barred)
        before = logits[rows, ids]
        logits[rows, ids] = -torch.inf
        yield
        logits[rows, ids] = before

    def can_capture(self, slots: Int32Array, positions: Int32Array | None = None) -> bool:
        """Whether `sample_captured` samples what `sample` does: no row bars, edits or wants log-probabilities.

        Without `positions`, those of the tokens to draw, a slot that may not stop yet counts as barring for ever.
        """
        return self._table.can_capture(slots, positions) and not len(self._edits.rows(slots))

    def sample_captured(self, logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """`sample` for a CUDA graph, which reads the slots' parameters when it is replayed. Nothing waits here."""
        return self._backend.choose(logits, slots, positions)


def _backend_for(table: SlotTable, device: torch.device, kernels: Kernels | None) -> SamplingBackend:
    if device.type == "cpu" and kernels is not None:
        return NativeSampling(table, kernels)
    if device.type == "cuda" and find_spec("triton") is not None:
        from roseinfer.model.sampling.triton import TritonSampling  # imports triton, which a CPU may lack

        return TritonSampling(table, device)
    return TorchSampling(table, device)
