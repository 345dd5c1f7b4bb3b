"""The engine process with a real model: its weights and its KV cache lie on huge pages where the system gives them."""

import asyncio
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
