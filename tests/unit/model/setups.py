"""Types, quantisation and kernels that a model can be run with on this processor, as parameters of tests."""

from dataclasses import dataclass
from typing import Literal

import torch

from roseinfer.config.options import RunnerConfig
from roseinfer.model.attention.kv_cache import CacheType
from roseinfer.model.device import DTYPES, Placement, Quantization
from roseinfer.model.kernels.library import LEVELS, Kernels, find_built, levels_here, load_kernels
from tests.conftest import BuiltKernels
from tests.emulated_kernels import EMULATED_LEVELS, EmulatedKernels


@dataclass(frozen=True)
class Setup:
    """One way to hold and multiply weights on a CPU."""

    dtype: Literal["float32", "bfloat16"]
    quantization: Quantization
    kernels: str  # a level, or "off"
    cache_type: CacheType = "auto"

    def __str__(self) -> str:
        cache = "" if self.cache_type == "auto" else f"-kv_{self.cache_type}"
        return f"{self.dtype}-{self.quantization}-{self.kernels}{cache}"

    def placement(self, built_kernels: BuiltKernels) -> Placement:
        """Compiles the kernels unless that was done."""
        kernels = None if self.kernels == "off" else kernels_at(self.kernels, built_kernels)
        return Placement(torch.device("cpu"), DTYPES[self.dtype], self.quantization, kernels)

    def runner_options(self, built_kernels: BuiltKernels) -> dict[str, str]:
        """Options of `RunnerConfig`."""
        if self.kernels == "off":
            return {"kernels": "off"}
        return {"kernels": self.kernels, "kernels_dir": str(built_kernels(self.kernels))}


def kernels_at(level: str, built_kernels: BuiltKernels) -> Kernels:
    """The kernels of a level of this processor, or of one that is emulated."""
    kernels_dir = built_kernels(level)
    if level in EMULATED_LEVELS:
        path = find_built(LEVELS[level], kernels_dir)
        assert path is not None
        return EmulatedKernels(level, path)
    kernels = load_kernels(RunnerConfig(kernels=level, kernels_dir=str(kernels_dir)))  # type: ignore[arg-type]
    assert kernels is not None
    return kernels


LEVELS_HERE = [level.name for level in levels_here()]

# Levels that single kernels are tested at; a whole model takes too long in an emulator. All levels of Arm have the same
# kernels but for products.
TESTED_LEVELS = [*LEVELS_HERE, *EMULATED_LEVELS]
LEVELS_WITHOUT_PRODUCTS = [*LEVELS_HERE, *EMULATED_LEVELS[-1:]]
_COMPILED = sorted(
    {*LEVELS_HERE[:1], *LEVELS_HERE[-1:]}
)  # the plainest code, and the code that this processor likes best

SETUPS = [
    Setup(dtype, quantization, kernels)
    for dtype in ("float32", "bfloat16")
    for quantization in ("none", "int8", "int4")
    for kernels in ("off", *_COMPILED)
]
