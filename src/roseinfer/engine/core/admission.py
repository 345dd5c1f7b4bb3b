"""Admission policies: in which order waiting sequences are tried, and whether one may overtake another."""

from collections.abc import Callable

from roseinfer.config.options import SchedulerConfig
from roseinfer.engine.core.sequence import Sequence

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
