"""Admission policies: in which order waiting sequences are tried, and whether one may overtake another.

A policy is a pure function of a window of the queue and of how often it has been asked; the scheduler walks the order
and admits what fits.
"""

from collections.abc import Callable
from collections.abc import Sequence as Window
from dataclasses import dataclass

from roseinfer.config.tree import SchedulerConfig
from roseinfer.engine.core.sequence import Sequence
from roseinfer.engine.core.waiting_queue import Turn
from roseinfer.messages import PRIORITY_WAIT_S, Request


@dataclass(frozen=True, slots=True)
class AdmissionOrder:
    """The sequences to try, in order. With `may_overtake`, one that does not fit is skipped; else the others wait."""

    sequences: list[Sequence]
    may_overtake: bool


AdmissionPolicy = Callable[[Window[Sequence], int], AdmissionOrder]
"""(window of the waiting queue, number of this turn from 0) -> order."""


def fifo(window: Window[Sequence], turn: int) -> AdmissionOrder:  # noqa: ARG001
    """In the queue's order; the first that does not fit holds up all behind it."""
    return AdmissionOrder(list(window), may_overtake=False)


def pack(fifo_every: int) -> AdmissionPolicy:
    """The shortest first, which fills a step with more prompts; every `fifo_every`-th turn is FIFO.

    Prompts of one length keep their order of arrival. In the FIFO turn a long prompt at the head of the window is not
    overtaken, which bounds its wait.
    """

    def policy(window: Window[Sequence], turn: int) -> AdmissionOrder:
        if turn % fifo_every == fifo_every - 1:
            return fifo(window, turn)
        return AdmissionOrder(sorted(window, key=lambda sequence: len(sequence.token_ids)), may_overtake=True)

    return policy


def make_policy(config: SchedulerConfig) -> AdmissionPolicy:
    """The policy of `scheduler.admission`. Under `priority` the queue itself is in order, so its policy is FIFO."""
    return pack(config.fifo_every) if config.admission == "pack" else fifo


def make_turn(config: SchedulerConfig) -> Turn:
    """Orders newcomers: each level of priority counts as having arrived `PRIORITY_WAIT_S` later.

    So a request is overtaken only by those that arrive within `PRIORITY_WAIT_S` times the difference of their levels
    after it, and its wait is bounded. The order of two requests never changes. Without priorities it is FIFO.
    """
    wait_ns = int(PRIORITY_WAIT_S * 1e9) if config.admission == "priority" else 0

    def turn(request: Request, inbox_ns: int) -> int:
        return inbox_ns + request.priority * wait_ns

    return turn
