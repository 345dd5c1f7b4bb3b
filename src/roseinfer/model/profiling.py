"""Torch's profiler behind the engine's `Profiler`: some steps become a trace that Perfetto and Chrome open.

On a GPU it also marks the capture range of Nsight Systems, which records exactly these steps when it was started with
`--capture-range=cudaProfilerApi`. Knows no steps and no requests.
"""

from pathlib import Path

import torch
from torch.profiler import ProfilerActivity

TRACE_NAME = "trace.json"


class TorchProfiler:
    """One trace at a time: operators and, on a GPU, kernels and copies. Neither shapes nor stacks, which cost more."""

    def __init__(self, device: str) -> None:
        self._is_cuda = device == "cuda"
        self._profile: torch.profiler.profile | None = None

    def start(self) -> None:
        """See Profiler."""
        activities = [ProfilerActivity.CPU]
        if self._is_cuda:
            activities.append(ProfilerActivity.CUDA)
            torch.cuda.synchronize()  # what was launched before is not of these steps
            torch.cuda.profiler.start()  # type: ignore[no-untyped-call]
        self._profile = torch.profiler.profile(activities=activities)
        self._profile.start()

    def stop(self, directory: Path) -> None:
        """See Profiler."""
        profile, self._profile = self._profile, None
        assert profile is not None, "stop without start"
        profile.stop()
        if self._is_cuda:
            torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        profile.export_chrome_trace(str(directory / TRACE_NAME))
