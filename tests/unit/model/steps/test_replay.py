"""Steps that are replayed: the same bits as steps that run as they are written, and memory that nothing else takes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from roseinfer.model.device import Placement
from roseinfer.model.families.causal_lm import CausalLM
from roseinfer.model.kernels.library import Kernels
from roseinfer.model.layers.norm import Norm
from roseinfer.model.steps.replay import Replays, SharedMemory
from tests.conftest import BuiltKernels
from tests.unit.model.conftest import MakePlayer, Shape, prompt_of
from tests.unit.model.setups import LEVELS_HERE, kernels_at

CPU = torch.device("cpu")
WIDTH, VOCAB_SIZE = 32, 500


@pytest.fixture(params=LEVELS_HERE)
def kernels(request: pytest.FixtureRequest, built_kernels: BuiltKernels) -> Kernels:
    return kernels_at(request.param, built_kernels)


class Head:
    """Counts how often Python runs it."""

    def __init__(self) -> None:
        self.weight = torch.randn(WIDTH, VOCAB_SIZE, generator=torch.Generator().manual_seed(1))
        self.num_runs = 0

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        self.num_runs += 1
        return hidden @ self.weight


def replays_of(
    forward: Callable[..., torch.Tensor],
    kernels: Kernels,
    logits: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.clone,
) -> Replays:
    model = SimpleNamespace(forward=forward, logits=logits, vocab_size=VOCAB_SIZE)
    return Replays(cast(CausalLM, model), kernels)


def no_attention(*_: object) -> torch.Tensor:
    raise AssertionError


class Forward:
    """Kernels with operators of torch before, between and behind them; counts how often Python runs it."""

    def __init__(self, kernels: Kernels) -> None:
        placement = Placement(CPU, torch.float32, kernels=kernels)
        weight = torch.arange(1.0, WIDTH + 1)
        self.norms = [Norm(weight, None, 1e-6, placement), Norm(weight.flip(0), weight, 1e-6, placement)]
        self.table = torch.randn(10, WIDTH, generator=torch.Generator().manual_seed(0))
        self.num_runs = 0

    def __call__(self, token_ids: torch.Tensor, positions: torch.Tensor, attend: object) -> torch.Tensor:
        self.num_runs += 1
        x = self.table.index_select(0, token_ids)
        delta = None
        for norm in self.norms * 3:
            halves = norm(x, delta).view(-1, 2, WIDTH // 2).unbind(1)
            delta = (halves[0] * halves[1]).repeat(1, 2)
        assert delta is not None
        return x.add_(delta).mul_(positions[:, None])


def test_the_same_bits_and_no_python(kernels: Kernels) -> None:
    forward = Forward(kernels)
    replay = replays_of(forward, kernels)
    ids, positions = torch.zeros(8, dtype=torch.int64), torch.zeros(8, dtype=torch.int64)
    for turn in range(6):
        for num_rows in (1, 5):
            ids[:num_rows], positions[:num_rows] = (torch.arange(num_rows) + turn) % 10, turn + 1
            found = replay.logits(ids[:num_rows], positions[:num_rows], no_attention).clone()
            wanted = Forward(kernels)(ids[:num_rows], positions[:num_rows], no_attention)
            assert torch.equal(found, wanted)
            torch.randn(1000)  # takes what a step that is over has freed
    assert forward.num_runs == 2
    other = ids[:5].clone()
    assert torch.equal(replay.logits(other, positions[:5], no_attention), forward(other, positions[:5], no_attention))
    assert forward.num_runs == 4, "inputs that lie elsewhere are not those of the recording"


def test_logits_of_few_rows_are_recorded_and_of_more_computed(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("roseinfer.model.steps.replay._FEW_ROWS", 3)
    head = Head()
    replay = replays_of(Forward(kernels), kernels, head)
    ids, positions = torch.zeros(4, dtype=torch.int64), torch.ones(4, dtype=torch.int64)
    for turn in range(3):
        for num_rows in (1, 2, 3, 4):
            ids[:num_rows] = torch.arange(num_rows) + turn
            before = head.num_runs
            found = replay.logits(ids[:num_rows], positions[:num_rows], no_attention)
            wanted = Head()(Forward(kernels)(ids[:num_rows], positions[:num_rows], no_attention))
            assert torch.equal(found, wanted)
            assert head.num_runs - before == (num_rows == 4 or turn == 0)
    sizes = sorted(map(len, replay._memory._pieces))
    assert sizes.pop() == 3 * VOCAB_SIZE * torch.float32.itemsize, "all recordings have their logits at one place"
    assert sizes.pop() <= 4 * WIDTH * torch.float32.itemsize


def test_operators_with_and_without_a_form_that_writes_in_place(kernels: Kernels) -> None:
    """Conversions, operators whose arguments torch's functions take otherwise, strides, and numbers that are none."""
    table = torch.randn(10, WIDTH, generator=torch.Generator().manual_seed(0))

    def forward(token_ids: torch.Tensor, positions: torch.Tensor, _: object) -> torch.Tensor:
        x = torch.nn.functional.embedding(token_ids, table)
        left, right = x.to(torch.bfloat16).chunk(2, -1)
        turned = torch.cat([-right, left], -1).t().clone().t()
        sums = turned.sum(-1, keepdim=True, dtype=torch.float32) + torch.softmax(x, -1, dtype=torch.float64)
        chosen = torch.where(sums > 0, sums, sums.log()).to(torch.float32).contiguous()
        return torch.clamp(chosen, min=-1.0) + torch.pow(2, positions[:, None].float()) + x.argmax(-1)[:, None]

    replay = replays_of(forward, kernels)
    ids, positions = torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)
    for turn in range(4):
        ids[:], positions[:] = (torch.arange(3) * 2 + turn) % 10, turn + 1
        found, wanted = replay.logits(ids, positions, no_attention), forward(ids, positions, None)
        assert torch.equal(found.view(torch.int32), wanted.view(torch.int32))


