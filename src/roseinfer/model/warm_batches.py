"""Batches that nobody asked for: what a runner meets before its first request. Knows nothing of tensors.

All their rows lie over the first blocks of the pool.
"""

from concurrent.futures import Future

import msgspec
import numpy as np

from roseinfer.engine.core.batch import ScheduledBatch, SlotBinding
from roseinfer.engine.core.constraint import Constraint, MaskArray, Matcher, TokenMasks
from roseinfer.messages import Grammar, SamplingParams
from roseinfer.model.sampling.logit_edits import GROUP

KINDS = (
    SamplingParams(frequency_penalty=0.1, logit_bias={0: 1.0}),
    SamplingParams(temperature=0.0),
    SamplingParams(),
    SamplingParams(top_p=0.9, num_logprobs=1),
)


def decode_batch(num_rows: int, start: int = 0, bindings: tuple[SlotBinding, ...] = ()) -> ScheduledBatch:
    """Rows that decode at one position."""
    blocks = np.arange(start + 1, dtype=np.int32)
    return ScheduledBatch(
        step_id=0,
        slots=np.arange(num_rows, dtype=np.int32),
        starts=np.full(num_rows, start, np.int32),
        num_new_tokens=np.ones(num_rows, np.int32),
        samples=np.ones(num_rows, np.bool_),
        num_device_rows=num_rows,
        token_ids=np.zeros(0, np.int32),
        block_table=np.repeat(blocks[None], num_rows, axis=0),
        bindings=bindings,
    )


def largest_draw(num_slots: int, vocab_size: int) -> ScheduledBatch:
    """A row for each slot, of which no few candidates hold all that it keeps, and which must not end yet."""
    params = SamplingParams(top_k=vocab_size - 1, min_tokens=1, num_logprobs=1)
    return decode_batch(num_slots, bindings=tuple(SlotBinding(slot, params, 1, (0,)) for slot in range(num_slots)))


def masked_draw(num_slots: int, vocab_size: int) -> ScheduledBatch:
    """As many rows with a grammar as are changed at a time."""
    params = SamplingParams(temperature=0.0, grammar=Grammar("regex", ""))
    num_rows = min(GROUP, num_slots)
    constraint = Constraint(_anything(), params, (), vocab_size)
    batch = decode_batch(num_rows, bindings=tuple(SlotBinding(slot, params, 1, ()) for slot in range(num_rows)))
    return msgspec.structs.replace(batch, masks=TokenMasks(dict.fromkeys(range(num_rows), constraint)))


class _Anything:
    """`Matcher` that allows every token."""

    is_over = False
    has_failed = False
    error = ""

    def fill(self, allowed: MaskArray) -> None:
        """See Matcher."""
        allowed[:] = 0xFFFFFFFF

    def accept(self, token_id: int) -> None:
        """See Matcher."""


def _anything() -> "Future[Matcher]":
    future: Future[Matcher] = Future()
    future.set_result(_Anything())
    return future
