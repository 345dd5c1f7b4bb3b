"""Weights of four bits: each 32 inputs of an output share a float16 scale, and w is about scale * q, q from -8 to 7.

The scale of a group is searched: candidates send the group's largest number to different q, each takes the scale that
fits its numbers best, and the candidate with the least squared error wins. What is a float16 times whole numbers from
-8 to 7 already, as the weights of GPTQ, AWQ and compressed-tensors mostly are, stays what it is. The kernel and the
search in torch give the same bits; docs/performance.md has what it does to a model's answers.
"""

import ctypes

import torch
from torch.nn import functional

from roseinfer.model.device import DTYPES, Placement, dtype_name

GROUP = 32
KERNEL = "linear_int4_of_float32"  # its name, by which a level is asked for it

# Where the largest number of a group may go, in units of the scale; then whole numbers, tried where they are exact.
_PLACES = (-8.0, -7.75, -8.25, -7.5, -8.5, -7.25, -8.75, -7.0, -9.0, -6.75, -9.25, -6.5, -6.25)
_WHOLE_PLACES = (8.0, 7.0, 6.0, -6.0, 5.0, -5.0, 4.0, -4.0, 3.0, -3.0, 2.0, -2.0, 1.0, -1.0)
_SMALLEST = 2.0**-21  # a group below has a scale that float16 does not hold: zeros

_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_int64


def grouped_rows(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Rows [rows, width] -> int8 of the same shape, scales [rows, groups] float16, and how many groups are exact.

    The same bits as kernels/cpp/quantize_int4.cpp. A group that is not finite gets a scale of NaN.
    """
    rows, width = weight.shape
    groups = functional.pad(weight.float(), (0, -width % GROUP)).reshape(-1, GROUP)
    largest = groups.gather(1, groups.abs().argmax(1, keepdim=True))
    is_finite = groups.isfinite().all(1, keepdim=True)
    is_small = largest.abs() < _SMALLEST
    numbers = torch.zeros_like(groups)
    scales = torch.full_like(largest, torch.nan)
    least = torch.full_like(largest, torch.inf)
    for place in (*_PLACES, *_WHOLE_PLACES):
        fitted, scale, error = _fit(groups, torch.full_like(largest, place) / largest)  # not by a reciprocal
        is_better = (error < least) & is_finite & ~is_small
        if place in _WHOLE_PLACES:
            is_better &= (largest / place).half().float() * place == largest
        numbers, scales = torch.where(is_better, fitted, numbers), torch.where(is_better, scale, scales)
        least = torch.where(is_better, error, least)
    scales[is_finite & is_small] = 0.0
    num_exact = int((is_finite & torch.where(is_small, largest == 0.0, least == 0.0)).sum())
    return numbers.to(torch.int8).view(rows, -1)[:, :width], scales.half().view(rows, -1), num_exact


def _fit(groups: torch.Tensor, factor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    numbers = (groups * factor).clamp(-8.0, 7.0).round()
    scale = (_total(groups * numbers) / _total(numbers * numbers)).half().float()
    error = groups - numbers * scale
    return numbers, scale, _total(error * error)


def _total(values: torch.Tensor) -> torch.Tensor:
    """Sums of 32 in the kernel's order."""
    a, b, c, d = torch.split(values, 8, 1)
    lanes = a + b + c + d
    while lanes.shape[1] > 1:
        low, high = lanes.chunk(2, 1)
        lanes = low + high
    return lanes


def grouped_piece(piece: torch.Tensor, placement: Placement) -> tuple[torch.Tensor, torch.Tensor, int]:
    """`grouped_rows`, by a kernel where there is one: the same bits."""
    if not placement.has_kernel(KERNEL):
        return grouped_rows(piece)
    assert placement.kernels is not None
    piece = (piece if piece.dtype in DTYPES.values() else piece.float()).contiguous()
    name = f"roseinfer_quantize_int4_{dtype_name(piece.dtype)}"
    quantize = placement.kernels.function(name, _POINTER, _SIZE, _SIZE, _POINTER, _POINTER, _POINTER)
    numbers = torch.empty(piece.shape, dtype=torch.int8)
    scales = torch.empty(len(piece), -(-piece.shape[1] // GROUP), dtype=torch.float16)
    num_exact = ctypes.c_int64()
    addresses = (numbers.data_ptr(), scales.data_ptr(), ctypes.addressof(num_exact))
    quantize(piece.data_ptr(), *piece.shape, *addresses)
    return numbers, scales, num_exact.value
