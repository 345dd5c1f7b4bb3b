"""Buffers that are used again."""

import torch

from roseinfer.model.scratch import Scratch

META = torch.device("meta")  # a device with addresses of its own, as far as Scratch can see


def test_a_name_keeps_its_memory() -> None:
    scratch = Scratch(torch.device("cpu"))
    first = scratch.take("a", (4, 3))
    assert scratch.take("a", (2, 2)).data_ptr() == first.data_ptr()
    assert scratch.take("b", (4, 3)).data_ptr() != first.data_ptr()
    assert scratch.take("a", (5, 3)).shape == (5, 3)


def test_a_gpu_keeps_what_was_outgrown() -> None:
    """A CUDA graph may have its address. All that is kept is no larger than what is used."""
    scratch = Scratch(META)
    for size in range(1, 100):
        scratch.take("a", (size,))
    sizes = [buffer.numel() for buffer in scratch._outgrown]
    assert sizes == [1, 2, 4, 8, 16, 32, 64]
    assert scratch.take("a", (128,)).numel() == 128
    assert len(scratch._outgrown) == len(sizes)


def test_a_cpu_takes_what_was_asked_for() -> None:
    scratch = Scratch(torch.device("cpu"))
    for size in (10, 11, 30):
        scratch.take("a", (size,))
    assert scratch._outgrown == []
    assert scratch._buffers["a"].numel() == 30
