"""Kernels with a model of an instruction that the processor may lack."""

import fcntl
from pathlib import Path

import pytest
import torch  # noqa: F401 - its OpenMP runtime is the one that kernels need

from roseinfer.model.kernels import library
from roseinfer.model.kernels.library import Kernels
from tests.conftest import require_tool
from tests.unit.model.setups import LEVELS_HERE


@pytest.fixture(scope="session")
def model_of_fours(kernels_dir: Path) -> Kernels:
    """The linears of AVX2 with a model of the instruction for four products in its place."""
    require_tool("g++")
    if "avx2" not in LEVELS_HERE:
        pytest.skip("this processor does not have AVX2")
    with pytest.MonkeyPatch.context() as patch, (kernels_dir / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        needed = [library.SOURCE_DIR / f"{name}.cpp" for name in ("init", "linear", "quantize", "quantize_int4")]
        patch.setattr(library, "sources", lambda: needed)
        level = library.Level("avx2_model", library.LEVELS["avx2"].instructions, ("-DROSEINFER_MODEL_FOURS",))
        return Kernels(level.name, library.build_kernels(level, kernels_dir, library.find_compiler())[0])
