"""The sampler: each parameter keeps what it says, draws follow the distribution, and rows ignore each other.

Every test runs over each backend that this machine has: plain torch, and the kernels of each level.
"""

import threading
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from roseinfer.engine.core.batch import NO_TOKEN, SlotBinding
from roseinfer.messages import SamplingParams, TokenLogprobs
from roseinfer.model.kernels.library import Kernels
from roseinfer.model.sampling.sampler import Sampler
from roseinfer.model.sampling.slot_table import MAX_RANKED, SamplingTable
from tests.conftest import BuiltKernels
from tests.unit.model.setups import LEVELS_WITHOUT_PRODUCTS, kernels_at

CPU = torch.device("cpu")


@pytest.fixture(params=["torch", *LEVELS_WITHOUT_PRODUCTS])
def kernels(request: pytest.FixtureRequest, built_kernels: BuiltKernels) -> Kernels | None:
    return None if request.param == "torch" else kernels_at(request.param, built_kernels)


Draw = Callable[..., tuple[list[int], list[TokenLogprobs | None]]]


@pytest.fixture
def draw(kernels: Kernels | None) -> Draw:
    """One step of a fresh sampler: row i has params[i] and samples for positions[i]."""

    def sample(
        logits: torch.Tensor, params: list[SamplingParams], positions: list[int] | None = None, prompt: int = 0
    ) -> tuple[list[int], list[TokenLogprobs | None]]:
        sampler = Sampler(len(params), logits.shape[1], CPU, kernels)
        for slot, row in enumerate(params):
            sampler.bind(SlotBinding(slot, row, prompt, eos_token_ids=(0,)))
        slots = np.arange(len(params), dtype=np.int32)
        tokens, logprobs = sampler.sample(logits, slots, np.array(positions or [10] * len(params), np.int32))
        return tokens.tolist(), [None] * len(params) if logprobs is None else logprobs.to_host(len(params))

    return sample


def draw_many(kernels: Kernels | None, logits: torch.Tensor, params: SamplingParams, count: int = 4000) -> np.ndarray:
    """How often each token of one distribution comes, over positions 0..count-1 of one seed."""
    sampler = Sampler(1, len(logits), CPU, kernels)
    sampler.bind(SlotBinding(0, params, 0, ()))
    slots, positions = np.zeros(count, np.int32), np.arange(count, dtype=np.int32)
    tokens, _ = sampler.sample(logits.expand(count, -1), slots, positions)
    return np.bincount(tokens.numpy(), minlength=len(logits)) / count


def random_logits(rows: int, vocab_size: int, spread: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(5)) * spread


def kept(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """The distribution that the parameters ask for, by the textbook: sort everything, apply one limit after another."""
    probs, order = (logits.double() / params.temperature).softmax(-1).sort(descending=True)
    if params.top_k:
        probs[params.top_k :] = 0
        probs /= probs.sum()
    probs[probs.cumsum(-1) - probs >= params.top_p] = 0
    probs[probs < params.min_p * probs[0]] = 0
    return torch.zeros_like(probs).scatter(0, order, probs / probs.sum())


def test_greedy_takes_the_first_of_the_largest(draw: Draw) -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0], [5.0, 3.0, 1.0, 3.0]])
    assert draw(logits, [SamplingParams(temperature=0.0)] * 2)[0] == [1, 0]
    assert draw(logits, [SamplingParams(temperature=2.0, top_k=1)] * 2)[0] == [1, 0]
    for num_rows in (1, 2):  # a row that is alone is shared out among threads
        for first in (0, 20_000):
            logits = torch.arange(40_000).expand(num_rows, -1).ge(first).float()
            assert all(
                draw(logits, [SamplingParams(temperature=0.0)] * num_rows)[0] == [first] * num_rows for _ in range(9)
            )


@pytest.mark.parametrize("temperature", [1e-30, 1e-4])
def test_a_tiny_temperature_is_greedy(draw: Draw, temperature: float) -> None:
    logits = random_logits(5, 300)
    assert draw(logits, [SamplingParams(temperature=temperature)] * 5)[0] == logits.argmax(-1).tolist()


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.5),
        SamplingParams(temperature=3.0),
        SamplingParams(top_k=3),
        SamplingParams(top_k=100, temperature=2.0),
        SamplingParams(top_k=290, temperature=5.0),
        SamplingParams(top_p=0.6),
        SamplingParams(top_p=0.95, temperature=4.0),
        SamplingParams(top_p=1e-6),
        SamplingParams(min_p=0.2),
        SamplingParams(min_p=0.01, temperature=4.0),
        SamplingParams(top_k=40, top_p=0.8, min_p=0.1, temperature=1.5),
    ],
    ids=str,
)
def test_draws_follow_what_the_parameters_keep(kernels: Kernels | None, params: SamplingParams) -> None:
    logits = random_logits(1, 300)[0]
    expected = kept(logits, params).numpy()
    frequencies = draw_many(kernels, logits, params)
    assert frequencies[expected == 0].sum() == 0
    assert np.abs(frequencies - expected).max() < 0.04  # five standard deviations of a half
    assert (frequencies[expected > 0.01] > 0).all()


