"""Draws a token among the likeliest of a row, those that top-k, top-p and min-p keep, without sorting the row.

One program does this for a row. Groups of 16 tokens have left their largest logit and their mass. From these alone
follows a logit that the last kept token surely reaches: of top-k, one that k groups reach; of top-p, one that groups of
enough mass reach. Groups below it are left out: with a top-k of 20 about 20 groups are left. Then the exact limits are
searched among the tokens of these groups. A search halves an interval of logits and moves its bounds to logits that
occur, so it takes about as many passes as the logarithm of the number of tokens that are left.

What is kept, and which token a draw falls on, is that of sampling/torch.py and kernels/cpp/sampling.cpp: of equal
logits the lower id counts as the likelier.
"""

from typing import NamedTuple

import triton.language as tl

from roseinfer.model.sampling.slot_table import MAX_RANKED
from roseinfer.model.triton_kernels.language import Constant, Pointer, kernel
from roseinfer.model.triton_kernels.logits import LOWEST_KEY, LOWEST_LOGIT, Logits, key_of, mass_of, value_of, values_at

_MAX_RANKED = tl.constexpr(MAX_RANKED)
_ROUGH_STEPS = tl.constexpr(16)  # of halving the range of float32: what is left of it is below 1 % of a logit
_BEYOND = tl.constexpr(0x7FFFFFFF)  # above all keys, ids and counts


class Groups(NamedTuple):
    """What the groups of each row leave [rows, pieces, groups of a piece]."""

    peaks: Pointer  # float32, the largest logit
    masses: Pointer  # float32, sum of exp((logit - peak of the piece) / temperature)
    left: Pointer  # int32, memory for the ids of the groups of a row that are left
    num_groups: Constant  # of a row
    tile: Constant  # a power of two: groups that are looked at together


@kernel()
def draw_likeliest(
    logits: Logits,
    groups: Groups,
    piece_peaks: tl.tensor,
    place: tl.tuple,
    peak: tl.tensor,
    total: tl.tensor,
    limits: tl.tuple,
    draw: tl.tensor,
) -> tl.tensor:
    """The id that a draw in [0, 1) falls on, of a row whose largest logit is finite.

    `place` is row, slot and position; `total` the mass of all tokens, float64; `limits` are temperature, top-k, top-p
    and min-p.
    """
    temperature, top_k, top_p, min_p = limits
    num_left = _leave_out(logits, groups, piece_peaks, place[0], peak, total, limits) * logits.group
    tokens = (place[0], place[1], place[2], num_left, peak, temperature)
    is_ranked = (top_k > 0) & (top_k <= _MAX_RANKED)
    # What is kept: the tokens above the cut, and of those at the cut, each of its own mass, the first few.
    cut, num_equal = tl.full([], LOWEST_KEY, tl.int32), tl.full([], _BEYOND, tl.int32)
    own, goal = tl.full([], 0.0, tl.float64), tl.full([], 0.0, tl.float64)
    for step in range(3):  # top-k, top-p, the draw: in a loop, so that the code of a search is there once
        if step == 0:
            goal, is_wanted = (top_k - 1).to(tl.float64), top_k > 0
        elif step == 1:
            goal, is_wanted = top_p * total, top_p < 1.0
        else:
            lowest, above_mass = _least_kept(logits, groups, tokens, cut, num_equal, min_p)
            total = above_mass + tl.where(lowest > cut, 0.0, num_equal * own)
            num_equal = tl.where(lowest > cut, _BEYOND, num_equal)
            cut, goal, is_wanted = lowest, draw * total, is_ranked
        if is_wanted:
            key = _search(logits, groups, tokens, cut, key_of(peak), goal, step == 0)
            above, above_mass, equal, own = _standing(logits, groups, tokens, key)
            missing = tl.where(own > 0.0, (goal - above_mass) / own, 0.0)
            missing = tl.where(step == 1, tl.ceil(missing), tl.floor(missing) + 1.0)
            missing = tl.where(step == 0, goal - above + 1.0, missing)
            limit = tl.where(key == cut, tl.minimum(num_equal, equal), equal)
            num_equal = tl.maximum(tl.minimum(missing, limit.to(tl.float64)), 0.0).to(tl.int32)
            total = above_mass + num_equal * own
            cut = key
    # Of the likelier tokens before the others the last one is drawn of what is kept now.
    return _find(logits, groups, tokens, cut, num_equal, tl.where(is_ranked, num_equal - 0.5, goal), is_ranked)


