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
        self._outgrown: list[torch.Tensor] = []

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The buffer `name` as a contiguous tensor of `shape`; each name keeps to one dtype."""
        size = math.prod(shape)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < size:
            buffer = torch.empty(self._room(size, buffer), dtype=dtype, device=self._device)
            self._buffers[name] = buffer
        return buffer[:size].view(shape)

    def _room(self, size: int, outgrown: torch.Tensor | None) -> int:
        """How much to take for `size`, in place of a buffer that is too small.

        On a GPU that one is kept, for a CUDA graph may write to its address as long as it lives. Twice its size is
        taken at least, so that all that were outgrown are no larger than the last together.
        """
        if outgrown is None or self._device.type == "cpu":
            return size
        self._outgrown.append(outgrown)
        return max(size, 2 * outgrown.numel())
