"""The sampler's kernels on a GPU: the tokens of torch on a CPU from the same numbers, and what limits keep."""

import numpy as np
import pytest
import torch

from roseinfer.engine.core.batch import SlotBinding
from roseinfer.messages import SamplingParams
from roseinfer.model.sampling.sampler import Sampler
from tests.unit.model.sampling.test_sampler_triton import EDITS, LIMITS, PROMPT, random_logits

pytestmark = pytest.mark.gpu

CUDA, CPU = torch.device("cuda"), torch.device("cpu")


def sampler_on(device: torch.device, owners: list[SamplingParams], vocab_size: int) -> Sampler:
    sampler = Sampler(len(owners), vocab_size, device, max_model_len=64)
    for slot, params in enumerate(owners):
        sampler.bind(SlotBinding(slot, params, len(PROMPT), (), PROMPT))
    return sampler


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocab_size", [300, 50_257, 151_936])
def test_the_tokens_of_a_cpu(vocab_size: int, dtype: torch.dtype) -> None:
    """Of a hundred draws one may fall on a neighbour, where an exponential is rounded another way."""
    owners = [*LIMITS, *(params for params in EDITS if max(params.logit_bias, default=0) < vocab_size)]
    slots = np.arange(len(owners), dtype=np.int32)
    on_gpu, on_cpu = sampler_on(CUDA, owners, vocab_size), sampler_on(CPU, owners, vocab_size)
    pairs: list[tuple[int, int]] = []
    for step in range(12):
        rows = random_logits(len(owners), vocab_size, dtype, seed=step)
        positions = slots * 0 + len(PROMPT) + step
        drawn = on_gpu.sample(rows.to(CUDA), slots, positions)[0].tolist()
        pairs += zip(drawn, on_cpu.sample(rows, slots, positions)[0].tolist(), strict=True)
    assert sum(computed != expected for computed, expected in pairs) <= len(pairs) / 100


def test_a_chi_square_of_draws() -> None:
    logits, count = torch.tensor([0.3, 2.0, -1.0, 1.0, 0.0, 1.0, -2.0]), 20_000
    sampler = sampler_on(CUDA, [SamplingParams(seed=77, top_k=5, top_p=0.9)], len(logits))
    rows, slots = logits.to(CUDA).expand(50, -1), np.zeros(50, np.int32)
    drawn = [
        sampler.sample(rows, slots, np.arange(start, start + 50, dtype=np.int32))[0] for start in range(0, count, 50)
    ]
    found = torch.cat(drawn).bincount(minlength=7).cpu()
    kept = torch.tensor([1, 3, 5, 0])
    likely = logits[kept].softmax(0) * count
    assert found.sum() == found[kept].sum()
    assert ((found[kept] - likely) ** 2 / likely).sum() < 11.34, "1 % of chi-squares of three degrees are above"
