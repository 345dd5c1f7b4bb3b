"""The runner: what it reports, how it is loaded, and that slots keep their last token on the device."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from roseinfer.config.options import CacheConfig, Config, ModelConfig, RunnerConfig
from roseinfer.engine.core.batch import NO_TOKEN, OWN_FAULT, ScheduledBatch, ScoredRow, SlotBinding
from roseinfer.errors import ConfigError
from roseinfer.messages import SamplingParams
from roseinfer.model.kernels.library import levels_here
from roseinfer.model.layers.linear import Linear
from roseinfer.model.runner import ModelRunner, load_runner
from roseinfer.model.sampling.sampler import Sampler
from roseinfer.records import LifecycleState
from tests.unit.model.conftest import MakePlayer, Shape, prompt_of, write_checkpoint

SHAPE = Shape()
LEVELS = [level.name for level in levels_here()]


def config_of(directory: Path, model: dict[str, object] | None = None, **runner: object) -> Config:
    """Without kernels, on one thread and in float32, unless said otherwise."""
    model = {"dtype": "float32"} | (model or {})
    runner = {"device": "cpu", "num_threads": 1, "kernels": "off"} | runner
    return Config(
        model=ModelConfig(path=str(directory), **model),  # type: ignore[arg-type]
        runner=RunnerConfig(**runner),  # type: ignore[arg-type]
    )


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "tiny", SHAPE)


def load(directory: Path, **model: object) -> ModelRunner:
    return load_runner(config_of(directory, model), 4, lambda *_: None)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_info(directory: Path, dtype: str) -> None:
    info = load(directory, dtype=dtype, max_model_len=100).info
    assert info.checkpoint_dir == str(directory)
    assert (info.model_type, info.vocab_size, info.max_model_len) == ("gpt2", 131, 100)
    assert (info.device, info.dtype, info.attention) == ("cpu", dtype, "gathered")
    assert (info.quantization, info.kernels) == ("none", "")
    assert info.num_blocks == 4 * 7
    assert info.eos_token_ids == []


@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_weights_that_are_no_numbers_are_refused_before_a_request_comes(
    directory: Path, quantization: str, broken: float
) -> None:
    file = directory / "model.safetensors"
    tensors = load_file(file)
    tensors["h.0.mlp.c_fc.weight"][3, 5] = broken
    save_file(tensors, file, metadata={"format": "pt"})
    runner = load(directory, quantization=quantization)
    with pytest.raises(ConfigError, match="logits are not finite in float32") as caught:
        runner.warm_up(64)
    assert caught.value.param == "model.path"


@pytest.mark.parametrize(("cache_type", "kv_dtype"), [("auto", "float32"), ("int8", "int8")])
def test_info_names_the_type_of_the_cache(directory: Path, cache_type: Literal["auto", "int8"], kv_dtype: str) -> None:
    """And a pool of so much memory has blocks of that type."""
    config = replace(config_of(directory), cache=CacheConfig(dtype=cache_type, cpu_memory_mib=1))
    info = load_runner(config, 256, lambda *_: None).info
    block_bytes = {"float32": 16 * 2 * 2 * 2 * 16 * 4, "int8": 16 * 2 * 2 * 2 * (16 + 4)}[kv_dtype]
    assert (info.kv_dtype, info.num_blocks) == (kv_dtype, (1 << 20) // block_bytes)


def test_info_names_the_linears_in_use(directory: Path) -> None:
    for quantization, name in (("none", "onednn"), ("int8", "int8"), ("int4", "int4")):
        info = load(directory, quantization=quantization).info
        assert (info.linear, info.quantization) == (name, quantization)


@pytest.mark.parametrize("level", LEVELS)
def test_info_names_the_kernels_in_use(directory: Path, level: str, built_kernels: Callable[[str], Path]) -> None:
    config = config_of(directory, kernels=level, kernels_dir=str(built_kernels(level)))
    info = load_runner(config, 4, lambda *_: None).info
    assert (info.kernels, info.attention) == (level, "native")


@pytest.mark.parametrize(
    ("dtype", "num_threads", "param"), [("bfloat16", 9, "runner.num_threads"), ("float32", 9, None)]
)
def test_threads_that_would_split_a_sum(
    directory: Path, dtype: str, num_threads: int, param: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)  # as on a newer processor
    config = config_of(directory, {"dtype": dtype}, num_threads=num_threads)
    if param is None:
        assert load_runner(config, 4, lambda *_: None).info.num_threads == num_threads
        return
    with pytest.raises(ConfigError, match="no more than 8 are exact") as caught:
        load_runner(config, 4, lambda *_: None)
    assert caught.value.param == param


def test_stages_of_loading_are_reported_in_order(directory: Path) -> None:
    told: list[tuple[LifecycleState, str, str]] = []
    load_runner(config_of(directory), 4, lambda state, stage, detail, *_: told.append((state, stage, detail)))
    assert [(state.value, stage) for state, stage, _ in told] == [
        ("loading", "checkpoint"),
        ("loading", "weights"),
        ("loading", "kv_cache"),
    ]
    assert all(detail for _, _, detail in told)


def test_threads_are_as_configured(directory: Path) -> None:
    torch.set_num_threads(2)
    load(directory)
    assert torch.get_num_threads() == 1


def test_a_context_longer_than_the_model_has_positions(directory: Path) -> None:
    with pytest.raises(ConfigError, match="257, but the model has only 256 positions") as caught:
        load(directory, max_model_len=257)
    assert caught.value.param == "model.max_model_len"


def test_without_a_length_the_context_is_what_the_cache_holds(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = write_checkpoint(tmp_path / "long", replace(SHAPE, num_positions=4096))
    cache = CacheConfig(num_blocks=70)

    info = load_runner(replace(config_of(directory), cache=cache), 4, lambda *_: None).info
    assert (info.max_model_len, info.num_blocks) == (1120, 70)
    assert "1120 tokens, which is all that the KV cache holds, and not the 4096 of the model" in caplog.text

    with pytest.raises(ConfigError, match="one sequence may take 4096"):  # what was asked for is not made less
        load_runner(replace(config_of(directory, {"max_model_len": 4096}), cache=cache), 4, lambda *_: None)
    with pytest.raises(ConfigError, match="one sequence may take 1024"):
        load_runner(replace(config_of(directory), cache=CacheConfig(num_blocks=63)), 4, lambda *_: None)


def test_a_cache_too_small_for_one_sequence(directory: Path) -> None:
    config = Config(model=ModelConfig(path=str(directory)), cache=CacheConfig(num_blocks=15))
    with pytest.raises(ConfigError) as caught:
        load_runner(config, 4, lambda *_: None)
    assert caught.value.param == "cache.num_blocks"


def test_bfloat16_is_near_float32(make_player: MakePlayer) -> None:
    rows = []
    for dtype in ("float32", "bfloat16"):
        player = make_player(Shape(head_dim=32), dtype)
        player.admit(0, prompt_of(50))
        rows.append(player.run(0, 1)[0].logits.float())
    assert (rows[0] - rows[1]).abs().max() < 0.05 * rows[0].abs().max()


def test_a_step_without_samples(make_player: MakePlayer) -> None:
    player = make_player(SHAPE)
    player.admit(0, prompt_of(30))
    player.admit(1, prompt_of(30))
    assert player.step({0: 10, 1: 7}) == {}
    assert set(player.step({0: 20, 1: 7})) == {0}


def test_seeds_decide_whatever_the_company_and_the_slot(make_player: MakePlayer) -> None:
    """Sampled requests repeat themselves alone, batched with others, and resumed after preemption."""
    params = SamplingParams(seed=11, top_p=0.95, num_logprobs=3)
    player = make_player(SHAPE)
    player.admit(0, prompt_of(20), params)
    expected = [(outcome.token_id, outcome.logprobs) for outcome in player.run(0, 12)]
    assert len({token_id for token_id, _ in expected}) > 3
    player.admit(5, prompt_of(20), params)
    player.admit(1, prompt_of(33), SamplingParams(seed=12))
    player.admit(2, prompt_of(3), SamplingParams(temperature=0.0))
    outcomes = [player.step({5: 20, 1: 33, 2: 3})[5]]
    outcomes += [player.step({1: 1, 5: 1, 2: 1})[5] for _ in range(5)]
    player.preempt(5, new_slot=3)
    outcomes += player.run(3, 6, chunk=9)
    assert [(outcome.token_id, outcome.logprobs) for outcome in outcomes] == expected


def test_the_last_token_of_a_slot_waits_on_the_device(make_player: MakePlayer) -> None:
    """The next step may be launched before the host has seen this one's tokens, and reads none from the batch."""
    player = make_player(SHAPE)
    player.admit(0, prompt_of(20))
    expected = [outcome.token_id for outcome in player.run(0, 3)]
    runner, table = player.runner, np.arange(4, dtype=np.int32)[None]
    binding = SlotBinding(0, SamplingParams(temperature=0.0), 20, ())

    def batch(start: int, token_ids: list[int], bindings: tuple[SlotBinding, ...] = ()) -> ScheduledBatch:
        return ScheduledBatch(
            step_id=0,
            slots=np.zeros(1, np.int32),
            starts=np.array([start], np.int32),
            num_new_tokens=np.array([len(token_ids) or 1], np.int32),
            samples=np.array([True]),
            num_device_rows=0 if token_ids else 1,
            token_ids=np.array(token_ids, np.int32),
            block_table=table,
            bindings=bindings,
        )

    launched = [
        runner.launch(batch(0, prompt_of(20), (binding,))),
        runner.launch(batch(20, [])),
        runner.launch(batch(21, [])),
    ]
    results = [step.wait() for step in launched]
    assert [result.token_ids.tolist() for result in results] == [[token_id] for token_id in expected]
    assert all(result.token_ids.dtype == np.int32 and result.logprobs is None for result in results)


