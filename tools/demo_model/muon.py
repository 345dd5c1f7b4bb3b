"""The optimizer Muon, in float32 and batched over matrices of one size: updates are nearly orthogonal.

Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks"; the scale of the update is that of
Liu et al. 2025, "Muon is Scalable for LLM Training". torch has one of its own, which orthogonalises in bfloat16, one
matrix at a time: on a CPU without bfloat16 arithmetic that takes nearly three times as long.
"""

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic iteration in Jordan et al.
_ITERATIONS = 5
_RMS_OF_ADAMW = 0.2  # Liu et al., section 2.2: an update as large as AdamW's


class Muon(torch.optim.Optimizer):
    """For the weight matrices of the blocks; embeddings, biases and norms are left to AdamW."""

    def __init__(
        self, matrices: Iterable[nn.Parameter], lr: float, weight_decay: float, momentum: float = 0.95
    ) -> None:
        super().__init__(matrices, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """One update, with Nesterov momentum and decoupled weight decay."""
        for group in self.param_groups:
            same_size: dict[tuple[int, int], list[nn.Parameter]] = defaultdict(list)
            for parameter in group["params"]:
                same_size[parameter.shape].append(parameter)
            for parameters in same_size.values():
                updates = torch.stack([self._momentum(parameter, group["momentum"]) for parameter in parameters])
                scale = _RMS_OF_ADAMW * max(updates.shape[1:]) ** 0.5
                for parameter, update in zip(parameters, orthogonalised(updates), strict=True):
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    parameter.add_(update, alpha=-group["lr"] * scale)

    def _momentum(self, parameter: nn.Parameter, momentum: float) -> Tensor:
        assert parameter.grad is not None
        average = self.state[parameter].setdefault("average", torch.zeros_like(parameter))
        average.lerp_(parameter.grad, 1 - momentum)
        return parameter.grad.lerp(average, momentum)


def orthogonalised(matrices: Tensor) -> Tensor:
    """[count, rows, columns] -> the same, singular values near 1: Newton-Schulz, on the shorter side."""
    if matrices.shape[1] > matrices.shape[2]:
        return orthogonalised(matrices.mT).mT
    a, b, c = _COEFFICIENTS
    x = matrices / (matrices.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x  # type: ignore[no-any-return]