LIMITS = [
    SamplingParams(),
    SamplingParams(top_k=3),
    SamplingParams(top_k=64, top_p=0.9, temperature=2.0),
    SamplingParams(top_k=MAX_RANKED, top_p=0.99, temperature=9.0),
    SamplingParams(top_k=MAX_RANKED + 1, temperature=9.0),
    SamplingParams(top_p=0.6),
    SamplingParams(top_p=0.95, temperature=4.0),
    SamplingParams(top_p=0.999, temperature=20.0),
    SamplingParams(min_p=0.05),
    SamplingParams(min_p=1e-4, top_p=0.7, temperature=4.0),
]


def test_backends_draw_the_same_tokens_from_the_same_numbers(draw: Draw) -> None:
    """However many tokens the limits keep, and whatever path finds them: a seed gives its tokens everywhere."""
    rows = [msgspec.structs.replace(params, seed=seed) for params in LIMITS for seed in range(20)]
    logits = random_logits(len(rows), 3000)
    logits[::2] = logits[::2].mul(4).round().div(4)  # many that are equal
    slots = np.arange(len(rows), dtype=np.int32)
    textbook = Sampler(len(rows), 3000, CPU)
    for slot, params in enumerate(rows):
        textbook.bind(SlotBinding(slot, params, 0, (0,)))
    assert draw(logits, rows)[0] == textbook.sample(logits, slots, slots * 0 + 10)[0].tolist()


def test_a_chi_square_of_draws(kernels: Kernels | None) -> None:
    count = 4000
    for params in LIMITS[:3]:
        logits = random_logits(1, 40, spread=1.0)[0]
        expected = kept(logits, params).numpy() * count
        frequencies = draw_many(kernels, logits, params, count) * count
        is_likely = expected >= 5
        chi = ((frequencies - expected)[is_likely] ** 2 / expected[is_likely]).sum()
        degrees = int(is_likely.sum())
        assert chi < degrees + 4 * (2 * degrees) ** 0.5, params


@pytest.mark.parametrize("vocab_size", [1, 2, 63, 64, 255, 256, 257, 1000])
def test_any_vocabulary(draw: Draw, vocab_size: int) -> None:
    logits = random_logits(4, vocab_size, spread=0.01)
    params = [SamplingParams(), SamplingParams(top_p=0.99), SamplingParams(top_k=vocab_size), SamplingParams(min_p=0.9)]
    tokens, _ = draw(logits, params)
    assert all(0 <= token < vocab_size for token in tokens)


def test_a_row_ignores_the_others(draw: Draw) -> None:
    """Every kind of row, bit for bit the same alone as in any company."""
    kinds = [
        SamplingParams(temperature=0.0, num_logprobs=2),
        SamplingParams(seed=1),
        SamplingParams(seed=2, temperature=1.7, num_logprobs=0),
        SamplingParams(seed=3, top_p=0.9, num_logprobs=5),
        SamplingParams(seed=4, top_p=0.999, temperature=30.0),  # grows to the whole vocabulary
        SamplingParams(seed=5, top_k=100, num_logprobs=2),
        SamplingParams(seed=6, top_k=400, min_p=0.05),
        SamplingParams(seed=7, min_tokens=50, stop_token_ids=(3, 4), num_logprobs=1),
    ]
    logits, positions = random_logits(len(kinds), 1111), [3 * row for row in range(len(kinds))]
    expected = [draw(logits[i : i + 1], [kinds[i]], [positions[i]]) for i in range(len(kinds))]
    for order in (list(range(8)), [7, 3, 5, 1], [2, 1], [6, 0, 4], [4] * 5 + [3]):
        tokens, logprobs = draw(logits[order], [kinds[i] for i in order], [positions[i] for i in order])
        assert [(token, logprob) for token, logprob in zip(tokens, logprobs, strict=True)] == [
            (expected[i][0][0], expected[i][1][0]) for i in order
        ]


