"""Samples tokens and computes log-probabilities with torch operators, on any device.

A row's token depends on its logits, its parameters and one random number, never on the other rows: rows are processed
in groups of equal need, and all sums run over pieces of a fixed size. The vocabulary is never sorted, and no random
number is drawn for a logit. Of equal logits the lower id counts as the likelier.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from roseinfer.engine.core.batch import NO_TOKEN, Int32Array
from roseinfer.model.device import Scratch
from roseinfer.model.device_stream import to_device
from roseinfer.model.sampling.logprobs import LogprobRows, Logprobs, rows_by_count
from roseinfer.model.sampling.slot_table import GREEDY, MAX_RANKED, TRUNCATED, WHOLE, Int64Array, SamplingTable

_CHUNK = 256  # of the vocabulary: its sum is one number, so a draw searches few sums and then one chunk
_CANDIDATES = (64, 256, MAX_RANKED)  # likeliest tokens to look at, as far as they suffice, before looking at all
_BITS_ABOVE_1 = 0x3F800001  # of the float32 that follows 1
# As int64 has them; products of int64 wrap around as those of uint64 do.
_GAMMA, _FIRST, _SECOND = (
    constant - 2**64 for constant in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)


class _Rows(NamedTuple):
    """Rows of one need, on the device: logits [rows, vocab_size] and, one entry a row, their slots' parameters."""

    logits: torch.Tensor
    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    draws: torch.Tensor  # float64 in [0, 1)


