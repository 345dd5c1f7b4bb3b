"""Brings log-probabilities of sampled tokens and of prompts from the device to the host."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from roseinfer.engine.core.batch import Int32Array, ScoredRow, Scores
from roseinfer.messages import MAX_LOGPROBS, TokenLogprobs
from roseinfer.model.sampling.slot_table import Int64Array

SCORE_WIDTH = 3 + 2 * MAX_LOGPROBS  # numbers of a row in `PackedLogprobs`


@dataclass(frozen=True, slots=True)
class LogprobRows:
    """Log-probabilities on the device, of the rows that want them; the likeliest tokens are grouped by their number."""

    rows: list[int]
    logprobs: torch.Tensor  # [len(rows)] of the sampled token
    ranks: torch.Tensor  # [len(rows)]
    likeliest: list[tuple[list[int], torch.Tensor, torch.Tensor]]  # indices into `rows`, ids and logprobs [., k]

    def tensors(self) -> list[torch.Tensor]:
        """All that is brought to the host."""
        return [self.ranks, *_scores(self)]

    def on_host(self, tensors: Iterator[torch.Tensor]) -> "LogprobRows":
        """The same with these `tensors` in place of its own."""
        return _with_scores(replace(self, ranks=next(tensors)), tensors)

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
    """As `LogprobRows`, of a whole batch in one tensor with the tokens, so that one copy brings all."""

    counts: Int32Array  # [rows] of the likeliest tokens, negative for rows that have nothing but a token
    # float64, which holds ids exactly [rows, 3 + 2n]: token, logprob, rank, ids of n likeliest tokens, their logprobs.
    numbers: torch.Tensor

    def tensors(self) -> list[torch.Tensor]:
        """All that is brought to the host."""
        return [self.numbers]

    def on_host(self, tensors: Iterator[torch.Tensor]) -> "PackedLogprobs":
        """The same with the next of these `tensors` in place of its own."""
        return replace(self, numbers=next(tensors))

    def to_host(self, num_rows: int) -> list[TokenLogprobs | None]:
        """One entry for each row of the batch, None for those without log-probabilities."""
        width = (self.numbers.shape[1] - 3) // 2
        result: list[TokenLogprobs | None] = [None] * num_rows
        for row, count in enumerate(self.counts.tolist()):
            if count >= 0:
                _, logprob, rank, *likeliest = self.numbers[row].tolist()
                ids, logprobs = likeliest[:count], likeliest[width : width + count]
                result[row] = TokenLogprobs(logprob, int(rank), [int(token_id) for token_id in ids], logprobs)
        return result


Logprobs = LogprobRows | PackedLogprobs


def rows_by_count(counts: Int32Array) -> list[tuple[int, Int64Array]]:
    """Each number of likeliest tokens that is asked for, and the rows that ask for it."""
    return [(count, np.flatnonzero(counts == count)) for count in sorted(set(counts.tolist()))]


def _scores(piece: LogprobRows) -> list[torch.Tensor]:
    """All but the ranks."""
    return [piece.logprobs, *(tensor for _rows, *pair in piece.likeliest for tensor in pair)]


def _with_scores(piece: LogprobRows, tensors: Iterator[torch.Tensor]) -> LogprobRows:
    """The piece with these in place of its `_scores`."""
    logprobs = next(tensors)
    return replace(
        piece, logprobs=logprobs, likeliest=[(rows, next(tensors), next(tensors)) for rows, *_ in piece.likeliest]
    )


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Log-probabilities on the device of prompt tokens, row after row, in pieces of any size."""

    scored: Sequence[ScoredRow]  # at least one
    pieces: Sequence[LogprobRows]

    def tensors(self) -> list[torch.Tensor]:
        """All that is brought to the host. Ranks stay."""
        return [tensor for piece in self.pieces for tensor in _scores(piece)]

    def on_host(self, tensors: Iterator[torch.Tensor]) -> "PromptScores":
        """The same with these `tensors` in place of its own."""
        return PromptScores(self.scored, [_with_scores(piece, tensors) for piece in self.pieces])

    def to_host(self) -> tuple[Scores, ...]:
        """The scores of each row."""
        num_tokens = sum(len(row.next_token_ids) for row in self.scored)
        width = max(row.num_likeliest for row in self.scored)
        logprobs = np.concatenate([piece.logprobs.numpy() for piece in self.pieces], dtype=np.float64)
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
