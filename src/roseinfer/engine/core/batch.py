"""The interface between scheduler and runner: the batch that goes in, and the sampled tokens that come back.

A batch is rows of (sequence, number of new tokens); there is no prefill mode and no decode mode. Rows whose one new
token is the one sampled last come first. The runner reads that token from its own memory, by slot, so a step can be
launched before the host has read the step before it. All other rows bring their token ids with them. A sequence with
drafted tokens has a row for its last token and one for each of them, side by side, and each of these rows samples.
"""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from roseinfer.engine.core.constraint import TokenMasks
from roseinfer.messages import Pooling, SamplingParams, TokenLogprobs

Int32Array = npt.NDArray[np.int32]
IndexArray = npt.NDArray[np.intp]  # numpy indexes with these directly; int32 it converts first, at four times the cost
BoolArray = npt.NDArray[np.bool_]
Float64Array = npt.NDArray[np.float64]
Pooled = npt.NDArray[np.float32] | npt.NDArray[np.int64]  # the last row, or the sum of rows in units of `POOLED_UNIT`

MAX_STEP_DRAFTS = 64  # drafted tokens in one step
POOLED_UNIT = 2.0**-24  # sums of integers are the same however a prompt was cut
NO_TOKEN = -1  # in place of a token id: the model's logits of the row were not finite
OWN_FAULT = -2  # likewise: the request's parameters cannot be used, or made finite logits infinite or NaN


class Watch(Protocol):
    """Measures the parts of a step: `with watch("forward"):`."""

    def __call__(self, name: str, /) -> AbstractContextManager[None]:
        """Begin the part `name`, a field of `PhaseTimes`; the `with` that follows ends it."""


@dataclass(frozen=True, slots=True)
class SlotBinding:
    """The new owner of a slot, as the runner must know it before the owner's first row.

    Random numbers depend only on (params.seed, position), so a sequence that is preempted and comes back in another
    slot continues unchanged.
    """

    slot: int
    params: SamplingParams
    num_prompt_tokens: int
    eos_token_ids: tuple[int, ...]  # empty when the request ignores them; barred until min_tokens is reached
    token_ids: Int32Array | None = None  # all known ones, prompt and generated, if `params.has_penalties`


class ScoredRow(msgspec.Struct, frozen=True, gc=False):
    """A row whose prompt tokens are scored: each gets its log-probability given the tokens before it."""

    row: int  # of the batch; never a device row
    next_token_ids: Int32Array  # what follows the row's first tokens: the prompt ends, or goes on in the next step
    num_likeliest: int


class Scores(msgspec.Struct, frozen=True, gc=False):
    """The result of a `ScoredRow`: an entry for each of its `next_token_ids`."""

    logprobs: Float64Array  # [tokens] of the model's own distribution
    top_token_ids: Int32Array  # [tokens, num_likeliest] the likeliest at that position, likeliest first
    top_logprobs: Float64Array  # [tokens, num_likeliest]


class PooledRow(msgspec.Struct, frozen=True, gc=False):
    """A row whose hidden rows, behind the final norm, are pooled: the last of its prompt, or all of them."""

    row: int  # of the batch; never a device row
    pooling: Pooling


class ScheduledBatch(msgspec.Struct, frozen=True, gc=False):
    """One step's work. Arrays have one entry a row unless their shape says otherwise.

    The runner reads the arrays during `launch` and keeps none of them: `block_table` is the scheduler's own.
    """

    step_id: int
    slots: Int32Array  # [rows] index into block_table and into the runner's per-slot state
    starts: Int32Array  # [rows] absolute position of the row's first new token = tokens already in its KV cache
    num_new_tokens: Int32Array  # [rows] >= 1
    samples: BoolArray  # [rows] the row reaches the end of its known tokens, so the next one is sampled
    num_device_rows: int  # rows[:n] have one new token, the one sampled last for their slot; all of them sample
    token_ids: Int32Array  # [sum(num_new_tokens[num_device_rows:])] of the other rows, row after row
    block_table: Int32Array  # [slots, max_blocks] block ids of every slot, valid up to the row's last new token
    bindings: tuple[SlotBinding, ...]  # to be applied, in order, before the rows
    drafted: Int32Array | None = None  # [rows] the drafted token that a row computes, or `NO_TOKEN`; None without any
    scored: tuple[ScoredRow, ...] = ()
    masks: TokenMasks | None = None  # for the rows that sample under a grammar
    pooled: tuple[PooledRow, ...] = ()

    @property
    def num_rows(self) -> int:
        return len(self.slots)

    @property
    def num_tokens(self) -> int:
        return self.num_device_rows + len(self.token_ids)


class SampledTokens(msgspec.Struct, frozen=True, gc=False):
    """The result of a batch: one entry for each row with `samples`, in row order, and one for each `scored` row."""

    token_ids: Int32Array  # `NO_TOKEN` or `OWN_FAULT` where a row has none
    logprobs: list[TokenLogprobs | None] | None  # None when no row asked
    scores: tuple[Scores, ...] = ()
    pooled: tuple[Pooled, ...] = ()  # [width] for each `pooled` row


class Launched(Protocol):
    """A batch that the device is computing."""

    @property
    def graph_rows(self) -> int:
        """Rows of the CUDA graph that runs it, padding included; 0 without one."""

    @property
    def h2d_bytes(self) -> int:
        """Bytes copied to a device with its own memory."""

    def wait(self) -> SampledTokens:
        """Block until the sampled tokens are on the host. Called once."""


class Runner(Protocol):
    """Computes batches: `model/runner.py`, or `tests/fake_runner.py`.

    The token at position p of a sequence is computed from the KV entries of positions 0..p, found through the block
    table; the KV entry of position p lies at offset p % block_size of the block `block_table[slot, p // block_size]`.
    """

    def launch(self, batch: ScheduledBatch, watch: Watch) -> Launched:
        """Start computing a batch of at least one row; `watch` measures the launch's parts.

        The batch before it may still be unread. Batches are computed in the order of their launches.
        """
