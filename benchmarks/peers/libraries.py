"""Runs planned requests through another library without a server, for a benchmark that calls it.

    python -m benchmarks.peers.libraries transformers MODEL_DIR --precision float32 [--device cpu]
    python -m benchmarks.peers.libraries ctranslate2 MODEL_DIR CONVERTED_DIR --precision float32
    python -m benchmarks.peers.libraries openvino MODEL_DIR CONVERTED_DIR --precision float32

Token ids in, stamps out: no HTTP and no text, which flatters a library a little. Needs the environment of peers, or for
transformers ours. The model is converted once, into CONVERTED_DIR.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.protocol import answer, answered

MAX_BATCH = 128
OPENVINO_CACHE_GIB = 3
OPENVINO_BATCHED_TOKENS = 512
OPENVINO_HINTS = {"float32": "f32", "bfloat16": "bf16"}  # with int8 and int4 weights it chooses by itself

Emit = Callable[[int], None]
"""Called with a sequence's index in the batch when it got a token."""

RunBatch = Callable[[list[list[int]], int, Emit], None]
"""Continues each prompt by a number of tokens, greedily, EOS or not."""


def command_of(
    library: str, model: Path, precision: str, *, converted: Path | None = None, python: Path | str = sys.executable
) -> list[str]:
    """The command of this program."""
    paths = [str(model)] if converted is None else [str(model), str(converted)]
    return [str(python), "-m", "benchmarks.peers.libraries", library, *paths, "--precision", precision]


