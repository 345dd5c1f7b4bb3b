"""How many blocks the cache gets."""

import pytest
import torch

from roseinfer.config.options import CacheConfig
from roseinfer.errors import ConfigError
from roseinfer.model.attention.base import AttentionSpec
from roseinfer.model.attention.kv_cache import KVCache, plan_num_blocks
from roseinfer.model.device import Placement

SPEC = AttentionSpec(8, 4, 32, scale=1.0, windows=(None, None))  # 2 KiB a token in float32
FLOAT32 = Placement(torch.device("cpu"), torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_has_a_scale_for_each_token_and_head(dtype: torch.dtype) -> None:
    assert SPEC.bytes_per_token(torch.int8) == 2 * 2 * 4 * (32 + 4)
    placement = Placement(torch.device("cpu"), dtype)
    cache = KVCache(SPEC, 5, 16, placement, "int8")
    tensors = (*cache.keys, *cache.values, *cache.key_scales, *cache.value_scales)
    assert sum(x.nbytes for x in tensors) == 5 * 16 * SPEC.bytes_per_token(torch.int8)
    config = CacheConfig(cpu_memory_mib=3, dtype="int8")
    assert plan_num_blocks(config, SPEC, placement, 1000, 1000) == (3 << 20) // (16 * 2 * 2 * 4 * 36)


def plan(config: CacheConfig, max_model_len: int = 1000, max_active_seqs: int = 4) -> int:
    return plan_num_blocks(config, SPEC, FLOAT32, max_model_len, max_active_seqs)


def test_bytes_are_keys_and_values_of_all_layers() -> None:
    assert SPEC.bytes_per_token(torch.float32) == 2 * 2 * 4 * 32 * 4
    cache = KVCache(SPEC, 5, 16, FLOAT32)
    assert sum(x.nbytes for x in (*cache.keys, *cache.values)) == 5 * 16 * SPEC.bytes_per_token(torch.float32)


def test_as_many_blocks_as_configured() -> None:
    assert plan(CacheConfig(num_blocks=63)) == 63


def test_no_more_than_all_sequences_can_use() -> None:
    assert plan(CacheConfig()) == 4 * 63  # 1000 tokens take 63 blocks of 16


def test_no_more_than_the_memory_holds() -> None:
    assert plan(CacheConfig(cpu_memory_mib=3)) == 3 * 1024 // 2 // 16
    assert plan(CacheConfig(cpu_memory_mib=3, block_size=64)) == 3 * 1024 // 2 // 64


@pytest.mark.parametrize(
    ("config", "told"),
    [(CacheConfig(num_blocks=62), "raise cache.num_blocks"), (CacheConfig(cpu_memory_mib=1), "cache.cpu_memory_mib")],
)
def test_one_full_sequence_must_fit(config: CacheConfig, told: str) -> None:
    with pytest.raises(ConfigError, match=told) as caught:
        plan(config)
    assert caught.value.param == "cache.num_blocks"
    assert "63 blocks" in caught.value.message


@pytest.mark.parametrize(
    ("config", "param"),
    [
        (CacheConfig(num_blocks=10**9), "cache.num_blocks"),
        (CacheConfig(cpu_memory_mib=10**9), "cache.cpu_memory_mib"),
    ],
)
def test_a_cpu_must_have_the_memory(config: CacheConfig, param: str) -> None:
    with pytest.raises(ConfigError, match=r"GiB, and this machine has \d") as caught:
        plan(config, max_active_seqs=10**7)
    assert caught.value.param == param


GPU = Placement(torch.device("cuda"), torch.bfloat16)  # 1 KiB a token
GIB, BLOCK_BYTES = 1 << 30, 16 << 10


def memory_of(monkeypatch: pytest.MonkeyPatch, free: int, total: int) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (free, total))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)


def test_on_a_gpu_the_share_of_its_memory_that_weights_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 100 GiB a share of 0.5 is 50, and 30 are in use."""
    memory_of(monkeypatch, free=70 * GIB, total=100 * GIB)
    config = CacheConfig(memory_utilization=0.5)
    assert plan_num_blocks(config, SPEC, GPU, 1000, 1_000_000) == 20 * GIB // BLOCK_BYTES
    with pytest.raises(ConfigError, match=r"hold 0 tokens.*raise cache.memory_utilization"):
        plan_num_blocks(CacheConfig(memory_utilization=0.1), SPEC, GPU, 1000, 1_000_000)


def test_a_gpu_that_others_fill_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A larger share would not help: another server holds the memory."""
    memory_of(monkeypatch, free=2 * GIB, total=80 * GIB)
    with pytest.raises(ConfigError, match=r"80\.0 GiB 78\.0 are in use, .*by other processes; CUDA_VISIBLE_DEVICES"):
        plan_num_blocks(CacheConfig(), SPEC, GPU, 1000, 4)


def test_on_a_gpu_something_is_left_to_compute_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever share was asked for: a step has its own tensors, and so have the graphs."""
    memory_of(monkeypatch, free=70 * GIB, total=100 * GIB)
    config = CacheConfig(memory_utilization=1.0)
    assert plan_num_blocks(config, SPEC, GPU, 1000, 1_000_000) == 69 * GIB // BLOCK_BYTES
    assert plan_num_blocks(config, SPEC, GPU, 1000, 1_000_000, sampling_bytes=GIB) == 68 * GIB // BLOCK_BYTES
