"""The CUDA sampler without a GPU: Triton's interpreter against torch, and the compiler against the number of builds."""

from collections.abc import Iterator, Sequence
from importlib.util import find_spec

import numpy as np
import pytest
import torch

from roseinfer.engine.core.batch import NO_TOKEN, OWN_FAULT, SlotBinding
from roseinfer.messages import SamplingParams, TokenLogprobs
from roseinfer.model.sampling.edit_table import EditTable
from roseinfer.model.sampling.logprobs import SCORE_WIDTH
from roseinfer.model.sampling.sampler import Sampler
from roseinfer.model.sampling.slot_table import SamplingTable
from roseinfer.model.sampling.torch import TorchSampling
from tests.unit.model.sampling import test_logit_edits
from tests.unit.model.triton_processes import ABSENT_GPU, Worker, compiled, compiler_process, interpreter_process

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed; the extra `test` has it")

CPU = torch.device("cpu")
OWNERS = (
    SamplingParams(temperature=0.0),
    SamplingParams(seed=5),
    SamplingParams(seed=2**63 - 1, temperature=0.3),
    SamplingParams(seed=9, temperature=3.0),
    SamplingParams(seed=10, temperature=0.7, top_k=20, top_p=0.8),  # Qwen3's
    SamplingParams(seed=11, top_p=0.9),
)
# Every limit alone and with the others, of few tokens and of many.
LIMITS = (
    SamplingParams(top_k=2),
    SamplingParams(top_k=20, top_p=0.95, temperature=0.6),
    SamplingParams(top_k=50, top_p=0.7, min_p=0.05, temperature=2.0),
    SamplingParams(top_k=150, top_p=0.9, temperature=4.0),
    SamplingParams(top_k=2**31 - 1, top_p=0.5),
    SamplingParams(top_k=2500, temperature=9.0),
    SamplingParams(top_p=0.3),
    SamplingParams(top_p=0.95, temperature=1.5),
    SamplingParams(top_p=1e-6),
    SamplingParams(min_p=0.02),
    SamplingParams(min_p=1.0),
    SamplingParams(top_p=0.8, min_p=0.001, temperature=0.3),
)


@pytest.fixture(scope="module")
def interpreter() -> Iterator[Worker]:
    yield from interpreter_process()


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    yield from compiler_process(tmp_path_factory.mktemp("triton"))


def table_of(vocab_size: int, owners: Sequence[SamplingParams] = OWNERS) -> SamplingTable:
    table = SamplingTable(len(owners), vocab_size, CPU)
    for slot, params in enumerate(owners):
        table.bind(SlotBinding(slot, params, 3, ()))
    return table


def both(
    logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, owners: Sequence[SamplingParams] = OWNERS
) -> tuple[list[int], list[int]]:
    """The tokens of the kernels, and those of torch."""
    from roseinfer.model.triton_kernels.sampling import choose

    vocab_size = logits.shape[1]
    table, edits = table_of(vocab_size, owners), EditTable(len(owners), vocab_size, 0, CPU)
    numbers = torch.zeros(len(logits), SCORE_WIDTH, dtype=torch.float64)
    expected = TorchSampling(table, CPU).tokens(logits, slots.int().numpy(), positions.int().numpy())
    computed = choose(logits, slots, positions, table, edits, numbers).tolist()
    assert numbers[:, 0].tolist() == computed
    return computed, expected.tolist()


def both_of_view(numbers: torch.Tensor, slots: torch.Tensor, num_behind: int) -> tuple[list[int], list[int]]:
    """`both` of rows that lie 64 numbers apart, of which so many follow the last row."""
    num_rows, vocab_size = numbers.shape
    stride = vocab_size + 64
    memory = torch.full(((num_rows - 1) * stride + vocab_size + num_behind,), torch.inf)
    logits = memory.as_strided(numbers.shape, (stride, 1)).copy_(numbers)
    return both(logits, slots, torch.arange(num_rows), LIMITS)