@kernel()
def _leave_out(
    logits: Logits,
    groups: Groups,
    piece_peaks: tl.tensor,
    row: tl.tensor,
    peak: tl.tensor,
    total: tl.tensor,
    limits: tl.tuple,
) -> tl.tensor:
    """Write the ids of the groups that may hold a kept token, in their order -> how many they are."""
    temperature, top_k, top_p, min_p = limits
    has_top_k = top_k > 0
    low, high = tl.full([], LOWEST_KEY + 1, tl.int32), key_of(peak)
    share = tl.where(top_p < 1.0, top_p * total, float("inf"))
    for _step in range(_ROUGH_STEPS):
        middle = _between(low, high)
        # Those tokens of a group that do not reach the middle have no more than its mass each.
        rest = mass_of(value_of(middle), peak, temperature) * (logits.group - 1)
        count, mass = tl.full([], 0, tl.int32), tl.full([], 0.0, tl.float64)
        for start in range(0, groups.num_groups, groups.tile):
            ids, peaks, masses = _groups_at(logits, groups, piece_peaks, row, start, peak, temperature)
            reaches = key_of(peaks) >= middle
            count += tl.sum(reaches.to(tl.int32), axis=0)
            surely = tl.maximum(masses - rest, mass_of(peaks, peak, temperature))
            mass += tl.sum(tl.where(reaches, surely, 0.0).to(tl.float64), axis=0)
        is_enough = tl.where(has_top_k, count >= top_k, mass >= share)
        low, high = tl.where(is_enough, middle, low), tl.where(is_enough, high, middle)
    least = tl.where(has_top_k, 0.0, min_p)  # what top-k keeps is what top-p is a share of, unlikely tokens too
    num_left = tl.full([], 0, tl.int32)
    for start in range(0, groups.num_groups, groups.tile):
        ids, peaks, masses = _groups_at(logits, groups, piece_peaks, row, start, peak, temperature)
        is_left = (key_of(peaks) >= low) & (mass_of(peaks, peak, temperature) >= least)
        place = num_left + tl.cumsum(is_left.to(tl.int32), axis=0) - 1
        tl.store(groups.left + row * groups.num_groups + place, ids, mask=is_left)
        num_left += tl.sum(is_left.to(tl.int32), axis=0)
    tl.debug_barrier()  # other threads of this program read them
    return num_left


