"""Which waiting sequences may be tried first: an order over a window of the queue, and whether one may overtake.

A policy is a pure function of the window and of how often it has been asked. It knows nothing of blocks or budgets;
the scheduler walks the order and admits what fits.
"""

from collections.abc import Callable
from collections.abc import Sequence as Window
from dataclasses import dataclass

from roseinfer.config.tree import SchedulerConfig
from roseinfer.engine.core.sequence import Sequence
from roseinfer.engine.core.waiting_queue import Turn
from roseinfer.messages import Request


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
    """Under `priority` the queue is in the right order already, and nobody in it is passed over."""
    return pack(config.fifo_every) if config.admission == "pack" else fifo


def by_priority(wait_ns: int) -> Turn:
    """Each level of priority counts as `wait_ns` of having come later.

    So a request can be overtaken by those that arrive within `wait_ns` times the difference of their levels after it,
    and by no other: the wait of every request is bounded, whatever comes. The order of two requests never changes.
    """

    def turn(request: Request, inbox_ns: int) -> int:
        return inbox_ns + request.priority * wait_ns

    return turn


def make_turn(config: SchedulerConfig) -> Turn:
    """Where a newcomer stands in the queue; without priorities, behind all who came before."""
    wait_ns = int(config.priority_wait_s * 1e9) if config.admission == "priority" else 0
    return by_priority(wait_ns)
