"""A request's tokens and logits, bit for bit, whatever else happens in the engine."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from tests.conftest import BuiltKernels
from tests.unit.model.conftest import GREEDY, MakePlayer, Outcome, Player, Shape, assert_same, prompt_of
from tests.unit.model.setups import LEVELS_HERE, SETUPS, Setup

SHAPES = [
    Shape(head_dim=16, num_heads=1),
    Shape(head_dim=16, num_heads=3),
    Shape(head_dim=32),
    Shape(head_dim=48),
    Shape(head_dim=64, num_heads=3),
]
# With the kernels that a user of this processor gets, and without any; each has its own attention and its own linears.
SETUPS_HERE = [setup for setup in SETUPS if setup.kernels in {"off", *LEVELS_HERE[-1:]}]
PLAIN, FASTEST = Setup("float32", "none", "off"), Setup("bfloat16", "none", SETUPS_HERE[-1].kernels)
INT8_CACHES = [replace(setup, cache_type="int8") for setup in (PLAIN, FASTEST)]
SETUPS_HERE += INT8_CACHES
every_setup = pytest.mark.parametrize("setup", SETUPS_HERE, ids=str)
both_ends = pytest.mark.parametrize("setup", [PLAIN, FASTEST, *INT8_CACHES], ids=str)
every_shape = pytest.mark.parametrize(
    ("setup", "shape"),
    [
        *((setup, SHAPES[-1]) for setup in SETUPS_HERE),
        *((setup, shape) for setup in (PLAIN, FASTEST) for shape in SHAPES[:-1]),
    ],
    ids=lambda value: f"{value.num_heads}x{value.head_dim}" if isinstance(value, Shape) else str(value),
)


@pytest.fixture
def make_player(make_player: MakePlayer, setup: Setup, built_kernels: BuiltKernels) -> MakePlayer:
    """A player over a runner of the test's setup."""
    types = {"dtype": setup.dtype, "quantization": setup.quantization, "cache_type": setup.cache_type}
    return partial(make_player, **types, **setup.runner_options(built_kernels))


LENGTHS = [1, 5, 8, 63, 64, 65, 75, 130]  # around the tiles of 8 and of 64


def alone(player: Player, prompt: list[int], num_tokens: int) -> list[Outcome]:
    """The sequence undisturbed: one prefill, then one token a step. Its slot and blocks are given back."""
    player.admit(0, prompt)
    outcomes = player.run(0, num_tokens)
    assert all(torch.isfinite(outcome.logits).all() for outcome in outcomes)
    player.free.extend(player.sequences.pop(0).blocks)
    return outcomes


@every_shape
def test_batched(make_player: MakePlayer, setup: Setup, shape: Shape) -> None:
    check_batched(make_player(shape, num_slots=len(LENGTHS)))


@pytest.mark.parametrize("setup", [PLAIN, Setup("bfloat16", "none", "off"), FASTEST], ids=str)
def test_batched_by_two_threads(make_player: MakePlayer, setup: Setup) -> None:
    check_batched(make_player(SHAPES[-1], num_slots=len(LENGTHS), num_threads=2))


@pytest.mark.parametrize("setup", [PLAIN], ids=str)
def test_a_head_alone_by_three_threads(make_player: MakePlayer, setup: Setup) -> None:
    """A tile of queries and a tile of keys are then the only product of a step."""
    check_batched(make_player(Shape(head_dim=24, num_heads=1), num_slots=len(LENGTHS), num_threads=3))


def check_batched(player: Player) -> None:
    prompts = [prompt_of(length, seed=length) for length in LENGTHS]
    expected = [alone(player, prompt, 6) for prompt in prompts]
    collected: dict[int, list[Outcome]] = {slot: [] for slot in range(len(prompts))}
    for slot, prompt in enumerate(prompts):  # one more each step: every batch mixes a prefill with decodes
        player.admit(slot, prompt)
        rows = {other: 1 for other in range(slot) if len(collected[other]) < 6} | {slot: len(prompt)}
        for other, outcome in player.step(rows).items():
            collected[other].append(outcome)
    while rows := {slot: 1 for slot, outcomes in collected.items() if len(outcomes) < 6}:
        for slot, outcome in player.step(rows).items():
            collected[slot].append(outcome)
    for slot, outcomes in collected.items():
        assert_same(outcomes, expected[slot])


