"""Names into reusable buffers. Knows nothing about what is computed in them.

A fresh temporary of some megabytes costs ten times its copy in page faults, each layer again; these grow to the
largest size asked for and stay.
"""

import math

import torch


class Scratch:
    """Grow-only buffers of one device. A buffer is valid until its name is taken again; its content is arbitrary."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[str, torch.Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The buffer `name` as a contiguous tensor of `shape`; each name keeps to one dtype."""
        size = math.prod(shape)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < size:
            buffer = torch.empty(size, dtype=dtype, device=self._device)
            self._buffers[name] = buffer
        return buffer[:size].view(shape)
