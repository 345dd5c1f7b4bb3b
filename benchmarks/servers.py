"""Starts roseinfer and its rivals for a benchmark, and reads what a server holds and counts.

A server that has been started is paused (SIGSTOP) whenever another one is measured, so that servers can be measured in
turn while only one of them has the processors.
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from benchmarks import http_client, protocol
from benchmarks.engine_options import precision_options
from benchmarks.protocol import Entrant
from benchmarks.workloads import BATCH, WORKLOADS, PlannedRequest
from roseinfer.bench.definitions import Observed
from roseinfer.bench.load import launcher
from roseinfer.bench.load.endpoint import Endpoint
from roseinfer.bench.load.launcher import free_port, serve_command

MODEL_NAME = "random"
LLAMA_CPP_SLOTS = 8  # as many streams as the workloads have that it runs; each has its share of the context
START_TIMEOUT_S = 420.0  # vLLM compiles for some minutes the first time it meets a model
GPU_START_TIMEOUT_S = 150.0
GPU_SHARE = "0.2"  # of a GPU's memory, for each of those that are up at once
GPU_RIVALS = {  # the module that serves, and its words for what all have in common
    "vllm": (
        "vllm.entrypoints.openai.api_server",
        (
            *("--model", "{model}", "--max-num-seqs", "{batch}", "--max-model-len", "{length}"),
            *("--gpu-memory-utilization", "{share}"),
        ),
    ),
    "sglang": (
        "sglang.launch_server",
        (
            *("--model-path", "{model}", "--max-running-requests", "{batch}", "--context-length", "{length}"),
            *("--mem-fraction-static", "{share}"),
        ),
    ),
}


def serving_options(precision: str, max_model_len: int) -> dict[str, str]:
    """The defaults but for the batch, the context, half the KV memory where a number takes half, and the queue.

    Rivals refuse nothing, and four prompts of 1,500 tokens in float32 take longer than the wait that is allowed.
    """
    return {
        **precision_options(precision),
        "server.max_queue_wait_s": "600",
        "model.max_model_len": str(max_model_len),
        "scheduler.max_num_seqs": str(BATCH),
        "cache.cpu_memory_mib": "2048" if precision == "float32" else "1024",
    }


class Server(launcher.Server, Entrant):
    """A running server of MODEL_NAME that takes turns with others."""

    workloads = tuple(WORKLOADS)
    poll_s = 0.5

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        port: int,
        log: Path,
        environment: Mapping[str, str] | None = None,
        timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        """Waits until the server generates. Raises LaunchFailed."""
        self.name = name
        log.parent.mkdir(parents=True, exist_ok=True)
        print(f"  starting {name}", flush=True)
        began = time.monotonic()
        super().__init__(command, port, log, environment={**os.environ, **(environment or {})})
        self.endpoint = Endpoint(self.url, model=MODEL_NAME)
        try:
            protocol.raise_groups(self.pid)
            self.wait_ready(timeout_s)
        except BaseException:
            self.close()
            raise
        protocol.raise_groups(self.pid)  # again: its engine has a session of its own
        print(f"  {name} answers after {time.monotonic() - began:.0f} s", flush=True)

    def is_ready(self) -> bool:
        return http_client.is_answering(self.endpoint)

    def drive(self, requests: Sequence[PlannedRequest]) -> list[Observed]:
        """See Entrant."""
        return http_client.drive(self.endpoint, requests)


def start_roseinfer(name: str, model: Path, options: Mapping[str, str], log: Path) -> Server:
    """`roseinfer serve` with these options, by path."""
    options = {**options, "server.served_model_name": MODEL_NAME}
    flags = [word for path, value in options.items() for word in (f"--{path.replace('_', '-')}", value)]
    port = free_port()
    return Server(name, serve_command(port, 0, ["--model", str(model), *flags]), port, log)


def start_vllm(venv: Path, model: Path, precision: str, max_model_len: int, log: Path) -> Server:
    """The CPU build of vLLM as its documentation starts it: every core bound, prefix cache on, 3 GiB of KV.

    Raises LaunchFailed.
    """
    if not (venv / "bin" / "vllm").is_file():
        raise launcher.LaunchFailed("not set up")
    port = free_port()
    cores = sorted(os.sched_getaffinity(0))
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": "3",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "OMP_NUM_THREADS": str(len(cores)),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    limits = ("--max-num-seqs", str(BATCH), "--max-model-len", str(max_model_len))
    options = ("--served-model-name", MODEL_NAME, "--dtype", precision, *limits)
    command = (str(venv / "bin" / "vllm"), "serve", str(model), *options, "--host", "127.0.0.1", "--port", str(port))
    return Server(f"vllm {precision}", command, port, log, environment)


def start_on_gpu(rival: str, model: Path, max_model_len: int, log: Path) -> Server:
    """VLLM or SGLang in bfloat16 on the GPU, with its share of the memory, offline.

    Raises LaunchFailed, also where this Python does not import it and PATH does not have it.
    """
    python = python_of(rival)
    if python is None:
        raise launcher.LaunchFailed("not installed")
    port, limits = free_port(), {"batch": str(BATCH), "length": str(max_model_len), "share": GPU_SHARE}
    module, flags = GPU_RIVALS[rival]
    command = [python, "-m", module, *(word.format(model=model, **limits) for word in flags)]
    command += ["--served-model-name", MODEL_NAME, "--dtype", "bfloat16", "--host", "127.0.0.1", "--port", str(port)]
    environment = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "CUDA_MODULE_LOADING": "LAZY"}
    if python != sys.executable:
        environment["PYTHONPATH"] = ""  # which is of ours
    return Server(f"{rival} bfloat16", command, port, log, environment, GPU_START_TIMEOUT_S)


def python_of(package: str) -> str | None:
    """The Python of this process if it imports the package, else that of the program of its name on PATH."""
    if find_spec(package) is not None:
        return sys.executable
    program = shutil.which(package)
    if program is None:
        return None
    first = Path(program).read_bytes().partition(b"\n")[0].decode(errors="replace")
    return first.removeprefix("#!").strip() if first.startswith("#!/") else None


def start_llama_cpp(directory: Path, model: Path, form: str, max_model_len: int, log: Path) -> Server:
    """llama.cpp's server as its documentation starts it, with a slot for each of `LLAMA_CPP_SLOTS` streams.

    `form` is `q8_0` or `q4_0`: the file is made once, by llama.cpp's own program, of one in bfloat16.
    """
    port = free_port()
    threads = str(len(os.sched_getaffinity(0)))
    context = str(LLAMA_CPP_SLOTS * max_model_len)
    options = ("--threads", threads, "--ctx-size", context, "--parallel", str(LLAMA_CPP_SLOTS))
    file = gguf_file(directory, model, form, log)
    command = (str(directory / "bin" / "llama-server"), "--model", str(file), *options, "--port", str(port))
    return Server(f"llama.cpp {form}", command, port, log)


def gguf_file(directory: Path, model: Path, form: str, log: Path) -> Path:
    """The model as llama.cpp reads it, made unless it is there. Raises LaunchFailed."""
    files = {kind: directory / "models" / f"{model.name}-{kind}.gguf" for kind in ("bf16", form)}
    python = str(directory / "bin" / "python")
    commands = {
        "bf16": [python, "-m", "benchmarks.peers.gguf_file", str(model)],
        form: [str(directory / "bin" / "llama-quantize"), str(files["bf16"])],
    }
    for kind, command in commands.items():
        if not files[kind].is_file():
            new = files[kind].with_suffix(".new")  # renamed when it is complete
            new.parent.mkdir(parents=True, exist_ok=True)
            arguments = [str(new)] if kind == "bf16" else [str(new), kind]
            if not protocol.run([*command, *arguments], log, START_TIMEOUT_S):
                raise launcher.LaunchFailed(f"{files[kind].name} could not be made, see {log}")
            new.rename(files[kind])
    return files[form]


def llama_cpp_version(directory: Path) -> str | None:
    """None when it is not set up: `benchmarks/peers/setup.sh` writes which sources the programs are built of."""
    file = directory / "version"
    return file.read_text().strip() if file.is_file() else None


def vllm_version(venv: Path) -> str | None:
    """None when there is no vLLM in the environment."""
    return version_in(str(venv / "bin" / "python"), "vllm") if (venv / "bin" / "vllm").is_file() else None


def version_in(python: str, package: str) -> str | None:
    """Versions of a package and of torch in the environment of a Python; None where it is not installed."""
    printed = subprocess.run(  # noqa: S603 - the environment that the caller named
        [python, "-c", f"import importlib.metadata as m; print(m.version('{package}'), m.version('torch'))"],
        capture_output=True,
        text=True,
        check=False,
    )
    version, _, torch = printed.stdout.strip().partition(" ")
    return f"{package} {version}, torch {torch}" if printed.returncode == 0 else None


def resident_mb(pid: int, field: str = "VmRSS") -> float:
    """Resident memory of a process in 10**6 bytes; with `VmHWM` its peak."""
    [line] = [each for each in Path(f"/proc/{pid}/status").read_text().splitlines() if each.startswith(f"{field}:")]
    return int(line.split()[1]) * 1024 / 1e6
