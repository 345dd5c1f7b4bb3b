"""Makes the batches that a runner computes before its first request: prompts, decode rows, and the largest draws."""

from concurrent.futures import Future

import msgspec
import numpy as np

from roseinfer.engine.core.batch import Int32Array, ScheduledBatch, SlotBinding
from roseinfer.engine.core.constraint import Constraint, MaskArray, Matcher, TokenMasks
from roseinfer.messages import Grammar, SamplingParams
from roseinfer.model.sampling.edit_table import MAX_BIASES
from roseinfer.model.sampling.logit_edits import GROUP

# Parameters that the warm-up runs a prompt and a decode step with: every kind of sampling.
WARM_UP_KINDS = (
    SamplingParams(frequency_penalty=0.1, logit_bias={0: 1.0}),
    SamplingParams(temperature=0.0),
    SamplingParams(),
    SamplingParams(top_p=0.9, num_logprobs=1),
)


def decode_batch(num_rows: int, start: int = 0, bindings: tuple[SlotBinding, ...] = ()) -> ScheduledBatch:
    """Rows that decode at one position."""
    return _batch(start, np.ones(num_rows, np.int32), num_rows, bindings)


def prompt_batch(
    num_tokens: int, max_length: int, num_slots: int, bindings: tuple[SlotBinding, ...] = ()
) -> ScheduledBatch:
    """Prompts of zeros, each of `max_length` but the last; no more tokens than the slots can hold."""
    num_rows = min(-(-num_tokens // max_length), num_slots)
    lengths = np.full(num_rows, max_length, np.int32)
    lengths[-1] = min(num_tokens - max_length * (num_rows - 1), max_length)
    return _batch(0, lengths, 0, bindings)


def _batch(
    start: int, num_new_tokens: Int32Array, num_device_rows: int, bindings: tuple[SlotBinding, ...]
) -> ScheduledBatch:
    num_rows = len(num_new_tokens)
    return ScheduledBatch(
        step_id=0,
        slots=np.arange(num_rows, dtype=np.int32),
        starts=np.full(num_rows, start, np.int32),
        num_new_tokens=num_new_tokens,
        samples=np.ones(num_rows, np.bool_),
        num_device_rows=num_device_rows,
        token_ids=np.zeros(num_new_tokens[num_device_rows:].sum(), np.int32),
        block_table=np.tile(np.arange(start + num_new_tokens.max(), dtype=np.int32), (num_rows, 1)),
        bindings=bindings,
    )


def largest_draw(num_slots: int, vocab_size: int) -> ScheduledBatch:
    """A row for each slot that keeps more tokens than the sampler's candidates, and must not end yet."""
    params = SamplingParams(top_k=vocab_size - 1, min_tokens=1, num_logprobs=1)
    return decode_batch(num_slots, bindings=tuple(SlotBinding(slot, params, 1, (0,)) for slot in range(num_slots)))


def masked_draw(num_slots: int, vocab_size: int) -> ScheduledBatch:
    """As many rows with a grammar as are edited at a time."""
    params = SamplingParams(temperature=0.0, grammar=Grammar("regex", ""))
    num_rows = min(GROUP, num_slots)
    matcher: Future[Matcher] = Future()
    matcher.set_result(_AnyToken())
    constraint = Constraint(matcher, params, (), vocab_size)
    batch = decode_batch(num_rows, bindings=tuple(SlotBinding(slot, params, 1, ()) for slot in range(num_rows)))
    return msgspec.structs.replace(batch, masks=TokenMasks({(slot, 1): (constraint, 0) for slot in range(num_rows)}))


def unheld_draw(num_slots: int, vocab_size: int) -> ScheduledBatch:
    """As many rows as are edited at a time, of owners with more biases than the tables on a GPU hold."""
    params = SamplingParams(presence_penalty=0.1, logit_bias=dict.fromkeys(range(min(MAX_BIASES + 1, vocab_size)), 1.0))
    num_rows, known = min(GROUP, num_slots), np.zeros(1, np.int32)
    return decode_batch(num_rows, bindings=tuple(SlotBinding(slot, params, 1, (), known) for slot in range(num_rows)))


class _AnyToken:
    """A `Matcher` that allows every token."""

    is_over = False
    has_failed = False
    error = ""

    def fill(self, allowed: MaskArray) -> None:
        allowed[:] = 0xFFFFFFFF

    def accept(self, token_id: int) -> None: ...

    def copy(self) -> "_AnyToken":
        return self

    def forced(self) -> list[int]:
        return []
