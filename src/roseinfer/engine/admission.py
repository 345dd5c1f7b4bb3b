"""Which waiting sequences may be tried first: an order over a window of the queue, and whether one may overtake.

A policy is a pure function of the window and of how often it has been asked. It knows nothing of blocks or budgets;
the scheduler walks the order and admits what fits.
"""

from collections.abc import Callable
from collections.abc import Sequence as Window
from dataclasses import dataclass

from roseinfer.config import SchedulerConfig
from roseinfer.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class AdmissionOrder:
    """The sequences to try, in order. With `may_overtake`, one that does not fit is passed over, not waited for."""

    sequences: list[Sequence]
    may_overtake: bool


AdmissionPolicy = Callable[[Window[Sequence], int], AdmissionOrder]
"""(window of the waiting queue, number of this turn from 0) -> order."""


def fifo(window: Window[Sequence], turn: int) -> AdmissionOrder:  # noqa: ARG001
    """In order of arrival; the first that does not fit holds up all behind it."""
    return AdmissionOrder(list(window), may_overtake=False)


def pack(fifo_every: int) -> AdmissionPolicy:
    """The shortest first, which fills a step with more prompts; every `fifo_every`-th turn is FIFO.

    Sorting is stable, so prompts of one length keep their order of arrival. The FIFO turn bounds how long a long
    prompt can be overtaken: it is at the head of the window in that turn, and nobody passes it.
    """

    def policy(window: Window[Sequence], turn: int) -> AdmissionOrder:
        if turn % fifo_every == fifo_every - 1:
            return fifo(window, turn)
        return AdmissionOrder(sorted(window, key=lambda sequence: len(sequence.token_ids)), may_overtake=True)

    return policy


def make_policy(config: SchedulerConfig) -> AdmissionPolicy:
    return fifo if config.admission == "fifo" else pack(config.fifo_every)
