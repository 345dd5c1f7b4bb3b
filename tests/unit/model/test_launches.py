"""The path of launches: Triton looks at the arguments of the first one of a kind, and at those of no other."""

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from benchmarks.gpu.performance_model import MODELS
from tests.unit.model.triton_processes import ABSENT_GPU, Worker, started

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed; the extra `test` has it")


def _prepare() -> None:
    import triton

    triton.runtime.driver.set_active(ABSENT_GPU)


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """Kernels are compiled, and their launches do nothing."""
    yield from started({"TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))}, _prepare)


def kernels_by_path(spoil: Callable[[], None]) -> tuple[set[str], list[str]]:
    """Of a layer's kernels those that Triton launched, and those that it launched again on tensors elsewhere."""
    from triton.runtime.jit import JITFunction

    from benchmarks.gpu.kernels import LayerKernels

    seen, run = list[str](), JITFunction.run

    def noted(kernel: Any, *arguments: Any, **options: Any) -> Any:
        seen.append(kernel.__name__)
        return run(kernel, *arguments, **options)

    found = []
    JITFunction.run = noted
    try:
        layers = [LayerKernels(MODELS["GPT-2 small"], 4, 512, torch.device("cpu")) for _ in range(2)]
        for layer in layers:
            for call in (layer.decoding(4), layer.prompts([24]), *layer.rest(4).values()):
                call()
            found.append(seen.copy())
            seen.clear()
            spoil()
    finally:
        JITFunction.run = run
    return set(found[0]), found[1]


def spoil_nothing() -> None: ...


def spoil_builds() -> None:
    from roseinfer.model.triton_kernels import language

    language._builds.clear()


def test_a_kernel_is_looked_up_by_triton_once(process: Worker) -> None:
    first, again = process.call(kernels_by_path, spoil_nothing)
    assert len(first) > 4
    assert again == []


def test_a_launch_that_triton_looks_at_is_seen(process: Worker) -> None:
    _, again = process.call(kernels_by_path, spoil_builds)
    assert len(set(again)) > 4
