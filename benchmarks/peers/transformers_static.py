"""Runs planned requests through transformers (`generate` over left-padded static batches), or its decode steps.

    python -m benchmarks.peers.transformers_static MODEL_DIR --precision float32 [--device cpu]

The calls `prepare`, `run` and `release` are those of `benchmarks/peers/engine_only.py --steps`.
"""

import argparse
import time
from typing import Any

from benchmarks.peers.static_batches import Emit, drive
from benchmarks.protocol import answer


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
    """A model in eager torch, with transformers' DynamicCache and default attention; greedy."""

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
        """Make so many decode steps, one token for each sequence in each."""
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    peer = Transformers(arguments.model, arguments.precision, arguments.device)
    steps = {name: getattr(peer, name) for name in ("prepare", "run", "release")}
    answer({"describe": peer.describe, "drive": lambda requests: drive(peer.run_batch, requests), **steps})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
