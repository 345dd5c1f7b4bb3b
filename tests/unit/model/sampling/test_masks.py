"""Rows with masks draw what their masks allow; the others, and all log-probabilities, are as without them."""

from concurrent.futures import Future

import numpy as np
import pytest
import torch

from roseinfer.engine.core.batch import SlotBinding
from roseinfer.engine.core.constraint import Constraint, MaskArray, Matcher, TokenMasks
from roseinfer.messages import Grammar, SamplingParams
from roseinfer.model.kernels.library import Kernels
from roseinfer.model.sampling.sampler import Sampler
from tests.unit.model.sampling.test_logit_edits import VOCAB, kernels, random_logits  # noqa: F401 - a fixture

CPU = torch.device("cpu")
GRAMMAR = Grammar("lark", "")
SLOTS = np.arange(6, dtype=np.int32)
POSITIONS = np.arange(10, 16, dtype=np.int32)
MASKED = {1: {7}, 3: {0, 31, 32, 299}, 4: set(range(100, 200))}


class Fixed:
    """A matcher that never changes its mind."""

    is_over = has_failed = False
    error = ""

    def __init__(self, allowed: set[int]) -> None:
        self._allowed = allowed

    def fill(self, allowed: MaskArray) -> None:
        allowed[:] = 0
        for token_id in self._allowed:
            allowed[token_id // 32] |= np.uint32(1 << (token_id % 32))

    def accept(self, token_id: int) -> None: ...


def masks() -> TokenMasks:
    made = {}
    for slot, allowed in MASKED.items():
        pending: Future[Matcher] = Future()
        pending.set_result(Fixed(allowed))
        made[slot] = Constraint(pending, SamplingParams(), (), VOCAB)
    return TokenMasks(made)


def sampler(kernels: Kernels | None, params: SamplingParams) -> Sampler:  # noqa: F811
    made = Sampler(len(SLOTS), VOCAB, CPU, kernels)
    for slot in SLOTS.tolist():
        grammar = GRAMMAR if slot in MASKED else None
        of_slot = SamplingParams(
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            presence_penalty=params.presence_penalty,
            seed=slot,
            num_logprobs=2,
            grammar=grammar,
        )
        made.bind(SlotBinding(slot, of_slot, 5, (), np.arange(5, dtype=np.int32)))
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0),
        SamplingParams(),
        SamplingParams(top_p=0.5),
        SamplingParams(top_k=3),
        SamplingParams(presence_penalty=1.0),
    ],
)
def test_masked_rows_draw_what_is_allowed_and_the_others_what_they_would(
    kernels: Kernels | None,  # noqa: F811
    params: SamplingParams,
    dtype: torch.dtype,
) -> None:
    seen: dict[int, set[int]] = {slot: set() for slot in MASKED}
    for seed in range(20):
        logits = random_logits(len(SLOTS), seed).to(dtype)
        before = logits.clone()
        tokens, logprobs = sampler(kernels, params).sample(logits, SLOTS, POSITIONS, masks())
        assert torch.equal(logits, before)
        assert logprobs is not None
        told = logprobs.to_host(len(SLOTS))
        free = np.array([slot for slot in SLOTS if slot not in MASKED])
        alone, _ = sampler(kernels, params).sample(logits[free].contiguous(), SLOTS[free], POSITIONS[free])
        assert torch.equal(tokens[free], alone)
        for slot, allowed in MASKED.items():
            token = int(tokens[slot])
            assert token in allowed
            seen[slot].add(token)
            if params.temperature == 0.0:
                assert token == max(sorted(allowed), key=lambda token_id: float(logits[slot, token_id]))
            entry = told[slot]
            assert entry is not None
            raw = torch.log_softmax(logits[slot].double(), -1)
            assert entry.logprob == pytest.approx(float(raw[token]), abs=1e-4)
            assert entry.top_token_ids[0] == int(logits[slot].float().argmax())
    assert seen[1] == {7}
    assert len(seen[4]) > 5
    assert len(seen[3]) > 1


def test_a_step_with_a_mask_is_not_for_a_graph() -> None:
    made = sampler(None, SamplingParams())
    for slot in (0, 1):  # without log-probabilities, which are not for one either
        made.bind(SlotBinding(slot, SamplingParams(grammar=GRAMMAR if slot else None), 5, ()))
    assert made.can_capture(SLOTS[:1])
    assert not made.can_capture(SLOTS[:2])