class TorchSampling:
    """The `SamplingBackend` in torch: on a GPU, and on a CPU without kernels."""

    def __init__(self, table: SamplingTable, device: torch.device) -> None:
        self._table = table
        self._device = device
        self._scratch = Scratch(device)

    def tokens(self, logits: torch.Tensor, slots: Int32Array, positions: Int32Array) -> torch.Tensor:
        needs = self._table.host["need"][slots]
        if not needs.any():
            return only_of_finite(logits, first_of_largest(logits))
        tokens = torch.empty(len(slots), dtype=torch.int64, device=self._device)
        for need in (GREEDY, WHOLE, TRUNCATED):
            rows = np.flatnonzero(needs == need)
            if len(rows):
                tokens[self._tensor(rows)] = self._of_one_need(need, logits, rows, slots, positions)
        return only_of_finite(logits, tokens)

    def tokens_of_edited(self, logits: torch.Tensor, slots: Int32Array, positions: Int32Array) -> torch.Tensor:
        return TorchSampling.tokens(self, logits, slots, positions)

    def _of_one_need(
        self, need: int, logits: torch.Tensor, rows: Int64Array, slots: Int32Array, positions: Int32Array
    ) -> torch.Tensor:
        some = logits if len(rows) == len(slots) else logits[self._tensor(rows)]
        if need == GREEDY:
            return first_of_largest(some)
        table, of_rows = self._table, self._tensor(slots[rows])
        draws = uniforms(table.seed[of_rows], self._tensor(positions[rows]))
        if need == WHOLE:
            return draw_whole(some, table.temperature[of_rows], draws, self._mass_buffer(some))
        temperature, top_k = table.temperature[of_rows], table.top_k[of_rows]
        return self._truncated(_Rows(some, temperature, top_k, table.top_p[of_rows], table.min_p[of_rows], draws))

    def _tensor(self, array: Int64Array | Int32Array) -> torch.Tensor:
        return to_device(array, self._device)

    def _mass_buffer(self, logits: torch.Tensor) -> torch.Tensor:
        return self._scratch.buffer("mass", mass_shape(logits))

    def _truncated(self, rows: _Rows) -> torch.Tensor:
        """Draw among the likeliest tokens: from a few of them if these suffice, from all only where they must."""
        num_rows, vocab_size = rows.logits.shape
        tokens = torch.empty(num_rows, dtype=torch.int64, device=self._device)
        norms = _chunk_sums(_mass(rows.logits, rows.temperature, self._mass_buffer(rows.logits))).sum(-1)
        pending, left = torch.arange(num_rows, device=self._device), rows
        for width in _CANDIDATES:
            drawn, is_enough = _draw_among(min(width, vocab_size), left, norms[pending])
            tokens[pending] = drawn
            pending = pending[~is_enough]
            if not len(pending):
                return tokens
            left = _Rows(*(part[pending] for part in rows))
        spare = self._scratch.buffer("spare", mass_shape(left.logits))
        tokens[pending] = _draw_kept(left, self._mass_buffer(left.logits), spare)
        return tokens

    def choose(self, logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        table = self._table
        draws = uniforms(table.seed[slots], positions)
        mass = torch.empty(mass_shape(logits), dtype=torch.float32, device=self._device)  # a graph keeps its own
        drawn = draw_whole(logits, table.temperature[slots], draws, mass)
        chosen = torch.where(table.need[slots] == GREEDY, first_of_largest(logits), drawn)
        return only_of_finite(logits, chosen)

    def last_logprobs(self, _counts: Int32Array) -> Logprobs | None:
        return None

    def logprobs(self, logits: torch.Tensor, tokens: torch.Tensor, rows: Int64Array, counts: Int32Array) -> LogprobRows:
        if len(rows) < len(tokens):
            on_device = self._tensor(rows)
            logits, tokens = logits[on_device], tokens[on_device]
        same = [self._tensor(of_count) for _count, of_count in rows_by_count(counts)]
        return replace(self.score(logits, tokens, counts, same), rows=rows.tolist())

    def score(
        self, logits: torch.Tensor, tokens: torch.Tensor, counts: Int32Array, same: Sequence[torch.Tensor]
    ) -> LogprobRows:
        ones = torch.ones(len(counts), device=self._device)
        norms = _chunk_sums(_mass(logits, ones, self._mass_buffer(logits))).sum(-1, keepdim=True).log_()
        norms += logits.amax(-1, keepdim=True)
        values = logits.gather(1, tokens.unsqueeze(-1))
        likeliest = []
        for (count, rows), on_device in zip(rows_by_count(counts), same, strict=True):
            top, ids = _likeliest(logits[on_device], count)
            likeliest.append((rows.tolist(), ids, top - norms[on_device]))
        return LogprobRows(
            rows=list(range(len(counts))),
            logprobs=(values - norms).squeeze(-1),
            ranks=torch.count_nonzero(logits > values, -1) + 1,
            likeliest=likeliest,
        )


def only_of_finite(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """The tokens [rows] of logits [rows, vocab_size], `NO_TOKEN` for rows whose largest is not finite: also NaN."""
    return torch.where(logits.amax(-1).isfinite(), tokens, NO_TOKEN)


def first_of_largest(logits: torch.Tensor) -> torch.Tensor:
    """The likeliest token of each row of logits [rows, vocab_size] -> [rows]; of equal ones the first."""
    num_chunks, vocab_size = logits.shape[1] // _CHUNK, logits.shape[1]
    if logits.device.type != "cpu" or num_chunks < 2:
        return logits.argmax(-1)
    # On a CPU a maximum is found several times faster than its place, above all in bfloat16: find the chunk first.
    largest = logits[:, : num_chunks * _CHUNK].view(-1, num_chunks, _CHUNK).amax(-1)
    if num_chunks * _CHUNK < vocab_size:
        largest = torch.cat((largest, logits[:, num_chunks * _CHUNK :].amax(-1, keepdim=True)), -1)
    # The last chunk begins early if it must, to be whole; what it shares with the one before is smaller.
    starts = (largest.float().argmax(-1, keepdim=True) * _CHUNK).clamp_(max=vocab_size - _CHUNK)
    inside = logits.gather(1, starts + torch.arange(_CHUNK)).float()
    return starts.squeeze(-1) + inside.argmax(-1)


def mass_shape(logits: torch.Tensor) -> tuple[int, int]:
    """Rows, and the vocabulary rounded up to whole chunks."""
    return logits.shape[0], -(-logits.shape[1] // _CHUNK) * _CHUNK


def draw_whole(
    logits: torch.Tensor, temperature: torch.Tensor, draws: torch.Tensor, mass_buffer: torch.Tensor
) -> torch.Tensor:
    """A token of each row of logits [rows, vocab_size] by its own draw [rows] float64, from all tokens -> [rows].

    Overwrites `mass_buffer` of `mass_shape`. A CUDA graph can hold this.
    """
    return _draw_in_two_levels(_mass(logits, temperature, mass_buffer), draws)


def _draw_in_two_levels(chunks: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """Find the chunk among the chunk sums, then the token inside it: masses [rows, chunks, 256] -> ids [rows]."""
    chunk, inside = _invert(_chunk_sums(chunks).cumsum(-1), draws)
    picked = chunks.gather(1, chunk[:, None, None].expand(-1, 1, _CHUNK)).squeeze(1)
    token, _ = _invert(picked.double().cumsum(-1), inside)
    return chunk * _CHUNK + token


def _mass(logits: torch.Tensor, temperature: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
    """exp((logit - maximum) / temperature) in `buffer`, seen as chunks of the vocabulary [rows, chunks, 256]."""
    vocab_size = logits.shape[1]
    buffer[:, vocab_size:] = 0
    mass = buffer[:, :vocab_size]
    # Of two types torch would make a whole copy in the wider one; so the logits are widened where they are needed.
    wide = logits if logits.dtype == mass.dtype else mass.copy_(logits)
    torch.sub(wide, logits.amax(-1, keepdim=True).float(), out=mass)
    mass.div_(temperature.unsqueeze(-1)).exp_()
    return _chunks_of(buffer)


def _chunks_of(masses: torch.Tensor) -> torch.Tensor:
    return masses.view(len(masses), -1, _CHUNK)


def _chunk_sums(chunks: torch.Tensor) -> torch.Tensor:
    """The sum of each chunk [rows, chunks] float64.

    A GPU adds in an order that depends on the number of chunks; in float64 that is too small to move a draw.
    """
    return chunks.sum(-1).double() if chunks.device.type == "cpu" else chunks.sum(-1, dtype=torch.float64)


def _draw_among(width: int, rows: _Rows, norms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A token for each row among its `width` likeliest, and whether these hold all that the row's limits keep."""
    values, ids = _likeliest(rows.logits, width)
    weights = (values - values[:, :1]).div_(rows.temperature.unsqueeze(-1)).exp_()
    cumulative = weights.double().cumsum(-1)
    has_top_k = rows.top_k > 0
    limit = torch.where(has_top_k, rows.top_k, width).clamp(max=width)
    # The mass that top-p is a share of is what top-k left, or that of the whole vocabulary.
    total = torch.where(has_top_k, cumulative.gather(1, limit.unsqueeze(-1) - 1).squeeze(-1), norms)
    is_needed = (cumulative - weights) < (rows.top_p * total).unsqueeze(-1)  # the mass before it is less than top_p
    is_likely = weights >= rows.min_p.unsqueeze(-1)
    num_top_p = torch.where(rows.top_p < 1, is_needed.sum(-1), width)
    kept = torch.minimum(torch.minimum(num_top_p, is_likely.sum(-1)), limit).clamp(min=1).unsqueeze(-1)
    weights.masked_fill_(torch.arange(width, device=kept.device) >= kept, 0)
    tokens = _draw_of_ranked(weights, ids, rows)
    if width == rows.logits.shape[1]:
        return tokens, torch.ones_like(tokens, dtype=torch.bool)
    # Tokens as likely as the last candidate may lie outside. Where one of them is kept, it is not known which: look on.
    is_certain = values.gather(1, kept - 1) > values[:, -1:]
    return tokens, is_certain.squeeze(-1) & (rows.top_k <= width)


def _draw_of_ranked(weights: torch.Tensor, ids: torch.Tensor, rows: _Rows) -> torch.Tensor:
    """A token of each row, of those whose weights are not 0: weights and ids [rows, n], the likeliest first."""
    by_id = ids.argsort(-1)
    order = torch.where(_is_ranked(rows), torch.arange(ids.shape[1], device=ids.device), by_id)
    index, _ = _invert(weights.gather(1, order).double().cumsum(-1), rows.draws)
    return ids.gather(1, order.gather(1, index.unsqueeze(-1))).squeeze(-1)


def _is_ranked(rows: _Rows) -> torch.Tensor:
    """Whether a draw of the row lays the likelier tokens before the others [rows, 1]: see `MAX_RANKED`."""
    return ((rows.top_k > 0) & (rows.top_k <= MAX_RANKED)).unsqueeze(-1)


def _draw_kept(rows: _Rows, masses: torch.Tensor, spare: torch.Tensor) -> torch.Tensor:
    """A token for each row among all that its limits keep, however many, without sorting them.

    Both buffers of `mass_shape` are overwritten.
    """
    _mass(rows.logits, rows.temperature, masses)

    def count_reaching(threshold: torch.Tensor) -> torch.Tensor:
        return torch.ge(masses, threshold, out=spare).sum(-1, keepdim=True)

    def mass_reaching(threshold: torch.Tensor) -> torch.Tensor:
        kept = torch.ge(masses, threshold, out=spare).mul_(masses)
        return _chunk_sums(_chunks_of(kept)).sum(-1, keepdim=True)

    if bool((rows.top_k > 0).any()):
        top_k = torch.where(rows.top_k > 0, rows.top_k, masses.shape[1]).unsqueeze(-1)
        least = _largest_reaching(lambda threshold: count_reaching(threshold) >= top_k, len(masses), masses.device)
        _keep(masses, least, top_k - count_reaching(_next(least)))
    shares = rows.top_p.unsqueeze(-1) * mass_reaching(torch.zeros_like(rows.min_p).unsqueeze(-1))
    least = _largest_reaching(lambda threshold: mass_reaching(threshold) >= shares, len(masses), masses.device)
    num_equal = ((shares - mass_reaching(_next(least))) / least).ceil_()
    _keep(masses, least.masked_fill_((rows.top_p >= 1).unsqueeze(-1), 0), num_equal)
    masses.mul_(torch.ge(masses, rows.min_p.unsqueeze(-1), out=spare))
    drawn = _draw_in_two_levels(_chunks_of(masses), rows.draws)
    is_ranked = _is_ranked(rows).squeeze(-1)
    if bool(is_ranked.any()):  # as many likely tokens as its top-k, and more that are as likely as the last of them
        ranked = _draw_of_ranked(*_likeliest(masses, min(MAX_RANKED, masses.shape[1])), rows)
        drawn = torch.where(is_ranked, ranked, drawn)
    return drawn


def _largest_reaching(
    reaches: Callable[[torch.Tensor], torch.Tensor], num_rows: int, device: torch.device
) -> torch.Tensor:
    """The largest threshold [rows, 1] for which `reaches` is true in each row; it is true for 0.

    Masses are never negative, so their order is that of their bits, and never above 1: the search halves the bits.
    """
    low = torch.zeros(num_rows, 1, dtype=torch.int32, device=device)
    high = torch.full_like(low, _BITS_ABOVE_1)
    for _ in range(_BITS_ABOVE_1.bit_length()):
        middle = (low + high) // 2
        is_reached = reaches(middle.view(torch.float32))
        low, high = torch.where(is_reached, middle, low), torch.where(is_reached, high, middle)
    return low.view(torch.float32)


def _next(threshold: torch.Tensor) -> torch.Tensor:
    """The next float32 above it."""
    return threshold.nextafter(torch.full_like(threshold, 2.0))


def _keep(masses: torch.Tensor, threshold: torch.Tensor, num_equal: torch.Tensor) -> None:
    """Set to 0 what is below the threshold, and of what is equal to it all but the first `num_equal`."""
    is_equal = masses == threshold
    is_kept = (masses > threshold) | (is_equal & (is_equal.cumsum(-1) <= num_equal))
    masses.masked_fill_(~is_kept, 0)


def _likeliest(logits: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest logits of each row as float32 [rows, width] and their ids, of equal ones the lower id first."""
    if width == logits.shape[1]:
        values, ids = logits.sort(dim=-1, descending=True, stable=True)
        return values.float(), ids
    _, ids = logits.topk(width)
    ids = ids.sort(-1).values
    values, order = logits.gather(1, ids).float().sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(1, order)


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


def uniforms(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Random numbers in [0, 1) float64, one for each seed int64 and position [rows], the same on every machine.

    The position-th output of SplitMix64 (Steele, Lea, Flood 2014) from the mixed seed, since seeds may be neighbours.
    """
    state = _mix64(seeds) + (positions.to(torch.int64) + 1) * _GAMMA
    return _shifted(_mix64(state), 11).double() * 2.0**-53


def _mix64(z: torch.Tensor) -> torch.Tensor:
    z = (z ^ _shifted(z, 30)) * _FIRST
    z = (z ^ _shifted(z, 27)) * _SECOND
    return z ^ _shifted(z, 31)


def _shifted(z: torch.Tensor, num_bits: int) -> torch.Tensor:
    """The bits of int64 shifted to the right; zeros come in, not the sign."""
    return torch.bitwise_and(z >> num_bits, 2 ** (64 - num_bits) - 1)
