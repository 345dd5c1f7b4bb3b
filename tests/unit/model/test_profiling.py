"""A profile of some work is a trace in Chrome's format that names the operators that ran, and no others."""

import json
from pathlib import Path

import torch

from roseinfer.model.profiling import TRACE_NAME, TorchProfiler


def test_the_trace_holds_what_ran_between_start_and_stop(tmp_path: Path) -> None:
    profiler, ones = TorchProfiler("cpu"), torch.ones(4, 4)
    torch.relu(ones)
    for number, operator in enumerate((torch.tanh, torch.sigmoid)):
        profiler.start()
        operator(ones)
        profiler.stop(tmp_path / str(number))
    for number, (name, other) in enumerate([("aten::tanh", "aten::sigmoid"), ("aten::sigmoid", "aten::tanh")]):
        trace = json.loads((tmp_path / str(number) / TRACE_NAME).read_text())
        names = {event.get("name") for event in trace["traceEvents"]}
        assert name in names
        assert not {other, "aten::relu"} & names