def test_a_row_alone_wakes_the_threads_that_wait(kernels: Kernels | None) -> None:
    """And starts none, which a region of threads within another one would do in every step."""
    sampler = Sampler(1, 40_000, torch.device("cpu"), kernels)
    sampler.bind(SlotBinding(0, SamplingParams(temperature=0.0), 1, ()))
    logits, slots = random_logits(1, 40_000), np.zeros(1, np.int32)

    def num_started() -> int:
        """Threads that the machine started beside a hundred draws: ids of threads are given in order."""
        before = started_thread()
        for position in range(100):
            sampler.sample(logits, slots, np.array([position], np.int32))
        return started_thread() - before

    assert min(num_started() for _ in range(5)) < 100


def started_thread() -> int:
    thread = threading.Thread()
    thread.start()
    thread.join()
    return thread.native_id or 0


def test_the_seed_and_the_position_decide(draw: Draw) -> None:
    logits = random_logits(1, 500, spread=0.1).expand(4, -1)
    same, _ = draw(logits, [SamplingParams(seed=9)] * 4, [5, 5, 6, 7])
    other, _ = draw(logits, [SamplingParams(seed=8)] * 4, [5, 5, 6, 7])
    assert same[0] == same[1]
    assert len({*same[1:], *other[1:]}) == 6


def test_neither_eos_nor_stop_before_min_tokens(draw: Draw) -> None:
    logits = torch.zeros(1, 9).index_fill(1, torch.tensor([0, 4]), 20.0)
    params = SamplingParams(temperature=0.0, min_tokens=3, stop_token_ids=(4, 99))
    first = [draw(logits, [params], [position], prompt=7)[0][0] for position in (7, 8, 9, 10)]
    assert first == [1, 1, 1, 0]
    drawn = [draw(logits, [SamplingParams(min_tokens=3, seed=seed)], [7], prompt=7)[0][0] for seed in range(50)]
    assert set(drawn) == {4}


def test_logprobs_are_of_the_raw_distribution(draw: Draw) -> None:
    logits = random_logits(3, 700)
    params = [
        SamplingParams(temperature=0.3, num_logprobs=4),
        SamplingParams(),
        SamplingParams(num_logprobs=0, min_tokens=9, stop_token_ids=tuple(range(1, 700, 2))),
    ]
    tokens, logprobs = draw(logits, params, [5, 5, 5])
    expected = logits.double().log_softmax(-1)
    assert logprobs[1] is None
    for row, count in ((0, 4), (2, 0)):
        entry = logprobs[row]
        assert entry is not None
        assert entry.logprob == pytest.approx(float(expected[row, tokens[row]]), abs=1e-6)
        assert entry.rank == int((expected[row] > expected[row, tokens[row]]).sum()) + 1
        top = expected[row].topk(count)
        assert entry.top_token_ids == top.indices.tolist()
        assert entry.top_logprobs == pytest.approx(top.values.tolist(), abs=1e-6)


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_that_is_not_finite_has_no_token_and_its_neighbours_have_theirs(
    draw: Draw, poison: float, dtype: torch.dtype
) -> None:
    needs = [
        SamplingParams(temperature=0.0),
        SamplingParams(seed=3),
        SamplingParams(top_p=0.5, seed=4),
        SamplingParams(top_k=5, seed=5),
        SamplingParams(top_k=3000, top_p=0.9, seed=6, num_logprobs=2),
    ]
    clean = random_logits(10, 5000).to(dtype)
    expected, _ = draw(clean.clone(), needs * 2)
    broken = clean.clone()
    for row in range(5):
        broken[row, (997 * row + 4999) % 5000] = poison  # a single number, in any chunk
    tokens, _ = draw(broken, needs * 2)
    assert tokens == [NO_TOKEN] * 5 + expected[5:]


def test_a_row_is_whole_while_something_is_above_minus_infinity(draw: Draw) -> None:
    logits = torch.full((4, 600), -torch.inf)
    logits[0, 599] = logits[1, 599] = -5.0
    params = [SamplingParams(temperature=0.0), SamplingParams(), SamplingParams(), SamplingParams(temperature=0.0)]
    assert draw(logits, params)[0] == [599, 599, NO_TOKEN, NO_TOKEN]


def test_a_new_owner_brings_its_own_parameters(kernels: Kernels | None) -> None:
    sampler = Sampler(1, 9, CPU, kernels)
    logits = torch.arange(9.0).unsqueeze(0)
    slots, positions = np.zeros(1, np.int32), np.array([2], np.int32)
    sampler.bind(SlotBinding(0, SamplingParams(temperature=0.0, min_tokens=5, num_logprobs=1), 2, (8,)))
    barred, logprobs = sampler.sample(logits, slots, positions)
    assert (barred.tolist(), logprobs is None) == ([7], False)
    sampler.bind(SlotBinding(0, SamplingParams(temperature=0.0), 2, (8,)))
    free, logprobs = sampler.sample(logits, slots, positions)
    assert (free.tolist(), logprobs is None) == ([8], True)


