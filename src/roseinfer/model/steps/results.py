"""Brings a step's tokens and what belongs to them to the host, while the next step runs."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from roseinfer.engine.core.batch import OWN_FAULT, SampledTokens
from roseinfer.model.device_stream import Event, Stream, fetched_together
from roseinfer.model.sampling.logprobs import SCORE_WIDTH, Logprobs, PackedLogprobs, PromptScores

_NUM_BUFFERS = 2  # a step is launched before the one before is read, at most


class LaunchedBatch(msgspec.Struct, eq=False):
    """The torch `Launched`: a batch whose tokens are sampled on the device, or will be."""

    _token_ids: npt.NDArray[Any]  # of any type; valid when the event has passed
    _event: Event
    _logprobs: Logprobs | None
    _scores: PromptScores | None
    graph_rows: int  # rows of the CUDA graph it runs in; 0 without one
    _pooled: Sequence[torch.Tensor] = ()
    h2d_bytes: int = 0
    _sampled: SampledTokens | None = None
    failed_rows: npt.NDArray[np.intp] | None = None  # of the sampling rows: they get `OWN_FAULT` as their tokens

    def wait(self) -> SampledTokens:
        if self._sampled is None:
            self._event.synchronize()
            token_ids = self._token_ids.astype(np.int32)
            if self.failed_rows is not None:
                token_ids[self.failed_rows] = OWN_FAULT
            logprobs = None if self._logprobs is None else self._logprobs.to_host(len(token_ids))
            scores = () if self._scores is None else self._scores.to_host()
            pooled = tuple(part.numpy() for part in self._pooled)
            self._sampled = SampledTokens(token_ids, logprobs, scores, pooled)
        return self._sampled


class Results:
    """Copies sampled tokens to the host while the next step runs.

    Each step in flight has its buffers and event, so that waiting for it waits for nothing queued later. One copy
    brings everything: tokens to a buffer, tokens with log-probabilities of a graph to another, and what else there is
    with them to memory that torch keeps.
    """

    def __init__(self, stream: Stream, max_rows: int) -> None:
        self._stream = stream
        num_scores = 0 if stream.is_host else max_rows * SCORE_WIDTH
        self._buffers = [
            (
                (
                    stream.new_host_tensor(max_rows, torch.int64),
                    stream.new_host_tensor(num_scores, torch.float64).view(-1, SCORE_WIDTH),
                ),
                stream.new_event(),
            )
            for _ in range(_NUM_BUFFERS)
        ]
        self._launched: list[LaunchedBatch | None] = [None] * _NUM_BUFFERS  # whose tokens are in each buffer
        self._turn = 0
        self._targets = cache(self._new_target)

    def _new_target(self, turn: int, num_rows: int) -> tuple[torch.Tensor, npt.NDArray[Any]]:
        """Where the tokens of a step without more than that arrive, and the same as the host reads it."""
        target = self._buffers[turn][0][0][:num_rows]
        return target, target.numpy()

    def fetch(
        self,
        token_ids: torch.Tensor,
        logprobs: Logprobs | None,
        graph_rows: int = 0,
        scores: PromptScores | None = None,
        pooled: Sequence[torch.Tensor] = (),
    ) -> LaunchedBatch:
        """Queue the copy of the tokens int64 [rows], which may change on the device afterwards, and of the rest."""
        turn, self._turn = self._turn, (self._turn + 1) % _NUM_BUFFERS
        last = self._launched[turn]
        if last is not None:
            last.wait()  # it keeps its tokens, if they have not been read yet
        event = self._buffers[turn][1]
        if logprobs is None and scores is None and not pooled:  # most steps, and the host is in a hurry
            target, on_host = self._targets(turn, token_ids.shape[0])
            self._stream.copy(target, token_ids)
            launched = LaunchedBatch(on_host, event, None, None, graph_rows)
        else:
            launched = self._fetch_all(turn, token_ids, logprobs, graph_rows, scores, pooled)
        event.record()
        self._launched[turn] = launched
        return launched

    def _fetch_all(
        self,
        turn: int,
        token_ids: torch.Tensor,
        logprobs: Logprobs | None,
        graph_rows: int,
        scores: PromptScores | None,
        pooled: Sequence[torch.Tensor],
    ) -> LaunchedBatch:
        buffers, event = self._buffers[turn]
        is_packed = isinstance(logprobs, PackedLogprobs)  # the tokens are among its numbers
        parts = [part for part in (logprobs, scores) if part is not None]
        tensors = [*([] if is_packed else [token_ids]), *(each for part in parts for each in part.tensors()), *pooled]
        if len(tensors) > 1 and token_ids.device.type != "cpu":
            tensors = fetched_together(tensors)
        else:  # all but the first, on a CPU, is where it is
            source, tensors[0] = tensors[0], buffers[is_packed][: len(token_ids)]
            self._stream.copy(tensors[0], source)
        on_host = iter(tensors)
        host = tensors[0][:, 0] if is_packed else next(on_host)
        logprobs = None if logprobs is None else logprobs.on_host(on_host)
        scores = None if scores is None else scores.on_host(on_host)
        return LaunchedBatch(host.numpy(), event, logprobs, scores, graph_rows, [*on_host])
