"""The CUDA kernels without a GPU: run by Triton's interpreter against textbook and reference, and compiled for real.

Both happen in processes of their own (see triton_processes.py).
"""

import re
import subprocess
from collections.abc import Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from roseinfer.errors import ConfigError
from roseinfer.model.attention.kv_cache import CacheType
from tests.attention_cases import (
    CPU,
    Bench,
    Case,
    check_history,
    check_padding,
    check_splits,
    invariant_results,
    new_backend,
)
from tests.unit.model.triton_processes import (
    ABSENT_GPU,
    Worker,
    compiled,
    compiler_process,
    interpreter_process,
    ptxas_for,
)

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed; the extra `test` has it")


@pytest.fixture(scope="module")
def interpreter() -> Iterator[Worker]:
    yield from interpreter_process()


HALF = torch.float16
BRAIN: dict[str, Any] = {
    "dtype": torch.bfloat16,
    "query_dtype": torch.float32,
}  # the interpreter does not round to bfloat16


@pytest.mark.parametrize(
    "case",
    [
        Case(2, 2),
        Case(2, 2, 80, 8, 50),
        Case(3, 1, 96, 32, dtype=HALF),
        Case(8, 1, 128, 64, 65, **BRAIN),
        Case(4, 2, 24, 16, 1),
        Case(2, 2, softcap=2.0, has_sinks=True),
        Case(8, 2, 32, 16, 50, has_sinks=True),
        Case(4, 2, 32, softcap=5.0),
        Case(2, 1, 256, 16),
        Case(2, 2, 80, 8, 50, cache_type="int8"),
        Case(8, 2, 64, 16, dtype=HALF, softcap=5.0, has_sinks=True, cache_type="int8"),
    ],
    ids=str,
)
def test_sequences_in_pieces_are_the_textbooks(interpreter: Worker, case: Case) -> None:
    interpreter.call(check_history, case, CPU)


@pytest.mark.parametrize("num_splits", [1, 2, 8])
@pytest.mark.parametrize(
    "case",
    [
        Case(1, 1, block_size=8),
        Case(4, 1, 128, 64, 300),
        Case(1, 1, 32, 32, 300, **BRAIN),
        Case(4, 2, 16, softcap=2.0, has_sinks=True),
        Case(1, 1, 32, 32, cache_type="int8"),
        Case(4, 2, 32, 16, 300, has_sinks=True, cache_type="int8"),
    ],
    ids=str,
)
def test_rows_of_any_length_are_split_and_joined(interpreter: Worker, case: Case, num_splits: int) -> None:
    interpreter.call(check_splits, case, CPU, num_splits)


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("num_kv_heads", [2, 1])
def test_padding_rows_touch_no_block(interpreter: Worker, num_kv_heads: int, batch_invariant: bool) -> None:
    interpreter.call(check_padding, Case(2, num_kv_heads, 32), CPU, batch_invariant=batch_invariant)


@pytest.mark.parametrize(("window", "cache_type"), [(None, "auto"), (37, "auto"), (37, "int8")])
def test_batch_invariant_results_are_equal_bit_by_bit(
    interpreter: Worker, window: int | None, cache_type: CacheType
) -> None:
    case = Case(2, 1, 32, window=window, cache_type=cache_type)
    alone, among_others, decoded = interpreter.call(invariant_results, case, CPU)
    assert torch.equal(alone, among_others)
    assert torch.equal(alone[135:], decoded)


