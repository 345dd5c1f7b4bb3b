"""How each server is started for a benchmark, kept ready, and stopped. Measures nothing.

A server that has been started is paused (SIGSTOP) whenever another one is measured: they can be measured in turn, and
only one of them has the processors.
"""

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import aiohttp

from benchmarks import protocol
from benchmarks.engine_options import precision_options, require_kernels
from benchmarks.http_client import Endpoint, is_answering
from benchmarks.workloads import BATCH

MODEL_NAME = "gpt2-random"
START_TIMEOUT_S = 420.0  # vLLM compiles for some minutes the first time it meets a model


class ServerFailed(RuntimeError):
    """The server did not start."""


@dataclass(frozen=True, slots=True)
class ServerPlan:
    """A command line that serves MODEL_NAME on a port of this host."""

    name: str
    command: tuple[str, ...]
    port: int
    environment: Mapping[str, str]


def serving_options(precision: str) -> dict[str, str]:
    """The defaults but for the batch, and half the KV memory where a number takes half."""
    return {
        **precision_options(precision),
        "scheduler.max_num_seqs": str(BATCH),
        "cache.cpu_memory_mib": "2048" if precision == "float32" else "1024",
    }


def roseinfer_plan(model: Path, precision: str) -> ServerPlan:
    """`roseinfer serve` on a free port."""
    require_kernels()
    port = free_port()
    options = {
        **serving_options(precision),
        "server.served_model_name": MODEL_NAME,
        "server.port": str(port),
        "server.ops_port": "0",
    }
    flags = [word for path, value in options.items() for word in (f"--{path.replace('_', '-')}", value)]
    command = (sys.executable, "-m", "roseinfer", "serve", "--model", str(model), *flags)
    return ServerPlan(f"roseinfer {precision}", command, port, {})


def vllm_plan(venv: Path, model: Path, precision: str) -> ServerPlan:
    """The CPU build of vLLM as its documentation starts it: every core bound, prefix cache on, 3 GiB of KV."""
    port = free_port()
    cores = sorted(os.sched_getaffinity(0))
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": "3",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "OMP_NUM_THREADS": str(len(cores)),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    options = ("--served-model-name", MODEL_NAME, "--dtype", precision, "--max-num-seqs", str(BATCH))
    command = (str(venv / "bin" / "vllm"), "serve", str(model), *options, "--host", "127.0.0.1", "--port", str(port))
    return ServerPlan(f"vllm {precision}", command, port, environment)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """One running server."""

    def __init__(self, plan: ServerPlan, log: Path) -> None:
        self.name = plan.name
        self.endpoint = Endpoint(f"http://127.0.0.1:{plan.port}", MODEL_NAME)
        self._log = log
        self._process = protocol.start(plan.command, log, env={**os.environ, **plan.environment})
        self.started_s = 0.0
        try:
            self._wait_until_ready()
        except BaseException:
            self.close()
            raise

    def _wait_until_ready(self) -> None:
        began = time.monotonic()
        while not is_answering(self.endpoint):
            if self._process.poll() is not None or time.monotonic() > began + START_TIMEOUT_S:
                raise ServerFailed(f"{self.name} did not start; see {self._log}")
            time.sleep(0.5)
        protocol.raise_groups(self._process.pid)
        self.started_s = time.monotonic() - began

    def pause(self) -> None:
        protocol.pause(self._process.pid)

    def resume(self) -> None:
        protocol.resume(self._process.pid)

    def peak_rss_mb(self) -> float:
        return protocol.peak_rss_mb(self._process.pid)

    def close(self) -> None:
        protocol.stop(self._process)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        self.close()


def vllm_version(venv: Path) -> str | None:
    """None when there is no vLLM in the environment."""
    python = venv / "bin" / "python"
    if not (venv / "bin" / "vllm").is_file():
        return None
    told = subprocess.run(  # noqa: S603 - the environment that the caller named
        [python, "-c", "import importlib.metadata as m; print(m.version('vllm'), m.version('torch'))"],
        capture_output=True,
        text=True,
        check=False,
    )
    vllm, _, torch = told.stdout.strip().partition(" ")
    return f"vllm {vllm}, torch {torch}" if told.returncode == 0 else None


async def wait_ready(url: str, timeout_s: float = 60.0) -> None:
    """Return once `/readyz` there answers 200. Raises TimeoutError."""
    async with asyncio.timeout(timeout_s), aiohttp.ClientSession() as session:
        while True:
            try:
                async with session.get(f"{url}/readyz") as response:
                    if response.status == 200:
                        return
            except aiohttp.ClientConnectionError:
                pass
            await asyncio.sleep(0.1)
