"""Changed logits: those of transformers' processors, with counts that know the token in flight; other rows apart."""

import itertools
from concurrent.futures import Future

import msgspec
import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from roseinfer.engine.core.batch import NO_TOKEN, OWN_FAULT, Int32Array, SlotBinding
from roseinfer.engine.core.constraint import Constraint, MaskArray, Matcher, TokenMasks
from roseinfer.messages import Grammar, SamplingParams
from roseinfer.model.kernels.library import Kernels
from roseinfer.model.sampling.edit_table import EditTable
from roseinfer.model.sampling.logit_edits import GROUP, Penalties
from roseinfer.model.sampling.sampler import Sampler
from tests.conftest import BuiltKernels
from tests.unit.model.setups import LEVELS_WITHOUT_PRODUCTS, kernels_at

CPU = torch.device("cpu")
VOCAB = 300
PROMPT = [5, 9, 9, 17, 200, 9]


@pytest.fixture(params=["torch", *LEVELS_WITHOUT_PRODUCTS])
def kernels(request: pytest.FixtureRequest, built_kernels: BuiltKernels) -> Kernels | None:
    return None if request.param == "torch" else kernels_at(request.param, built_kernels)


def random_logits(rows: int, seed: int = 5) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def binding(slot: int, params: SamplingParams, generated: list[int], prompt: list[int] = PROMPT) -> SlotBinding:
    known = np.array(prompt + generated, np.int32) if params.has_penalties else None
    return SlotBinding(slot, params, len(prompt), (), known)


def edited(logits: torch.Tensor, params: SamplingParams, generated: list[int]) -> torch.Tensor:
    """What becomes of one row of logits."""
    edit, changed = Penalties(CPU), logits.clone()
    assert edit.bind(binding(0, params, generated))
    slots, positions = np.zeros(1, np.int32), np.array([len(PROMPT) + len(generated)], np.int32)
    edit.apply(changed.unsqueeze(0), slots, positions)
    return changed


