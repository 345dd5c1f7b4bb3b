"""What ptxas gives Triton's kernels is what kernel_budgets.json says, and that is enough."""

import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from importlib.util import find_spec

import pytest

from benchmarks.gpu.performance_model import MODELS
from tests.unit.model.kernel_budgets import (
    CAPABILITIES,
    SHARED_BYTES,
    VOCABULARIES,
    budgets_of,
    budgets_of_sampling,
    read,
)
from tests.unit.model.triton_processes import Worker

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed; the extra `test` has it")

WRITTEN_WITH, BUDGETS = read()
SAMPLE = [(90, "GPT-2 small"), (80, "Llama-3.1-8B")]
SAMPLING_SAMPLE = [(90, 50257)]
# All take minutes: .ci/run has the time.
TAKES_ALL = bool(os.environ.get("ROSEINFER_REQUIRE_ALL"))
PLACES = [(of, name) for of in CAPABILITIES for name in sorted(MODELS)] if TAKES_ALL else SAMPLE
SAMPLING_PLACES = [(of, size) for of in CAPABILITIES for size in VOCABULARIES] if TAKES_ALL else SAMPLING_SAMPLE


@pytest.fixture(scope="module")
def compiler() -> Iterator[Worker]:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as executor:
        yield Worker(executor)


@pytest.fixture
def of_this_triton() -> None:
    if find_spec("triton") and version("triton") != WRITTEN_WITH:
        pytest.skip(f"the file is of Triton {WRITTEN_WITH}")


@pytest.mark.usefixtures("of_this_triton")
@pytest.mark.parametrize(("capability", "name"), PLACES)
def test_ptxas_gives_what_the_file_says(compiler: Worker, capability: int, name: str) -> None:
    """To write the file again: python -m tests.unit.model.kernel_budgets."""
    assert compiler.call(budgets_of, capability, name) == BUDGETS[f"sm_{capability}, {name}"]


@pytest.mark.usefixtures("of_this_triton")
@pytest.mark.parametrize(("capability", "vocab_size"), SAMPLING_PLACES)
def test_so_it_does_for_sampling(compiler: Worker, capability: int, vocab_size: int) -> None:
    budgets = compiler.call(budgets_of_sampling, capability, vocab_size)
    assert budgets == BUDGETS[f"sm_{capability}, {vocab_size} logits"]


def test_the_file_has_every_gpu_and_model_and_every_kernel_fits() -> None:
    """And spills no register."""
    shapes = [*MODELS, *(f"{size} logits" for size in VOCABULARIES)]
    assert set(BUDGETS) == {f"sm_{capability}, {shape}" for capability in CAPABILITIES for shape in shapes}
    for capability in CAPABILITIES:
        for shape in shapes:
            for kernel, budget in BUDGETS[f"sm_{capability}, {shape}"].items():
                assert budget.spilled == 0, (capability, shape, kernel)
                assert budget.shared <= SHARED_BYTES[capability], (capability, shape, kernel)


def test_logits_are_read_16_bytes_at_a_time() -> None:
    """Whatever the vocabulary: a mask that ends at an odd place would narrow the loads, and those of GPT-2 are odd."""
    for capability in CAPABILITIES:
        of_vocabularies = [BUDGETS[f"sm_{capability}, {size} logits"] for size in VOCABULARIES]
        assert len({budgets["sampling: _measure_piece"].loads for budgets in of_vocabularies}) == 1
        assert all(budgets["sampling: _measure_piece"].loads.startswith("16*") for budgets in of_vocabularies)
