"""Computes log-probabilities of the sampled tokens and of the likeliest ones, before edits, while a step samples.

Each piece leaves its mass and its likeliest tokens; the program that has drawn the row's token joins them.
"""

from typing import NamedTuple

import triton.language as tl

from roseinfer.messages import MAX_LOGPROBS
from roseinfer.model.sampling.logprobs import SCORE_WIDTH
from roseinfer.model.triton_kernels.language import Pointer, kernel
from roseinfer.model.triton_kernels.logits import (
    Logits,
    key_of,
    mass_of,
    raw_values_at,
    value_of,
)

PADDED_LIKELIEST = 32  # the power of two from `MAX_LOGPROBS` on

_NEVER = tl.constexpr(-0x80000000)  # below all keys
_MAX_LIKELIEST = tl.constexpr(MAX_LOGPROBS)
_PADDED = tl.constexpr(PADDED_LIKELIEST)
_WIDTH = tl.constexpr(SCORE_WIDTH)


class Scores(NamedTuple):
    """What the pieces leave [rows, pieces, ...], and the result."""

    counts: Pointer  # int32 in the records of slots: how many likeliest tokens; negative where nothing is asked
    masses: Pointer  # float32 [1] sum of exp(logit - the piece's largest)
    keys: Pointer  # int32 [PADDED_LIKELIEST] of the likeliest tokens
    ids: Pointer  # int32 [PADDED_LIKELIEST]
    numbers: Pointer  # float64 [rows, SCORE_WIDTH], as in `PackedLogprobs`


@kernel()
def score_piece(
    logits: Logits, scores: Scores, at: tl.tensor, start: tl.tensor, raw: tl.tensor, peak: tl.tensor, count: tl.tensor
) -> None:
    """Leave the mass of a piece that begins at `start`, and its `count` likeliest tokens, of equal ones the first."""
    columns = start + tl.arange(0, logits.piece)
    tl.store(scores.masses + at, tl.sum(mass_of(raw, peak, 1.0), axis=0))
    keys = tl.where(columns < logits.vocab_size, key_of(raw), _NEVER)
    for index in range(count):
        key, place = tl.max(keys, axis=0, return_indices=True)
        found = start + place
        tl.store(scores.keys + at * _PADDED + index, key)
        tl.store(scores.ids + at * _PADDED + index, found)
        keys = tl.where(columns == found, _NEVER, keys)


@kernel()
def note_drawn(scores: Scores, row: tl.tensor, token: tl.tensor) -> None:
    """Leave the row's token beside its log-probabilities."""
    tl.store(scores.numbers + row * _WIDTH, token.to(tl.float64))


@kernel()
def score_row(
    logits: Logits, scores: Scores, row: tl.tensor, raw_peaks: tl.tensor, token: tl.tensor, count: tl.tensor
) -> None:
    """The log-probability and the rank of a token, and the `count` likeliest tokens with theirs."""
    piece = tl.arange(0, logits.padded_pieces)
    peak = tl.max(raw_peaks, axis=0)
    masses = tl.load(scores.masses + row * logits.num_pieces + piece, mask=piece < logits.num_pieces, other=0.0)
    masses = (masses * mass_of(raw_peaks, peak, 1.0)).to(tl.float64)
    norm = peak.to(tl.float64) + tl.log(tl.sum(masses, axis=0))
    own = tl.load(logits.numbers + row * logits.row_stride + token).to(tl.float32)
    rank = tl.full([], 1, tl.int32)
    for start in range(logits.num_pieces):
        columns = start * logits.piece + tl.arange(0, logits.piece)
        raw = raw_values_at(logits, row, columns, columns < logits.width)
        rank += tl.sum((raw > own).to(tl.int32), axis=0)
    numbers = scores.numbers + row * _WIDTH
    tl.store(numbers + 1, own.to(tl.float64) - norm)
    tl.store(numbers + 2, rank.to(tl.float64))
    index = tl.arange(0, logits.padded_pieces * _PADDED)
    at = row * logits.num_pieces * _PADDED + index
    is_found = (index // _PADDED < logits.num_pieces) & (index % _PADDED < count)
    keys = tl.load(scores.keys + at, mask=is_found, other=_NEVER)
    for place in range(count):
        key, best = tl.max(keys, axis=0, return_indices=True)
        found = tl.load(scores.ids + row * logits.num_pieces * _PADDED + best)
        tl.store(numbers + 3 + place, found.to(tl.float64))
        tl.store(numbers + 3 + _MAX_LIKELIEST + place, value_of(key).to(tl.float64) - norm)
        keys = tl.where(index == best, _NEVER, keys)
