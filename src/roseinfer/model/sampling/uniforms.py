"""Seeds and positions into random numbers, on the device that holds them. Knows nothing about what is drawn."""

import torch

_GAMMA, _FIRST, _SECOND = (
    constant - 2**64 for constant in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)  # as int64 has them; products of int64 wrap around as those of uint64 do


def uniforms(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """One float64 in [0, 1) for each seed int64 and position [rows], the same on every machine.

    The position-th output of the SplitMix64 generator (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number
    generators") that starts from the mixed seed; mixed, so that seeds near each other do not share their sequences.
    """
    state = _mix64(seeds) + (positions.to(torch.int64) + 1) * _GAMMA
    return _shifted(_mix64(state), 11).double() * 2.0**-53


def _mix64(z: torch.Tensor) -> torch.Tensor:
    z = (z ^ _shifted(z, 30)) * _FIRST
    z = (z ^ _shifted(z, 27)) * _SECOND
    return z ^ _shifted(z, 31)


def _shifted(z: torch.Tensor, num_bits: int) -> torch.Tensor:
    """The bits of int64 moved to the right; zeros come in, not the sign."""
    return torch.bitwise_and(z >> num_bits, 2 ** (64 - num_bits) - 1)