def drive(run_batch: RunBatch, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Run the requests of a workload as static batches. Returns one answer for each, on one clock.

    All requests that are due form a batch, which runs to its end; meanwhile the others wait.
    """
    start = time.perf_counter_ns()
    due = [start + round(request["at"] * 1e9) for request in requests]
    stamps: list[list[int]] = [[] for _ in requests]
    done = 0
    while done < len(requests):
        time.sleep(max(0.0, (due[done] - time.perf_counter_ns()) / 1e9))
        now = time.perf_counter_ns()
        batch = [i for i in range(done, min(len(requests), done + MAX_BATCH)) if due[i] <= now]

        def emit(index: int, batch: list[int] = batch) -> None:
            stamps[batch[index]].append(time.perf_counter_ns())

        run_batch([requests[i]["token_ids"] for i in batch], requests[batch[0]]["new_tokens"], emit)
        done += len(batch)
    for request, tokens in zip(requests, stamps, strict=True):
        assert len(tokens) == request["new_tokens"], f"{len(tokens)} tokens in place of {request['new_tokens']}"
    return [answered(*each) for each in zip(due, stamps, strict=True)]


class _Stamps:
    """What `generate` hands tokens to, the prompt first."""

    def __init__(self, emit: Emit, batch: int) -> None:
        self._emit = emit
        self._batch = batch
        self._is_prompt = True

    def put(self, value: Any) -> None:  # noqa: ARG002
        if self._is_prompt:
            self._is_prompt = False
            return
        for index in range(self._batch):
            self._emit(index)

    def end(self) -> None: ...


class Transformers:
    """A model in eager torch, with transformers' DynamicCache and default attention; greedy, left-padded batches.

    `prepare`, `run` and `release` are the calls of `benchmarks/peers/engine_only.py --steps`.
    """

    def __init__(self, model: str, precision: str, device: str) -> None:
        import torch
        import transformers

        torch.set_grad_enabled(False)
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, precision))
        self._model = loaded.eval().to(device)
        self._device = device
        self._cache: Any = None
        self._tokens: Any = None
        attention = self._model.config._attn_implementation  # noqa: SLF001 - it has no public name
        details = f"{attention} attention, {torch.get_num_threads()} threads"
        self._version = f"transformers {transformers.__version__}, torch {torch.__version__}, {details}"

    def describe(self) -> str:
        return self._version

    def run_batch(self, prompts: list[list[int]], new_tokens: int, emit: Emit) -> None:
        """See RunBatch."""
        import torch

        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts], device=self._device)
        mask = torch.ones_like(ids)
        for row, prompt in enumerate(prompts):
            mask[row, : width - len(prompt)] = 0
        self._model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=False,
            pad_token_id=0,
            streamer=_Stamps(emit, len(prompts)),
        )

    def prepare(self, batch: int, context: int, num_steps: int) -> None:  # noqa: ARG002
        """Fill the cache with random numbers, which cost as much to read as true ones."""
        import torch
        from transformers import DynamicCache

        config = self._model.config
        shape = (batch, config.n_head, context, config.n_embd // config.n_head)
        generator = torch.Generator(self._device).manual_seed(0)
        kind = {"dtype": self._model.dtype, "device": self._device}
        self._cache = DynamicCache()
        for layer in range(config.n_layer):
            keys, values = (torch.randn(shape, generator=generator, **kind) for _ in range(2))
            self._cache.update(keys, values, layer)
        self._tokens = torch.zeros((batch, 1), dtype=torch.int64, device=self._device)

    def run(self, num_steps: int) -> dict[str, list[float]]:
        """Make a number of decode steps, one token for each sequence in each."""
        durations: list[float] = []
        for _ in range(num_steps):
            began = time.perf_counter()
            output = self._model(input_ids=self._tokens, past_key_values=self._cache, use_cache=True)
            self._tokens = output.logits[:, -1:].argmax(-1)
            self._tokens.tolist()  # the host needs them, as the engine does: on a GPU this waits
            durations.append(time.perf_counter() - began)
        return {"step": durations}

    def release(self) -> None:
        """Let the sequences go."""
        self._cache = self._tokens = None


class CTranslate2Static:
    """A generator on a CPU; stamps are taken in its step callback.

    A precision that the processor has no kernels for is refused: the library would silently take another one.
    """

    def __init__(self, model: str, converted: Path, precision: str) -> None:
        import ctranslate2  # type: ignore[import-not-found]  # the peers' environment has it
        from transformers import AutoTokenizer

        if precision not in ctranslate2.get_supported_compute_types("cpu"):
            raise SystemExit(f"CTranslate2 has no {precision} on this processor")
        if not (converted / "model.bin").is_file():
            ctranslate2.converters.TransformersConverter(model).convert(str(converted), force=True)
        self._tokens_of = AutoTokenizer.from_pretrained(model).convert_ids_to_tokens
        self._generator: Any = ctranslate2.Generator(
            str(converted),
            device="cpu",
            compute_type=precision,
            intra_threads=len(os.sched_getaffinity(0)),
            inter_threads=1,
        )
        self._version = f"ctranslate2 {ctranslate2.__version__}"

    def describe(self) -> str:
        return self._version

    def run_batch(self, prompts: list[list[int]], new_tokens: int, emit: Emit) -> None:
        """See RunBatch."""

        def step(result: Any) -> bool:
            emit(result.batch_id)
            return False

        self._generator.generate_batch(
            [self._tokens_of(prompt) for prompt in prompts],
            max_length=new_tokens,
            min_length=new_tokens,
            sampling_topk=1,
            beam_size=1,
            include_prompt_in_result=False,
            cache_static_prompt=False,
            callback=step,
        )


def export_openvino(model: str, exported: Path, precision: str) -> None:
    """Write the model as OpenVINO reads it, unless it is there."""
    if (exported / "openvino_model.xml").is_file():
        return
    tool = Path(sys.executable).parent / "optimum-cli"
    weights = "fp32" if precision in OPENVINO_HINTS else precision
    task = "text-generation-with-past"
    command = [str(tool), "export", "openvino", "--model", model, "--task", task, "--weight-format", weights]
    subprocess.run([*command, str(exported)], check=True, stdout=sys.stderr)  # noqa: S603 - the environment's own program


class OpenVinoBatching:
    """A pipeline with continuous batching on a CPU, step by step."""

    def __init__(self, model: str, exported: Path, precision: str) -> None:
        import openvino  # type: ignore[import-not-found]  # the peers' environment has it
        import openvino_genai  # type: ignore[import-not-found]

        export_openvino(model, exported, precision)
        self._openvino, self._genai = openvino, openvino_genai
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = OPENVINO_CACHE_GIB
        scheduler.max_num_seqs = MAX_BATCH
        scheduler.max_num_batched_tokens = OPENVINO_BATCHED_TOKENS
        scheduler.dynamic_split_fuse = True
        scheduler.enable_prefix_caching = True  # as roseinfer and vLLM have it by default
        properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": len(os.sched_getaffinity(0))}
        if hint := OPENVINO_HINTS.get(precision):
            properties |= {"INFERENCE_PRECISION_HINT": hint, "KV_CACHE_PRECISION": hint}
        self._pipeline: Any = openvino_genai.ContinuousBatchingPipeline(str(exported), scheduler, "CPU", properties)
        self._num_requests = 0

    def describe(self) -> str:
        return f"openvino-genai {self._genai.__version__}"

    def drive(self, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """One answer for each request, on one clock."""
        start = time.perf_counter_ns()
        due = [start + round(request["at"] * 1e9) for request in requests]
        stamps: list[list[int]] = [[] for _ in requests]
        live: dict[int, Any] = {}
        sent = 0
        while sent < len(requests) or live:
            while sent < len(requests) and due[sent] <= time.perf_counter_ns():
                live[sent] = self._add(requests[sent])
                sent += 1
            if not live:
                time.sleep(max(0.0, (due[sent] - time.perf_counter_ns()) / 1e9))
                continue
            self._pipeline.step()
            now = time.perf_counter_ns()
            for index, handle in list(live.items()):
                while handle.can_read():
                    num_new = sum(len(output.generated_ids) for output in handle.read().values())
                    stamps[index] += [now] * num_new
                if len(stamps[index]) >= requests[index]["new_tokens"]:
                    del live[index]
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
        return [answered(*each) for each in zip(due, stamps, strict=True)]

    def _add(self, request: dict[str, Any]) -> Any:
        import numpy as np

        config = self._genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = request["new_tokens"]
        config.ignore_eos = True
        config.do_sample = False
        self._num_requests += 1
        prompt = self._openvino.Tensor(np.array([request["token_ids"]], dtype=np.int64))
        return self._pipeline.add_request(self._num_requests, prompt, config)


def handlers_of(arguments: argparse.Namespace) -> dict[str, Callable[..., Any]]:
    """Load the library and the model. Returns what it answers, by the name of the call."""
    if arguments.library == "openvino":
        openvino = OpenVinoBatching(arguments.model, arguments.converted, arguments.precision)
        return {"describe": openvino.describe, "drive": openvino.drive}
    if arguments.library == "ctranslate2":
        static = CTranslate2Static(arguments.model, arguments.converted, arguments.precision)
        return {"describe": static.describe, "drive": partial(drive, static.run_batch)}
    eager = Transformers(arguments.model, arguments.precision, arguments.device)
    steps = {name: getattr(eager, name) for name in ("prepare", "run", "release")}
    return {"describe": eager.describe, "drive": partial(drive, eager.run_batch), **steps}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", choices=("transformers", "ctranslate2", "openvino"))
    parser.add_argument("model")
    parser.add_argument("converted", type=Path, nargs="?")
    parser.add_argument("--precision", choices=("float32", "bfloat16", "int8", "int4"), default="float32")
    parser.add_argument("--device", default="cpu", help="of transformers; default: %(default)s")
    answer(handlers_of(parser.parse_args()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
