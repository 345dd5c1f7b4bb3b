"""Brings log-probabilities of sampled tokens and of prompts from the device to the host."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from roseinfer.engine.core.batch import Int32Array, ScoredRow, Scores
from roseinfer.messages import TokenLogprobs
from roseinfer.model.sampling.slot_table import Int64Array


@dataclass(frozen=True, slots=True)
class LogprobRows:
    """Log-probabilities on the device, of the rows that want them; the likeliest tokens are grouped by their number."""

    rows: list[int]
    logprobs: torch.Tensor  # [len(rows)] of the sampled token
    ranks: torch.Tensor  # [len(rows)]
    likeliest: list[tuple[list[int], torch.Tensor, torch.Tensor]]  # indices into `rows`, ids and logprobs [., k]

    def fetch(self) -> "LogprobRows":
        """Queue the copies to the host, complete when the step's event has passed; torch keeps the pinned memory."""
        likeliest = [(rows, _fetched(ids), _fetched(values)) for rows, ids, values in self.likeliest]
        return replace(self, logprobs=_fetched(self.logprobs), ranks=_fetched(self.ranks), likeliest=likeliest)

    def to_host(self, num_rows: int) -> list[TokenLogprobs | None]:
        """One entry for each row of the batch, None for those without log-probabilities."""
        top: dict[int, tuple[list[int], list[float]]] = {}
        for indices, ids, logprobs in self.likeliest:
            top.update(zip(indices, zip(ids.tolist(), logprobs.tolist(), strict=True), strict=True))
        result: list[TokenLogprobs | None] = [None] * num_rows
        for index, (row, logprob, rank) in enumerate(
            zip(self.rows, self.logprobs.tolist(), self.ranks.tolist(), strict=True)
        ):
            result[row] = TokenLogprobs(logprob, rank, *top[index])
        return result


@dataclass(frozen=True, slots=True)
class PackedLogprobs:
    """As `LogprobRows`, of a whole batch in one tensor, so that one copy brings them."""

    counts: Int32Array  # [rows] of the likeliest tokens, negative for rows that want nothing
    numbers: torch.Tensor  # float64 [rows, 2 + 2n]: logprob, rank, ids of n likeliest tokens, and their logprobs

    def fetch(self) -> "PackedLogprobs":
        """Queue the copy to the host, complete when the step's event has passed."""
        return replace(self, numbers=_fetched(self.numbers))

    def to_host(self, num_rows: int) -> list[TokenLogprobs | None]:
        """One entry for each row of the batch, None for those without log-probabilities."""
        width = self.numbers.shape[1] // 2 - 1
        result: list[TokenLogprobs | None] = [None] * num_rows
        for row, count in enumerate(self.counts.tolist()):
            if count >= 0:
                logprob, rank, *likeliest = self.numbers[row].tolist()
                ids, logprobs = likeliest[:count], likeliest[width : width + count]
                result[row] = TokenLogprobs(logprob, int(rank), [int(token_id) for token_id in ids], logprobs)
        return result


Logprobs = LogprobRows | PackedLogprobs
Likeliest = list[tuple[list[int], torch.Tensor, torch.Tensor]]  # as in `LogprobRows`


def rows_by_count(counts: Int32Array) -> list[tuple[int, Int64Array]]:
    """Each number of likeliest tokens that is asked for, and the rows that ask for it."""
    return [(count, np.flatnonzero(counts == count)) for count in sorted(set(counts.tolist()))]


def _tensors(likeliest: Likeliest) -> Iterator[torch.Tensor]:
    for _rows, ids, values in likeliest:
        yield from (ids, values)


def _fetched(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to("cpu", non_blocking=True)


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Log-probabilities on the device of prompt tokens, row after row, in pieces of any size."""

    scored: Sequence[ScoredRow]  # at least one
    pieces: Sequence[LogprobRows]

    def fetch(self) -> "PromptScores":
        """Queue one copy of everything to the host, complete when the step's event has passed. Ranks stay."""
        parts = [part for piece in self.pieces for part in (piece.logprobs, *_tensors(piece.likeliest))]
        numbers = _fetched(torch.cat([part.double().flatten() for part in parts]))  # float64 holds ids exactly
        on_host = iter(torch.split(numbers, [part.numel() for part in parts]))
        pieces = []
        for piece in self.pieces:
            logprobs = next(on_host)
            likeliest = [
                (rows, next(on_host).view(ids.shape), next(on_host).view(values.shape))
                for rows, ids, values in piece.likeliest
            ]
            pieces.append(replace(piece, logprobs=logprobs, likeliest=likeliest))
        return PromptScores(self.scored, pieces)

    def to_host(self) -> tuple[Scores, ...]:
        """The scores of each row."""
        num_tokens = sum(len(row.next_token_ids) for row in self.scored)
        width = max(row.num_likeliest for row in self.scored)
        logprobs = np.concatenate([piece.logprobs.numpy() for piece in self.pieces])
        ids, values = np.zeros((num_tokens, width), np.int32), np.zeros((num_tokens, width), np.float64)
        start = 0
        for piece in self.pieces:
            for indices, piece_ids, piece_values in piece.likeliest:
                at, count = start + np.array(indices), piece_ids.shape[1]
                ids[at, :count] = piece_ids.numpy()
                values[at, :count] = piece_values.numpy()
            start += len(piece.rows)
        scores, start = [], 0
        for row in self.scored:
            mine, count = slice(start, start := start + len(row.next_token_ids)), row.num_likeliest
            scores.append(Scores(logprobs[mine], ids[mine, :count], values[mine, :count]))
        return tuple(scores)
