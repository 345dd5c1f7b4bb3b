"""Samples a token of each row of logits: the likeliest, or a draw from all.

A row is cut into pieces, one program each, which leave their peak, its place and their mass; then one program a row
joins them. It inverts the cumulative distribution in two levels: it finds the piece among the masses, reads that piece
again, and finds the token inside it. Pieces have one size, so a row's token depends on no other row.
"""

from typing import NamedTuple

import torch
import triton.language as tl
from triton import next_power_of_2

from roseinfer.engine.core.batch import NO_TOKEN
from roseinfer.model.sampling.slot_table import GREEDY, SLOT, SlotTable
from roseinfer.model.triton_kernels.language import LOG2_E, Constant, Pointer, constant, kernel

PIECE = 4096  # of the vocabulary

_LOWEST = tl.constexpr(float("-inf"))
_GREEDY = tl.constexpr(GREEDY)
_NO_TOKEN = tl.constexpr(NO_TOKEN)
_LOG2_E = tl.constexpr(LOG2_E)
_GAMMA = tl.constexpr(0x9E3779B97F4A7C15)
_FIRST = tl.constexpr(0xBF58476D1CE4E5B9)
_SECOND = tl.constexpr(0x94D049BB133111EB)


class Logits(NamedTuple):
    """[rows, vocab_size]; a row's lie side by side."""

    numbers: Pointer
    row_stride: int
    vocab_size: Constant
    piece: Constant  # a power of two
    num_pieces: Constant
    padded_pieces: Constant  # the next power of two


class Table(NamedTuple):
    """The parameters of slots: each pointer is that of a field in the first record of the table."""

    seeds: Pointer  # int64
    temperatures: Pointer  # float32
    needs: Pointer  # int32
    record_words: Constant  # length of a record, in int64


class Pieces(NamedTuple):
    """Results of the pieces of each row [rows, pieces]."""

    peaks: Pointer  # float32, the largest logit
    places: Pointer  # int32, its first index in the piece
    masses: Pointer  # float32, sum of exp((logit - peak) / temperature)


