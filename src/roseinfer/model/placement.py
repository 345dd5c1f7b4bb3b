"""Device, type, quantisation and kernels into the kind of linear they mean. Knows nothing about weights."""

from dataclasses import dataclass, field
from typing import Literal

import torch

from roseinfer.errors import ConfigError
from roseinfer.model.kernels.library import Kernels
from roseinfer.model.layers.weight_memory import WeightMemory

LinearKind = Literal["torch", "onednn", "amx", "registers", "int8"]
Quantization = Literal["none", "int8"]


@dataclass(frozen=True, slots=True)
class Placement:
    """Where weights live and in what type they are multiplied. Norms and residuals are float32 regardless.

    Raises ConfigError for int8 anywhere but on a CPU.
    """

    device: torch.device
    dtype: torch.dtype  # of weights, unless they are quantised, of activations and of the KV cache
    quantization: Quantization = "none"
    kernels: Kernels | None = None
    memory: WeightMemory = field(default_factory=WeightMemory, compare=False, repr=False)  # of packed weights

    def __post_init__(self) -> None:
        if self.quantization == "int8" and self.device.type != "cpu":
            raise ConfigError(
                "int8 weights are for CPUs: choose --quantization none, or --device cpu.", param="model.quantization"
            )

    @property
    def linears(self) -> LinearKind:
        """How linears are multiplied. All but `torch` give a row the same bits whatever the others (`padded_rows`)."""
        if self.quantization == "int8":
            return "int8"
        if self.device.type != "cpu":
            return "torch"
        if self.dtype == torch.bfloat16 and self.has_tiles:
            return "amx"
        if self.kernels is not None and (self.dtype == torch.float32 or self.has_pairs):
            return "registers"
        return "onednn" if hasattr(torch.ops.mkldnn, "_linear_pointwise") else "torch"

    @property
    def splits_sums(self) -> bool:
        """Whether many threads would make a row's bits depend on its neighbours."""
        return self.linears == "onednn" and self.dtype == torch.bfloat16

    @property
    def has_tiles(self) -> bool:
        """Whether the kernels multiply on AMX tiles."""
        return self.kernels is not None and self.kernels.has("roseinfer_linear_bfloat16")

    @property
    def has_pairs(self) -> bool:
        """Whether the kernels multiply pairs of bfloat16 in registers."""
        return self.kernels is not None and self.kernels.has("roseinfer_linear_bfloat16_pairs")

    @property
    def has_fours(self) -> bool:
        """Whether the kernels multiply int8 in registers, by fours."""
        return self.kernels is not None and self.kernels.has("roseinfer_linear_int8_fours_of_float32")

    def padded_rows(self, num_rows: int) -> int:
        """The next number of rows that linears are to be run with: most kinds take any, oneDNN prefers few.

        It builds a kernel for each number of rows it meets, about a millisecond for each shape of weight, and a single
        row goes another way than several and gets other bits. So: even, and with four significant bits at most; 8
        sizes to each doubling can all be met before the first request, and cost an eighth more rows at worst.
        """
        if self.linears != "onednn":
            return num_rows
        step = max(2, 1 << max(0, (num_rows - 1).bit_length() - 4))
        return -(-num_rows // step) * step
