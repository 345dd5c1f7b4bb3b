"""Measures what drawing the tokens of a step costs, by what its rows ask for.

    python -m benchmarks.costs.sampling [--device cuda] [--rows 64] [--vocab-size 151936]

On a CPU with the compiled kernels, on a GPU with those of Triton. Kinds are measured in turn; the figures are medians
over the turns, and their range.
"""

import argparse
import statistics
import time

import numpy as np
import torch

from roseinfer.config.options import RunnerConfig
from roseinfer.engine.core.batch import SlotBinding
from roseinfer.messages import SamplingParams
from roseinfer.model.kernels.library import load_kernels
from roseinfer.model.sampling.sampler import Sampler

KINDS = {
    "greedy": SamplingParams(temperature=0.0),
    "drawn": SamplingParams(),
    "of Qwen3": SamplingParams(temperature=0.6, top_k=20, top_p=0.95),
    "top-p": SamplingParams(top_p=0.9),
    "top-p, flat": SamplingParams(top_p=0.99, temperature=3.0),
    "min-p": SamplingParams(min_p=0.05),
    "penalties": SamplingParams(repetition_penalty=1.05, presence_penalty=0.5, max_tokens=4096),
    "log-probabilities": SamplingParams(temperature=0.0, num_logprobs=5),
}
TURNS, STEPS = 9, 20


def new_sampler(device: torch.device, params: SamplingParams, num_rows: int, vocab_size: int) -> Sampler:
    if device.type == "cpu":
        sampler = Sampler(num_rows, vocab_size, device, load_kernels(RunnerConfig()))
    else:
        sampler = Sampler(num_rows, vocab_size, device, max_model_len=8192)
    prompt = np.arange(1000, dtype=np.int32) % vocab_size
    for slot in range(num_rows):
        sampler.bind(SlotBinding(slot, params, len(prompt), (), prompt))
    return sampler


def step_us(sampler: Sampler, logits: torch.Tensor, turn: int) -> float:
    slots = np.arange(len(logits), dtype=np.int32)
    began = time.perf_counter()
    for step in range(STEPS):
        tokens, _ = sampler.sample(logits, slots, slots * 0 + 1000 + turn * STEPS + step)
    tokens.cpu()
    return (time.perf_counter() - began) / STEPS * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--vocab-size", type=int, default=50_257)
    parser.add_argument("--threads", type=int, default=0, help="of a CPU; torch's choice by default")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(arguments.rows, arguments.vocab_size, generator=generator) * 3).to(device)
    samplers = {kind: new_sampler(device, params, *logits.shape) for kind, params in KINDS.items()}
    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for turn in range(TURNS + 1):
        for kind, sampler in samplers.items():
            found[kind].append(step_us(sampler, logits, turn))
    for kind, times in found.items():
        best = sorted(times[1:])  # the first turn compiles
        print(f"{kind:18} {statistics.median(best):9.1f} us a step ({best[0]:.1f} to {best[-1]:.1f})")


if __name__ == "__main__":
    main()
