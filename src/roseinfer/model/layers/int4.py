"""Weights of four bits: 32 inputs of an output share a float16 scale and a zero, and w is about scale * (q - zero).

What is a float16 times whole numbers already, as the weights of GPTQ, AWQ and compressed-tensors are, stays what it is.
For other numbers the zero is 8, and the scale of a group is searched: candidates send the group's largest number to
different q, each takes the scale that fits its numbers best, and the candidate with the least squared error wins. The
kernel and the search in torch give the same bits; docs/performance.md has what it does to a model's answers.
"""

from typing import NamedTuple

import torch
from torch.nn import functional

GROUP = 32
MIDDLE, _MOST = 8, 15  # the zero where nothing asks for another, and the largest q
KERNEL = "linear_int4_of_float32"  # its name, by which a level is asked for it

# Where the largest number of a group may go, in units of the scale.
_PLACES = (-8.0, -7.75, -8.25, -7.5, -8.5, -7.25, -8.75, -7.0, -9.0, -6.75, -9.25, -6.5, -6.25)
_SMALLEST = 2.0**-21  # a group below has a scale that float16 does not hold: zeros


class Grouped(NamedTuple):
    """Rows in int4."""

    numbers: torch.Tensor  # [rows, width] uint8
    scales: torch.Tensor  # [rows, groups] float16; NaN where a group is not finite
    zeros: torch.Tensor  # [rows, groups] uint8
    num_exact: int  # groups that have exactly the numbers that they were given


class _Found(NamedTuple):
    """What is found for groups: q is w * factor, rounded, and zero added."""

    factor: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor

    def where(self, condition: torch.Tensor, other: "_Found") -> "_Found":
        return _Found(*(torch.where(condition, a, b) for a, b in zip(self, other, strict=True)))


def grouped_rows(weight: torch.Tensor) -> Grouped:
    """Rows [rows, width] in int4: the same bits as kernels/cpp/quantize_int4.cpp."""
    rows, width = weight.shape
    weights = functional.pad(weight.float(), (0, -width % GROUP)).reshape(-1, GROUP).t().contiguous()
    largest = weights.gather(0, weights.abs().argmax(0, keepdim=True))[0]
    is_finite = weights.isfinite().all(0)
    nothing = torch.zeros_like(largest)
    found = _Found(nothing, torch.where(is_finite, 0.0, torch.nan), nothing + MIDDLE)
    is_exact = is_finite & (largest == 0.0)
    is_open = is_finite & (largest != 0.0)
    for place in range(1, _MOST + 1):
        fits, exact = _exact(weights, largest, place)
        fits &= is_open
        found, is_exact, is_open = exact.where(fits, found), is_exact | fits, is_open & ~fits
    found = _searched(weights, largest, is_open & (largest.abs() >= _SMALLEST), found)
    numbers = ((weights * found.factor).round() + found.zero).nan_to_num(0.0).clamp(0, _MOST)
    scales, zeros = (each.view(rows, -1) for each in (found.scale.half(), found.zero.to(torch.uint8)))
    return Grouped(numbers.to(torch.uint8).t().reshape(rows, -1)[:, :width], scales, zeros, int(is_exact.sum()))


def _exact(weights: torch.Tensor, largest: torch.Tensor, place: int) -> tuple[torch.Tensor, _Found]:
    """Which groups are a float16 times whole numbers, of which the largest is `place`."""
    size = largest.abs()
    places = torch.full_like(size, place)
    scale, factor = size / places, places / size  # not by reciprocals
    numbers = (weights * factor).round()
    least, most = numbers.amin(0).clamp(max=0.0), numbers.amax(0).clamp(min=0.0)
    fits = (scale.half().float() == scale) & (scale * place == size) & (numbers * scale == weights).all(0)
    most_above = _MOST - MIDDLE
    is_turned = (most == most_above + 1) & (least > -MIDDLE)  # a negative scale will do
    moved = torch.where(least < -MIDDLE, -least, torch.where(most > most_above, _MOST - most, MIDDLE))
    sign = torch.where(is_turned, -1.0, 1.0)
    return fits & (most - least <= _MOST), _Found(sign * factor, sign * scale, torch.where(is_turned, MIDDLE, moved))


def _searched(weights: torch.Tensor, largest: torch.Tensor, is_open: torch.Tensor, found: _Found) -> _Found:
    least = torch.full_like(largest, torch.inf)
    for place in _PLACES:
        factor = torch.full_like(largest, place) / largest
        numbers = (weights * factor).clamp(-MIDDLE, _MOST - MIDDLE).round()
        scale = (_total(weights * numbers) / _total(numbers * numbers)).half().float()
        off = weights - numbers * scale
        error = _total(off * off)
        is_better = is_open & (error < least)
        found = _Found(factor, scale, found.zero).where(is_better, found)
        least = torch.where(is_better, error, least)
    is_beyond = is_open & least.isinf()
    return found._replace(scale=torch.where(is_beyond, torch.nan, found.scale))


def _total(values: torch.Tensor) -> torch.Tensor:
    """Sums of groups [32, groups], one number after the other, as the kernel adds them."""
    total = torch.zeros_like(values[0])
    for each in values:
        total = total + each
    return total
