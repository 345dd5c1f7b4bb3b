"""Every CPU backend against the textbook: softmax over the positions a token sees, in double precision. And exactness:
what a token gets is the same to the bit however its sequence was cut, and whatever else was computed with it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
import torch

from roseinfer.engine.core.batch import Int32Array
from roseinfer.errors import ConfigError
from roseinfer.model.attention.base import AttentionBackend, AttentionSpec, PackedTokens
from roseinfer.model.attention.kv_cache import CacheType, KVCache, quantized_heads
from roseinfer.model.attention.registry import choose_attention
from roseinfer.model.device import Placement
from roseinfer.model.kernels.library import levels_here
from tests.conftest import BuiltKernels
from tests.unit.model.setups import TESTED_LEVELS, kernels_at

CPU = torch.device("cpu")
LEVELS = [level for level in TESTED_LEVELS if level != "neon_dotprod"]  # which has other products of integers only
BACKENDS = ["reference", "gathered", *(f"native-{level}" for level in LEVELS)]
MakeBackend = Callable[[KVCache, AttentionSpec], AttentionBackend]
Sequence3 = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # q, k, v of all positions of one sequence


every_cache_type = pytest.mark.parametrize("cache_type", ["auto", "int8"])


@pytest.fixture(params=BACKENDS)
def make_backend(request: pytest.FixtureRequest, built_kernels: BuiltKernels) -> MakeBackend:
    """One backend a test run, over a given cache."""
    name, _, level = request.param.partition("-")
    kernels = kernels_at(level, built_kernels) if level else None
    return lambda cache, spec: choose_attention(name, cache, spec, kernels)


def make_cache(
    spec: AttentionSpec,
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype = torch.float32,
    cache_type: CacheType = "auto",
) -> KVCache:
    return KVCache(spec, num_blocks, block_size, Placement(CPU, dtype), cache_type)


def spec_of(num_heads: int, num_kv_heads: int, head_dim: int, *windows: int | None) -> AttentionSpec:
    return AttentionSpec(num_heads, num_kv_heads, head_dim, head_dim**-0.5, windows or (None,))


def random_sequence(spec: AttentionSpec, length: int, seed: int, dtype: torch.dtype = torch.float32) -> Sequence3:
    """Views of one packed tensor, as a model's projection leaves them."""
    num_heads = [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads]
    generator = torch.Generator().manual_seed(seed)
    packed = torch.randn(length, sum(num_heads), spec.head_dim, generator=generator).to(dtype)
    q, k, v = torch.split(packed, num_heads, 1)
    return q, k, v


def as_stored(sequence: Sequence3, cache_type: CacheType) -> Sequence3:
    """The sequence with the keys and values that a cache of the type gives back."""
    if cache_type == "auto":
        return sequence
    q, k, v = sequence
    k, v = (numbers.double() * scales.double().unsqueeze(-1) for numbers, scales in map(quantized_heads, (k, v)))
    return q, k, v


def textbook(sequence: Sequence3, spec: AttentionSpec, window: int | None = None) -> torch.Tensor:
    """All positions of one sequence -> [positions, heads * head_dim]."""
    q, k, v = sequence
    groups = q.shape[1] // k.shape[1]
    q, k, v = (x.double().transpose(0, 1) for x in (q, k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)))
    positions = torch.arange(q.shape[1])
    distance = positions[:, None] - positions
    is_hidden = (distance < 0) | (distance >= (window or len(positions)))
    scores = q @ k.transpose(1, 2) * spec.scale
    if spec.softcap:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    scores = scores.masked_fill(is_hidden, -torch.inf)
    if spec.sinks is not None:  # of the only layer
        scores = torch.cat([scores, spec.sinks[0].double().view(-1, 1, 1).expand(-1, len(positions), 1)], -1)
    return torch.matmul(scores.softmax(-1)[..., : len(positions)], v).transpose(0, 1).flatten(1)


