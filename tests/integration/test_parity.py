"""Our models against `transformers`, on small random checkpoints: the same logits, the same greedy tokens."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

from roseinfer.config import Config, ModelConfig, RunnerConfig
from roseinfer.engine.batch import ScheduledBatch, SlotBinding
from roseinfer.messages import SamplingParams
from roseinfer.model.runner import ModelRunner, load_runner

# Weights wider than a model is born with, so that no two logits are nearly equal and greedy has no ties.
GPT2_CONFIGS = {
    "gpt2": GPT2Config(vocab_size=211, n_positions=256, n_embd=64, n_layer=3, n_head=4, initializer_range=0.2),
    "gpt2-one-head": GPT2Config(vocab_size=97, n_positions=200, n_embd=32, n_layer=2, n_head=1, initializer_range=0.3),
    "gpt2-untied-gelu": GPT2Config(
        vocab_size=150,
        n_positions=256,
        n_embd=96,
        n_layer=2,
        n_head=2,
        n_inner=200,
        activation_function="gelu",
        tie_word_embeddings=False,
        layer_norm_epsilon=1e-3,
        initializer_range=0.2,
    ),
}
NUM_TOKENS = 64
TOLERANCE = 1e-4


@pytest.fixture(params=GPT2_CONFIGS, scope="module")
def reference(request: pytest.FixtureRequest) -> PreTrainedModel:
    torch.manual_seed(0)
    config = GPT2_CONFIGS[request.param]
    config.bos_token_id = config.eos_token_id = None
    model = GPT2LMHeadModel(config).eval()
    for parameter in model.parameters():  # biases and norms are born at 0 and 1, where a mistake would not show
        if parameter.dim() == 1:
            parameter.data += torch.randn(parameter.shape) * 0.2
    return model


@pytest.fixture
def runner(reference: PreTrainedModel, tmp_path: Path) -> ModelRunner:
    reference.save_pretrained(tmp_path)
    model = ModelConfig(path=str(tmp_path), dtype="float32")
    return load_runner(Config(model=model, runner=RunnerConfig(device="cpu", num_threads=1)), 1, lambda *_: None)


def batch_of(start: int, token_ids: list[int]) -> ScheduledBatch:
    """One row of one sequence over the first blocks."""
    return ScheduledBatch(
        step_id=0,
        slots=np.zeros(1, np.int32),
        starts=np.array([start], np.int32),
        num_new_tokens=np.array([len(token_ids)], np.int32),
        samples=np.array([True]),
        num_device_rows=0,
        token_ids=np.array(token_ids, np.int32),
        block_table=np.arange(16, dtype=np.int32)[None],
        bindings=(SlotBinding(0, SamplingParams(temperature=0.0), 1, ()),),
    )


@torch.inference_mode()
def greedy(reference: PreTrainedModel, prompt: list[int]) -> list[int]:
    token_ids = list(prompt)
    for _ in range(NUM_TOKENS):
        token_ids.append(int(reference(torch.tensor([token_ids])).logits[0, -1].argmax()))
    return token_ids


@pytest.mark.parametrize("prompt_length", [1, 100])
def test_logits_and_greedy_tokens(reference: PreTrainedModel, runner: ModelRunner, prompt_length: int) -> None:
    vocab_size = reference.config.vocab_size
    prompt = np.random.default_rng(3).integers(0, vocab_size, prompt_length).tolist()
    expected = greedy(reference, prompt)
    logits = reference(torch.tensor([expected])).logits[0].detach()
    gaps = logits.topk(2).values.diff().abs()
    assert float(gaps[prompt_length - 1 : -1].min()) > 2 * TOLERANCE, "greedy nearly ties: widen the weights"
    ours, position, step = list(prompt), 0, prompt
    while len(ours) < len(expected):
        row = runner.logits(batch_of(position, step))
        torch.testing.assert_close(row[0], logits[position + len(step) - 1], atol=TOLERANCE, rtol=0)
        sampled = runner.launch(batch_of(position, step)).wait().token_ids.tolist()
        position, step = position + len(step), sampled
        ours += sampled
    assert ours == expected


def test_every_position_of_a_prompt(reference: PreTrainedModel, runner: ModelRunner) -> None:
    """All prefixes, one token a step, so that each of the model's positions is compared."""
    length = runner.info.max_model_len
    prompt = np.random.default_rng(4).integers(0, reference.config.vocab_size, length).tolist()
    expected = reference(torch.tensor([prompt])).logits[0].detach()
    rows = [runner.logits(batch_of(position, [token_id]))[0] for position, token_id in enumerate(prompt)]
    torch.testing.assert_close(torch.stack(rows), expected, atol=TOLERANCE, rtol=0)