def textbook(logits: torch.Tensor, params: SamplingParams, generated: list[int]) -> torch.Tensor:
    """The processors of transformers where it has them, OpenAI's formula for the other two."""
    known = torch.tensor([PROMPT + generated])
    processors = LogitsProcessorList()
    if params.logit_bias:
        processors.append(SequenceBiasLogitsProcessor([[[token], bias] for token, bias in params.logit_bias.items()]))
    if params.repetition_penalty != 1.0:
        processors.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    scores: torch.Tensor = processors(known, logits.unsqueeze(0).clone())[0]
    for token in range(VOCAB):
        count = generated.count(token)
        scores[token] -= count * params.frequency_penalty + (count > 0) * params.presence_penalty
    return scores


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(repetition_penalty=1.3),
        SamplingParams(repetition_penalty=0.6),
        SamplingParams(presence_penalty=1.1),
        SamplingParams(frequency_penalty=-0.7),
        SamplingParams(presence_penalty=-2.0, frequency_penalty=2.0),
        SamplingParams(logit_bias={17: 100.0, 200: -100.0, 4: 0.5}),
        SamplingParams(
            repetition_penalty=1.9, presence_penalty=0.3, frequency_penalty=0.4, logit_bias={9: -1.5, 33: 2.0}
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("generated", [[], [17], [33, 33, 9, 33, 4]], ids=str)
def test_the_logits_of_the_reference(params: SamplingParams, generated: list[int]) -> None:
    logits = random_logits(1)[0]
    logits[[5, 9, 17, 200]] = torch.tensor([0.5, -0.5, 1.5, 0.0])  # all around what a penalty distinguishes
    torch.testing.assert_close(
        edited(logits, params, generated), textbook(logits, params, generated), atol=2e-6, rtol=1e-6
    )


@pytest.mark.parametrize("min_p", [0.02, 0.3])
def test_min_p_keeps_what_the_reference_keeps(kernels: Kernels | None, min_p: float) -> None:
    logits = random_logits(1)
    expected = MinPLogitsWarper(min_p)(torch.tensor([PROMPT]), logits.clone())[0].isfinite()
    sampler = Sampler(1, VOCAB, CPU, kernels)
    sampler.bind(binding(0, SamplingParams(min_p=min_p), []))
    tokens, _ = sampler.sample(logits.expand(3000, -1), np.zeros(3000, np.int32), np.arange(3000, dtype=np.int32))
    likely = logits[0].softmax(-1) > 0.004
    assert not (set(tokens.tolist()) - set(expected.nonzero().flatten().tolist()))
    assert set((expected & likely).nonzero().flatten().tolist()) <= set(tokens.tolist())


def generate(
    kernels: Kernels | None, params: list[SamplingParams], num_tokens: int, restart: int = 0
) -> list[list[int]]:
    """Tokens of slots that sample together from logits of their positions; at `restart` each gets a new slot."""
    num_slots, known = 2 * len(params), [list(PROMPT) for _ in params]
    sampler = Sampler(num_slots, VOCAB, CPU, kernels)
    slots: Int32Array = np.arange(len(params), dtype=np.int32)
    for step in range(num_tokens):
        if step in {0, restart}:
            slots = slots if step == 0 else slots[::-1] + len(params)
            for slot, asked, tokens in zip(slots.tolist(), params, known, strict=True):
                sampler.bind(binding(slot, asked, tokens[len(PROMPT) :]))
        logits = random_logits(1, step).expand(len(params), -1).clone()
        before = logits.clone()
        positions = np.array([len(tokens) for tokens in known], np.int32)
        drawn, _ = sampler.sample(logits, slots, positions)
        assert torch.equal(logits, before), "the model's own logits are left as they are"
        for tokens, token in zip(known, drawn.tolist(), strict=True):
            tokens.append(token)
    return [tokens[len(PROMPT) :] for tokens in known]


KINDS = [
    SamplingParams(temperature=0.0, max_tokens=20, frequency_penalty=2.0),
    SamplingParams(seed=1, max_tokens=20),
    SamplingParams(seed=2, max_tokens=20, presence_penalty=1.5, top_p=0.9),
    SamplingParams(temperature=0.0, max_tokens=20, logit_bias={7: 6.0, 8: 6.0}),
    SamplingParams(seed=3, max_tokens=20, repetition_penalty=1.4, logit_bias={9: 9.0}, top_k=20),
    SamplingParams(seed=4, max_tokens=20, min_tokens=9, stop_token_ids=(3,), repetition_penalty=0.8),
]


def test_a_row_ignores_the_others_and_comes_back_in_another_slot(kernels: Kernels | None) -> None:
    alone = [generate(kernels, [kind], 20)[0] for kind in KINDS]
    assert generate(kernels, KINDS, 20) == alone
    assert generate(kernels, KINDS[::-1], 20)[::-1] == alone
    assert generate(kernels, KINDS, 20, restart=7) == alone
    assert generate(kernels, KINDS * (GROUP // 4), 20) == alone * (GROUP // 4)


def test_a_token_counts_from_the_step_after_it(kernels: Kernels | None) -> None:
    """Nothing but the sampler itself has told it what it drew: so a step may be in flight."""
    sampler = Sampler(1, VOCAB, CPU, kernels)
    sampler.bind(binding(0, SamplingParams(temperature=0.0, frequency_penalty=2.0, max_tokens=9), []))
    logits = torch.zeros(1, VOCAB)
    logits[0, 40], logits[0, 41] = 5.0, 2.5
    drawn = [
        int(sampler.sample(logits, np.zeros(1, np.int32), np.array([len(PROMPT) + step], np.int32))[0])
        for step in range(6)
    ]
    assert drawn == [40, 40, 41, 40, 41, 0]


def test_small_changes_count_in_bfloat16_too(kernels: Kernels | None) -> None:
    """Logits near 100 lie half a point apart there; a bias of a tenth still decides."""
    logits = torch.full((1, VOCAB), -100.0).bfloat16()
    sampler = Sampler(1, VOCAB, CPU, kernels)
    sampler.bind(binding(0, SamplingParams(temperature=0.0, logit_bias={77: 0.1}), []))
    assert sampler.sample(logits, np.zeros(1, np.int32), np.array([6], np.int32))[0].tolist() == [77]


def test_log_probabilities_are_the_models_own(kernels: Kernels | None) -> None:
    logits = random_logits(1)
    sampler = Sampler(1, VOCAB, CPU, kernels)
    sampler.bind(binding(0, SamplingParams(temperature=0.0, logit_bias={77: 100.0}, num_logprobs=1), []))
    tokens, logprobs = sampler.sample(logits, np.zeros(1, np.int32), np.array([6], np.int32))
    assert logprobs is not None
    [entry] = logprobs.to_host(1)
    assert entry is not None
    expected = logits.double().log_softmax(-1)[0]
    assert tokens.tolist() == [77]
    assert entry.logprob == pytest.approx(float(expected[77]), abs=1e-6)
    assert entry.top_token_ids == [int(expected.argmax())]


def test_no_graph_where_logits_are_changed() -> None:
    sampler = Sampler(2, VOCAB, CPU)
    slots = np.zeros(1, np.int32)
    sampler.bind(binding(0, SamplingParams(logit_bias={3: 1.0}), []))
    assert not sampler.can_capture(slots)
    assert sampler.can_capture(slots + 1)
    sampler.bind(binding(0, msgspec.structs.replace(KINDS[1]), []))
    assert sampler.can_capture(slots)


def test_parameters_that_cannot_be_used_take_nothing_from_another_slot() -> None:
    """As the runner does it: a slot whose owner asked for a bias gets one whose bias is none, and then a plain one."""
    sampler = Sampler(2, VOCAB, CPU)
    sampler.bind(binding(0, SamplingParams(temperature=0.0, logit_bias={3: 50.0}), []))
    with pytest.raises(ValueError, match=r"str|much"):
        sampler.bind(binding(0, SamplingParams(temperature=0.0, logit_bias={5: "much"}), []))  # type: ignore[dict-item]
    sampler.bind(binding(0, SamplingParams(temperature=0.0), []))
    sampler.bind(binding(1, SamplingParams(temperature=0.0, logit_bias={7: 50.0}), []))
    logits, slots, positions = random_logits(2), np.arange(2, dtype=np.int32), np.full(2, len(PROMPT), np.int32)
    assert sampler.sample(logits, slots, positions)[0].tolist() == [int(logits[0].argmax()), 7]


def draw_once(kernels: Kernels | None, logits: torch.Tensor, params: list[SamplingParams]) -> list[int]:
    """The tokens after the prompt, one row for each of the parameters."""
    sampler = Sampler(len(params), VOCAB, CPU, kernels)
    slots = np.arange(len(params), dtype=np.int32)
    for slot, asked in enumerate(params):
        sampler.bind(binding(slot, asked, []))
    tokens, _ = sampler.sample(logits, slots, np.full(len(params), len(PROMPT), np.int32))
    drawn: list[int] = tokens.tolist()
    return drawn


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_a_row_without_a_finite_logit_failed_by(kernels: Kernels | None, dtype: torch.dtype) -> None:
    """By its own fault where the model's logits are finite; whatever it asks for where they are not."""
    edits = [
        SamplingParams(seed=1, repetition_penalty=1e-39),  # the front doors refuse it
        SamplingParams(temperature=0.0, logit_bias={5: float("inf")}),
        SamplingParams(temperature=0.0, logit_bias={5: 1.0}),
        SamplingParams(temperature=0.0, repetition_penalty=1.3),
    ]
    logits = random_logits(1).abs().repeat(2 * len(edits), 1).to(dtype)
    logits[2:8, 17] = torch.nan
    logits[4:6, 17] = torch.inf
    tokens = draw_once(kernels, logits, [*edits, *[SamplingParams(seed=2)] * 4])
    assert tokens == [OWN_FAULT] * 2 + [NO_TOKEN] * 6


FIRST, LEAST = 1.1754944e-38, 5e-324  # normal float32, denormal float64
EXTREMES: dict[str, list[object]] = {
    "temperature": [0.0, LEAST, 1e-39, FIRST, 0.999999e-5, 1e-5, 2.0],
    "top_p": [LEAST, 1e-39, FIRST, 1.0 - 2.0**-53, 1.0],
    "top_k": [0, 1, VOCAB, 2**31 - 1],
    "min_p": [0.0, LEAST, 1e-39, FIRST, 1.0],
    "presence_penalty": [-2.0, -LEAST, 1e-39, 2.0],
    "frequency_penalty": [-2.0, -LEAST, 1e-39, 2.0],
    "repetition_penalty": [1e-5, 1.0 - 2.0**-53, 2.0],
    "logit_bias": [{5: -100.0}, {9: 100.0}, {5: LEAST}, {9: -1e-39}, dict.fromkeys(range(VOCAB), -100.0)],
}


@pytest.mark.parametrize("scale", [0.0, 1e-39, 1.0, 1e4], ids=str)
def test_no_values_that_a_request_may_have_leave_a_row_without_a_token(kernels: Kernels | None, scale: float) -> None:
    """Every parameter at its bounds and at denormal numbers, alone and in pairs with every other."""
    single = [(name, value) for name, values in EXTREMES.items() for value in values]
    asked = [dict(pair) for pair in itertools.combinations_with_replacement(single, 2)]
    params = [msgspec.convert({"seed": seed, **fields}, SamplingParams) for seed, fields in enumerate(asked)]
    logits = random_logits(len(params), seed=8) * scale
    tokens = draw_once(kernels, logits, params)
    assert [fields for fields, token in zip(asked, tokens, strict=True) if not 0 <= token < VOCAB] == []


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

    def copy(self) -> "Fixed":
        return self

    def forced(self) -> list[int]:
        return []


def masks() -> TokenMasks:
    return TokenMasks({(slot, int(POSITIONS[slot])): (masked(allowed), 0) for slot, allowed in MASKED.items()})


def masked(allowed: set[int]) -> Constraint:
    pending: Future[Matcher] = Future()
    pending.set_result(Fixed(allowed))
    return Constraint(pending, SamplingParams(), (), VOCAB)


def sampler(kernels: Kernels | None, params: SamplingParams) -> Sampler:
    made = Sampler(len(SLOTS), VOCAB, CPU, kernels)
    bind_all(made, params)
    return made


def bind_all(made: Sampler, params: SamplingParams) -> None:
    """Give each slot an owner, those in `MASKED` one with a grammar."""
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


@pytest.mark.parametrize("held", [0, 1, 40])
def test_rows_behind_drafted_tokens_are_edited_as_they_would_be_alone(kernels: Kernels | None, held: int) -> None:
    """As long as the drafts hold: what the first `held` of them are. More rows than are edited at a time."""
    num_rows = GROUP + 9
    params = SamplingParams(
        seed=1, frequency_penalty=0.3, repetition_penalty=1.2, min_tokens=20, stop_token_ids=(9,), max_tokens=64
    )
    logits = random_logits(1).repeat(num_rows + 1, 1)
    positions = np.arange(len(PROMPT), len(PROMPT) + num_rows + 1, dtype=np.int32)
    slots = np.zeros(num_rows + 1, np.int32)
    single, drafting = Sampler(1, VOCAB, CPU, kernels), Sampler(1, VOCAB, CPU, kernels)
    for made in (single, drafting):
        made.bind(binding(0, params, []))
    alone = [
        int(single.sample(logits[row : row + 1].clone(), slots[:1], positions[row : row + 1])[0])
        for row in range(num_rows + 1)
    ]
    drafted = np.array([NO_TOKEN, *alone[:held], *(token + 1 for token in alone[held : num_rows - 1])], np.int32)
    tokens, _ = drafting.sample(logits[:-1].clone(), slots[:-1], positions[:-1], None, drafted)
    assert tokens[: held + 1].tolist() == alone[: held + 1]
    last = slice(held + 1, held + 2)  # the next step begins behind the last token that holds
    assert int(drafting.sample(logits[last].clone(), slots[last], positions[last])[0]) == alone[held + 1]


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
    kernels: Kernels | None,
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


def test_each_of_more_masked_rows_than_are_changed_at_a_time_has_its_own_mask(kernels: Kernels | None) -> None:
    num_rows = GROUP + 3
    made = Sampler(num_rows, VOCAB, CPU, kernels)
    for slot in range(num_rows):
        made.bind(SlotBinding(slot, SamplingParams(grammar=GRAMMAR), 5, ()))
    all_masks = TokenMasks({(slot, 9): (masked({7 * slot}), 0) for slot in range(num_rows)})
    slots, positions = np.arange(num_rows, dtype=np.int32), np.full(num_rows, 9, np.int32)
    tokens, _ = made.sample(random_logits(num_rows), slots, positions, all_masks)
    assert tokens.tolist() == [7 * slot for slot in range(num_rows)]


def test_a_step_with_a_mask_is_not_for_a_graph() -> None:
    made = sampler(None, SamplingParams())
    for slot in (0, 1):  # without log-probabilities, which are not for one either
        made.bind(SlotBinding(slot, SamplingParams(grammar=GRAMMAR if slot else None), 5, ()))
    assert made.can_capture(SLOTS[:1])
    assert not made.can_capture(SLOTS[:2])


@pytest.mark.parametrize("num_biases", [1, 1100])
def test_a_table_refuses_biases_outside_of_the_vocabulary(num_biases: int) -> None:
    """Also those that it leaves to torch, whose kernel would stop the device for everybody."""
    table = EditTable(1, 1100, 8, torch.device("cpu"))
    params = SamplingParams(logit_bias=dict.fromkeys(range(1, num_biases + 1), 1.0) | {1100: 1.0})
    with pytest.raises(IndexError, match="logit_bias"):
        table.bind(binding(0, params, []), np.zeros(0, np.int64))