def pack(spans: Sequence[tuple[int, range]], table: Int32Array, num_repetitions: int = 0) -> PackedTokens:
    """So many positions of each slot, in one step."""
    slots = [slot for slot, span in spans for _ in span]
    positions = [position for _, span in spans for position in span]
    return PackedTokens(
        slots=np.array(slots + slots[-1:] * num_repetitions, np.int32),
        positions=np.array(positions + positions[-1:] * num_repetitions, np.int32),
        query_starts=np.cumsum([0, *(len(span) for _, span in spans)]).astype(np.int32),
        block_table=table,
        max_query_len=max(len(span) for _, span in spans),
        max_context_len=max(span.stop for _, span in spans),
    )


@dataclass
class Steps:
    """Sequences in the slots of a block table, advanced by hand."""

    backend: AttentionBackend
    table: Int32Array
    sequences: dict[int, Sequence3]

    def run(self, *spans: tuple[int, range], layer: int = 0, num_repetitions: int = 0) -> list[torch.Tensor]:
        """One step; what each span got, in their order."""
        packed = [
            torch.cat([self.sequences[slot][i][span.start : span.stop] for slot, span in spans]) for i in range(3)
        ]
        packed = [torch.cat([x, *[x[-1:]] * num_repetitions]) for x in packed]
        attend = self.backend.prepare(pack(spans, self.table, num_repetitions))
        out = attend(layer, *packed)[: sum(len(span) for _, span in spans)].clone()
        return list(torch.split(out, [len(span) for _, span in spans]))

    def run_alone(self, slot: int, pieces: Sequence[int], layer: int = 0) -> torch.Tensor:
        """A sequence by itself, cut at these positions."""
        return torch.cat([self.run((slot, range(*piece)), layer=layer)[0] for piece in pairwise(pieces)])


def shuffled_table(num_slots: int, num_columns: int) -> Int32Array:
    return np.random.default_rng(0).permutation(num_slots * num_columns).astype(np.int32).reshape(num_slots, -1)


PIECES = {0: (0, 1, 2, 20, 69, 70), 1: (0, 3, 6, 8, 9, 9), 2: (0, 64, 65, 130, 191, 200)}  # where each step begins


def run_in_pieces(steps: Steps, layer: int = 0) -> dict[int, torch.Tensor]:
    """Three sequences of different lengths, advanced by uneven pieces in shared steps."""
    results: dict[int, list[torch.Tensor]] = {slot: [] for slot in PIECES}
    for step in range(5):
        spans = [(slot, range(*pieces[step : step + 2])) for slot, pieces in PIECES.items()]
        spans = [(slot, span) for slot, span in spans if span]
        for (slot, _), part in zip(spans, steps.run(*spans, layer=layer), strict=True):
            results[slot].append(part)
    return {slot: torch.cat(parts) for slot, parts in results.items()}


@pytest.mark.parametrize(
    ("block_size", "num_heads", "num_kv_heads"), [(8, 4, 2), (16, 1, 1), (16, 6, 1), (32, 3, 3), (64, 6, 1), (64, 4, 2)]
)
@every_cache_type
def test_sequences_in_pieces_are_the_whole(
    make_backend: MakeBackend, block_size: int, num_heads: int, num_kv_heads: int, cache_type: CacheType
) -> None:
    spec = spec_of(num_heads, num_kv_heads, 24)
    table = shuffled_table(3, 256 // block_size)
    sequences = {slot: random_sequence(spec, PIECES[slot][-1], slot) for slot in PIECES}
    backend = make_backend(make_cache(spec, table.size, block_size, cache_type=cache_type), spec)
    for slot, got in run_in_pieces(Steps(backend, table, sequences)).items():
        expected = textbook(as_stored(sequences[slot], cache_type), spec)
        torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=1e-5)