def test_min_tokens_counts_from_the_end_of_the_prompt(make_player: MakePlayer) -> None:
    """Even when the request comes back after preemption, its prompt and tokens computed in one piece."""
    player = make_player(SHAPE)
    player.admit(0, prompt_of(12))
    first = player.run(0, 1)[0].token_id
    player.admit(1, prompt_of(12), SamplingParams(temperature=0.0, min_tokens=1), eos=(first,))
    player.admit(2, prompt_of(12), SamplingParams(temperature=0.0, min_tokens=1, stop_token_ids=(first,)))
    barred = player.run(1, 1) + player.run(2, 1)
    assert all(outcome.token_id == int(outcome.logits.topk(2).indices[1]) for outcome in barred)
    player.sequences[1].token_ids.pop()
    player.preempt(1, new_slot=4)
    assert player.run(4, 2)[0].token_id == barred[0].token_id


def test_a_warm_runner_has_met_every_number_of_rows(make_player: MakePlayer, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that oneDNN builds no kernel while a request waits."""
    met: dict[int, set[int]] = {}
    call = Linear.__call__

    def recording(linear: Linear, x: torch.Tensor) -> torch.Tensor:
        met.setdefault(id(linear), set()).add(x.shape[0])
        return call(linear, x)

    monkeypatch.setattr(Linear, "__call__", recording)
    player = make_player(SHAPE, num_slots=20, kernels="off")
    player.runner.warm_up(200)
    model, placement = player.runner._model, player.runner._placement
    for linear in model.layer_linears:
        assert {placement.padded_rows(count) for count in range(1, 201)} <= met[id(linear)]
    assert {placement.padded_rows(count) for count in range(1, 21)} <= met[id(model.head)]


def test_warming_up_leaves_no_trace(make_player: MakePlayer) -> None:
    outcomes = []
    for is_warm in (False, True):
        player = make_player(SHAPE)
        if is_warm:
            player.runner.warm_up(100)
        player.admit(0, prompt_of(20), SamplingParams(seed=3))
        outcomes.append([outcome.token_id for outcome in player.run(0, 8)])
    assert outcomes[0] == outcomes[1]


def test_a_result_is_kept_until_it_is_asked_for(make_player: MakePlayer) -> None:
    """Also when more steps were launched than there are buffers for."""
    player = make_player(SHAPE)
    player.admit(0, prompt_of(20), SamplingParams(seed=3, num_logprobs=2))
    expected = [(outcome.token_id, outcome.logprobs) for outcome in player.run(0, 6)]
    player.preempt(0, new_slot=1)
    sequence = player.sequences[1]
    sequence.token_ids = prompt_of(20)
    launched = []
    for step in range(6):
        count = 1 if step else 20
        sequence.is_last_on_device = step > 0
        launched.append(player.runner.launch(player._batch([1], {1: count})))
        sequence.num_computed += count
        sequence.is_new = False
        sequence.token_ids.append(-1)  # on the device alone
    results = [step.wait() for step in launched]
    assert [(int(result.token_ids[0]), (result.logprobs or [None])[0]) for result in results] == expected
    assert [step.wait() is result for step, result in zip(launched, results, strict=True)] == [True] * 6
    assert {step.graph_rows for step in launched} == {0}


def test_parameters_that_cannot_be_used_fail_their_request_and_no_other(
    make_player: MakePlayer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Until the slot has another owner; what its neighbour samples stays what it was."""
    player = make_player(SHAPE)
    runner, bind = player.runner, Sampler.bind
    prompts = [prompt_of(20), prompt_of(12)]

    def batch(bindings: tuple[SlotBinding, ...]) -> ScheduledBatch:
        return ScheduledBatch(
            step_id=0,
            slots=np.arange(2, dtype=np.int32),
            starts=np.zeros(2, np.int32),
            num_new_tokens=np.array([20, 12], np.int32),
            samples=np.array([True, True]),
            num_device_rows=0,
            token_ids=np.array(prompts[0] + prompts[1], np.int32),
            block_table=np.arange(8, dtype=np.int32).reshape(2, 4),
            bindings=bindings,
        )

    greedy = SamplingParams(temperature=0.0)
    bindings = (SlotBinding(0, greedy, 20, ()), SlotBinding(1, SamplingParams(temperature=0.0, seed=666), 12, ()))
    sound = runner.launch(batch((bindings[0], SlotBinding(1, greedy, 12, ())))).wait().token_ids.tolist()

    def refusing(sampler: Sampler, binding: SlotBinding) -> None:
        if binding.params.seed == 666:
            raise IndexError("past the vocabulary")
        bind(sampler, binding)

    monkeypatch.setattr(Sampler, "bind", refusing)
    assert runner.launch(batch(bindings)).wait().token_ids.tolist() == [sound[0], OWN_FAULT]
    assert "no other" in caplog.text
    assert runner.launch(batch(())).wait().token_ids.tolist() == [sound[0], OWN_FAULT]
    assert runner.launch(batch((SlotBinding(1, greedy, 12, ()),))).wait().token_ids.tolist() == sound


def test_a_prompt_is_scored_beside_drafted_tokens_as_it_is_alone(make_player: MakePlayer) -> None:
    """Drafted tokens are rows of the batch, and one row with their sequence where rows are packed."""
    prompt = np.array(prompt_of(20, seed=1), np.int32)
    found = []
    for num_drafts in (0, 3):
        player = make_player(Shape())
        player.admit(0, prompt_of(9))
        player.run(0, 2)
        player.admit(1, prompt.tolist())
        slots, lengths = [0] * (1 + num_drafts) + [1], [1] * (1 + num_drafts) + [len(prompt)]
        player.sequences[0].token_ids += [5] * num_drafts
        batch = player._batch([0, 1], {0: 1 + num_drafts, 1: len(prompt)})
        drafted = np.array([NO_TOKEN, *[5] * num_drafts, NO_TOKEN], np.int32)
        start = int(batch.starts[0])
        rows = msgspec.structs.replace(
            batch,
            slots=np.array(slots, np.int32),
            starts=np.array([*range(start, start + 1 + num_drafts), 0], np.int32),
            num_new_tokens=np.array(lengths, np.int32),
            samples=np.ones(len(slots), np.bool_),
            num_device_rows=0,
            token_ids=np.concatenate([np.array(player.sequences[0].token_ids[start:], np.int32), prompt]),
            drafted=drafted if num_drafts else None,
            scored=(ScoredRow(1 + num_drafts, prompt[1:], 1),),
        )
        [scores] = player.runner.launch(rows).wait().scores
        found.append([part.tobytes() for part in msgspec.structs.astuple(scores)])
    assert found[0] == found[1]


def test_prompts_that_are_scored_together_have_the_scores_they_have_alone(make_player: MakePlayer) -> None:
    """Of different lengths, and with different numbers of likeliest tokens, in several pieces."""
    counts = {0: 3, 1: 0, 2: 7}
    prompts = {slot: np.array(prompt_of(length, seed=slot), np.int32) for slot, length in enumerate((11, 30, 17))}

    def scores(slots: list[int]) -> dict[int, list[bytes]]:
        player = make_player(Shape())
        for slot in slots:
            player.admit(slot, prompts[slot].tolist())
        batch = player._batch(slots, {slot: len(prompts[slot]) for slot in slots})
        asked = tuple(ScoredRow(row, prompts[slot][1:], counts[slot]) for row, slot in enumerate(slots))
        found = player.runner.launch(msgspec.structs.replace(batch, scored=asked)).wait().scores
        return {
            slot: [part.tobytes() for part in msgspec.structs.astuple(of_row)]
            for slot, of_row in zip(slots, found, strict=True)
        }

    assert scores([0, 1, 2]) == scores([0]) | scores([1]) | scores([2])
