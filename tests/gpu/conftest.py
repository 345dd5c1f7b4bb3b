"""What the tests on a GPU share: small checkpoints and runners of them. Without a GPU they are not collected."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from roseinfer.config.options import CacheConfig, Config, ModelConfig, RunnerConfig, SchedulerConfig
from roseinfer.model.runner import ModelRunner, load_runner
from tests.unit.model.conftest import Shape, write_checkpoint

HAS_GPU = torch.cuda.is_available()
NUM_SLOTS = 24
NUM_BLOCKS = 400
MAX_TOKENS = NUM_SLOTS * 128  # of a step: the tests' driver knows no budget, and may send all prompts at once

collect_ignore_glob = [] if HAS_GPU else ["test_*.py"]


def pytest_report_header() -> str:
    return "tests/gpu: " + (torch.cuda.get_device_name() if HAS_GPU else "no CUDA device, so none of them is collected")


@pytest.fixture(scope="session")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers, two heads of 64."""
    return write_checkpoint(tmp_path_factory.mktemp("gpt2"), Shape(head_dim=64))


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four heads of 32 that share two key heads; weights wide enough that no two logits are nearly equal."""
    torch.manual_seed(3)
    config = Qwen3Config(
        vocab_size=131,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        initializer_range=0.2,
    )
    directory = tmp_path_factory.mktemp("qwen3")
    Qwen3ForCausalLM(config).save_pretrained(directory)
    return directory


LoadRunner = Callable[..., ModelRunner]


@pytest.fixture
def load(gpt2: Path) -> Iterator[LoadRunner]:
    """A warm runner in float32 on the GPU; what is given are options of `RunnerConfig`, or another model."""

    def load_warm(
        directory: Path = gpt2,
        dtype: str = "float32",
        told: list[tuple[object, ...]] | None = None,
        **options: object,
    ) -> ModelRunner:
        config = Config(
            model=ModelConfig(path=str(directory), dtype=dtype),  # type: ignore[arg-type]
            cache=CacheConfig(num_blocks=NUM_BLOCKS),
            scheduler=SchedulerConfig(max_num_seqs=NUM_SLOTS, max_num_batched_tokens=MAX_TOKENS),
            runner=RunnerConfig(**{"device": "cuda"} | options),  # type: ignore[arg-type]
        )
        on_progress = (lambda *_: None) if told is None else lambda *stage: told.append(stage)
        runner = load_runner(config, NUM_SLOTS, on_progress)
        runner.warm_up(512)
        return runner

    yield load_warm
    torch.cuda.synchronize()