@every_cache_type
@pytest.mark.parametrize("head_dim", [8, 16, 64, 72, 128])
def test_heads_of_every_size(make_backend: MakeBackend, head_dim: int, cache_type: CacheType) -> None:
    spec = spec_of(4, 2, head_dim)
    table = shuffled_table(1, 8)
    sequence = random_sequence(spec, 100, seed=3)
    steps = Steps(make_backend(make_cache(spec, 8, 16, cache_type=cache_type), spec), table, {0: sequence})
    got = steps.run_alone(0, (0, 37, 38, 100))
    expected = textbook(as_stored(sequence, cache_type), spec)
    torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("window", "cache_type"), [(1, "auto"), (5, "auto"), (5, "int8"), (64, "auto"), (100, "auto"), (100, "int8")]
)
def test_a_window_hides_what_is_far_behind(make_backend: MakeBackend, window: int, cache_type: CacheType) -> None:
    """Layers of one model may have different windows, and are computed from one `prepare`."""
    spec = spec_of(4, 2, 16, None, window)
    table = shuffled_table(3, 16)
    sequences = {slot: random_sequence(spec, PIECES[slot][-1], slot) for slot in PIECES}
    cache = make_cache(spec, table.size, 16, cache_type=cache_type)
    steps = Steps(make_backend(cache, spec), table, sequences)
    for layer in (0, 1):
        for slot, got in run_in_pieces(steps, layer).items():
            expected = textbook(as_stored(sequences[slot], cache_type), spec, spec.windows[layer])
            torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize(("softcap", "cache_type"), [(0.0, "auto"), (0.5, "auto"), (50.0, "auto"), (50.0, "int8")])
def test_soft_caps_and_sinks(
    make_backend: MakeBackend, softcap: float, has_sinks: bool, window: int | None, cache_type: CacheType
) -> None:
    """A sink may be higher than every score, or so low that it is nothing. The cut of a sequence changes no bit."""
    sinks = (torch.tensor([8.0, -1.0, 0.3, -200.0]),) if has_sinks else None
    spec = AttentionSpec(4, 2, 16, 0.7, (window,), softcap=softcap, sinks=sinks)
    sequences = {slot: random_sequence(spec, PIECES[slot][-1], slot) for slot in PIECES}
    cache = make_cache(spec, 48, 16, cache_type=cache_type)
    steps = Steps(make_backend(cache, spec), shuffled_table(3, 16), sequences)
    for slot, got in run_in_pieces(steps).items():
        expected = textbook(as_stored(sequences[slot], cache_type), spec, window)
        torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=1e-5)
        assert torch.equal(got, steps.run_alone(slot, (0, PIECES[slot][-1])))


def test_the_scale_is_the_specs(make_backend: MakeBackend) -> None:
    spec = AttentionSpec(2, 2, 16, 0.5, (None,))
    sequence = random_sequence(spec, 70, seed=1)
    steps = Steps(make_backend(make_cache(spec, 5, 16), spec), shuffled_table(1, 5), {0: sequence})
    torch.testing.assert_close(steps.run_alone(0, (0, 70)).double(), textbook(sequence, spec), atol=1e-5, rtol=1e-5)


