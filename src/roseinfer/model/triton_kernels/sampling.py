"""Samples a token of each row of logits: the likeliest, or a draw from all or from the likeliest.

A row is cut into pieces, one program each, which leave their peak, its place and their mass; then one program a row
joins them. For a draw from all it inverts the cumulative distribution in two levels: it finds the piece among the
masses, reads that piece again, and finds the token inside it. Draws from the likeliest are in likeliest.py. Pieces have
one size, so a row's token depends on no other row.
"""

from typing import NamedTuple

import torch
import triton.language as tl
from triton import next_power_of_2

from roseinfer.engine.core.batch import NO_TOKEN, OWN_FAULT
from roseinfer.model.sampling.edit_table import CHANGES, EditTable
from roseinfer.model.sampling.slot_table import GREEDY, TRUNCATED, SamplingTable
from roseinfer.model.triton_kernels.language import Pointer, constant, kernel
from roseinfer.model.triton_kernels.likeliest import Groups, draw_likeliest
from roseinfer.model.triton_kernels.logits import (
    GROUP,
    LOWEST_LOGIT,
    PIECE,
    Logits,
    logits_of,
    mass_of,
    note_token,
    raw_values_at,
    values_at,
)
from roseinfer.model.triton_kernels.logprobs import PADDED_LIKELIEST, Scores, note_drawn, score_piece, score_row

_GROUP_TILE = 4096  # groups that one program looks at together, at most

_CHANGES = tl.constexpr(CHANGES)
_GREEDY = tl.constexpr(GREEDY)
_TRUNCATED = tl.constexpr(TRUNCATED)
_NO_TOKEN, _OWN_FAULT = tl.constexpr(NO_TOKEN), tl.constexpr(OWN_FAULT)
_GAMMA = tl.constexpr(0x9E3779B97F4A7C15)
_FIRST = tl.constexpr(0xBF58476D1CE4E5B9)
_SECOND = tl.constexpr(0x94D049BB133111EB)


class Table(NamedTuple):
    """The parameters of slots: each pointer is that of a field in the first record of the table."""

    seeds: Pointer  # int64
    top_ks: Pointer  # int64
    top_ps: Pointer  # float64
    temperatures: Pointer  # float32
    min_ps: Pointer  # float32
    needs: Pointer  # int32


class Pieces(NamedTuple):
    """Results of the pieces of each row [rows, pieces]."""

    peaks: Pointer  # float32, the largest logit
    places: Pointer  # int32, its first index in the piece
    masses: Pointer  # float32, sum of exp((logit - peak) / temperature)
    raw_peaks: Pointer  # float32, the model's largest logit


def choose(
    logits: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    table: SamplingTable,
    edits: EditTable,
    numbers: torch.Tensor | None = None,
) -> torch.Tensor:
    """The next token of each row of logits [rows, vocab_size], by the parameters and edits of its slot.

    slots and positions [rows] are integers on the device -> ids [rows] int64, `NO_TOKEN` where the model's largest
    logit is not finite and `OWN_FAULT` where only edits made it so. They go to `numbers` float64 [rows, SCORE_WIDTH]
    too, with log-probabilities where slots ask for them. Without it logits are drawn from as they are, no token is
    counted, and there are no log-probabilities. Nothing waits for the device.
    """
    num_rows = len(logits)
    if not num_rows:  # part of a prompt: such logits have rows of another length, which the kernels would be built for
        return torch.empty(0, dtype=torch.int64, device=logits.device)
    rows = logits_of(logits, table, edits, are_changed=numbers is not None)
    pieces, groups = _new_pieces(num_rows, rows.num_pieces.value, logits.device)
    asked = Table(table.seed, table.top_k, table.top_p, table.temperature, table.min_p, table.need)
    scores = _new_scores(num_rows, rows.num_pieces.value, table, pieces.peaks if numbers is None else numbers)
    ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    _measure_piece[num_rows, rows.num_pieces.value](rows, asked, pieces, groups, scores, slots, positions, num_warps=8)
    _join_pieces[num_rows,](rows, asked, pieces, groups, scores, slots, positions, ids, num_warps=16)
    return ids


def _new_scores(num_rows: int, num_pieces: int, table: SamplingTable, numbers: torch.Tensor) -> Scores:
    shape, device = (num_rows, num_pieces), numbers.device
    likeliest = torch.empty(2, *shape, PADDED_LIKELIEST, dtype=torch.int32, device=device)
    return Scores(table.num_logprobs, torch.empty(shape, device=device), likeliest[0], likeliest[1], numbers)


