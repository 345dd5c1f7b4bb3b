"""What a runner has met before its first request: on a GPU that is none, and on a CPU no more than it needs."""

from collections.abc import Iterable
from functools import partial
from importlib.util import find_spec

import numpy as np
import pytest
import torch

from roseinfer.config.options import RunnerConfig
from roseinfer.engine.core.batch import ScheduledBatch, SlotBinding
from roseinfer.engine.pace import Pace
from roseinfer.messages import SamplingParams
from roseinfer.model.device import Scratch
from roseinfer.model.runner import ModelRunner
from roseinfer.model.sampling import torch as sampling_torch
from roseinfer.model.sampling.edit_table import EditTable
from roseinfer.model.sampling.logit_edits import GROUP, GrammarMasks, Penalties
from roseinfer.model.sampling.slot_table import SamplingTable
from roseinfer.model.sampling.torch import TorchSampling
from roseinfer.model.steps.graphs import decode_graph_sizes
from roseinfer.model.steps.warm_up_batches import WARM_UP_KINDS, decode_batch, unheld_draw
from tests.unit.model.conftest import MakePlayer, Shape
from tests.unit.model.fake_device import LateStream
from tests.unit.model.fake_model import make_runner, row_model

NUM_SLOTS = GROUP + 8
VOCAB = 3000  # more than the most candidates that are looked at before all tokens are


def runner_of() -> ModelRunner:
    config = RunnerConfig(cuda_graphs="off")
    return make_runner(LateStream(), config, NUM_SLOTS, make_model=partial(row_model, VOCAB))


def record(patch: pytest.MonkeyPatch, owner: object, name: str) -> list[tuple[object, ...]]:
    """The arguments of each call of a function, which goes on as it was."""
    calls: list[tuple[object, ...]] = []
    function = getattr(owner, name)

    def noted(*arguments: object) -> object:
        calls.append(arguments)
        return function(*arguments)

    patch.setattr(owner, name, noted)
    return calls


