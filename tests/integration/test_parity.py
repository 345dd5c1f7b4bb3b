"""Our models against `transformers`, on small random checkpoints: the same logits, the same greedy tokens.

Every checkpoint is written by `save_pretrained` and read as a server reads it. In float32 the two differ by rounding
alone: no logit by more than `TOLERANCE`, of logits that go up to about 10.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MinistralConfig,
    MinistralForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    SeedOssConfig,
    SeedOssForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

from roseinfer.config.options import CacheConfig, Config, ModelConfig, RunnerConfig
from roseinfer.engine.core.batch import ScheduledBatch, SlotBinding
from roseinfer.messages import SamplingParams
from roseinfer.model.kernels.library import levels_here
from roseinfer.model.runner import ModelRunner, load_runner
from tests.conftest import BuiltKernels

NUM_TOKENS = 64
TOLERANCE = 1e-4

# Weights wider than a model is born with, so that no two logits are nearly equal and greedy has no ties.
GPT2 = {"vocab_size": 211, "n_positions": 150, "n_embd": 64, "n_layer": 3, "n_head": 4, "initializer_range": 0.2}
LLAMA: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 64,
    "intermediate_size": 100,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 144,
    "initializer_range": 0.2,
}
SMALL = {"vocab_size": 101, "hidden_size": 48, "num_hidden_layers": 2}
ROPE = {"rope_theta": 500.0, "original_max_position_embeddings": 50, "factor": 4.0}
CONFIGS = {
    "gpt2": GPT2Config(**GPT2),
    "gpt2-one-head": GPT2Config(**GPT2 | {"vocab_size": 97, "n_embd": 32, "n_head": 1, "initializer_range": 0.3}),
    "gpt2-untied-gelu": GPT2Config(
        **GPT2 | {"vocab_size": 150, "n_embd": 96, "n_layer": 2, "n_head": 2},
        n_inner=200,
        activation_function="gelu",
        tie_word_embeddings=False,
        layer_norm_epsilon=1e-3,
    ),
    "llama": LlamaConfig(**LLAMA),
    "llama-biases-tied": LlamaConfig(
        **LLAMA | SMALL | {"num_key_value_heads": 4},
        head_dim=32,
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
        rms_norm_eps=1e-3,
    ),
    "llama-llama3-rope": LlamaConfig(
        **LLAMA, rope_parameters=ROPE | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    ),
    "llama-yarn": LlamaConfig(**LLAMA, rope_parameters=ROPE | {"rope_type": "yarn"}),
    "llama-linear": LlamaConfig(**LLAMA, rope_parameters={"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}),
    "llama-dynamic": LlamaConfig(
        **LLAMA | SMALL, rope_parameters={"rope_type": "dynamic", "rope_theta": 500.0, "factor": 4.0}
    ),
    "mistral-window": MistralConfig(**LLAMA | {"num_key_value_heads": 1}, sliding_window=37),
    "mistral": MistralConfig(**LLAMA | {"num_key_value_heads": 4}, sliding_window=None),
    "mistral-layer-types": MinistralConfig(
        **LLAMA,
        head_dim=24,
        sliding_window=20,
        layer_types=["full_attention", "sliding_attention", "sliding_attention"],
    ),
    "qwen2-tied": Qwen2Config(**LLAMA, tie_word_embeddings=True),
    "qwen2-windows": Qwen2Config(**LLAMA, use_sliding_window=True, sliding_window=24, max_window_layers=1),
    "qwen2-layer-types": Qwen2Config(
        **LLAMA,
        use_sliding_window=True,
        sliding_window=24,
        max_window_layers=3,
        layer_types=["sliding_attention", "full_attention", "full_attention"],
    ),
    "granite": GraniteConfig(
        **LLAMA,
        embedding_multiplier=3.0,
        residual_multiplier=0.7,
        attention_multiplier=0.2,
        logits_scaling=1.7,
        tie_word_embeddings=True,
    ),
    "seed-oss": SeedOssConfig(**LLAMA, head_dim=24, attention_out_bias=True),
    "smollm3": SmolLM3Config(**LLAMA, no_rope_layer_interval=2),
    "smollm3-windows-untied": SmolLM3Config(
        **LLAMA,
        no_rope_layers=[1, 0, 1],
        use_sliding_window=True,
        sliding_window=20,
        tie_word_embeddings=False,
        attention_bias=True,
    ),
    "smollm3-layer-types": SmolLM3Config(
        **LLAMA, sliding_window=20, layer_types=["sliding_attention", "full_attention", "sliding_attention"]
    ),
    "qwen3": Qwen3Config(**LLAMA, head_dim=32),
    "qwen3-windows-biases": Qwen3Config(
        **LLAMA,
        head_dim=24,
        attention_bias=True,
        use_sliding_window=True,
        sliding_window=16,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
}
MODELS: dict[type, type[PreTrainedModel]] = {
    GPT2Config: GPT2LMHeadModel,
    LlamaConfig: LlamaForCausalLM,
    MinistralConfig: MinistralForCausalLM,  # which transformers takes for a mistral with layer_types
    MistralConfig: MistralForCausalLM,
    Qwen2Config: Qwen2ForCausalLM,
    Qwen3Config: Qwen3ForCausalLM,
    GraniteConfig: GraniteForCausalLM,
    SeedOssConfig: SeedOssForCausalLM,
    SmolLM3Config: SmolLM3ForCausalLM,
}


@pytest.fixture(params=CONFIGS, scope="module")
def reference(request: pytest.FixtureRequest) -> PreTrainedModel:
    torch.manual_seed(0)
    config = CONFIGS[request.param]
    config.bos_token_id = config.eos_token_id = config.pad_token_id = None
    model = MODELS[type(config)](config).eval()
    for parameter in model.parameters():  # biases and norms are born at 0 and 1, where a mistake would not show
        if parameter.dim() == 1:
            parameter.data += torch.randn(parameter.shape) * 0.2
    return model


def change_config(directory: Path, changes: dict[str, Any]) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def load(reference: PreTrainedModel, directory: Path, **runner: Any) -> ModelRunner:
    reference.save_pretrained(directory, max_shard_size="150KB")  # in several files, all but the smallest
    if reference.config.model_type == "ministral":  # stored as Ministral 8B is
        change_config(directory, {"model_type": "mistral", "architectures": ["MistralForCausalLM"]})
    return load_stored(directory, **runner)


def load_stored(directory: Path, **runner: Any) -> ModelRunner:
    config = Config(
        model=ModelConfig(path=str(directory), dtype="float32"),
        cache=CacheConfig(num_blocks=16),
        runner=RunnerConfig(device="cpu", num_threads=1, **({"kernels": "off"} | runner)),
    )
    return load_runner(config, 1, lambda *_: None)


@pytest.fixture
def runner(reference: PreTrainedModel, tmp_path: Path) -> ModelRunner:
    return load(reference, tmp_path)


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


def prompt_of(reference: PreTrainedModel, length: int) -> list[int]:
    prompt: list[int] = np.random.default_rng(3).integers(0, reference.config.vocab_size, length).tolist()
    return prompt


@torch.inference_mode()
def greedy(reference: PreTrainedModel, prompt: list[int]) -> list[int]:
    """Each token from the whole text before it, without a cache."""
    token_ids = list(prompt)
    for _ in range(NUM_TOKENS):
        token_ids.append(int(reference(torch.tensor([token_ids]), logits_to_keep=1).logits[0, -1].argmax()))
    return token_ids


def test_greedy_tokens(reference: PreTrainedModel, runner: ModelRunner) -> None:
    prompt = prompt_of(reference, 70)
    expected = greedy(reference, prompt)
    gaps = reference(torch.tensor([expected])).logits[0].detach().topk(2).values.diff().abs()
    assert float(gaps[len(prompt) - 1 : -1].min()) > 2 * TOLERANCE, "greedy nearly ties: widen the weights"
    ours, position, step = list(prompt), 0, prompt
    while len(ours) < len(expected):
        sampled = runner.launch(batch_of(position, step)).wait().token_ids.tolist()
        position, step = position + len(step), sampled
        ours += sampled
    assert ours == expected


def test_logits_at_every_position(reference: PreTrainedModel, runner: ModelRunner) -> None:
    """All prefixes of a text as long as the model allows, one token a step; then a prompt at once."""
    prompt = prompt_of(reference, runner.info.max_model_len)
    expected = reference(torch.tensor([prompt])).logits[0].detach()
    rows = [runner.logits(batch_of(position, [token_id]))[0] for position, token_id in enumerate(prompt)]
    rows[99] = runner.logits(batch_of(0, prompt[:100]))[0]
    torch.testing.assert_close(torch.stack(rows), expected, atol=TOLERANCE, rtol=0)


def test_with_compiled_kernels(reference: PreTrainedModel, tmp_path: Path, built_kernels: BuiltKernels) -> None:
    """At the highest level of this processor: a prompt in pieces, then token by token."""
    level = levels_here()[-1].name
    runner = load(reference, tmp_path, kernels=level, kernels_dir=str(built_kernels(level)))
    assert runner.info.kernels == level
    prompt = prompt_of(reference, 144)
    expected = reference(torch.tensor([prompt])).logits[0].detach()
    for start, end in ((0, 90), (90, 136), *((i, i + 1) for i in range(136, 144))):
        row = runner.logits(batch_of(start, prompt[start:end]))[0]
        torch.testing.assert_close(row, expected[end - 1], atol=TOLERANCE, rtol=0)


def test_parameters_are_counted_once(reference: PreTrainedModel, runner: ModelRunner) -> None:
    assert runner.info.model_type == reference.config.model_type.replace("ministral", "mistral")
    assert runner.info.num_parameters == sum(parameter.numel() for parameter in reference.parameters())


@pytest.mark.parametrize("is_equal", [False, True])
@pytest.mark.parametrize("name", ["gpt2-untied-gelu", "llama"])
def test_a_head_beside_tied_embeddings(name: str, is_equal: bool, tmp_path: Path) -> None:
    """config.json ties them, and the file holds a head: transformers uses it where it differs."""
    torch.manual_seed(0)
    config = CONFIGS[name]
    stored = MODELS[type(config)](config)
    if is_equal:
        stored.get_output_embeddings().weight.data = stored.get_input_embeddings().weight.data.clone()
    stored.save_pretrained(tmp_path)
    change_config(tmp_path, {"tie_word_embeddings": True})
    reference = AutoModelForCausalLM.from_pretrained(tmp_path)
    runner = load_stored(tmp_path)
    prompt = prompt_of(reference, 50)
    expected = reference(torch.tensor([prompt])).logits[0, -1].detach()
    torch.testing.assert_close(runner.logits(batch_of(0, prompt))[0], expected, atol=TOLERANCE, rtol=0)
    assert runner.info.num_parameters == sum(parameter.numel() for parameter in reference.parameters())


@pytest.mark.parametrize("name", ["gpt2", "llama-biases-tied"])
def test_tied_embeddings_under_the_name_of_the_head(name: str, tmp_path: Path) -> None:
    """Of two names of one weight a file may have either, and transformers takes what is there."""
    torch.manual_seed(0)
    MODELS[type(CONFIGS[name])](CONFIGS[name]).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    [table] = [each for each in tensors if each.endswith(("wte.weight", "embed_tokens.weight"))]
    save_file({"lm_head.weight" if each == table else each: tensor for each, tensor in tensors.items()}, file)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path)
    runner, prompt = load_stored(tmp_path), prompt_of(reference, 50)
    expected = reference(torch.tensor([prompt])).logits[0, -1].detach()
    torch.testing.assert_close(runner.logits(batch_of(0, prompt))[0], expected, atol=TOLERANCE, rtol=0)
    assert runner.info.num_parameters == sum(parameter.numel() for parameter in reference.parameters())
