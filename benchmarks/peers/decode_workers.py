"""Answers calls of `benchmarks/decode_step.py`: decode steps of the engine at one precision, or of transformers.

    python -m benchmarks.peers.decode_workers engine MODEL_DIR --precision bfloat16 [--batch 64] [--context 512]
    python -m benchmarks.peers.decode_workers transformers MODEL_DIR [--device cpu]

Both subjects answer the same calls: `prepare` brings so many sequences to a context, `run` makes so many decode steps
and returns the seconds of each, `release` lets them go.
"""

import argparse
import gc
import random
import time
from pathlib import Path
from typing import Any

from benchmarks.engine_options import PRECISIONS, config_of, parse, precision_options
from benchmarks.protocol import answer
from benchmarks.random_gpt2 import NUM_POSITIONS

PREFILL_TOKENS = 8192  # in one step, so that all sequences begin to decode within a few steps of each other
NUM_SPARE_TOKENS = 32
Measured = dict[str, list[float]]  # "step" and, of an engine, its phases: seconds of each step


class EngineSubject:
    """`Engine.step` as the server runs it: scheduler, model, sampling, commit; greedy, EOS ignored."""

    def __init__(self, model: Path, options: dict[str, str], batch: int, context: int) -> None:
        from roseinfer.wiring import build_engine

        needed_tokens = batch * (context + 128)
        defaults = {
            "scheduler.max_num_seqs": str(batch),
            "scheduler.max_num_batched_tokens": str(PREFILL_TOKENS),
            "cache.prefix_caching": "false",  # every sequence must have keys of its own to read
            "cache.num_blocks": str(max(needed_tokens, NUM_POSITIONS) // 16 + batch),
        }
        self._engine = build_engine(config_of(model, {**defaults, **options}), lambda _: None)
        gc.freeze()  # as the engine's loop does when it begins
        self._generator = random.Random(0)
        self._names: list[str] = []

    def describe(self) -> dict[str, Any]:
        import msgspec

        return dict(msgspec.to_builtins(self._engine.info))

    def prepare(self, batch: int, context: int, num_steps: int) -> None:
        """Start `batch` sequences that have `context` tokens each, and room for `num_steps` more."""
        from roseinfer.messages import Request, SamplingParams

        # One token of the context is sampled by the prefill, and the first sequences decode while the last are read.
        params = SamplingParams(temperature=0.0, max_tokens=num_steps + NUM_SPARE_TOKENS, ignore_eos=True)
        self._names = [f"{batch} {context} {i}" for i in range(batch)]
        for name in self._names:
            prompt = self._generator.choices(range(self._engine.info.vocab_size), k=context - 1)
            self._engine.add_request(Request(request_id=name, prompt_token_ids=prompt, params=params))
        while self._engine.step().record.num_decode_seqs < batch:
            pass

    def run(self, num_steps: int) -> Measured:
        """Make so many decode steps, one token for each sequence in each."""
        durations: Measured = {"step": [], "schedule": [], "launch": [], "wait": [], "commit": []}
        for _ in range(num_steps):
            began = time.perf_counter()
            record = self._engine.step().record
            durations["step"].append(time.perf_counter() - began)
            assert record.num_decode_seqs == len(self._names), "not a decode step of all sequences"
            for name in ("schedule", "launch", "wait", "commit"):
                durations[name].append(getattr(record.phases, name) / 1e9)
        return durations

    def release(self) -> None:
        """Let the sequences go."""
        for name in self._names:
            self._engine.abort(name)
        while self._engine.has_work:
            self._engine.step()


class TransformersSubject:
    """A model of transformers in eager torch with its DynamicCache and default attention; greedy."""

    def __init__(self, model: Path, device: str, dtype: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_grad_enabled(False)
        self._device = device
        loaded: Any = AutoModelForCausalLM.from_pretrained(str(model), dtype=getattr(torch, dtype))
        self._model = loaded.eval().to(device)
        self._cache: Any = None
        self._tokens: Any = None

    def describe(self) -> dict[str, Any]:
        import torch
        import transformers

        return {
            "version": transformers.__version__,
            "dtype": str(self._model.dtype).removeprefix("torch."),
            "attention": self._model.config._attn_implementation,  # noqa: SLF001 - it has no public name
            "num_threads": torch.get_num_threads(),
        }

    def prepare(self, batch: int, context: int, num_steps: int) -> None:  # noqa: ARG002
        """The cache is filled with random numbers, which cost as much to read as true ones."""
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

    def run(self, num_steps: int) -> Measured:
        durations: list[float] = []
        for _ in range(num_steps):
            began = time.perf_counter()
            output = self._model(input_ids=self._tokens, past_key_values=self._cache, use_cache=True)
            self._tokens = output.logits[:, -1:].argmax(-1)
            self._tokens.tolist()  # the host needs them, as the engine does: on a GPU this waits
            durations.append(time.perf_counter() - began)
        return {"step": durations}

    def release(self) -> None:
        self._cache = self._tokens = None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("subject", choices=("engine", "transformers"))
    parser.add_argument("model", type=Path)
    parser.add_argument("--precision", choices=PRECISIONS, default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, default=64, metavar="N", help="engine: the largest that will be asked for")
    parser.add_argument("--context", type=int, default=512, metavar="N", help="engine: likewise")
    parser.add_argument(
        "--option", action="append", default=[], metavar="PATH=VALUE", help="engine: of the config tree"
    )
    arguments = parser.parse_args()
    subject: EngineSubject | TransformersSubject
    if arguments.subject == "engine":
        options = {
            "runner.device": arguments.device,
            **precision_options(arguments.precision),
            **parse(arguments.option),
        }
        subject = EngineSubject(arguments.model, options, arguments.batch, arguments.context)
    else:
        subject = TransformersSubject(arguments.model, arguments.device, arguments.precision)
    answer({name: getattr(subject, name) for name in ("describe", "prepare", "run", "release")})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