def random_logits(num_rows: int, vocab_size: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(vocab_size + seed)
    return (torch.randn(num_rows, vocab_size, generator=generator) * 3).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocab_size", [1, 300, 4096, 9001])
def test_the_tokens_of_torch(interpreter: Worker, vocab_size: int, dtype: torch.dtype) -> None:
    slots, positions = torch.arange(20) % len(OWNERS), torch.arange(20) * 7
    computed, expected = interpreter.call(both, random_logits(20, vocab_size, dtype), slots.int(), positions.int())
    assert computed == expected


@pytest.mark.parametrize("vocab_size", [300, 301, 9001])
def test_what_lies_behind_a_row_is_not_of_it(interpreter: Worker, vocab_size: int) -> None:
    """Rows of a head on a GPU have padding behind them, which kernels read, and the last of a view may have none."""
    numbers, slots = random_logits(20, vocab_size, torch.float32), torch.arange(20) % len(LIMITS)
    alone, expected = interpreter.call(both, numbers, slots, torch.arange(20), LIMITS)
    assert alone == expected
    for num_behind in (0, 64):
        assert interpreter.call(both_of_view, numbers, slots, num_behind) == (alone, alone)


def test_equal_logits_and_what_is_no_number(interpreter: Worker) -> None:
    """Of the largest the first, in its piece and among pieces; a row without numbers takes no other row down."""
    logits = torch.zeros(6, 10_000)
    logits[0, [3, 7, 5000]] = logits[1, [4999, 9000]] = 1.0
    logits[2:4] = torch.nan
    logits[4, 1:] = -torch.inf
    logits[5, :4500] = -torch.inf
    slots, positions = torch.tensor([0, 0, 0, 1, 1, 1]), torch.arange(6)
    tokens, _ = interpreter.call(both, logits, slots, positions)
    assert tokens[:2] == [3, 4999]
    assert tokens[4] == 0
    assert 4500 <= tokens[5] < 10_000
    assert tokens[2:4] == [NO_TOKEN, NO_TOKEN]


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_one_number_that_is_not_finite_takes_its_row(interpreter: Worker, poison: float) -> None:
    logits = random_logits(8, 10_000, torch.float32)
    slots, positions = torch.arange(8) % len(OWNERS), torch.arange(8)
    sound, _ = interpreter.call(both, logits, slots, positions)
    logits[1, 9_999] = logits[2, 0] = logits[7, 4096] = poison
    logits[4] = -torch.inf
    tokens, expected = interpreter.call(both, logits, slots, positions)
    assert tokens == expected == [NO_TOKEN if row in {1, 2, 4, 7} else token for row, token in enumerate(sound)]


def test_a_row_ignores_the_others(interpreter: Worker) -> None:
    logits = random_logits(8, 9001, torch.float32)
    slots, positions = torch.arange(8) % len(OWNERS), torch.arange(8) + 11
    together, _ = interpreter.call(both, logits, slots, positions)
    for row in range(8):
        some = slice(row, row + 1)
        assert interpreter.call(both, logits[some], slots[some], positions[some])[0] == together[some]


@pytest.mark.parametrize("vocab_size", [5, 300, 5000])
def test_limits_keep_and_draw_what_torch_does(interpreter: Worker, vocab_size: int) -> None:
    count = len(LIMITS) * (2 if vocab_size < 5000 else 1)
    slots, positions = torch.arange(count) % len(LIMITS), torch.arange(count) * 3
    logits = random_logits(count, vocab_size, torch.float32)
    computed, expected = interpreter.call(both, logits, slots, positions, LIMITS)
    assert computed == expected


def test_limits_among_equal_logits_and_few_that_are_finite(interpreter: Worker) -> None:
    """Equal ones side by side and pieces apart; and rows of which a grammar leaves fewer tokens than top-k."""
    logits = torch.zeros(2 * len(LIMITS), 4500)
    logits[: len(LIMITS), 700:730] = logits[: len(LIMITS), 4300:4310] = 1.0
    logits[len(LIMITS) :] = -torch.inf
    logits[len(LIMITS) :, [0, 17, 4499]] = torch.tensor([1.0, -0.0, 0.0])
    slots, positions = torch.arange(len(logits)) % len(LIMITS), torch.arange(len(logits)) * 5
    computed, expected = interpreter.call(both, logits, slots, positions, LIMITS)
    assert computed == expected
    assert set(computed[len(LIMITS) :]) == {0, 17, 4499}


def test_draws_within_limits_follow_the_distribution(interpreter: Worker) -> None:
    """Chi-square of the tokens that the kernels draw, which are torch's, against the textbook."""
    logits, count = torch.tensor([0.3, 2.0, -1.0, 1.0, 0.0, 1.0, -2.0]), 60
    slots, positions = torch.zeros(count, dtype=torch.int64), torch.arange(count)
    owner = [SamplingParams(seed=77, top_k=5, top_p=0.9)]
    computed, expected = interpreter.call(both, logits.expand(count, -1), slots, positions, owner)
    assert computed == expected
    kept = torch.tensor([1, 3, 5, 0])
    likely = logits[kept].softmax(0) * count
    found = torch.bincount(torch.tensor(computed), minlength=7)
    assert found.sum() == found[kept].sum()
    assert ((found[kept] - likely) ** 2 / likely).sum() < 11.34, "1 % of chi-squares of three degrees are above"


PROMPT = np.array([7, 8, 8], np.int32)
EDITS = (
    *OWNERS[:2],
    SamplingParams(temperature=0.0, frequency_penalty=2.0, max_tokens=20),
    SamplingParams(seed=6, repetition_penalty=1.5, logit_bias={7: 3.0}),
    SamplingParams(seed=7, presence_penalty=1.0, top_p=0.9, min_tokens=2, stop_token_ids=(9,)),
    SamplingParams(seed=8, temperature=0.7, top_k=20, top_p=0.8, repetition_penalty=1.05, max_tokens=20),
    SamplingParams(temperature=0.0, min_tokens=3, stop_token_ids=(9, 1), logit_bias={9: 100.0, 1: 50.0}),
    SamplingParams(temperature=0.0, presence_penalty=-0.5, repetition_penalty=0.7),
    SamplingParams(temperature=0.0, logit_bias=dict.fromkeys(range(1100), -50.0)),  # more than a slot has room for
)


def samplers(owners: Sequence[SamplingParams], vocab_size: int) -> tuple[Sampler, Sampler]:
    """One with the kernels, and one that is torch; each row has a slot."""
    made = Sampler(len(owners), vocab_size, CPU), Sampler(len(owners), vocab_size, CPU)
    made[0]._use_triton(max_model_len=40)
    for sampler in made:
        for slot, params in enumerate(owners):
            sampler.bind(SlotBinding(slot, params, len(PROMPT), (), PROMPT))
    return made


def edited(owners: Sequence[SamplingParams], vocab_size: int, num_steps: int) -> list[list[list[int]]]:
    """The tokens of some steps, by the kernels, by the kernels in a graph, and by torch."""
    count = len(owners)
    slots, (kernels, textbook), (captured, _) = (
        np.arange(count, dtype=np.int32),
        samplers(owners, vocab_size),
        samplers(owners, vocab_size),
    )
    told: list[list[list[int]]] = [[], [], []]
    for step in range(num_steps):
        rows = random_logits(1, vocab_size, torch.bfloat16).expand(count, -1).clone()
        positions = slots * 0 + len(PROMPT) + step
        told[0].append(kernels.sample(rows, slots, positions)[0].tolist())
        told[2].append(textbook.sample(rows, slots, positions)[0].tolist())
        if captured.can_capture(slots, positions):
            captured.refresh(slots, positions)
            tokens = captured.sample_captured(rows, torch.from_numpy(slots), torch.from_numpy(positions))
            told[1].append(tokens.tolist())
    return told


def test_rows_whose_logits_are_changed_first(interpreter: Worker) -> None:
    kernels, _, expected = interpreter.call(edited, EDITS, 5000, 5)
    assert kernels == expected
    assert len({step[2] for step in expected}) > 1, "a penalty has moved a greedy row"
    assert {step[6] for step in expected[:3]}.isdisjoint({9, 1})
    assert [step[6] for step in expected[3:]] == [9, 9], "from there on it may stop"


def test_a_graph_changes_logits_too(interpreter: Worker) -> None:
    kernels, captured, expected = interpreter.call(edited, EDITS[:-1], 300, 5)
    assert captured == kernels == expected


def drafting(owner: SamplingParams, num_steps: int) -> list[list[int]]:
    """Tokens of one slot: drawn by the kernels alone, and with some drafted tokens in between, right and wrong ones."""
    told: list[list[int]] = []
    for drafts in (False, True):
        sampler, _ = samplers([owner], 300)
        known, random = list(PROMPT), np.random.default_rng(3)
        while len(known) < num_steps:
            held = told[0][len(known) :][: random.integers(0, 3)] if drafts else []
            draft = [*held, *random.integers(0, 300, 1)] if len(held) == 2 else held
            positions = np.arange(len(known), len(known) + len(draft) + 1, dtype=np.int32)
            rows = torch.stack([random_logits(1, 300, torch.float32, seed=int(at))[0] for at in positions])
            drafted = np.array([NO_TOKEN, *draft], np.int32)
            slots = np.zeros(len(positions), np.int32)
            tokens = sampler.sample(rows, slots, positions, None, drafted if draft else None)[0].tolist()
            num_right = next((i for i, token in enumerate(draft) if token != tokens[i]), len(draft))
            known += tokens[: num_right + 1]
        told.append(known[:num_steps])
    return told


def test_tokens_that_were_drafted_count_if_they_held(interpreter: Worker) -> None:
    """Torch draws beside drafted tokens, and the kernels go on from what held."""
    alone, among_drafts = interpreter.call(drafting, SamplingParams(seed=4, frequency_penalty=0.8, max_tokens=30), 20)
    assert among_drafts == alone


def told_logprobs(vocab_size: int) -> list[list[TokenLogprobs | None]]:
    """Of each row, by the kernels, by the kernels in a graph, and by torch."""
    owners = [
        SamplingParams(temperature=0.0, num_logprobs=0),
        SamplingParams(seed=1),
        SamplingParams(seed=2, top_k=20, temperature=3.0, num_logprobs=20),
        SamplingParams(seed=3, temperature=9.0, num_logprobs=3, logit_bias={5: 2.0}, presence_penalty=1.0),
        SamplingParams(temperature=0.0, num_logprobs=2, min_tokens=2, stop_token_ids=(1, 2)),
    ]
    kernels, textbook = samplers(owners, vocab_size)
    slots = np.arange(len(owners), dtype=np.int32)
    positions, rows = slots * 0 + 3, random_logits(len(owners), vocab_size, torch.bfloat16)
    rows[4] = rows[4].round()  # many that are equal: of these torch.topk takes any
    told = []
    for sampler in (kernels, textbook):
        _, logprobs = sampler.sample(rows, slots, positions)
        assert logprobs is not None
        told.append(logprobs.to_host(len(owners)))
    captured, _ = samplers(owners, vocab_size)
    assert captured.can_capture(slots, positions)
    captured.refresh(slots, positions)
    captured.sample_captured(rows, torch.from_numpy(slots), torch.from_numpy(positions))
    logprobs = captured.captured_logprobs(slots)
    assert logprobs is not None
    return [*told, logprobs.to_host(len(owners))]


@pytest.mark.parametrize("vocab_size", [25, 9001])
def test_log_probabilities(interpreter: Worker, vocab_size: int) -> None:
    """Of the model's own logits, whatever a token was drawn by."""
    kernels, textbook, captured = interpreter.call(told_logprobs, vocab_size)
    assert captured == kernels
    rows = random_logits(len(kernels), vocab_size, torch.bfloat16).float()
    rows[4] = rows[4].round()
    ids = rows.sort(descending=True, stable=True).indices.tolist()
    for row, (computed, expected) in enumerate(zip(kernels, textbook, strict=True)):
        if computed is None or expected is None:
            assert computed is expected is None
            continue
        assert computed.rank == expected.rank
        assert computed.logprob == pytest.approx(expected.logprob, abs=1e-5)
        assert computed.top_token_ids == ids[row][: len(expected.top_token_ids)]
        assert computed.top_logprobs == pytest.approx(expected.top_logprobs, abs=1e-5)


def masked(params: SamplingParams) -> list[list[int]]:
    """Tokens under grammars and without, by the kernels, by the kernels in a graph, and by torch."""
    slots, positions = test_logit_edits.SLOTS, test_logit_edits.POSITIONS
    told: list[list[int]] = [[], [], []]
    for seed in range(3):
        kernels, captured, textbook = (test_logit_edits.sampler(None, params) for _ in range(3))
        for made in (kernels, captured):
            made._use_triton(max_model_len=40)
            test_logit_edits.bind_all(made, params)
        rows = random_logits(len(slots), test_logit_edits.VOCAB, torch.float32, seed)
        told[0] += kernels.sample(rows, slots, positions, test_logit_edits.masks())[0].tolist()
        told[2] += textbook.sample(rows, slots, positions, test_logit_edits.masks())[0].tolist()
        assert captured.can_capture(slots, positions)
        captured._stage_masks(test_logit_edits.masks())  # a graph's come with the step
        told[1] += captured.sample_captured(rows, torch.from_numpy(slots), torch.from_numpy(positions)).tolist()
    return told


@pytest.mark.parametrize("params", [SamplingParams(temperature=0.0), SamplingParams(top_k=5, top_p=0.9)], ids=str)
def test_masks_of_grammars(interpreter: Worker, params: SamplingParams) -> None:
    kernels, captured, expected = interpreter.call(masked, params)
    assert captured == kernels == expected


def test_a_bias_of_no_token_leaves_nothing_behind() -> None:
    """The next owner of a slot, or of another one, gets its own words alone."""
    table = EditTable(2, 40, 8, CPU)
    params = SamplingParams(presence_penalty=1.0, logit_bias={40: 1.0})
    with pytest.raises(IndexError, match="logit_bias"):
        table.bind(SlotBinding(0, params, 3, (), PROMPT), np.array([5]))
    table.bind(SlotBinding(1, SamplingParams(logit_bias={3: 1.0}), 3, ()), np.array([], np.int64))
    assert table.words.nonzero().tolist() == [[1, 3]]


def own_faults() -> list[list[int]]:
    owners = [
        SamplingParams(temperature=0.0, logit_bias={5: float("inf")}),
        SamplingParams(seed=1, repetition_penalty=1e-39),
        SamplingParams(temperature=0.0, logit_bias={5: 1.0}),
    ]
    told = []
    for sampler in samplers(owners, 300):
        slots, rows = np.arange(3, dtype=np.int32), random_logits(1, 300, torch.float32).abs().repeat(3, 1)
        rows[2, 17] = torch.nan
        told.append(sampler.sample(rows, slots, slots * 0 + 3)[0].tolist())
    return told


def test_what_a_row_failed_by(interpreter: Worker) -> None:
    assert interpreter.call(own_faults) == [[OWN_FAULT, OWN_FAULT, NO_TOKEN]] * 2


def compile_rows(capability: int, vocab_size: int, dtype: torch.dtype) -> dict[str, str]:
    """The kernels that batches of several sizes need, in graphs and without, as PTX by their names."""
    from roseinfer.model.sampling.triton import TritonSampling

    ABSENT_GPU.capability = capability
    compiled.clear()
    table, integers = table_of(vocab_size), torch.zeros(40, dtype=torch.int64)
    sampling = TritonSampling(table, CPU, EditTable(len(OWNERS), vocab_size, 1024, CPU))
    for num_rows in (1, 2, 15, 16, 17):
        logits, rows = torch.zeros(num_rows, vocab_size, dtype=dtype), np.zeros(num_rows, np.int32)
        sampling.tokens(logits, rows, rows)
        for start in (0, 1):  # of a buffer that is cut up: addresses are not those of whole tensors
            part = integers[start : start + num_rows]
            sampling.choose(logits, part, part)
    kernels = {id(kernel): kernel for kernel in compiled}.values()
    assert len(kernels) == len({kernel.metadata.name for kernel in kernels}), "each is built once"
    return {kernel.metadata.name: kernel.asm["ptx"] for kernel in kernels}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("capability", "vocab_size"), [(80, 50257), (90, 151_936)])
def test_kernels_are_compiled_once(compiler: Worker, capability: int, vocab_size: int, dtype: torch.dtype) -> None:
    """Whatever the number of rows: no stream waits for a compiler."""
    codes = compiler.call(compile_rows, capability, vocab_size, dtype)
    assert set(codes) == {"_join_pieces", "_measure_piece"}
    assert "0d3FEFFFFFFFFFFFFF" in codes["_join_pieces"], "the float64 below 1, which a float32 would round to 1"
