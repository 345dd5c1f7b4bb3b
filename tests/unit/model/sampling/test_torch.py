"""Random numbers of seeds and positions: the published generator, and no pattern over either."""

import numpy as np
import torch

from roseinfer.model.sampling.torch import uniforms


def test_uniforms_are_splitmix64() -> None:
    """Pinned: a change would change every seeded completion. Computed here with exact integers."""

    def mix(z: int) -> int:
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        return z ^ (z >> 31)

    seeds, positions = [0, 1, 2**63 - 1, 12345], [0, 7, 100_000, 2**31 - 1]
    expected = [
        (mix((mix(seed) + (position + 1) * 0x9E3779B97F4A7C15) % 2**64) >> 11) / 2**53
        for seed, position in zip(seeds, positions, strict=True)
    ]
    for dtype in (torch.int32, torch.int64):
        assert uniforms(torch.tensor(seeds), torch.tensor(positions, dtype=dtype)).tolist() == expected


def test_uniforms_are_uniform_over_seeds_and_positions() -> None:
    seeds, positions = np.divmod(np.arange(10_000), 100)
    numbers = uniforms(torch.from_numpy(seeds), torch.from_numpy(positions)).numpy()
    counts, _ = np.histogram(numbers, bins=20, range=(0, 1))
    assert ((numbers >= 0) & (numbers < 1)).all()
    assert len(np.unique(numbers)) == len(numbers)
    assert np.abs(counts - 500).max() < 110  # five standard deviations
