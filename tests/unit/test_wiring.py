"""What the wiring decides itself, without a server."""

import logging
import subprocess
import sys
from typing import Literal

import msgspec
import pytest

from roseinfer import wiring
from roseinfer.config.options import Config, RunnerConfig
from tests.unit.observe.facts import ENGINE


@pytest.mark.parametrize(
    ("device", "wanted", "depth"),
    [("cpu", "auto", 0), ("cpu", 0, 0), ("cpu", 1, 0), ("cuda", "auto", 1), ("cuda", 0, 0), ("cuda", 1, 1)],
)
def test_a_gpu_launches_ahead_and_a_cpu_does_not_and_says_so_where_it_was_asked(
    device: str, wanted: Literal["auto", 0, 1], depth: int, caplog: pytest.LogCaptureFixture
) -> None:
    assert RunnerConfig().pipeline_depth == "auto"
    config = Config(runner=RunnerConfig(pipeline_depth=wanted))
    info = msgspec.structs.replace(ENGINE, device=device)
    with caplog.at_level(logging.WARNING):
        assert wiring._pipeline_depth(config, info) == depth
    assert ("runner.pipeline_depth" in caplog.text) == (wanted not in {"auto", depth})


FIRST_BURST = """
from roseinfer.config.options import Config
from roseinfer.wiring import build_engine

config = Config()
pacer = build_engine(config, lambda _: None).scheduler._pacer
assert pacer.most_prompt_tokens(num_rows=1, num_waiting=31) > 2 * config.cache.block_size
"""


def test_prompts_of_the_first_burst_are_cut_by_what_the_warm_up_took() -> None:
    """In a process of its own, whose memory an engine may tune."""
    done = subprocess.run([sys.executable, "-c", FIRST_BURST], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


OUT_OF_MEMORY = """
import sys

import torch

from roseinfer.config.options import Config
from roseinfer.errors import ConfigError
from roseinfer.model import runner
from roseinfer.wiring import build_engine


def run_out(*_: object) -> None:
    raise torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.57 GiB of which 1.20 GiB is "
        "free. Including non-PyTorch memory, this process has 22.36 GiB memory in use."
    )


setattr(runner if sys.argv[1] == "load_runner" else runner.ModelRunner, sys.argv[1], run_out)
try:
    build_engine(Config(), lambda _: None)
except ConfigError as error:
    print(error)
"""


@pytest.mark.parametrize(("where", "param"), [("load_runner", "model.path"), ("warm_up", "cache.memory_utilization")])
def test_a_gpu_that_is_too_small_is_a_sentence(where: str, param: str) -> None:
    """Not a traceback of an engine that failed."""
    command = [sys.executable, "-c", OUT_OF_MEMORY, where]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert said.startswith(f"{param}: The GPU's memory does not suffice to ")
    assert said.endswith("23.57 GiB of which 1.20 GiB is free.\n")
