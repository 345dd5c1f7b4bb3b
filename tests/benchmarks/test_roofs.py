"""The roof of a decode step: weights or multiplication, whichever is slower, and the KV cache after it."""

from functools import partial

import pytest

from benchmarks import roofs


def test_what_a_step_of_gpt2_small_reads() -> None:
    all_layers = 85_054_464
    biases_and_norms = 12 * (9 * 768 + 2 * 2 * 768)
    assert all_layers - biases_and_norms + 50257 * 768 == roofs.STEP_WEIGHTS
    assert roofs.kv_bytes("bfloat16", 1, 1) == 36_864
    assert roofs.kv_bytes("float32", 64, 512) == 64 * 512 * 73_728
    assert roofs.kv_bytes("int8", 2, 3) == roofs.kv_bytes("bfloat16", 2, 3), "int8 is of the linears"


def test_one_sequence_is_bound_by_the_weights() -> None:
    weights_s = roofs.STEP_WEIGHTS * 2 / 30e9
    assert roofs.roof_ms("bfloat16", 1, 64, 30e9, 1e12) == pytest.approx((weights_s + 64 * 36_864 / 30e9) * 1e3)


def test_a_large_batch_is_bound_by_the_multiplication() -> None:
    multiply_s = 2 * roofs.STEP_WEIGHTS * 64 / 440e9
    assert roofs.roof_ms("bfloat16", 64, 64, 30e9, 440e9) == pytest.approx((multiply_s + 64 * 64 * 36_864 / 30e9) * 1e3)


def test_the_bandwidth_is_that_of_about_as_many_bytes() -> None:
    assert roofs.nearest_mib(10 * 2**20) == 118
    assert roofs.nearest_mib(roofs.step_bytes("bfloat16", 1, 64)) == 236
    assert roofs.nearest_mib(800 * 2**20) == 472, "nearer in ratio than 1416"
    assert roofs.nearest_mib(2**40) == 1416


def test_a_rate_is_of_the_fastest_way_to_read(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [0.0]

    def reading(took_s: float) -> None:
        now_s[0] += took_s

    monkeypatch.setattr("time.perf_counter", lambda: now_s[0])
    monkeypatch.setattr(
        roofs, "read_patterns", lambda _: {"one": partial(reading, 4.0), "other": partial(reading, 2.0)}
    )
    assert roofs.read_rate(100)() == 50


def test_the_roof_of_a_gpu_takes_the_bandwidth_of_weights_and_cache_together() -> None:
    measured = {"bandwidth": {"236": 36e9, "1416": 27e9}, "peak": {"bfloat16": 2e12}}
    assert roofs.roof_of(measured, "bfloat16", 1, 64) == roofs.roof_ms("bfloat16", 1, 64, 36e9, 2e12)
    assert roofs.roof_of(measured, "bfloat16", 64, 512) == roofs.roof_ms("bfloat16", 64, 512, 27e9, 2e12)


def test_a_median_is_of_at_least_three_calls_and_not_the_first() -> None:
    calls: list[int] = []
    assert roofs.median_s(lambda: calls.append(0), 0.0) >= 0
    assert len(calls) == 4