@kernel()
def _groups_at(
    logits: Logits,
    groups: Groups,
    piece_peaks: tl.tensor,
    row: tl.tensor,
    start: tl.tensor,
    peak: tl.tensor,
    temperature: tl.tensor,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Ids of a tile of groups, their largest logits, and their masses relative to the peak of the row."""
    ids = start + tl.arange(0, groups.tile)
    is_group = ids < groups.num_groups
    at = row * groups.num_groups + ids
    peaks = tl.load(groups.peaks + at, mask=is_group, other=LOWEST_LOGIT)
    masses = tl.load(groups.masses + at, mask=is_group, other=0.0)
    piece = row * logits.num_pieces + ids // (logits.piece // logits.group)
    of_piece = tl.load(piece_peaks + piece, mask=is_group, other=LOWEST_LOGIT)
    return ids, peaks, masses * mass_of(of_piece, peak, temperature)


@kernel()
def _tokens_at(
    logits: Logits,
    groups: Groups,
    tokens: tl.tuple,
    start: tl.tensor,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """A tile of the tokens that are left: their ids, keys and masses float64; lowest key and 0 where there are none."""
    row, slot, position, num_left, peak, temperature = tokens
    index = start + tl.arange(0, logits.piece)
    is_left = index < num_left
    ids = tl.load(groups.left + row * groups.num_groups + index // logits.group, mask=is_left, other=0)
    ids = ids * logits.group + index % logits.group
    values = values_at(logits, (row, slot, position), ids, is_left)
    return ids, key_of(values), mass_of(values, peak, temperature).to(tl.float64)


@kernel()
def _search(
    logits: Logits,
    groups: Groups,
    tokens: tl.tuple,
    low: tl.tensor,
    high: tl.tensor,
    goal: tl.tensor,
    is_count: tl.tensor,
) -> tl.tensor:
    """The highest key above `low` that occurs and is reached by more mass, or tokens, than the goal; else `low`.

    `high` is the highest key that occurs.
    """
    while low < high:
        middle = _between(low, high)
        reached = tl.full([], 0.0, tl.float64)
        next_above, next_below = tl.full([], _BEYOND, tl.int32), tl.full([], -_BEYOND, tl.int32)
        for start in range(0, tokens[3], logits.piece):
            _ids, keys, masses = _tokens_at(logits, groups, tokens, start)
            reaches = keys >= middle
            reached += tl.sum(tl.where(reaches, tl.where(is_count, 1.0, masses), 0.0), axis=0)
            next_above = tl.minimum(next_above, tl.min(tl.where(reaches, keys, _BEYOND), axis=0))
            next_below = tl.maximum(next_below, tl.max(tl.where(reaches, -_BEYOND, keys), axis=0))
        is_enough = reached > goal
        low, high = tl.where(is_enough, next_above, low), tl.where(is_enough, high, next_below)
    return low


@kernel()
def _standing(
    logits: Logits, groups: Groups, tokens: tl.tuple, key: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Number and mass of the tokens above a key, the number of those that have it, and the mass of one of them."""
    above, equal = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    above_mass, own = tl.full([], 0.0, tl.float64), tl.full([], 0.0, tl.float64)
    for start in range(0, tokens[3], logits.piece):
        _ids, keys, masses = _tokens_at(logits, groups, tokens, start)
        above += tl.sum((keys > key).to(tl.int32), axis=0)
        above_mass += tl.sum(tl.where(keys > key, masses, 0.0), axis=0)
        equal += tl.sum((keys == key).to(tl.int32), axis=0)
        own = tl.maximum(own, tl.max(tl.where(keys == key, masses, 0.0), axis=0))
    return above, above_mass, equal, own


@kernel()
def _least_kept(
    logits: Logits, groups: Groups, tokens: tl.tuple, cut: tl.tensor, num_equal: tl.tensor, min_p: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """The key of the least likely token that min-p keeps too, and the mass of those that it keeps above the cut."""
    lowest, above_mass = tl.full([], _BEYOND, tl.int32), tl.full([], 0.0, tl.float64)
    for start in range(0, tokens[3], logits.piece):
        _ids, keys, masses = _tokens_at(logits, groups, tokens, start)
        is_kept = (keys > LOWEST_KEY) & (masses >= min_p)
        above_mass += tl.sum(tl.where(is_kept & (keys > cut), masses, 0.0), axis=0)
        is_kept &= (keys > cut) | ((keys == cut) & (num_equal > 0))
        lowest = tl.minimum(lowest, tl.min(tl.where(is_kept, keys, _BEYOND), axis=0))
    return lowest, above_mass


@kernel()
def _find(
    logits: Logits,
    groups: Groups,
    tokens: tl.tuple,
    cut: tl.tensor,
    num_equal: tl.tensor,
    target: tl.tensor,
    is_ranked: tl.tensor,
) -> tl.tensor:
    """The id at which the mass of what is kept, or if it is ranked the number of those at the cut, passes the target.

    Lower ids come first.
    """
    token, last = tl.full([], _BEYOND, tl.int32), tl.full([], 0, tl.int32)
    num_seen, before = tl.full([], 0, tl.int32), tl.full([], 0.0, tl.float64)
    for start in range(0, tokens[3], logits.piece):
        ids, keys, masses = _tokens_at(logits, groups, tokens, start)
        is_equal = (keys == cut).to(tl.int32)
        is_kept = (keys > cut) | ((is_equal == 1) & (num_seen + tl.cumsum(is_equal, axis=0) <= num_equal))
        weights = tl.where(is_ranked, is_equal.to(tl.float64), tl.where(is_kept, masses, 0.0))
        is_passed = (weights > 0.0) & (before + tl.cumsum(weights, axis=0) > target)
        token = tl.minimum(token, tl.min(tl.where(is_passed, ids, _BEYOND), axis=0))
        last = tl.maximum(last, tl.max(tl.where(weights > 0.0, ids, 0), axis=0))
        num_seen += tl.sum(is_equal, axis=0)
        before += tl.sum(weights, axis=0)
    return tl.minimum(token, last)


@kernel()
def _between(low: tl.tensor, high: tl.tensor) -> tl.tensor:
    """Above `low` and at most `high`, if `low` is below."""
    return (low | high) - ((low ^ high) >> 1)
