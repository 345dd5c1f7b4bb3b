"""The sampling that a CUDA graph holds: the tokens of `sample`, for the rows that it says it can, and no host in it."""

import numpy as np
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from roseinfer.engine.core.batch import SlotBinding
from roseinfer.messages import SamplingParams
from roseinfer.model.sampling.sampler import Sampler

CPU = torch.device("cpu")


def make_sampler(params: list[SamplingParams], vocab_size: int, prompt: int = 3) -> Sampler:
    sampler = Sampler(len(params), vocab_size, CPU)
    for slot, row in enumerate(params):
        sampler.bind(SlotBinding(slot, row, prompt, eos_token_ids=(0,)))
    return sampler


def random_logits(rows: int, vocab_size: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(3)) * 2).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64], ids=str)
def test_the_tokens_of_sample(dtype: torch.dtype, slot_dtype: torch.dtype) -> None:
    params = [
        SamplingParams(temperature=0.0),
        SamplingParams(seed=1),
        SamplingParams(seed=2**63 - 1, temperature=1.7),
        SamplingParams(seed=3, temperature=0.2),
        SamplingParams(seed=4, top_k=1),
    ]
    sampler, logits = make_sampler(params, 1300), random_logits(5, 1300, dtype)
    slots, positions = np.array([4, 1, 0, 3, 2], np.int32), np.array([9, 8, 700, 6, 12], np.int32)
    assert sampler.can_capture(slots)
    expected, _ = sampler.sample(logits, slots, positions)
    captured = sampler.sample_captured(
        logits, torch.from_numpy(slots).to(slot_dtype), torch.from_numpy(positions).to(slot_dtype)
    )
    assert captured.dtype == torch.int64
    assert captured.tolist() == expected.tolist()


def test_padding_changes_no_row() -> None:
    """A graph of eight rows serves five: what the other rows hold is not looked at."""
    sampler, logits = make_sampler([SamplingParams(seed=7), SamplingParams(temperature=0.0)], 800), torch.empty(8, 800)
    logits[:5], logits[5:] = random_logits(5, 800, torch.float32), torch.nan
    slots, positions = torch.tensor([0, 1, 0, 1, 0, 1, 1, 0]), torch.arange(8)
    some = sampler.sample_captured(logits[:5], slots[:5], positions[:5])
    assert sampler.sample_captured(logits, slots, positions)[:5].tolist() == some.tolist()


def test_what_a_slot_is_bound_to_later_counts() -> None:
    """A replay reads the table where it lies: a view of it taken before sees what is bound after."""
    sampler, logits = make_sampler([SamplingParams(temperature=0.0)], 500), random_logits(1, 500, torch.float32)
    slots, positions = torch.tensor([0]), torch.tensor([4])

    def step(logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return sampler.sample_captured(logits, slots, positions)

    traced = make_fx(step)(logits, slots, positions)
    assert traced(logits, slots, positions).tolist() == logits.argmax(-1).tolist()
    drawn = set()
    for seed in range(20):
        sampler.bind(SlotBinding(0, SamplingParams(seed=seed, temperature=2.0), 3, ()))
        [token] = traced(logits, slots, positions).tolist()
        assert token == sampler.sample(logits, np.zeros(1, np.int32), np.array([4], np.int32))[0].item()
        drawn.add(token)
    assert len(drawn) > 5


def test_which_rows_it_can() -> None:
    kinds = {
        "greedy": SamplingParams(temperature=0.0),
        "whole": SamplingParams(),
        "top_p": SamplingParams(top_p=0.9),
        "top_k": SamplingParams(top_k=5),
        "min_p": SamplingParams(min_p=0.1),
        "logprobs": SamplingParams(num_logprobs=0),
        "barred": SamplingParams(min_tokens=4),
        "greedy_top_p": SamplingParams(temperature=0.0, top_p=0.5),
    }
    sampler = make_sampler(list(kinds.values()), 100, prompt=10)
    can = {name: sampler.can_capture(np.array([0, slot], np.int32)) for slot, name in enumerate(kinds)}
    assert {name for name, is_able in can.items() if is_able} == {"greedy", "whole", "greedy_top_p"}
    barred = np.array([0, list(kinds).index("barred")], np.int32)
    assert not sampler.can_capture(barred, np.array([20, 13], np.int32))
    assert sampler.can_capture(barred, np.array([10, 14], np.int32)), "from there on it may stop"


def test_min_tokens_without_anything_to_bar_is_no_obstacle() -> None:
    sampler = Sampler(1, 50, CPU)
    sampler.bind(SlotBinding(0, SamplingParams(min_tokens=8, ignore_eos=True), 3, eos_token_ids=()))
    assert sampler.can_capture(np.zeros(1, np.int32))


def test_nothing_asks_the_device_for_a_number() -> None:
    """On the meta device there are no numbers, so code that reads one fails."""
    sampler = Sampler(4, 900, torch.device("meta"))
    ids = sampler.sample_captured(
        torch.empty(4, 900, device="meta", dtype=torch.bfloat16),
        torch.empty(4, device="meta", dtype=torch.int32),
        torch.empty(4, device="meta", dtype=torch.int32),
    )
    assert (ids.shape, ids.dtype, ids.device.type) == ((4,), torch.int64, "meta")