def choose(logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, table: SlotTable) -> torch.Tensor:
    """The next token of each row of logits [rows, vocab_size]: greedy where its slot is, else a draw from all tokens.

    slots and positions [rows] are integers on the device -> ids [rows] int64, `NO_TOKEN` where the largest logit is not
    finite. Nothing waits for the device.
    """
    num_rows, vocab_size = logits.shape
    assert logits.stride(1) == 1 or vocab_size == 1, "a row's logits lie side by side"
    num_pieces = -(-vocab_size // PIECE)
    shape, device = (num_rows, num_pieces), logits.device
    pieces = Pieces(
        torch.empty(shape, dtype=torch.float32, device=device),
        torch.empty(shape, dtype=torch.int32, device=device),
        torch.empty(shape, dtype=torch.float32, device=device),
    )
    rows = Logits(
        logits,
        logits.stride(0),
        constant(vocab_size),
        constant(PIECE),
        constant(num_pieces),
        constant(next_power_of_2(num_pieces)),
    )
    asked = Table(table.seed, table.temperature, table.need, constant(SLOT.itemsize // 8))
    ids = torch.empty(num_rows, dtype=torch.int64, device=device)
    _measure_piece[num_rows, num_pieces](rows, asked, pieces, slots, num_warps=8)
    _join_pieces[num_rows,](rows, asked, pieces, slots, positions, ids, num_warps=8)
    return ids


@kernel("slots")
def _measure_piece(logits: Logits, table: Table, pieces: Pieces, slots: tl.tensor) -> None:
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    values = _piece_of(logits, row, piece)
    peak, place = tl.max(values, axis=0, return_indices=True)  # of equal ones the first
    temperature = tl.load(table.temperatures + tl.load(slots + row).to(tl.int64) * table.record_words * 2)
    at = row * logits.num_pieces + piece
    tl.store(pieces.peaks + at, peak)
    tl.store(pieces.places + at, place)
    tl.store(pieces.masses + at, tl.sum(_mass(values, peak, temperature), axis=0))


@kernel("slots", "positions")
def _join_pieces(
    logits: Logits, table: Table, pieces: Pieces, slots: tl.tensor, positions: tl.tensor, ids: tl.tensor
) -> None:
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, logits.padded_pieces)
    at, is_piece = row * logits.num_pieces + index, index < logits.num_pieces
    peaks = tl.load(pieces.peaks + at, mask=is_piece, other=_LOWEST)
    peak, first = tl.max(peaks, axis=0, return_indices=True)
    token = first * logits.piece + tl.load(pieces.places + row * logits.num_pieces + first)
    slot = tl.load(slots + row).to(tl.int64)
    if tl.load(table.needs + slot * table.record_words * 2) != _GREEDY:
        temperature = tl.load(table.temperatures + slot * table.record_words * 2)
        draw = _uniform(tl.load(table.seeds + slot * table.record_words), tl.load(positions + row))
        masses = tl.load(pieces.masses + at, mask=is_piece, other=0.0) * _mass(peaks, peak, temperature)
        piece, inside = _invert(masses, index, draw)
        values = _piece_of(logits, row, piece)
        place, _ = _invert(_mass(values, tl.max(values, axis=0), temperature), tl.arange(0, logits.piece), inside)
        token = piece * logits.piece + place
    is_sound = (peak > _LOWEST) & (peak < -_LOWEST)
    tl.store(ids + row, tl.where(is_sound, token.to(tl.int64), _NO_TOKEN))


@kernel()
def _piece_of(logits: Logits, row: tl.tensor, piece: tl.tensor) -> tl.tensor:
    """float32, with -inf past the vocabulary; NaN becomes +inf, which makes the row have no token."""
    columns = piece * logits.piece + tl.arange(0, logits.piece)
    at = logits.numbers + row * logits.row_stride + columns
    values = tl.load(at, mask=columns < logits.vocab_size, other=_LOWEST).to(tl.float32)
    return tl.where(values == values, values, -_LOWEST)  # noqa: PLR0124 - false for NaN


@kernel()
def _mass(values: tl.tensor, peak: tl.tensor, temperature: tl.tensor) -> tl.tensor:
    """exp((value - peak) / temperature); 0 for -inf, whatever the peak."""
    return tl.where(values > _LOWEST, tl.exp2((values - peak) * (_LOG2_E / temperature)), 0.0)


@kernel()
def _invert(masses: tl.tensor, index: tl.tensor, draw: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Where a draw in [0, 1) falls in masses: the index, and how far inside it, again in [0, 1).

    An entry without mass of its own is never hit, whatever the rounding.
    """
    cumulative = tl.cumsum(masses.to(tl.float64), axis=0)
    total = tl.max(cumulative, axis=0)
    target = draw * total
    last = tl.sum((cumulative < total).to(tl.int32), axis=0)
    hit = tl.minimum(tl.sum((cumulative <= target).to(tl.int32), axis=0), last)
    before = tl.sum(tl.where(index == hit - 1, cumulative, 0.0), axis=0)
    own = tl.sum(tl.where(index == hit, cumulative, 0.0), axis=0) - before
    inside = tl.where(own > 0.0, (target - before) / own, 0.0)
    below_one = tl.full([], 1.0 - 2.0**-53, tl.float64)  # as a bare number it would be a float32, and 1.0
    return hit, tl.minimum(tl.maximum(inside, 0.0), below_one)


@kernel()
def _uniform(seed: tl.tensor, position: tl.tensor) -> tl.tensor:
    """The number in [0, 1) of a seed and a position: `uniforms` in sampling/torch.py."""
    state = _mix64(seed.to(tl.uint64)) + (position.to(tl.uint64) + 1) * _GAMMA
    return (_mix64(state) >> 11).to(tl.float64) * 2.0**-53


@kernel()
def _mix64(z: tl.tensor) -> tl.tensor:
    z = (z ^ (z >> 30)) * _FIRST
    z = (z ^ (z >> 27)) * _SECOND
    return z ^ (z >> 31)
