"""Sampled tokens on the device into arrays on the host, while the next step runs. Knows nothing of how they came.

Each step in flight has a buffer of pinned memory and an event. Who waits for a step waits for its event and for
nothing that was queued after it.
"""

import numpy as np
import numpy.typing as npt
import torch

from roseinfer.engine.core.batch import OWN_FAULT, SampledTokens
from roseinfer.model.device_stream import Event, Stream
from roseinfer.model.sampling.logprobs import LogprobRows, PromptScores

_NUM_BUFFERS = 2  # a step is launched before the one before is read, at most


class LaunchedBatch:
    """A batch whose tokens are sampled on the device, or will be."""

    def __init__(
        self,
        token_ids: torch.Tensor,
        event: Event,
        logprobs: LogprobRows | None,
        scores: PromptScores | None,
        graph_rows: int,
    ) -> None:
        self.graph_rows = graph_rows  # rows of the CUDA graph it runs in; 0 without one
        self.h2d_bytes = 0
        self._token_ids = token_ids  # of the host, when the event has passed
        self._event = event
        self._logprobs = logprobs
        self._scores = scores
        self._sampled: SampledTokens | None = None
        self._failed_rows: npt.NDArray[np.intp] | None = None

    def fail(self, rows: npt.NDArray[np.intp]) -> None:
        """These rows, of those that sample, have no tokens by their own fault, whatever the device says."""
        self._failed_rows = rows

    def wait(self) -> SampledTokens:
        """See Launched."""
        if self._sampled is None:
            self._event.synchronize()
            token_ids = self._token_ids.numpy().astype(np.int32)
            if self._failed_rows is not None:
                token_ids[self._failed_rows] = OWN_FAULT
            logprobs = None if self._logprobs is None else self._logprobs.to_host(len(token_ids))
            scores = () if self._scores is None else self._scores.to_host()
            self._sampled = SampledTokens(token_ids, logprobs, scores)
        return self._sampled


class Results:
    """The buffers that sampled tokens come back in."""

    def __init__(self, stream: Stream, max_rows: int) -> None:
        self._stream = stream
        self._buffers = [
            (stream.new_host_tensor(max_rows, torch.int64), stream.new_event()) for _ in range(_NUM_BUFFERS)
        ]
        self._launched: list[LaunchedBatch | None] = [None] * _NUM_BUFFERS  # whose tokens are in each buffer
        self._turn = 0

    def fetch(
        self,
        token_ids: torch.Tensor,
        logprobs: LogprobRows | None,
        graph_rows: int = 0,
        scores: PromptScores | None = None,
    ) -> LaunchedBatch:
        """Queue the way back of the tokens int64 [rows], which may change on the device afterwards."""
        turn, self._turn = self._turn, (self._turn + 1) % _NUM_BUFFERS
        last = self._launched[turn]
        if last is not None:
            last.wait()  # it keeps its tokens, if nobody has asked for them yet
        buffer, event = self._buffers[turn]
        host = buffer[: len(token_ids)]
        self._stream.copy(host, token_ids)
        launched = LaunchedBatch(
            host,
            event,
            None if logprobs is None else logprobs.fetch(),
            None if scores is None else scores.fetch(),
            graph_rows,
        )
        event.record()
        self._launched[turn] = launched
        return launched
