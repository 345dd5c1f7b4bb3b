"""What ptxas gives Triton's kernels is what kernel_budgets.json says, and that is enough."""

import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from importlib.util import find_spec

import pytest

from tests.unit.model.kernel_budgets import CAPABILITIES, SHARED_BYTES, budgets_of, read
from tests.unit.model.triton_processes import Worker

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed; the extra `test` has it")

WRITTEN_WITH, BUDGETS = read()
SAMPLE = [(90, "GPT-2 small"), (80, "Llama-3.1-8B")]
MODELS = sorted({place.split(", ")[1] for place in BUDGETS})
# All take minutes: .ci/run has the time.
PLACES = [(of, name) for of in CAPABILITIES for name in MODELS] if os.environ.get("ROSEINFER_REQUIRE_ALL") else SAMPLE


@pytest.fixture(scope="module")
def compiler() -> Iterator[Worker]:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as executor:
        yield Worker(executor)


@pytest.mark.parametrize(("capability", "name"), PLACES)
def test_ptxas_gives_what_the_file_says(compiler: Worker, capability: int, name: str) -> None:
    """To write the file again: python -m tests.unit.model.kernel_budgets."""
    if find_spec("triton") and version("triton") != WRITTEN_WITH:
        pytest.skip(f"the file is of Triton {WRITTEN_WITH}")
    assert compiler.call(budgets_of, capability, name) == BUDGETS[f"sm_{capability}, {name}"]


def test_the_file_has_every_gpu_and_model_and_every_kernel_fits() -> None:
    """And spills no register."""
    assert set(BUDGETS) == {f"sm_{capability}, {name}" for capability in CAPABILITIES for name in MODELS}
    for capability in CAPABILITIES:
        for name in MODELS:
            for kernel, budget in BUDGETS[f"sm_{capability}, {name}"].items():
                assert budget.spilled == 0, (capability, name, kernel)
                assert budget.shared <= SHARED_BYTES[capability], (capability, name, kernel)
