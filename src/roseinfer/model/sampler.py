"""Logits into token ids, and into log-probabilities where asked. Knows nothing about models or pages.

A row's token depends on its logits, its parameters and one random number, never on the other rows: rows are worked on
in groups of equal need, and all sums run over pieces of a fixed size. The vocabulary is never sorted for a row that
can do without, and no random number is drawn for a logit.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from roseinfer.engine.batch import Int32Array, SlotBinding
from roseinfer.messages import TokenLogprobs
from roseinfer.model.scratch import Scratch

_CHUNK = 256  # of the vocabulary: its sum is one number, so a draw searches few sums and then one chunk
_CANDIDATES = (64, 256, 2048)  # likeliest tokens to look at, as far as they suffice, before sorting all
_GREEDY, _WHOLE, _TRUNCATED = range(3)  # a slot's need: the maximum, a draw from all tokens, from the likeliest

UInt64Array = npt.NDArray[np.uint64]


def uniforms(seeds: UInt64Array, positions: Int32Array) -> npt.NDArray[np.float64]:
    """One number in [0, 1) for each (seed, position), the same on every machine.

    The position-th output of the SplitMix64 generator (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number
    generators") that starts from the mixed seed; mixed, so that seeds near each other do not share their sequences.
    """
    gamma = np.uint64(0x9E3779B97F4A7C15)
    state = _mix64(seeds) + (positions.astype(np.uint64) + np.uint64(1)) * gamma
    return (_mix64(state) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix64(z: UInt64Array) -> UInt64Array:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@dataclass(frozen=True, slots=True)
class LogprobRows:
    """Log-probabilities on the device: for the rows that asked, and the likeliest tokens by how many were asked for."""

    rows: list[int]
    logprobs: torch.Tensor  # [len(rows)] of the sampled token
    ranks: torch.Tensor  # [len(rows)]
    likeliest: list[tuple[list[int], torch.Tensor, torch.Tensor]]  # indices into `rows`, ids and logprobs [., k]

    def to_host(self, num_rows: int) -> list[TokenLogprobs | None]:
        """One entry for each row of the batch, None for those that did not ask."""
        top: dict[int, tuple[list[int], list[float]]] = {}
        for indices, ids, logprobs in self.likeliest:
            top.update(zip(indices, zip(ids.tolist(), logprobs.tolist(), strict=True), strict=True))
        result: list[TokenLogprobs | None] = [None] * num_rows
        for index, (row, logprob, rank) in enumerate(
            zip(self.rows, self.logprobs.tolist(), self.ranks.tolist(), strict=True)
        ):
            result[row] = TokenLogprobs(logprob, rank, *top[index])
        return result


class Sampler:
    """Chooses the next token of each row by the parameters of the row's slot."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._scratch = Scratch(device)
        self._need = np.zeros(num_slots, np.int8)
        self._temperature = np.ones(num_slots, np.float32)
        self._top_k = np.zeros(num_slots, np.int64)
        self._top_p = np.ones(num_slots, np.float64)
        self._min_p = np.zeros(num_slots, np.float32)
        self._seed = np.zeros(num_slots, np.uint64)
        self._barred_before = np.zeros(num_slots, np.int64)  # positions from which on the slot may stop
        self._barred_ids: list[npt.NDArray[np.int64]] = [np.zeros(0, np.int64)] * num_slots
        self._num_logprobs = np.full(num_slots, -1, np.int64)

    def bind(self, binding: SlotBinding) -> None:
        """The slot's parameters from now on."""
        slot, params = binding.slot, binding.params
        is_whole = params.top_k == 0 and params.top_p >= 1.0 and params.min_p <= 0.0
        is_greedy = params.is_greedy or params.top_k == 1
        self._need[slot] = _GREEDY if is_greedy else _WHOLE if is_whole else _TRUNCATED
        self._temperature[slot] = params.temperature
        self._top_k[slot] = min(params.top_k, self._vocab_size)
        self._top_p[slot] = params.top_p
        self._min_p[slot] = params.min_p
        self._seed[slot] = params.seed
        count = params.num_logprobs
        self._num_logprobs[slot] = -1 if count is None else min(count, self._vocab_size)
        stops = np.array(sorted({*binding.eos_token_ids, *params.stop_token_ids}), np.int64)
        self._barred_ids[slot] = stops[stops < self._vocab_size]  # what is no token needs no bar
        self._barred_before[slot] = binding.num_prompt_tokens + params.min_tokens if params.min_tokens else 0

    def sample(
        self, logits: torch.Tensor, slots: Int32Array, positions: Int32Array
    ) -> tuple[torch.Tensor, LogprobRows | None]:
        """Logits [rows, vocab_size] float32, and where each row's next token will stand -> ids [rows] on the device."""
        allowed = self._bar(logits, slots, positions)
        needs = self._need[slots]
        if not needs.any():
            tokens = allowed.argmax(-1)
        else:
            tokens = torch.empty(len(slots), dtype=torch.int64, device=self._device)
            for need, draw in ((_GREEDY, self._greedy), (_WHOLE, self._whole), (_TRUNCATED, self._truncated)):
                rows = np.flatnonzero(needs == need)
                if len(rows):
                    tokens[self._tensor(rows)] = draw(self._rows(allowed, rows), slots[rows], positions[rows])
        return tokens, self._logprobs(logits, tokens, slots)

    def _tensor(self, array: npt.NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)

    def _rows(self, tensor: torch.Tensor, rows: npt.NDArray[np.int64]) -> torch.Tensor:
        """Some rows, in ascending order; no copy if they are all of them."""
        return tensor if len(rows) == tensor.shape[0] else tensor[self._tensor(rows)]

    def _bar(self, logits: torch.Tensor, slots: Int32Array, positions: Int32Array) -> torch.Tensor:
        """The logits with eos and stop tokens at -inf in the rows that may not stop yet; a copy if there are any."""
        waiting = np.flatnonzero(positions < self._barred_before[slots])
        if not len(waiting):
            return logits
        barred = [self._barred_ids[slots[row]] for row in waiting]
        rows, columns = np.repeat(waiting, [len(ids) for ids in barred]), np.concatenate(barred)
        return logits.index_put(
            (self._tensor(rows), self._tensor(columns)), torch.tensor(-torch.inf, device=self._device)
        )

    def _greedy(self, logits: torch.Tensor, _slots: Int32Array, _positions: Int32Array) -> torch.Tensor:
        return logits.argmax(-1)

    def _whole(self, logits: torch.Tensor, slots: Int32Array, positions: Int32Array) -> torch.Tensor:
        """Inverse of the cumulative distribution in two levels: find the chunk among the chunk sums, then the token."""
        chunks = self._mass(logits, self._temperature[slots])
        draws = self._tensor(uniforms(self._seed[slots], positions))
        sums = chunks.sum(-1).double().cumsum(-1)
        chunk, inside = _invert(sums, draws)
        picked = chunks[torch.arange(chunk.shape[0], device=self._device), chunk].double().cumsum(-1)
        token, _ = _invert(picked, inside)
        return chunk * _CHUNK + token

    def _mass(self, logits: torch.Tensor, temperatures: npt.NDArray[np.float32]) -> torch.Tensor:
        """exp((logit - maximum) / temperature), in chunks of the vocabulary [rows, chunks, 256], in scratch."""
        num_chunks = -(-self._vocab_size // _CHUNK)
        padded = self._scratch.take("mass", (logits.shape[0], num_chunks * _CHUNK))
        padded[:, self._vocab_size :] = 0
        mass = padded[:, : self._vocab_size]
        torch.sub(logits, logits.amax(-1, keepdim=True), out=mass)
        mass.div_(self._tensor(temperatures).unsqueeze(-1)).exp_()
        return padded.view(-1, num_chunks, _CHUNK)

    def _truncated(self, logits: torch.Tensor, slots: Int32Array, positions: Int32Array) -> torch.Tensor:
        """Draw among the likeliest tokens: from a few of them if these suffice, from all only where they must."""
        tokens = torch.empty(len(slots), dtype=torch.int64, device=self._device)
        norms = self._mass(logits, self._temperature[slots]).sum(-1).double().sum(-1)
        pending = np.arange(len(slots))
        for width in (*_CANDIDATES, self._vocab_size):
            rows = pending[self._top_k[slots[pending]] <= width]
            if not len(rows):
                continue
            drawn, is_enough = self._draw_among(
                width, self._rows(logits, rows), self._rows(norms, rows), slots[rows], positions[rows]
            )
            tokens[self._tensor(rows)] = drawn
            is_done = np.zeros(len(slots), np.bool_)
            is_done[rows] = is_enough.numpy(force=True)
            pending = pending[~is_done[pending]]
        return tokens

    def _draw_among(
        self,
        width: int,
        logits: torch.Tensor,
        norms: torch.Tensor,
        slots: Int32Array,
        positions: Int32Array,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A token for each row among its `width` likeliest, and whether these hold all that the row's limits keep."""
        width = min(width, self._vocab_size)
        values, ids = logits.topk(width)
        weights = (values - values[:, :1]).div_(self._tensor(self._temperature[slots]).unsqueeze(-1)).exp_()
        cumulative = weights.double().cumsum(-1)
        top_k, top_p = self._tensor(self._top_k[slots]), self._tensor(self._top_p[slots])
        has_top_k = top_k > 0  # and then no larger than the width
        limit = torch.where(has_top_k, top_k, width)
        # The mass that top-p is a share of is what top-k left, or that of the whole vocabulary.
        total = torch.where(has_top_k, cumulative.gather(1, limit.unsqueeze(-1) - 1).squeeze(-1), norms)
        is_needed = (cumulative - weights) < (top_p * total).unsqueeze(-1)  # the mass before it does not reach top_p
        is_likely = weights >= self._tensor(self._min_p[slots]).unsqueeze(-1)
        num_top_p = torch.where(top_p < 1, is_needed.sum(-1), width)
        kept = torch.minimum(torch.minimum(num_top_p, is_likely.sum(-1)), limit).clamp(min=1)
        ends = cumulative.gather(1, kept.unsqueeze(-1) - 1)
        draws = self._tensor(uniforms(self._seed[slots], positions))
        index, _ = _invert(torch.minimum(cumulative, ends), draws)
        tokens = ids.gather(1, index.unsqueeze(-1)).squeeze(-1)
        return tokens, has_top_k | (kept < width) | (width == self._vocab_size)

    def _logprobs(self, logits: torch.Tensor, tokens: torch.Tensor, slots: Int32Array) -> LogprobRows | None:
        """Log-softmax of the raw logits, for the rows that asked."""
        counts = self._num_logprobs[slots]
        rows = np.flatnonzero(counts >= 0)
        if not len(rows):
            return None
        some, chosen = self._rows(logits, rows), self._rows(tokens, rows).unsqueeze(-1)
        norms = self._mass(some, np.ones(len(rows), np.float32)).sum(-1).double().sum(-1, keepdim=True).log_()
        norms += some.amax(-1, keepdim=True)
        values = some.gather(1, chosen)
        likeliest = []
        for count in sorted(set(counts[rows].tolist())):
            same = np.flatnonzero(counts[rows] == count)
            top, ids = self._rows(some, same).topk(count)
            likeliest.append((same.tolist(), ids, top - self._rows(norms, same)))
        return LogprobRows(
            rows=rows.tolist(),
            logprobs=(values - norms).squeeze(-1),
            ranks=torch.count_nonzero(some > values, -1) + 1,
            likeliest=likeliest,
        )


def _invert(cumulative: torch.Tensor, draws: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Where draws [rows] in [0, 1) fall in cumulative masses [rows, n] float64: the index, and how far inside it.

    An entry without mass of its own is never hit, whatever the rounding.
    """
    totals = cumulative[:, -1:]
    targets = draws.unsqueeze(-1) * totals
    last = (cumulative < totals).sum(-1, keepdim=True)
    index = torch.minimum(torch.searchsorted(cumulative, targets, right=True), last)
    before = torch.where(index > 0, cumulative.gather(1, (index - 1).clamp_(min=0)), 0.0)
    inside = (targets - before) / (cumulative.gather(1, index) - before)
    return index.squeeze(-1), inside.squeeze(-1).clamp_(0.0, 1.0 - 2.0**-53)
