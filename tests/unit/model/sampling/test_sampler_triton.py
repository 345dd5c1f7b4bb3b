"""The CUDA sampler without a GPU: Triton's interpreter against torch, and the compiler against the number of builds."""

from collections.abc import Iterator
from importlib.util import find_spec

import numpy as np
import pytest
import torch

from roseinfer.engine.core.batch import NO_TOKEN, SlotBinding
from roseinfer.messages import SamplingParams
from roseinfer.model.sampling.sampler import Sampler
from roseinfer.model.sampling.slot_table import SlotTable
from roseinfer.model.sampling.torch import TorchSampling
from tests.unit.model.triton_processes import Ahead, Worker, compiled, compiler_process, interpreter_process

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed; the extra `test` has it")

CPU = torch.device("cpu")
OWNERS = (
    SamplingParams(temperature=0.0),
    SamplingParams(seed=5),
    SamplingParams(seed=2**63 - 1, temperature=0.3),
    SamplingParams(seed=9, temperature=3.0),
)


@pytest.fixture(scope="module")
def interpreter() -> Iterator[Worker]:
    yield from interpreter_process()


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    yield from compiler_process(tmp_path_factory.mktemp("triton"))


def table_of(vocab_size: int) -> SlotTable:
    table = SlotTable(len(OWNERS), vocab_size, CPU)
    for slot, params in enumerate(OWNERS):
        table.bind(SlotBinding(slot, params, 3, ()))
    return table


def both(logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> tuple[list[int], list[int]]:
    """The tokens of the kernels, and those of torch."""
    from roseinfer.model.triton_kernels.sampling import choose

    table = table_of(logits.shape[1])
    computed, expected = choose(logits, slots, positions, table), TorchSampling(table, CPU).choose
    return computed.tolist(), expected(logits, slots, positions).tolist()


def random_logits(num_rows: int, vocab_size: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(vocab_size)) * 3).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocab_size", [1, 300, 4096, 9001])
def test_the_tokens_of_torch(interpreter: Worker, vocab_size: int, dtype: torch.dtype) -> None:
    slots, positions = torch.arange(20) % 4, torch.arange(20) * 7
    computed, expected = interpreter.call(both, random_logits(20, vocab_size, dtype), slots.int(), positions.int())
    assert computed == expected


def test_equal_logits_and_what_is_no_number(interpreter: Worker) -> None:
    """Of the largest the first, in its piece and among pieces; a row without numbers takes no other row down."""
    logits = torch.zeros(6, 10_000)
    logits[0, [3, 7, 5000]] = logits[1, [4999, 9000]] = 1.0
    logits[2:4] = torch.nan
    logits[4, 1:] = -torch.inf
    logits[5, :4500] = -torch.inf
    slots, positions = torch.tensor([0, 0, 0, 1, 1, 1]), torch.arange(6)
    tokens, _ = interpreter.call(both, logits, slots, positions)
    assert tokens[:2] == [3, 4999]
    assert tokens[4] == 0
    assert 4500 <= tokens[5] < 10_000
    assert tokens[2:4] == [NO_TOKEN, NO_TOKEN]


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_one_number_that_is_not_finite_takes_its_row(interpreter: Worker, poison: float) -> None:
    logits = random_logits(8, 10_000, torch.float32)
    slots, positions = torch.arange(8) % 4, torch.arange(8)
    sound, _ = interpreter.call(both, logits, slots, positions)
    logits[1, 9_999] = logits[2, 0] = logits[7, 4096] = poison
    logits[4] = -torch.inf
    tokens, expected = interpreter.call(both, logits, slots, positions)
    assert tokens == expected == [NO_TOKEN if row in {1, 2, 4, 7} else token for row, token in enumerate(sound)]


def test_a_row_ignores_the_others(interpreter: Worker) -> None:
    logits = random_logits(8, 9001, torch.float32)
    slots, positions = torch.arange(8) % 4, torch.arange(8) + 11
    together, _ = interpreter.call(both, logits, slots, positions)
    for row in range(8):
        some = slice(row, row + 1)
        assert interpreter.call(both, logits[some], slots[some], positions[some])[0] == together[some]


def edited(logits: torch.Tensor, num_steps: int) -> list[list[list[int]]]:
    """What the whole sampler draws with this backend and with torch's, where rows change their logits first."""
    from roseinfer.model.sampling.triton import TritonSampling

    kinds = [
        *OWNERS,
        SamplingParams(temperature=0.0, frequency_penalty=2.0),
        SamplingParams(seed=6, repetition_penalty=1.5, logit_bias={7: 3.0}),
        SamplingParams(seed=7, presence_penalty=1.0, top_p=0.9, min_tokens=2, stop_token_ids=(9,)),
    ]
    told = []
    for backend in (TritonSampling, TorchSampling):
        sampler = Sampler(len(kinds), logits.shape[1], CPU)
        sampler._backend = backend(sampler._table, CPU)
        for slot, params in enumerate(kinds):
            sampler.bind(SlotBinding(slot, params, 3, (), np.array([7, 8, 8], np.int32)))
        slots = np.arange(len(kinds), dtype=np.int32)
        rows = logits.expand(len(kinds), -1).clone()
        told.append([sampler.sample(rows, slots, slots * 0 + 3 + step)[0].tolist() for step in range(num_steps)])
    return told


def test_rows_whose_logits_are_changed_first(interpreter: Worker) -> None:
    computed, expected = interpreter.call(edited, random_logits(1, 5000, torch.bfloat16), 4)
    assert computed == expected
    assert len({step[4] for step in computed}) > 1, "a penalty has moved a greedy row"


def compile_rows(capability: int, vocab_size: int, dtype: torch.dtype) -> dict[str, str]:
    """The kernels that batches of several sizes need, in graphs and without, as PTX by their names."""
    from roseinfer.model.sampling.triton import TritonSampling

    Ahead.capability = capability
    compiled.clear()
    table, integers = table_of(vocab_size), torch.zeros(40, dtype=torch.int64)
    sampling = TritonSampling(table, CPU)
    for num_rows in (1, 2, 15, 16, 17):
        logits, rows = torch.zeros(num_rows, vocab_size, dtype=dtype), np.zeros(num_rows, np.int32)
        sampling.tokens(logits, rows, rows)
        for start in (0, 1):  # of a buffer that is cut up: addresses are not those of whole tensors
            part = integers[start : start + num_rows]
            sampling.choose(logits, part, part)
    kernels = {id(kernel): kernel for kernel in compiled}.values()
    assert len(kernels) == len({kernel.metadata.name for kernel in kernels}), "each is built once"
    return {kernel.metadata.name: kernel.asm["ptx"] for kernel in kernels}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("capability", "vocab_size"), [(80, 50257), (90, 151_936)])
def test_kernels_are_compiled_once(compiler: Worker, capability: int, vocab_size: int, dtype: torch.dtype) -> None:
    """Whatever the number of rows: no stream waits for a compiler."""
    codes = compiler.call(compile_rows, capability, vocab_size, dtype)
    assert set(codes) == {"_join_pieces", "_measure_piece"}
    assert "0d3FEFFFFFFFFFFFFF" in codes["_join_pieces"], "the float64 below 1, which a float32 would round to 1"