def test_sampling_has_met_every_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    draws = record(monkeypatch, sampling_torch, "_draw_kept")
    scored = record(monkeypatch, TorchSampling, "logprobs")
    masked = record(monkeypatch, GrammarMasks, "apply")
    barred: list[int] = []
    barred_of = SamplingTable.barred

    def noted(table: SamplingTable, *arguments: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
        rows_and_ids = barred_of(table, *arguments)
        barred.append(0 if rows_and_ids is None else len(rows_and_ids[0]))
        return rows_and_ids

    monkeypatch.setattr(SamplingTable, "barred", noted)
    runner_of().warm_up(64)
    assert [len(masses) for _, masses, _ in draws] == [NUM_SLOTS]  # type: ignore[arg-type]
    assert max(len(rows) for _, _, _, rows, _ in scored) == NUM_SLOTS  # type: ignore[arg-type]
    assert [len(logits) for _, logits, _, _ in masked] == [GROUP]  # type: ignore[arg-type]
    assert [count for count in barred if count] == [NUM_SLOTS]


def test_buffers_of_sampling_are_taken_once_and_suffice(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU one that is outgrown is kept, and one that grows in a stream may not fit any more."""
    taken = record(monkeypatch, Scratch, "_new_size")
    runner = runner_of()
    runner.warm_up(64)
    assert len(taken) == 3, "the masses, a spare one, and the logits that are changed"
    counts = runner._sampler._edits._penalties._counts
    kinds = [SamplingParams(top_k=VOCAB - 1), SamplingParams(num_logprobs=5), SamplingParams(logit_bias={1: 1.0})]
    for params in (*kinds, SamplingParams(presence_penalty=0.5)):
        bindings = tuple(SlotBinding(slot, params, 0, (), np.zeros(0, np.int32)) for slot in range(NUM_SLOTS))
        runner.launch(decode_batch(NUM_SLOTS, bindings=bindings)).wait()
    assert len(taken) == 3
    assert runner._sampler._edits._penalties._counts is counts


def test_torch_has_edited_what_a_gpus_tables_do_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its counts take memory once, for as many rows as are edited at a time."""
    penalised = record(monkeypatch, Penalties, "_penalise")
    runner_of().warm_up(64)
    assert max(len(owners) for _, _, owners, _ in penalised) == GROUP  # type: ignore[arg-type]
    table = EditTable(NUM_SLOTS, VOCAB, 8, torch.device("cpu"))
    for binding in unheld_draw(NUM_SLOTS, VOCAB).bindings:
        table.bind(binding, np.zeros(0, np.int64))
    assert not table.is_held[:GROUP].any()


def test_all_slots_but_the_first_are_plain_afterwards() -> None:
    """So the steps that follow meet the kernels of plain rows, whatever their number."""
    runner = runner_of()
    runner.warm_up(64)
    assert runner._sampler.can_capture(np.arange(1, NUM_SLOTS, dtype=np.int32))


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed; the extra `test` has it")
@pytest.mark.parametrize("num_kv_heads", [8, 12])
def test_attention_has_met_every_number_of_splits(monkeypatch: pytest.MonkeyPatch, num_kv_heads: int) -> None:
    """Each is a kernel of its own. Steps of one token a row may have more rows than the largest graph: prompts end."""
    from roseinfer.model.triton_kernels.decode import choose_num_splits
    from roseinfer.model.triton_kernels.tunings import decode_tuning

    tuning = decode_tuning("", 1, 64, torch.bfloat16)

    def splits(sizes: Iterable[int]) -> set[int]:
        return {choose_num_splits(size * num_kv_heads, 100_000, 132, tuning) for size in sizes}

    runner = make_runner(LateStream(), RunnerConfig(), NUM_SLOTS, max_decode_rows=6)
    batches = record(monkeypatch, runner, "_launch_eager")
    runner.warm_up(64)
    met = {batch.num_rows for batch, _ in batches if batch.num_device_rows}  # type: ignore[attr-defined]
    assert splits(met) == splits(range(1, NUM_SLOTS + 1))
    assert runner.info.decode_graph_sizes == list(decode_graph_sizes(6)), (
        "a graph never has more rows than a step decodes"
    )


def test_a_cpu_is_spared_what_costs_it_time(make_player: MakePlayer, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_player(Shape(), num_slots=12).runner
    sizes: list[tuple[int, int]] = []
    launch = runner.launch

    def noted(batch: ScheduledBatch) -> object:
        sizes.append((batch.num_rows, batch.num_tokens))
        return launch(batch)

    monkeypatch.setattr(runner, "launch", noted)
    layers = record(monkeypatch, runner._attention, "prepare")
    runner.warm_up(200)
    measured = [(1, 1), (8, 8), (1, 32), (1, 1)]
    assert sizes == [(1, 8), (1, 1)] * len(WARM_UP_KINDS) + [(12, 12)] + measured
    assert max(len(tokens.slots) for (tokens,) in layers) == 200  # type: ignore[attr-defined]


def test_the_first_burst_of_prompts_is_cut_by_what_warm_steps_take(make_player: MakePlayer) -> None:
    pace = Pace(target_ns=None, least=16, cuts=True)
    assert pace.most_prompt_tokens(num_rows=1, num_waiting=31) == 16, "it knows nothing yet"
    for size, duration_ns in make_player(Shape(), num_slots=12).runner.warm_up(200):
        pace.learn_size(size, duration_ns)
    assert pace.most_prompt_tokens(num_rows=1, num_waiting=31) >= 124


def test_the_largest_prompt_of_a_cpu_runs_one_layer(make_player: MakePlayer, monkeypatch: pytest.MonkeyPatch) -> None:
    player = make_player(Shape(num_layers=3), num_slots=12)
    shapes = record(monkeypatch, player.runner._model._blocks[0], "down")  # type: ignore[attr-defined]
    last = record(monkeypatch, player.runner._model._blocks[-1], "qkv")  # type: ignore[attr-defined]
    player.runner.warm_up(200)
    assert max(len(x) for (x,) in shapes) == 200  # type: ignore[arg-type]
    assert max(len(x) for (x,) in last) == 32, "a prompt that is measured"  # type: ignore[arg-type]