def _new_pieces(num_rows: int, num_pieces: int, device: torch.device) -> tuple[Pieces, Groups]:
    num_groups = num_pieces * PIECE // GROUP

    def memory(count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(num_rows, count, dtype=dtype, device=device)

    pieces = Pieces(
        memory(num_pieces, torch.float32),
        memory(num_pieces, torch.int32),
        memory(num_pieces, torch.float32),
        memory(num_pieces, torch.float32),
    )
    groups = Groups(
        memory(num_groups, torch.float32),
        memory(num_groups, torch.float32),
        memory(num_groups, torch.int32),
        constant(num_groups),
        constant(min(next_power_of_2(num_groups), _GROUP_TILE)),
    )
    return pieces, groups


@kernel("slots", "positions")
def _measure_piece(
    logits: Logits,
    table: Table,
    pieces: Pieces,
    groups: Groups,
    scores: Scores,
    slots: tl.tensor,
    positions: tl.tensor,
) -> None:
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot, position = tl.load(slots + row).to(tl.int64), tl.load(positions + row)
    values = _piece_of(logits, (row, slot, position), piece)
    peak, first = tl.max(values, axis=0, return_indices=True)  # of equal ones the first
    record = slot * logits.record_words
    masses = mass_of(values, peak, tl.load(table.temperatures + record * 2))
    at = row * logits.num_pieces + piece
    tl.store(pieces.peaks + at, peak)
    tl.store(pieces.places + at, first)
    tl.store(pieces.masses + at, tl.sum(masses, axis=0))
    if logits.are_changed:
        raw_peak, count = peak, tl.load(scores.counts + record * 2)
        if ((tl.load(logits.kinds + slot * logits.edit_words) & _CHANGES) != 0) | (count >= 0):
            columns = piece * logits.piece + tl.arange(0, logits.piece)
            raw = raw_values_at(logits, row, columns, columns < logits.width)
            raw_peak = tl.max(raw, axis=0)
            if count >= 0:
                score_piece(logits, scores, at, piece * logits.piece, raw, raw_peak, count)
        tl.store(pieces.raw_peaks + at, raw_peak)
    if tl.load(table.needs + record * 2) == _TRUNCATED:
        shape: tl.constexpr = [logits.piece // logits.group, logits.group]
        at_groups = at * (logits.piece // logits.group) + tl.arange(0, logits.piece // logits.group)
        tl.store(groups.peaks + at_groups, tl.max(tl.reshape(values, shape), axis=1))
        tl.store(groups.masses + at_groups, tl.sum(tl.reshape(masses, shape), axis=1))


@kernel("slots", "positions")
def _join_pieces(
    logits: Logits,
    table: Table,
    pieces: Pieces,
    groups: Groups,
    scores: Scores,
    slots: tl.tensor,
    positions: tl.tensor,
    ids: tl.tensor,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    slot, position = tl.load(slots + row).to(tl.int64), tl.load(positions + row)
    index = tl.arange(0, logits.padded_pieces)
    at, is_piece = row * logits.num_pieces + index, index < logits.num_pieces
    peaks = tl.load(pieces.peaks + at, mask=is_piece, other=LOWEST_LOGIT)
    peak, first = tl.max(peaks, axis=0, return_indices=True)
    token = first * logits.piece + tl.load(pieces.places + row * logits.num_pieces + first)
    is_sound = (peak > LOWEST_LOGIT) & (peak < -LOWEST_LOGIT)
    record = slot * logits.record_words
    need = tl.load(table.needs + record * 2)
    if is_sound & (need != _GREEDY):
        temperature = tl.load(table.temperatures + record * 2)
        draw = _uniform(tl.load(table.seeds + record), position)
        masses = tl.load(pieces.masses + at, mask=is_piece, other=0.0) * mass_of(peaks, peak, temperature)
        if need == _TRUNCATED:
            limits = (
                temperature,
                tl.load(table.top_ks + record),
                tl.load(table.top_ps + record),
                tl.load(table.min_ps + record * 2),
            )
            total = tl.sum(masses.to(tl.float64), axis=0)
            token = draw_likeliest(logits, groups, pieces.peaks, (row, slot, position), peak, total, limits, draw)
        else:
            token = _draw_from_all(logits, (row, slot, position), masses, index, temperature, draw)
    failed = tl.full([], _NO_TOKEN, tl.int64)
    if logits.are_changed:
        raw_peaks = tl.load(pieces.raw_peaks + at, mask=is_piece, other=LOWEST_LOGIT)
        raw_peak = tl.max(raw_peaks, axis=0)
        is_models = (raw_peak > LOWEST_LOGIT) & (raw_peak < -LOWEST_LOGIT)
        is_sound &= is_models
        failed = tl.where(is_models, _OWN_FAULT, failed)
        count = tl.load(scores.counts + record * 2)
        if count >= 0:
            score_row(logits, scores, row, raw_peaks, tl.where(is_sound, token, 0), count)
    drawn = tl.where(is_sound, token.to(tl.int64), failed)
    tl.store(ids + row, drawn)
    if logits.are_changed:
        note_drawn(scores, row, drawn)
    if is_sound:
        note_token(logits, slot, position, token)


@kernel()
def _draw_from_all(
    logits: Logits,
    place: tl.tuple,
    masses: tl.tensor,
    index: tl.tensor,
    temperature: tl.tensor,
    draw: tl.tensor,
) -> tl.tensor:
    """The id that a draw falls on, of pieces of these masses."""
    piece, inside = _invert(masses, index, draw)
    values = _piece_of(logits, place, piece)
    found, _ = _invert(mass_of(values, tl.max(values, axis=0), temperature), tl.arange(0, logits.piece), inside)
    return piece * logits.piece + found


@kernel()
def _piece_of(logits: Logits, place: tl.tuple, piece: tl.tensor) -> tl.tensor:
    columns = piece * logits.piece + tl.arange(0, logits.piece)
    return values_at(logits, place, columns, columns < logits.width)


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