@both_ends
def test_chunked_at_every_size(make_player: MakePlayer, setup: Setup) -> None:
    prompt = prompt_of(75)
    player = make_player(Shape(head_dim=48), num_slots=75)
    expected = alone(player, prompt, 3)
    for chunk in range(1, 75):
        player.admit(chunk, prompt)
        assert_same(player.run(chunk, 3, chunk), expected)
        player.free.extend(player.sequences.pop(chunk).blocks)


@every_shape
def test_chunked(make_player: MakePlayer, setup: Setup, shape: Shape) -> None:
    player = make_player(shape)
    prompt = prompt_of(140)
    expected = alone(player, prompt, 3)
    for slot, chunk in enumerate((1, 7, 16, 24, 64, 100)):
        player.admit(slot, prompt)
        assert_same(player.run(slot, 3, chunk), expected)
        player.free.extend(player.sequences.pop(slot).blocks)


@every_shape
def test_block_size_does_not_matter(make_player: MakePlayer, setup: Setup, shape: Shape) -> None:
    prompt = prompt_of(100)
    expected = alone(make_player(shape), prompt, 4)
    for block_size in (8, 64):
        assert_same(alone(make_player(shape, block_size=block_size), prompt, 4), expected)


@every_shape
def test_shared_prefix(make_player: MakePlayer, setup: Setup, shape: Shape) -> None:
    player = make_player(shape)
    owner, prompt = prompt_of(130, seed=1), prompt_of(130, seed=1)[:96] + prompt_of(20, seed=2)
    expected = alone(player, prompt, 4)
    player.admit(0, owner)
    player.run(0, 2)
    for slot, num_blocks in enumerate((1, 3, 4, 6), start=1):
        player.share(slot, prompt, owner=0, num_blocks=num_blocks)
    shared = {slot: len(prompt) - player.sequences[slot].num_computed for slot in (1, 2, 3, 4)}
    collected = {slot: [outcome] for slot, outcome in player.step(shared).items()}
    for _ in range(3):
        for slot, outcome in player.step(dict.fromkeys(collected, 1)).items():
            collected[slot].append(outcome)
    for outcomes in collected.values():
        assert_same(outcomes, expected)


@every_shape
def test_resumed_after_preemption(make_player: MakePlayer, setup: Setup, shape: Shape) -> None:
    player = make_player(shape)
    prompt = prompt_of(58)
    expected = alone(player, prompt, 12)
    player.admit(0, prompt)
    outcomes = player.run(0, 5)
    player.preempt(0, new_slot=3)
    player.admit(0, prompt_of(20, seed=9))  # its old slot and blocks go to somebody else
    player.run(0, 2)
    outcomes += player.run(3, 4)
    player.preempt(3, new_slot=1)
    outcomes += player.run(1, 3, chunk=50)
    assert_same(outcomes, expected)


@both_ends
def test_what_blocks_held_before(make_player: MakePlayer, setup: Setup) -> None:
    player = make_player(Shape())
    prompt = prompt_of(40)
    expected = alone(player, prompt, 3)
    cache = player.runner._attention._cache  # type: ignore[attr-defined]
    for layer in range(2):
        keys, values = cache.keys[layer], cache.values[layer]
        if cache.is_quantized:
            keys, values = cache.key_scales[layer], cache.value_scales[layer]
        keys.fill_(torch.nan)
        values.fill_(torch.finfo(values.dtype).max / 127)
    assert_same(alone(player, prompt, 3), expected)


@both_ends
def test_a_broken_sequence_does_not_break_the_next_owner_of_its_blocks(make_player: MakePlayer, setup: Setup) -> None:
    player = make_player(Shape())
    prompt = prompt_of(40)
    expected = alone(player, prompt, 3)
    model = player.runner._model
    embedding = model._token_embedding  # type: ignore[attr-defined]
    embed = embedding.plus

    def broken_at_7(ids: torch.Tensor, *others: Any) -> torch.Tensor:
        rows: torch.Tensor = embed(ids, *others)
        return rows.masked_fill_((ids == 7)[:, None], torch.nan)

    embedding.plus = broken_at_7
    broken = [7] * player.block_size * len(player.free)
    player.admit(0, broken[:250])
    assert player.step({0: 250})[0].logits.isnan().all()
    player.free.extend(player.sequences.pop(0).blocks)
    embedding.plus = embed
    assert_same(alone(player, prompt, 3), expected)


@every_setup
def test_warm_up_leaves_no_trace(make_player: MakePlayer, setup: Setup) -> None:
    player = make_player(Shape())
    prompt = prompt_of(40)
    expected = alone(player, prompt, 3)
    player.runner.warm_up(max_num_tokens=64)
    player.admit(0, prompt, GREEDY)
    assert_same(player.run(0, 3), expected)