def test_what_reads_numbers_back_is_not_repeated(kernels: Kernels) -> None:
    forward = Forward(kernels)

    def chooses(token_ids: torch.Tensor, positions: torch.Tensor, attend: Callable[..., torch.Tensor]) -> torch.Tensor:
        hidden = forward(token_ids, positions, attend)
        return hidden if int(token_ids[0]) else -hidden

    replay = replays_of(chooses, kernels)
    ids, positions = torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.int64)
    for token_id in (0, 1, 0):
        ids[0] = token_id
        assert torch.equal(replay.logits(ids, positions, no_attention), chooses(ids, positions, no_attention))
    assert forward.num_runs == 6


def test_recordings_have_few_operators(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roseinfer.model.steps.replay._MOST_OPERATORS", 20)
    forward = Forward(kernels)
    replay = replays_of(forward, kernels)
    ids, positions = torch.zeros(4, dtype=torch.int64), torch.ones(4, dtype=torch.int64)
    for num_rows in (1, 4, 1, 4):  # a recording has 15
        found = replay.logits(ids[:num_rows], positions[:num_rows], no_attention).clone()
        assert torch.equal(found, Forward(kernels)(ids[:num_rows], positions[:num_rows], no_attention))
    assert forward.num_runs == 3, "one row is recorded, four have no room beside it"


def test_operators_share_the_memory_of_what_is_gone(kernels: Kernels) -> None:
    weights = torch.randn(30, 16, 16, generator=torch.Generator().manual_seed(0))

    def deep(token_ids: torch.Tensor, positions: torch.Tensor, attend: object) -> torch.Tensor:
        x = positions[:, None].float().repeat(1, 16)
        for weight in weights:
            x = x + torch.softmax((x @ weight).t(), 0).t()  # of which one comes out with strides of its own
        return x

    replay = replays_of(deep, kernels)
    ids, positions = torch.zeros(5, dtype=torch.int64), torch.zeros(5, dtype=torch.int64)
    for turn in range(4):
        positions += turn
        assert torch.equal(replay.logits(ids, positions, no_attention), deep(ids, positions, no_attention))
    assert len(replay._memory._pieces) <= 5


def test_a_piece_of_memory_is_lent_until_its_last_view_is_gone() -> None:
    memory = SharedMemory()
    first = memory.empty((4, 8), torch.float32)
    address, view = first.data_ptr(), first[1:].t()
    assert address % 64 == 0
    del first
    second = memory.empty((4, 8), torch.bfloat16)
    assert second.data_ptr() != address
    del view
    assert memory.empty((30,), torch.float32).data_ptr() == address


@pytest.mark.parametrize("level", sorted({*LEVELS_HERE[:1], *LEVELS_HERE[-1:]}))  # oneDNN multiplies bfloat16 at some
@pytest.mark.parametrize("precision", [("float32", "none"), ("bfloat16", "none"), ("bfloat16", "int8")])
@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("num_rows", [1, 3])
def test_a_runner_replays_its_decode_steps(
    make_player: MakePlayer,
    built_kernels: BuiltKernels,
    num_rows: int,
    is_tied: bool,
    precision: tuple[str, str],
    level: str,
) -> None:
    """Contexts grow past blocks and tiles, and the steps of a prompt go between."""
    options: dict[str, object] = {"kernels": level, "kernels_dir": str(built_kernels(level))}
    options |= {"dtype": precision[0], "quantization": precision[1]}
    found = []
    for is_replayed in (True, False):
        player = make_player(Shape(is_tied=is_tied), num_slots=num_rows, **options)
        assert player.runner._replay is not None
        if not is_replayed:
            player.runner._replay = None
        for slot in range(num_rows):
            player.admit(slot, prompt_of(60 + slot, seed=slot))
        outcomes = [player.step({slot: 60 + slot}) for slot in range(num_rows)]
        outcomes += [player.step(dict.fromkeys(range(num_rows), 1)) for _ in range(10)]
        found.append([outcome for step in outcomes for outcome in step.values()])
    for mine, other in zip(*found, strict=True):
        assert mine.token_id == other.token_id
        assert torch.equal(mine.logits, other.logits)


def test_the_step_that_is_recorded_has_a_phase_of_its_own(
    make_player: MakePlayer, built_kernels: BuiltKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes longer than those that repeat it, and a stream that waits for it hears why."""
    level = LEVELS_HERE[-1]
    player = make_player(Shape(), num_slots=1, kernels=level, kernels_dir=str(built_kernels(level)))
    phases: list[str] = []

    @contextmanager
    def watch(name: str) -> Iterator[None]:
        phases.append(name)
        yield

    launch = player.runner._launch_eager
    monkeypatch.setattr(player.runner, "_launch_eager", lambda batch, _: launch(batch, watch))
    player.admit(0, prompt_of(5, seed=0))
    for num_tokens in (5, 1, 1):
        player.step({0: num_tokens})
    assert [name for name in phases if name in {"capture", "forward"}] == ["forward", "capture", "forward"]
