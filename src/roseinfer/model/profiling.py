"""Torch's profiler behind the engine's `Profiler`: some steps become a trace that Perfetto and Chrome open.

On a GPU it also marks the capture range of Nsight Systems, which records exactly these steps when it was started with
`--capture-range=cudaProfilerApi`. Knows no steps and no requests.
"""

from pathlib import Path

import torch
from torch.autograd import profiler

TRACE_NAME = "trace.json"


class TorchProfiler:
    """One trace at a time: operators and, on a GPU, kernels and copies. Neither shapes nor stacks, which cost more.

    It is the profiler below `torch.profiler`, whose first start imports a compiler and would cost a step a second.
    """

    def __init__(self, device: str) -> None:
        self._is_cuda = device == "cuda"
        self._profile: profiler.profile | None = None

    def start(self) -> None:
        """See Profiler."""
        if self._is_cuda:
            torch.cuda.synchronize()  # what was launched before is not of these steps
            torch.cuda.profiler.start()  # type: ignore[no-untyped-call]
        self._profile = profiler.profile(use_device="cuda" if self._is_cuda else None, use_kineto=True)
        self._profile.__enter__()  # type: ignore[no-untyped-call]

    def stop(self, directory: Path) -> None:
        """See Profiler."""
        profile, self._profile = self._profile, None
        assert profile is not None, "stop without start"
        profile.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        if self._is_cuda:
            torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        profile.export_chrome_trace(str(directory / TRACE_NAME))  # type: ignore[no-untyped-call]
