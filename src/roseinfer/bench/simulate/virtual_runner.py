"""A `Runner` without a model, on a virtual clock: a batch takes as long as the cost model says.

A token follows from its sequence's seed and its position, so it does not depend on slots, batches or preemptions. It is
the one after the token before it, so drafts need no text that repeats itself: `foretell` knows a share of all tokens.
"""

from collections.abc import Callable
from contextlib import ExitStack
from hashlib import blake2b

import numpy as np

from roseinfer.bench.load.plan import FIRST_TOKEN_ID
from roseinfer.bench.options import LAUNCH_PARTS, Delay
from roseinfer.bench.simulate.cost_model import CostModel
from roseinfer.engine.core.batch import Int32Array, SampledTokens, ScheduledBatch, Watch
from roseinfer.observe.gaps.causes import Cause


class VirtualClock:
    """Nanoseconds that pass when `advance` is called. It does not begin at 0, which no stamp may be."""

    def __init__(self) -> None:
        self.now_ns = 1_000_000_000

    def __call__(self) -> int:
        return self.now_ns

    def advance(self, duration_ns: int) -> None:
        self.now_ns += duration_ns

    def advance_to(self, moment_ns: int) -> None:
        """Does nothing when the moment has passed."""
        self.now_ns = max(self.now_ns, moment_ns)


def foretell(token_ids: Int32Array, most: int, *, share: float, vocab_size: int) -> Int32Array:
    """A draft of `most` tokens that goes on as `VirtualRunner` does, but for tokens that no text foretells."""
    num_ids = vocab_size - FIRST_TOKEN_ID
    draft: Int32Array = (int(token_ids[-1]) - FIRST_TOKEN_ID + 1 + np.arange(most, dtype=np.int32)) % num_ids
    draft += FIRST_TOKEN_ID
    chances = [blake2b(token.to_bytes(4, "little"), digest_size=4).digest() for token in draft.tolist()]
    draft[np.frombuffer(b"".join(chances), "<u4") >= share * 2**32] = 0  # no text has this one
    return draft


class VirtualLaunched:
    """See Launched."""

    graph_rows = 0
    h2d_bytes = 0

    def __init__(self, clock: VirtualClock, ready_ns: int, sampled: SampledTokens) -> None:
        self._clock = clock
        self._ready_ns = ready_ns
        self._sampled = sampled

    def wait(self) -> SampledTokens:
        """See Launched."""
        self._clock.advance_to(self._ready_ns)
        return self._sampled


class VirtualRunner:
    """A device that computes batch after batch, each as long as the cost model says.

    With `is_asynchronous`, as a GPU is, launching takes no time and waiting does; otherwise it is the other way round.
    """

    def __init__(
        self,
        clock: VirtualClock,
        costs: CostModel,
        *,
        vocab_size: int,
        num_slots: int,
        is_asynchronous: bool = False,
        delays: tuple[Delay, ...] = (),
        collect: Callable[[int], None] = lambda _: None,
        on_launch: Callable[[ScheduledBatch], None] = lambda _: None,
    ) -> None:
        """`collect` gets the nanoseconds of each injected collection, and `on_launch` each batch."""
        self._clock = clock
        self._costs = costs
        self._vocab_size = vocab_size
        self._is_asynchronous = is_asynchronous
        self._delays = delays
        self._collect = collect
        self._on_launch = on_launch
        self._seeds = np.zeros(num_slots, np.int64)
        self._num_prompt_tokens = np.zeros(num_slots, np.int32)
        self._ready_ns = 0  # of the batch launched last

    def launch(self, batch: ScheduledBatch, watch: Watch) -> VirtualLaunched:
        """See Runner."""
        self._on_launch(batch)
        for binding in batch.bindings:
            self._seeds[binding.slot] = (binding.params.seed or 0) % 2**62  # to which a position is added
            self._num_prompt_tokens[binding.slot] = binding.num_prompt_tokens
        for delay in self._delays:
            if batch.step_id % delay.every == 0:
                self._delay(delay, watch)
        ends = batch.starts + batch.num_new_tokens
        # Of the rows that bring their tokens along, those behind their prompts decode: with drafts, and after some.
        decodes = (batch.num_new_tokens == 1) & (batch.starts >= self._num_prompt_tokens[batch.slots])
        num_rows = int(decodes.sum())
        num_context_tokens = int(ends[decodes].sum() if self._costs.prefill_is_free else ends.sum())
        compute_ns = self._costs.compute_ns(num_rows, batch.num_tokens - num_rows, num_context_tokens)
        self._ready_ns = max(self._ready_ns, self._clock.now_ns) + compute_ns
        with watch("forward"):
            if not self._is_asynchronous:
                self._clock.advance_to(self._ready_ns)
        numbers = self._seeds[batch.slots[batch.samples]] + ends[batch.samples]
        token_ids = numbers % (self._vocab_size - FIRST_TOKEN_ID) + FIRST_TOKEN_ID
        return VirtualLaunched(self._clock, self._ready_ns, SampledTokens(token_ids.astype(np.int32), None))

    def _delay(self, delay: Delay, watch: Watch) -> None:
        if delay.cause is Cause.GC:
            self._collect(delay.duration_ns)
            self._clock.advance(delay.duration_ns)
            return
        with ExitStack() as stack:
            for name in LAUNCH_PARTS[delay.cause]:
                stack.enter_context(watch(name))
            self._clock.advance(delay.duration_ns)