def test_large_scores_do_not_overflow(make_backend: MakeBackend) -> None:
    spec = spec_of(1, 1, 16)
    q = torch.full((100, 1, 16), 30.0)
    k, v = q * torch.linspace(-1, 1, 100)[:, None, None], random_sequence(spec, 100, seed=0)[2]
    steps = Steps(make_backend(make_cache(spec, 16, 16), spec), shuffled_table(1, 16), {0: (q, k, v)})
    expected = textbook((q, k, v), spec)
    torch.testing.assert_close(steps.run_alone(0, (0, 100)).double(), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "block_size", "cache_type"),
    [
        *((2, 2, 32, 16, "auto"), (4, 1, 64, 32, "auto"), (6, 2, 128, 64, "auto"), (3, 3, 96, 8, "auto")),
        *((40, 1, 64, 16, "auto"), (2, 1, 40, 16, "auto")),
        *((4, 1, 64, 32, "int8"), (3, 3, 96, 8, "int8"), (2, 1, 40, 16, "int8")),
    ],
)
def test_the_cache_keeps_its_type_and_the_sums_are_float32(
    make_backend: MakeBackend, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int, cache_type: CacheType
) -> None:
    """bfloat16 in and out; only the rounding of the inputs, of the weights and of the result is lost."""
    spec = spec_of(num_heads, num_kv_heads, head_dim)
    table = shuffled_table(1, 256 // block_size)
    cache = make_cache(spec, table.size, block_size, torch.bfloat16, cache_type)
    sequence = random_sequence(spec, 200, 5, torch.bfloat16)
    got = Steps(make_backend(cache, spec), table, {0: sequence}).run_alone(0, (0, 130, 131, 200))
    assert (got.dtype, cache.keys[0].dtype) == (torch.bfloat16, cache.dtype)
    tolerance = 2**-8 if cache_type == "auto" else 2**-7  # weights are rounded behind their values' scales
    expected = textbook(as_stored(sequence, cache_type), spec)
    torch.testing.assert_close(got.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "window", "cache_type"),
    [
        *((3, 3, 64, None, "auto"), (8, 2, 24, 30, "auto"), (6, 3, 96, None, "auto")),
        *((8, 2, 24, 30, "int8"), (4, 2, 64, None, "int8")),
    ],
)
def test_a_token_gets_the_same_bits_in_every_batch(
    make_backend: MakeBackend,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    window: int | None,
    dtype: torch.dtype,
    cache_type: CacheType,
) -> None:
    """Whole, token by token, in pieces among others, after a prefix that another computed: torch.equal."""
    spec = spec_of(num_heads, num_kv_heads, head_dim, window)
    table = shuffled_table(4, 16)
    sequences = {slot: random_sequence(spec, PIECES[slot][-1], slot, dtype) for slot in PIECES}
    sequences[3] = sequences[2]

    def fresh(table: Int32Array = table) -> Steps:
        return Steps(make_backend(make_cache(spec, table.size, 16, dtype, cache_type), spec), table, sequences)

    among_others = run_in_pieces(fresh())
    for slot, pieces in PIECES.items():
        length = pieces[-1]
        assert torch.equal(fresh().run_alone(slot, (0, length)), among_others[slot])
        assert torch.equal(fresh().run_alone(slot, range(length + 1)), among_others[slot])
    sharing = table.copy()
    sharing[3, :5] = sharing[2, :5]
    steps = fresh(sharing)
    steps.run((2, range(200)))
    assert torch.equal(steps.run((0, range(70)), (3, range(80, 200)))[1], among_others[2][80:])


@every_cache_type
def test_the_number_of_threads_changes_no_bit(make_backend: MakeBackend, cache_type: CacheType) -> None:
    spec = spec_of(4, 2, 64)
    sequence = random_sequence(spec, 150, 0, torch.bfloat16)
    results = []
    for num_threads in (1, 3):
        torch.set_num_threads(num_threads)
        cache = make_cache(spec, 10, 16, torch.bfloat16, cache_type)
        results.append(Steps(make_backend(cache, spec), shuffled_table(1, 10), {0: sequence}).run_alone(0, (0, 7, 150)))
    assert torch.equal(*results)


@every_cache_type
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_what_a_former_owner_left_in_a_block_is_not_seen(
    make_backend: MakeBackend, poison: float, dtype: torch.dtype, cache_type: CacheType
) -> None:
    spec = spec_of(2, 1, 16)
    clean, other = (random_sequence(spec, 128, seed, dtype) for seed in (1, 2))
    bad = (other[0], torch.full_like(other[1], poison), torch.full_like(other[2], poison))
    table = shuffled_table(1, 8).repeat(2, 0)  # two slots with the same blocks, one after the other
    fresh, used = (
        Steps(make_backend(make_cache(spec, 8, 16, dtype, cache_type), spec), table, {0: bad, 1: clean})
        for _ in range(2)
    )
    used.run_alone(0, (0, 128))
    pieces = (0, 5, 6, 39, 73)
    expected = fresh.run_alone(1, pieces)
    assert expected.isfinite().all()
    assert torch.equal(used.run_alone(1, pieces), expected)


