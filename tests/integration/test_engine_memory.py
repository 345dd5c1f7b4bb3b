"""The engine process: weights and KV cache lie on huge pages where the system gives them; no compiler is imported."""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from roseinfer.config.options import Config
from roseinfer.engine.link.transport import ProcessTransport
from roseinfer.messages import EngineInfo, Event

THP_ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def why_not() -> str | None:
    """Why a process that asks for huge pages gets none here; None where it gets them."""
    if not THP_ENABLED.exists() or not Path("/proc/self/smaps_rollup").exists():
        return "this system does not tell of huge pages"
    if "[never]" in THP_ENABLED.read_text(encoding="ascii"):
        return f"{THP_ENABLED} says never"
    if "THP_enabled:\t0" in Path("/proc/self/status").read_text(encoding="ascii"):
        return "huge pages are turned off for this process"
    return None


async def start(transport: ProcessTransport) -> None:
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[EngineInfo] = loop.create_future()

    def on_event(event: Event) -> None:
        if isinstance(event, EngineInfo):
            ready.set_result(event)

    await transport.start(on_event, lambda reason: ready.set_exception(RuntimeError(reason)))
    await ready


def huge_kib(pid: int | None) -> int:
    """KiB of the process's anonymous memory that lie on huge pages."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
    [size] = [line.split()[1] for line in lines if line.startswith("AnonHugePages:")]
    return int(size)


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
async def test_weights_and_cache_lie_on_huge_pages() -> None:
    transport = ProcessTransport(Config())
    try:
        await start(transport)
        assert huge_kib(transport.pid) > 0
    finally:
        await transport.close()


RECORDING = """
import sys
from types import SimpleNamespace
import torch
from roseinfer.model.steps.replay import SharedMemory, _Recorder

x = torch.ones(2)
recorder = _Recorder(SharedMemory(), SimpleNamespace(function=lambda *_: None))
with torch.inference_mode():
    with recorder:
        y = x + x
    x.fill_(2.0)
    recorder.parts[0]()
assert y.tolist() == [4.0, 4.0]
assert "torch._dynamo" not in sys.modules
"""


def test_recording_a_step_imports_no_compiler() -> None:
    """Torch's takes 74 MB, and 142 with Triton."""
    done = subprocess.run([sys.executable, "-c", RECORDING], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


IMPORTS = """
import sys
from roseinfer.runtime.stand_ins import forget_stand_ins, stand_in
from roseinfer.wiring import _UNUSED

stand_in(*_UNUSED)
import torch

forget_stand_ins()
assert not any(name.startswith("torch._refs") for name in sys.modules)
assert torch.ones(2, 3).T.contiguous().view(-1).tolist() == [1.0] * 6
from torch._meta_registrations import meta_index_Tensor  # as torch's compiler does

assert torch.empty(4, device="meta").sort().values.shape == (4,)
assert torch._meta_registrations.meta_index_Tensor is meta_index_Tensor
assert torch.distributions.Normal(0.0, 1.0).sample().shape == ()
assert len(torch.utils.data.TensorDataset(torch.ones(2))) == 2
assert torch.export.Dim("rows") and torch.quantization.QuantStub and torch.masked.masked_tensor
"""


def test_torch_is_whole_again_when_what_was_put_off_is_imported() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


async def test_an_engine_imports_no_python_code_for_tensors_without_numbers() -> None:
    program = """
import sys
from roseinfer import wiring

def build(config, on_progress):
    engine = wiring.build_engine(config, on_progress)
    assert not sys.modules.keys() & {*wiring._UNUSED, "torch._refs"}
    return engine

raise SystemExit(wiring.engine_main(int(sys.argv[1]), build))
"""
    transport = ProcessTransport(Config(), ("-c", program))
    try:
        await start(transport)
    finally:
        await transport.close()
