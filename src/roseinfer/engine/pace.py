"""Sizes the chunks of prompts that a step computes beside decoding rows, from what recent steps took.

Prompts lengthen the gap between two tokens of every stream that decodes. With a target the gap is held to it. Without
one a step takes 30 ms, which no reader notices, or twice what its decoding rows take alone, whichever is longer. It
takes more where more requests wait for their first token than stream: the sooner the prompts of a burst are done, the
more of its streams share each step that follows.
"""

from roseinfer.config.options import SchedulerConfig
from roseinfer.engine.core.steps import StepCounts
from roseinfer.runtime.step_costs import StepCosts, StepSize

_WEIGHT = 0.1  # of a newer step in how much longer than by the fit steps take now
_UNNOTICED_NS = 30_000_000
_PROMPT_TIME = 1.0  # that a step has for prompts, over the time that its decoding rows take alone
_CROWD_POWER = 3  # of how many times as many wait as stream, by which prompts have more time
_MOST_AT_ONCE = 16  # steps
_ALL = 1 << 30  # prompt tokens: more than any step holds
_MOST_DRIFT = 2.0  # of that, either way: what takes longer was interrupted


class Pace:
    """What steps take. Prompts are cut only where it `cuts`, into no less than `least` tokens."""

    def __init__(self, *, target_ns: float | None, least: int, cuts: bool) -> None:
        """`target_ns` is of the gap between two tokens."""
        self._target_ns = target_ns
        self._least = least
        self.cuts = cuts
        self._costs = StepCosts()
        self._drift = 1.0  # of steps that decoded, over what the fit said of them
        self._num_context_tokens = 0  # of the last step
        self._draft_share = 0.0  # of the last step that decoded: drafted tokens for each of its sequences
        self._unlearned: list[tuple[StepCounts, int]] = []
        self._num_at_once = 0  # grows, so that what the first steps took is known at once

    @classmethod
    def of(cls, config: SchedulerConfig, block_size: int, *, is_cpu: bool) -> "Pace":
        """The pace of an engine with this scheduler. Without options only a CPU cuts: of others nothing is measured."""
        target_ns = None if config.target_itl_ms is None else config.target_itl_ms * 1e6
        cuts = target_ns is not None or (is_cpu and config.max_prefill_tokens is None)
        return cls(target_ns=target_ns, least=block_size, cuts=cuts)

    def learn_step(self, counts: StepCounts, duration_ns: int) -> None:
        """See Pacer."""
        self._unlearned.append((counts, duration_ns))
        if len(self._unlearned) > self._num_at_once:
            self._num_at_once = min(self._num_at_once + 1, _MOST_AT_ONCE)
            self._learn()

    def learn_size(self, size: StepSize, duration_ns: int) -> None:
        """Note what a step of the warm-up took."""
        self._costs.learn(size, duration_ns)

    def _learn(self) -> None:
        """Learn from the steps noted since the last time: together, since the model has the caches in between."""
        for counts, duration_ns in self._unlearned:
            num_rows = counts.num_decode_seqs + counts.num_draft_tokens
            size = StepSize(num_rows, counts.num_prefill_tokens, counts.num_context_tokens)
            if num_rows and (expected_ns := self._costs.expected_ns(size)):
                drift = min(max(duration_ns / expected_ns, 1 / _MOST_DRIFT), _MOST_DRIFT)
                self._drift += _WEIGHT * (drift - self._drift)
            self._costs.learn(size, duration_ns)
            self._num_context_tokens = counts.num_context_tokens
            if counts.num_decode_seqs:
                self._draft_share = counts.num_draft_tokens / counts.num_decode_seqs
        self._unlearned.clear()

    def most_prompt_tokens(self, num_rows: int, num_waiting: int) -> int:
        """See Pacer."""
        if not self.cuts:
            return _ALL
        self._learn()
        decode_ns = self._decode_ns(num_rows)
        if not decode_ns:
            return self._least
        if self._target_ns is None:
            share = _PROMPT_TIME * max(1.0, (num_waiting / num_rows) ** _CROWD_POWER)
            left_ns = max(_UNNOTICED_NS - decode_ns, decode_ns * share)
        else:
            left_ns = self._target_ns / self._drift - self._decode_ns(num_rows + round(num_rows * self._draft_share))
        return max(self._least, int(left_ns / self._costs.prompt_token_ns(decode_ns, num_rows)))

    def row_share(self, num_rows: int) -> float:
        """The time that one more row adds to a step of `num_rows` decode rows, as a share of it; 1 at first."""
        decode_ns = self._decode_ns(num_rows)
        return self._costs.row_ns(decode_ns, num_rows) / decode_ns if decode_ns else 1.0

    def _decode_ns(self, num_rows: int) -> int:
        """The expected nanoseconds of a step of `num_rows` rows without prompt tokens; 0 before the first fit."""
        return self._costs.expected_ns(StepSize(num_rows, 0, self._num_context_tokens)) or 0
