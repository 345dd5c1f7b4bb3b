"""Runs planned requests through OpenVINO GenAI's continuous batching on a CPU, step by step.

    python -m benchmarks.peers.openvino_batching MODEL_DIR EXPORTED_DIR --precision float32

Needs the environment of peers. The model is exported once by optimum-intel into EXPORTED_DIR. float32 computes and
caches in float32, bfloat16 in bfloat16; int8 has int8 weights (nncf, with float32 activations). Token ids in, stamps
out: no HTTP and no text.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.protocol import answer

CACHE_GIB = 3
MAX_SEQUENCES = 128
MAX_BATCHED_TOKENS = 512
HINTS = {"float32": "f32", "bfloat16": "bf16", "int8": "f32"}


def export(model: str, exported: Path, precision: str) -> None:
    """Write the model as OpenVINO reads it, unless it is there."""
    if (exported / "openvino_model.xml").is_file():
        return
    tool = Path(sys.executable).parent / "optimum-cli"
    weights = "int8" if precision == "int8" else "fp32"
    task = "text-generation-with-past"
    command = [str(tool), "export", "openvino", "--model", model, "--task", task, "--weight-format", weights]
    subprocess.run([*command, str(exported)], check=True, stdout=sys.stderr)  # noqa: S603 - the environment's own program


class OpenVinoBatching:
    """A pipeline that is ready."""

    def __init__(self, exported: Path, precision: str) -> None:
        import openvino  # type: ignore[import-not-found]  # the peers' environment has it
        import openvino_genai  # type: ignore[import-not-found]

        self._openvino, self._genai = openvino, openvino_genai
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = CACHE_GIB
        scheduler.max_num_seqs = MAX_SEQUENCES
        scheduler.max_num_batched_tokens = MAX_BATCHED_TOKENS
        scheduler.dynamic_split_fuse = True
        scheduler.enable_prefix_caching = True  # as roseinfer and vLLM have it by default
        properties = {
            "INFERENCE_PRECISION_HINT": HINTS[precision],
            "KV_CACHE_PRECISION": HINTS[precision],
            "INFERENCE_NUM_THREADS": len(os.sched_getaffinity(0)),
        }
        self._pipeline: Any = openvino_genai.ContinuousBatchingPipeline(str(exported), scheduler, "CPU", properties)
        self._num_requests = 0

    def describe(self) -> str:
        return f"openvino-genai {self._genai.__version__}"

    def drive(self, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """One answer for each request, in seconds on one clock."""
        start = time.perf_counter()
        due = [start + request["at"] for request in requests]
        pieces: list[list[float]] = [[] for _ in requests]
        live: dict[int, Any] = {}
        sent = 0
        while sent < len(requests) or live:
            while sent < len(requests) and due[sent] <= time.perf_counter():
                live[sent] = self._add(requests[sent])
                sent += 1
            if not live:
                time.sleep(max(0.0, due[sent] - time.perf_counter()))
                continue
            self._pipeline.step()
            now = time.perf_counter()
            for index, handle in list(live.items()):
                while handle.can_read():
                    num_new = sum(len(output.generated_ids) for output in handle.read().values())
                    pieces[index] += [now] * num_new
                if len(pieces[index]) >= requests[index]["new_tokens"]:
                    del live[index]
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
        return [
            {"submitted": moment, "pieces": stamps, "num_tokens": len(stamps)}
            for moment, stamps in zip(due, pieces, strict=True)
        ]

    def _add(self, request: dict[str, Any]) -> Any:
        import numpy as np

        config = self._genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = request["new_tokens"]
        config.ignore_eos = True
        config.do_sample = False
        self._num_requests += 1
        prompt = self._openvino.Tensor(np.array([request["token_ids"]], dtype=np.int64))
        return self._pipeline.add_request(self._num_requests, prompt, config)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("exported", type=Path)
    parser.add_argument("--precision", choices=tuple(HINTS), default="float32")
    arguments = parser.parse_args()
    export(arguments.model, arguments.exported, arguments.precision)
    peer = OpenVinoBatching(arguments.exported, arguments.precision)
    answer({"describe": peer.describe, "drive": peer.drive})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
