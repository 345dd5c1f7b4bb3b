"""Log-probabilities on the device into messages on the host. Knows nothing about how they are computed."""

from dataclasses import dataclass

import torch

from roseinfer.messages import TokenLogprobs


@dataclass(frozen=True, slots=True)
class LogprobRows:
    """Log-probabilities on the device: for the rows that asked, and the likeliest tokens by how many were asked for."""

    rows: list[int]
    logprobs: torch.Tensor  # [len(rows)] of the sampled token
    ranks: torch.Tensor  # [len(rows)]
    likeliest: list[tuple[list[int], torch.Tensor, torch.Tensor]]  # indices into `rows`, ids and logprobs [., k]

    def to_host(self, num_rows: int) -> list[TokenLogprobs | None]:
        """One entry for each row of the batch, None for those that did not ask."""
        top: dict[int, tuple[list[int], list[float]]] = {}
        for indices, ids, logprobs in self.likeliest:
            top.update(zip(indices, zip(ids.tolist(), logprobs.tolist(), strict=True), strict=True))
        result: list[TokenLogprobs | None] = [None] * num_rows
        for index, (row, logprob, rank) in enumerate(
            zip(self.rows, self.logprobs.tolist(), self.ranks.tolist(), strict=True)
        ):
            result[row] = TokenLogprobs(logprob, rank, *top[index])
        return result
