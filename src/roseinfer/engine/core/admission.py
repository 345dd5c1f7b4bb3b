"""Admission policies: in which order waiting sequences are tried, and whether one may overtake another.

A policy is a pure function; the scheduler walks the order and admits what fits.
"""

from collections.abc import Callable

from roseinfer.config.tree import SchedulerConfig
from roseinfer.engine.core.sequence import Sequence
from roseinfer.engine.core.waiting_queue import Turn
from roseinfer.messages import PRIORITY_WAIT_S, Request

AdmissionPolicy = Callable[[list[Sequence], int], tuple[list[Sequence], bool]]
"""(window of the queue, number of this turn from 0) -> the order to try, and whether to skip what does not fit."""


def fifo(window: list[Sequence], turn: int) -> tuple[list[Sequence], bool]:  # noqa: ARG001
    """In the queue's order; the first that does not fit holds up all behind it."""
    return window, False


def pack(fifo_every: int) -> AdmissionPolicy:
    """The shortest first, which fills a step with more prompts; every `fifo_every`-th turn is FIFO.

    Prompts of one length keep their order of arrival. In the FIFO turn a long prompt at the head of the window is not
    overtaken, which bounds its wait.
    """

    def policy(window: list[Sequence], turn: int) -> tuple[list[Sequence], bool]:
        if turn % fifo_every == fifo_every - 1:
            return fifo(window, turn)
        return sorted(window, key=lambda sequence: len(sequence.token_ids)), True

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