def test_repetitions_of_the_last_token_change_nothing(make_backend: MakeBackend) -> None:
    spec = spec_of(2, 2, 16)
    table = shuffled_table(2, 8)
    sequences = {slot: random_sequence(spec, 90, slot) for slot in range(2)}
    results = []
    for num_repetitions in (0, 3):
        steps = Steps(make_backend(make_cache(spec, 16, 16), spec), table, sequences)
        first = steps.run((0, range(50)), (1, range(33)), num_repetitions=num_repetitions)
        second = steps.run((0, range(50, 51)), (1, range(33, 90)), num_repetitions=num_repetitions)
        results.append(torch.cat([*first, *second]))
    assert torch.equal(*results)


def test_int8_keeps_what_its_rounding_leaves(make_backend: MakeBackend) -> None:
    """Numbers of a key, and of a value, are wrong by half of a 127th of its largest."""
    spec = spec_of(4, 2, 64)
    sequence = random_sequence(spec, 200, 1)
    steps = Steps(make_backend(make_cache(spec, 13, 16, cache_type="int8"), spec), shuffled_table(1, 13), {0: sequence})
    error = (steps.run_alone(0, (0, 150, 151, 200)).double() - textbook(sequence, spec)).abs()
    assert 1e-4 < error.max() < 0.05
    assert error.mean() < 0.005


def test_a_key_that_is_not_finite_fails_its_own_sequence(make_backend: MakeBackend) -> None:
    """A broken token is found by its logits: what attends to its key is NaN, in int8 too."""
    spec = spec_of(2, 1, 16)
    q, k, v = random_sequence(spec, 40, 1)
    k[7, 0, 3] = torch.nan
    steps = Steps(make_backend(make_cache(spec, 3, 16, cache_type="int8"), spec), shuffled_table(1, 3), {0: (q, k, v)})
    got = steps.run_alone(0, (0, 40))
    assert got[:7].isfinite().all()
    assert got[7:].isnan().all()


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
def test_a_value_that_is_not_finite_leaves_the_tokens_before_it_alone(make_backend: MakeBackend, poison: float) -> None:
    spec = spec_of(2, 1, 16)
    clean = random_sequence(spec, 40, 1)
    q, k, v = (each.clone() for each in clean)
    v[7, 0, 3] = poison
    expected, got = (
        Steps(make_backend(make_cache(spec, 3, 16), spec), shuffled_table(1, 3), {0: sequence}).run_alone(0, (0, 40))
        for sequence in (clean, (q, k, v))
    )
    assert torch.equal(got[:7], expected[:7])


def test_auto_takes_the_compiled_kernel_where_it_is_built_and_can_compute(built_kernels: BuiltKernels) -> None:
    if not levels_here():
        pytest.skip("this processor has no level of the kernels")
    spec, odd = spec_of(2, 2, 16), spec_of(2, 2, 12)
    kernels = kernels_at(levels_here()[0].name, built_kernels)
    assert choose_attention("auto", make_cache(spec, 2, 16), spec, kernels).name == "native"
    assert choose_attention("auto", make_cache(spec, 2, 16), spec, None).name == "gathered"
    assert choose_attention("auto", make_cache(odd, 2, 16), odd, kernels).name == "gathered"
    with pytest.raises(ConfigError, match="head_dim that is a multiple of 8, and this model has 12") as refusal:
        choose_attention("native", make_cache(odd, 2, 16), odd, kernels)
    assert refusal.value.param == "runner.attention"


@pytest.mark.parametrize(
    ("name", "reason"),
    [("native", "run `roseinfer kernels build`"), ("triton", "CUDA only"), ("flashinfer", "CUDA only")],
)
def test_a_named_backend_that_cannot_run_here_is_refused(name: str, reason: str) -> None:
    spec = spec_of(2, 2, 16)
    with pytest.raises(ConfigError, match=reason) as refusal:
        choose_attention(name, make_cache(spec, 2, 16), spec, None)
    assert refusal.value.param == "runner.attention"
