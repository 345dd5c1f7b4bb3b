"""A profile on a GPU names the kernels that ran between start and stop."""

import json
from pathlib import Path

import pytest
import torch

from roseinfer.model.device_stream import TRACE_NAME, TorchProfiler

pytestmark = pytest.mark.gpu


def test_the_trace_holds_kernels(tmp_path: Path) -> None:
    profiler, ones = TorchProfiler("cuda"), torch.ones(64, 64, device="cuda")
    for number in range(2):
        profiler.start()
        (ones @ ones).tanh()
        torch.cuda.synchronize()
        profiler.stop(tmp_path / str(number))
        events = json.loads((tmp_path / str(number) / TRACE_NAME).read_text())["traceEvents"]
        assert any(event.get("cat") == "kernel" for event in events)
        assert any(event.get("name") == "aten::tanh" for event in events)