def test_equal_logits_are_as_likely_in_order_of_their_ids(draw: Draw) -> None:
    """Of tokens that are equally likely, limits keep the lowest ids, wherever the others lie."""
    logits = torch.zeros(1, 5000)
    logits[0, 700:] = 1.0
    kinds = [SamplingParams(top_k=3), SamplingParams(top_k=64), SamplingParams(top_k=3000), SamplingParams(top_p=0.01)]
    kinds += [SamplingParams(top_k=3, min_p=1.0), SamplingParams(top_k=3000, min_p=1.0)]
    for params, count in zip(kinds, (3, 64, 3000, 46, 3, 3000), strict=True):
        rows = [msgspec.structs.replace(params, seed=seed) for seed in range(60)]
        tokens, _ = draw(logits.expand(60, -1), rows)
        assert min(tokens) >= 700
        assert 700 < max(tokens) < 700 + count
    _, [logprobs] = draw(logits, [SamplingParams(temperature=0, num_logprobs=3)])
    assert logprobs is not None
    assert logprobs.top_token_ids == [700, 701, 702]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0, num_logprobs=3),
        SamplingParams(),
        SamplingParams(top_p=0.8),
        SamplingParams(top_k=7, min_p=0.1),
    ],
    ids=str,
)
def test_bfloat16_is_read_as_it_is(draw: Draw, params: SamplingParams) -> None:
    logits = random_logits(6, 1500).bfloat16()
    rows = [msgspec.structs.replace(params, seed=seed) for seed in range(6)]
    tokens, logprobs = draw(logits, rows)
    expected_tokens, expected_logprobs = draw(logits.float(), rows)
    assert tokens == expected_tokens
    assert logprobs == expected_logprobs


def test_rows_may_lie_apart(draw: Draw) -> None:
    logits = random_logits(8, 900)
    rows = [
        SamplingParams(temperature=0.0),
        SamplingParams(),
        SamplingParams(top_p=0.5),
        SamplingParams(num_logprobs=1),
    ]
    assert draw(logits[::2, :700], rows) == draw(logits[::2, :700].contiguous(), rows)


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what torch is asked for: the names of the operators, and the largest tensor that one of them made."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()
        self.largest = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._overloadpacket.__name__
        self.names.add(name)
        arguments = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        known = {leaf.untyped_storage().data_ptr() for leaf in arguments}
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage().data_ptr() not in known:
                self.largest = max(self.largest, leaf.numel())
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_makes_neither_copies_nor_random_numbers_of_all_logits(kernels: Kernels | None, dtype: torch.dtype) -> None:
    params = [
        SamplingParams(temperature=0.0),
        SamplingParams(),
        SamplingParams(top_p=0.99, temperature=50.0),
        SamplingParams(top_k=30, top_p=0.9),
        SamplingParams(temperature=0.0, min_tokens=9),
    ]
    logits = random_logits(5, 40_000).to(dtype)
    before = logits.clone()
    for rows in ([0], [1], [2], [3], [4], [0, 1, 2, 3, 4]):
        sampler = Sampler(5, 40_000, CPU, kernels)
        for slot in rows:
            sampler.bind(SlotBinding(slot, params[slot], 5, (0,)))
        slots = np.array(rows, np.int32)
        some = logits[: len(rows)]
        sampler.sample(some, slots, slots * 0 + 9)  # buffers that stay are made once
        with _Watch() as watch:
            sampler.sample(some, slots, slots * 0 + 9)
        assert not {name for name in watch.names if "rand" in name or "multinomial" in name or "exponential" in name}
        if kernels is not None or rows in ([0], [1], [4]):
            assert watch.largest < 40_000 * len(rows) / 2
        assert torch.equal(logits, before), "barred tokens are given back"


def test_slots_that_may_not_stop_yet_are_counted() -> None:
    table = SamplingTable(4, 32, torch.device("cpu"))
    barring, plain = SamplingParams(min_tokens=2, stop_token_ids=(5,)), SamplingParams(min_tokens=2)
    for slot, params in ((0, barring), (1, barring), (0, plain), (1, barring), (2, plain)):
        table.bind(SlotBinding(slot, params, 3, ()))
    assert table.num_barred == 1
    slots = np.arange(4, dtype=np.int32)
    barred = table.barred(slots, np.full(4, 4, np.int32))
    assert barred is not None
    assert [part.tolist() for part in barred] == [[1], [5]]
    table.bind(SlotBinding(1, plain, 3, ()))
    assert table.barred(slots, np.full(4, 4, np.int32)) is None
