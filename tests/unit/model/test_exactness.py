"""A request's tokens and logits, bit for bit, whatever else happens in the engine."""

import pytest
import torch

from tests.unit.model.conftest import GREEDY, MakePlayer, Outcome, Player, Shape, prompt_of

SHAPES = [
    Shape(head_dim=16, num_heads=1),
    Shape(head_dim=16, num_heads=3),
    Shape(head_dim=32),
    Shape(head_dim=48),
    Shape(head_dim=64, num_heads=3),
]
DTYPES = ["float32", "bfloat16"]
every_dtype = pytest.mark.parametrize("dtype", DTYPES)
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape.num_heads}x{shape.head_dim}")

LENGTHS = [1, 5, 8, 63, 64, 65, 75, 130]  # around the tiles of 8 and of 64


def assert_same(outcomes: list[Outcome], expected: list[Outcome]) -> None:
    assert [outcome.token_id for outcome in outcomes] == [outcome.token_id for outcome in expected]
    for outcome, other in zip(outcomes, expected, strict=True):
        assert torch.equal(outcome.logits, other.logits)


def alone(player: Player, prompt: list[int], num_tokens: int) -> list[Outcome]:
    """The sequence as nobody disturbs it: one prefill, then one token a step. Its slot and blocks are given back."""
    player.admit(0, prompt)
    outcomes = player.run(0, num_tokens)
    assert all(torch.isfinite(outcome.logits).all() for outcome in outcomes)
    player.free.extend(player.sequences.pop(0).blocks)
    return outcomes


@every_dtype
@pytest.mark.parametrize(
    ("shape", "num_threads"), [*((shape, 1) for shape in SHAPES), (SHAPES[-1], 2)], ids=lambda value: str(value)[:32]
)
def test_batched(make_player: MakePlayer, shape: Shape, num_threads: int, dtype: str) -> None:
    player = make_player(shape, dtype, num_slots=len(LENGTHS), num_threads=num_threads)
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


@every_dtype
def test_chunked_at_every_size(make_player: MakePlayer, dtype: str) -> None:
    prompt = prompt_of(75)
    player = make_player(Shape(head_dim=48), dtype, num_slots=75)
    expected = alone(player, prompt, 3)
    for chunk in range(1, 75):
        player.admit(chunk, prompt)
        assert_same(player.run(chunk, 3, chunk), expected)
        player.free.extend(player.sequences.pop(chunk).blocks)


@every_dtype
@every_shape
def test_chunked(make_player: MakePlayer, shape: Shape, dtype: str) -> None:
    player = make_player(shape, dtype)
    prompt = prompt_of(140)
    expected = alone(player, prompt, 3)
    for slot, chunk in enumerate((1, 7, 16, 24, 64, 100)):
        player.admit(slot, prompt)
        assert_same(player.run(slot, 3, chunk), expected)
        player.free.extend(player.sequences.pop(slot).blocks)


@every_dtype
@every_shape
@pytest.mark.parametrize("block_size", [8, 64])
def test_block_size_does_not_matter(make_player: MakePlayer, shape: Shape, dtype: str, block_size: int) -> None:
    prompt = prompt_of(100)
    expected = alone(make_player(shape, dtype), prompt, 4)
    assert_same(alone(make_player(shape, dtype, block_size=block_size), prompt, 4), expected)


@every_dtype
@every_shape
def test_shared_prefix(make_player: MakePlayer, shape: Shape, dtype: str) -> None:
    player = make_player(shape, dtype)
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


@every_dtype
@every_shape
def test_resumed_after_preemption(make_player: MakePlayer, shape: Shape, dtype: str) -> None:
    player = make_player(shape, dtype)
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


@every_dtype
def test_what_blocks_held_before(make_player: MakePlayer, dtype: str) -> None:
    player = make_player(Shape(), dtype)
    prompt = prompt_of(40)
    expected = alone(player, prompt, 3)
    cache = player.runner._attention._cache  # type: ignore[attr-defined]
    for layer in range(2):
        cache.keys[layer].fill_(torch.nan)
        cache.values[layer].fill_(torch.finfo(cache.values[layer].dtype).max)
    assert_same(alone(player, prompt, 3), expected)


def test_a_broken_sequence_does_not_break_the_next_owner_of_its_blocks(make_player: MakePlayer) -> None:
    player = make_player(Shape())
    prompt = prompt_of(40)
    expected = alone(player, prompt, 3)
    embedding = player.runner._model._token_embedding  # type: ignore[attr-defined]
    kept = embedding.table[7].clone()
    embedding.table[7] = torch.nan
    broken = [7] * player.block_size * len(player.free)
    player.admit(0, broken[:250])
    assert player.step({0: 250})[0].logits.isnan().all()
    player.free.extend(player.sequences.pop(0).blocks)
    embedding.table[7] = kept
    assert_same(alone(player, prompt, 3), expected)


@every_dtype
def test_warm_up_leaves_no_trace(make_player: MakePlayer, dtype: str) -> None:
    player = make_player(Shape(), dtype)
    prompt = prompt_of(40)
    expected = alone(player, prompt, 3)
    player.runner.warm_up(max_num_tokens=64)
    player.admit(0, prompt, GREEDY)
    assert_same(player.run(0, 3), expected)
