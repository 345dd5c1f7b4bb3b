"""Runs planned requests through transformers: `generate` over left-padded static batches, stamps from a streamer.

python -m benchmarks.peers.transformers_static MODEL_DIR --precision float32
"""

import argparse
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


class TransformersStatic:
    """A model that is ready."""

    def __init__(self, model: str, precision: str, device: str) -> None:
        import torch
        import transformers

        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, precision))
        self._model = loaded.eval().to(device)
        self._device = device
        self._version = f"transformers {transformers.__version__}, torch {torch.__version__}"

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
        with torch.inference_mode():
            self._model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=new_tokens,
                min_new_tokens=new_tokens,
                do_sample=False,
                pad_token_id=0,
                streamer=_Stamps(emit, len(prompts)),
            )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    peer = TransformersStatic(arguments.model, arguments.precision, arguments.device)
    answer({"describe": peer.describe, "drive": lambda requests: drive(peer.run_batch, requests)})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