def results_far_apart(case: Case, sparse_file: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Of three tokens that are 2**30 numbers apart, of which nothing but themselves is ever read, and side by side."""
    rows, stride = [(0, 3)], 1 << 30
    results = []
    for is_far in (True, False):
        bench = Bench(case, CPU, 1, 3)
        inputs = bench.inputs(rows)
        if is_far:
            packed = torch.cat(inputs, 1)
            memory = torch.from_file(str(sparse_file), shared=True, size=3 * stride, dtype=packed.dtype)
            sparse_file.unlink()
            apart = memory.as_strided(packed.shape, (stride, *packed.stride()[1:])).copy_(packed)
            q, k, v = torch.split(apart, [x.shape[1] for x in inputs], 1)
            inputs = q, k, v
        results.append(new_backend(bench).prepare(bench.pack(rows))(0, *inputs))
    return results[0], results[1]


def test_offsets_of_a_step_may_pass_two_to_the_31(interpreter: Worker, tmp_path: Path) -> None:
    far, near = interpreter.call(results_far_apart, Case(2, 1, 16, dtype=HALF), tmp_path / "numbers")
    assert torch.equal(far, near)


def norms(width: int, dtype: torch.dtype, has_delta: bool) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(computed, expected): the sum in place, its layer norm, the sum again, its root-mean-square norm."""
    from roseinfer.model.triton_kernels.pointwise import add_norm

    generator = torch.Generator().manual_seed(width)
    x = torch.randn(5, width, generator=generator) + 2
    delta = torch.randn(5, width, generator=generator).to(dtype) if has_delta else None
    weight, bias = torch.randn(2, width, generator=generator)
    total = x.double() if delta is None else x.double() + delta.double()
    centred = total - total.mean(-1, keepdim=True)
    layer_sum, rms_sum = x.clone(), x.clone()
    layer = add_norm(layer_sum, delta, weight, bias, 1e-5, torch.float32)
    rms = add_norm(rms_sum, delta, weight, None, 1e-5, torch.float32)
    return [
        (layer_sum, total),
        (layer, centred * (centred.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight + bias),
        (rms_sum, total),
        (rms, total * (total.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight),
    ]


@pytest.mark.parametrize("has_delta", [False, True])
@pytest.mark.parametrize(("width", "dtype"), [(24, torch.float32), (768, HALF), (1000, torch.bfloat16)])
def test_norms(interpreter: Worker, width: int, dtype: torch.dtype, has_delta: bool) -> None:
    for computed, expected in interpreter.call(norms, width, dtype, has_delta):
        torch.testing.assert_close(computed, expected.float(), atol=1e-5, rtol=1e-5)


def turned(num_heads: int, head_dim: int, has_norms: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(computed, expected) merged rows of `num_heads` queries, two keys and two values."""
    from roseinfer.model.triton_kernels.pointwise import Turns, turn_heads

    generator = torch.Generator().manual_seed(head_dim)
    merged = torch.randn(5, num_heads + 4, head_dim, generator=generator)
    table, positions = torch.rand(9, head_dim // 2, generator=generator) * 6, torch.tensor([0, 8, 3, 3, 1])
    angles = table[positions][:, None]
    query, key = torch.randn(2, head_dim, generator=generator)
    heads = merged[:, : num_heads + 2].double()
    if has_norms:
        weights = torch.cat((query.expand(num_heads, -1), key.expand(2, -1)))
        heads = heads * (heads.square().mean(-1, keepdim=True) + 1e-3).rsqrt() * weights
    halves = torch.cat((-heads[..., head_dim // 2 :], heads[..., : head_dim // 2]), -1)
    wide = torch.cat((angles, angles), -1).double()
    expected = torch.cat((heads * wide.cos() + halves * wide.sin(), merged[:, num_heads + 2 :]), 1)
    norm_weights = (query, key) if has_norms else None
    turn_heads(merged, num_heads, 2, Turns(table.cos(), table.sin(), positions), norm_weights, 1e-3)
    return merged, expected


@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize(("num_heads", "head_dim"), [(2, 24), (14, 64), (8, 128)])
def test_queries_and_keys_are_turned(interpreter: Worker, num_heads: int, head_dim: int, has_norms: bool) -> None:
    computed, expected = interpreter.call(turned, num_heads, head_dim, has_norms)
    torch.testing.assert_close(computed, expected.float(), atol=1e-5, rtol=1e-5)


def gated(rows: torch.Tensor) -> torch.Tensor:
    from roseinfer.model.triton_kernels.pointwise import silu_gate

    return silu_gate(rows)


@pytest.mark.parametrize("inner", [24, 1024, 1500])
def test_gates(interpreter: Worker, inner: int) -> None:
    rows = torch.randn(3, 2 * inner, generator=torch.Generator().manual_seed(inner)) * 9
    gate, up = rows.double().chunk(2, -1)
    expected = (gate * gate.sigmoid() * up).float()
    torch.testing.assert_close(interpreter.call(gated, rows), expected, atol=1e-5, rtol=1e-5)


def embedded(ids: torch.Tensor, table: torch.Tensor, positions: torch.Tensor) -> list[torch.Tensor]:
    """Rows of the table alone, and with those of a table twice as large numbers."""
    from roseinfer.model.triton_kernels.pointwise import embed

    return [embed(ids, table, None, None), embed(ids, table, positions, 2 * table.contiguous())]


def test_embeddings(interpreter: Worker) -> None:
    """Of a table in the model's type whose rows are longer than they seem, to the bits of float32 sums."""
    table = torch.randn(9, 32, generator=torch.Generator().manual_seed(0)).half()[:, :24]
    ids, positions = torch.tensor([8, 0, 3]), torch.tensor([2, 1, 0])
    alone, added = interpreter.call(embedded, ids, table, positions)
    assert torch.equal(alone, table.float()[ids])
    assert torch.equal(added, table.float()[ids] + 2 * table.float()[positions])


def normed_linear(num_rows: int, width: int, num_inputs: int, has_bias: bool) -> list[torch.Tensor]:
    """The sums, the norms, the counters, and what the first two should be; of the second of two calls."""
    from roseinfer.model.triton_kernels.linear import NUM_COUNTERS, Weights, linear_add_norm

    generator = torch.Generator().manual_seed(width)
    rows = torch.randn(num_rows, num_inputs + 8, generator=generator).half()[:, :num_inputs]
    weight = torch.randn(width, num_inputs, generator=generator).half()
    scale, *biases = torch.randn(3, width, generator=generator)
    bias, shift = biases if has_bias else (None, None)
    counters = torch.zeros(NUM_COUNTERS, dtype=torch.int32)
    weights = Weights(weight, bias, scale, shift, 1e-5, 0.5, counters)
    x = torch.randn(num_rows, width, generator=generator)
    linear_add_norm(rows, weights, x.clone(), torch.float32)
    total = x.double() + 0.5 * (rows.double() @ weight.double().t() + (0 if bias is None else bias.double()))
    normed = linear_add_norm(rows, weights, x, torch.float32)
    centred = total - total.mean(-1, keepdim=True) if has_bias else total
    expected = centred * (centred.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * scale
    return [x, normed, counters, total.float(), (expected if shift is None else expected + shift).float()]


@pytest.mark.parametrize(
    ("num_rows", "width", "num_inputs", "has_bias"), [(1, 24, 40, True), (17, 64, 256, False), (64, 40, 128, True)]
)
def test_a_linear_is_added_and_normed(
    interpreter: Worker, num_rows: int, width: int, num_inputs: int, has_bias: bool
) -> None:
    """The counters are zero again, or the second call would norm too early."""
    sums, norms, counters, *expected = interpreter.call(normed_linear, num_rows, width, num_inputs, has_bias)
    assert not counters.any()
    torch.testing.assert_close([sums, norms], expected, atol=1e-4, rtol=1e-5)


# --- the compiler -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    yield from compiler_process(tmp_path_factory.mktemp("triton"))


def compile_steps(capability: int, case: Case, steps: list[list[int]]) -> list[tuple[str, int]]:
    """Steps of rows with so many new tokens each -> name and bytes of shared memory of each kernel they are made of."""
    from roseinfer.model.triton_kernels.decode import Parts, decode
    from roseinfer.model.triton_kernels.paging import heads_of, pages_of, scores_of, step_of
    from roseinfer.model.triton_kernels.tunings import decode_tuning
    from roseinfer.model.triton_kernels.varlen import tiles_of, varlen

    ABSENT_GPU.capability = capability
    compiled.clear()
    bench = Bench(case, CPU, max(map(len, steps)), max(map(sum, steps)))
    heads, pages = heads_of(case.spec), pages_of(bench.cache, 0)
    [scores] = scores_of(case.spec, CPU)
    tiles = tiles_of(heads, case.dtype)
    tuning = decode_tuning("", heads.group.value, heads.padded_dim.value, bench.cache.dtype)
    for counts in steps:
        rows = list(enumerate(counts))
        tokens = bench.pack(rows, num_padding_rows=1)
        assert tokens.device is not None
        q, k, v = bench.inputs(rows, 1)
        step, shape = step_of(q, k, v, torch.empty_like(q)), (len(counts), case.num_heads, 4)
        if max(counts) == 1:
            arrivals = torch.zeros(len(counts), case.num_kv_heads, dtype=torch.int32)
            parts = Parts(torch.empty(*shape, case.head_dim), torch.empty(shape), torch.empty(shape), arrivals)
            decode(step, pages, tokens.device, parts, heads, scores, tuning)
        else:
            varlen(step, pages, tokens.device, heads, tiles, scores)
    kernels = {id(kernel): kernel.metadata for kernel in compiled}
    return sorted((metadata.name, metadata.shared) for metadata in kernels.values())


SHARED_BYTES = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10}  # of a program, at most: CUDA C++ programming guide


@pytest.mark.parametrize(
    ("capability", "case"),
    [
        (80, Case(2, 2, dtype=torch.bfloat16)),
        (89, Case(2, 2, 256, dtype=HALF)),
        (90, Case(14, 2, dtype=torch.bfloat16)),
        (90, Case(4, 1, 128, window=100, dtype=torch.bfloat16)),
        (90, Case(2, 1, 80)),
        (90, Case(8, 4, 256, dtype=torch.bfloat16, softcap=50.0)),
        (80, Case(64, 8, dtype=torch.bfloat16, has_sinks=True)),
        (90, Case(2, 2, softcap=5.0, has_sinks=True)),
        (80, Case(2, 2, dtype=torch.bfloat16, cache_type="int8")),
        (90, Case(14, 2, dtype=torch.bfloat16, cache_type="int8")),
    ],
    ids=str,
)
def test_kernels_are_compiled_once_and_fit(compiler: Worker, capability: int, case: Case) -> None:
    """Whatever the number of rows and tokens: no stream waits for a compiler."""
    steps = [[1], [1, 1], [1] * 15, [1] * 16, [2], [1, 3, 1], [5] * 15, [17] * 16]
    kernels = compiler.call(compile_steps, capability, case, steps)
    decode = "_decode_head" if case.num_heads == case.num_kv_heads else "_decode_group"
    assert [name for name, _ in kernels] == ["_append_tile", "_attend_tile", decode]
    assert max(num_bytes for _, num_bytes in kernels) <= SHARED_BYTES[capability]


def compile_with_ptxas(capability: int, case: Case, directory: Path) -> dict[str, tuple[int, int]]:
    """Warps of each attention kernel, and the bytes of registers that it spills."""
    compile_steps(capability, case, [[1], [2]])
    source, cubin = directory / "kernel.ptx", directory / "kernel.cubin"
    found = {}
    for kernel in compiled:
        source.write_text(kernel.asm["ptx"])
        [target] = re.findall(r"^\.target (sm_\d+a?)", kernel.asm["ptx"], re.MULTILINE)
        command = [ptxas_for(capability), "--verbose", f"--gpu-name={target}", str(source), "--output-file", str(cubin)]
        told = subprocess.run(command, check=True, capture_output=True, text=True).stderr
        [spilled] = re.findall(r"(\d+) bytes spill stores", told)
        found[kernel.metadata.name] = kernel.metadata.num_warps, int(spilled)
    return found


@pytest.mark.parametrize(
    ("capability", "case", "num_warps"),
    [
        (90, Case(128, 1, 128, dtype=torch.bfloat16), {"_decode_group": 8, "_attend_tile": 8}),
        (90, Case(64, 1, 256, dtype=torch.bfloat16), {"_decode_group": 8, "_attend_tile": 4}),
        (80, Case(4, 1, 256, dtype=torch.bfloat16), {"_decode_group": 4, "_attend_tile": 8}),
        (90, Case(4, 1, 256), {"_decode_group": 4, "_attend_tile": 8}),
    ],
    ids=str,
)
def test_large_tiles_get_the_warps_that_hold_their_sums(
    compiler: Worker, tmp_path: Path, capability: int, case: Case, num_warps: dict[str, int]
) -> None:
    """Eight only where four would spill registers."""
    found = compiler.call(compile_with_ptxas, capability, case, tmp_path)
    assert {name: found[name][0] for name in num_warps} == num_warps
    if not version("triton").startswith("3.4."):  # whose compiler spills some: docs/log.md
        assert max(found[name][1] for name in num_warps) == 0


def compile_rows(capability: int, dtype: torch.dtype) -> list[tuple[str, int]]:
    """What else a layer is made of, for batches of several sizes -> name and bytes of shared memory of each kernel."""
    from roseinfer.model.triton_kernels.linear import NUM_COUNTERS, Weights, linear_add_norm
    from roseinfer.model.triton_kernels.pointwise import Turns, add_norm, embed, silu_gate, turn_heads

    ABSENT_GPU.capability = capability
    compiled.clear()
    weight, bias, angles = torch.ones(896), torch.ones(896), torch.zeros(99, 32)
    square, counters = torch.zeros(896, 896, dtype=dtype), torch.zeros(NUM_COUNTERS, dtype=torch.int32)
    layer, root = (
        Weights(square, shift, weight, shift, 1e-5, 1.0, counters) for shift in (bias, None)
    )  # LayerNorm with a bias of the linear, RMSNorm without one
    for num_rows in (1, 2, 15, 16, 17):
        x, delta = torch.zeros(num_rows, 896), torch.zeros(num_rows, 896, dtype=dtype)
        for added in (delta, None):  # the first norm of a model has nothing to add
            add_norm(x, added, weight, bias, 1e-5, dtype)
            add_norm(x, added, weight, None, 1e-5, dtype)
        for norms in ((weight[:64], weight[:64]), None):
            merged = torch.zeros(num_rows, 18, 64, dtype=dtype)
            turn_heads(merged, 14, 2, Turns(angles, angles, torch.zeros(num_rows, dtype=torch.int64)), norms, 1e-6)
        silu_gate(torch.zeros(num_rows, 9728, dtype=dtype))
        for weights in (layer, root):
            linear_add_norm(torch.zeros(num_rows, 896, dtype=dtype), weights, x, dtype)
        ids = torch.zeros(num_rows, dtype=torch.int64)
        for positions in (ids, None):
            embed(ids, square, positions, None if positions is None else square)
    kernels = {id(kernel): kernel.metadata for kernel in compiled}
    return sorted((metadata.name, metadata.shared) for metadata in kernels.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("capability", [80, 90])
def test_norms_and_gates_are_compiled_once_and_fit(compiler: Worker, capability: int, dtype: torch.dtype) -> None:
    kernels = compiler.call(compile_rows, capability, dtype)
    names = ["_add_norm_row"] * 4 + ["_embed_row"] * 2 + ["_gate_tile"] + ["_linear_tile"] * 2 + ["_turn_row"] * 2
    assert [name for name, _ in kernels] == names
    assert max(num_bytes for _, num_bytes in kernels) <= SHARED_BYTES[capability]


# --- what needs neither -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_programs", "num_keys", "num_splits"),
    [
        (12, 64, 1),  # GPT-2 alone, early on: one program reads so few keys as fast as several
        (12, 200, 4),
        (12, 1024, 16),
        (12, 100_000, 32),  # 22 would do, but powers of two need fewer kernels
        (768, 100_000, 1),  # 64 of GPT-2: the rows alone fill the GPU
        (132, 100_000, 2),
        (1, 10_000_000, 32),
    ],
)
def test_rows_are_split_where_they_leave_processors_idle(num_programs: int, num_keys: int, num_splits: int) -> None:
    from roseinfer.model.triton_kernels.decode import choose_num_splits
    from roseinfer.model.triton_kernels.tunings import decode_tuning

    tuning = decode_tuning("", 1, 64, torch.bfloat16)
    assert choose_num_splits(num_programs, num_keys, 132, tuning) == num_splits


def test_what_was_measured_on_a_gpu_is_used_there_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from roseinfer.model.triton_kernels import tunings

    measured = tunings.DecodeTuning(tile=128, min_split_keys=128, programs=4, num_warps=8)
    key = tunings.decode_key(1, 64, torch.bfloat16)
    monkeypatch.setattr(tunings, "read_tunings", lambda: {"A GPU": tunings.Tunings(decode={key: measured})})
    found = [
        tunings.decode_tuning(name, 1, dim, torch.bfloat16)
        for name, dim in (("A GPU", 64), ("A GPU", 128), ("Another", 64))
    ]
    assert [tuning == measured for tuning in found] == [True, False, False]


@pytest.mark.parametrize("name", ["triton", "flashinfer"])
def test_no_cuda_no_kernels(name: str) -> None:
    with pytest.raises(ConfigError, match=r"CUDA|installed"):
        new_backend(Bench(Case(2, 2, dtype=HALF), CPU, 1, 16), name)
