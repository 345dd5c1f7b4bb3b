"""Gaps with known parts, for the tests of explanations."""

from roseinfer.observe.gaps.causes import Cause
from roseinfer.observe.gaps.request_gaps import Gap

MS = 1_000_000


def make_gap(parts_ms: dict[Cause, float], *, serial: int = 0, end_ms: float = 1000.0, step_id: int = 1) -> Gap:
    """A gap that ends then; its cause is the largest part that is not decode, if it has one."""
    parts = {cause: int(part * MS) for cause, part in parts_ms.items()}
    end_ns, duration_ns = int(end_ms * MS), sum(parts.values())
    others = {cause: part for cause, part in parts.items() if cause is not Cause.DECODE} or parts
    cause = max(others, key=lambda cause: others[cause])
    return Gap(serial, 1, end_ns - duration_ns, end_ns, step_id, parts, cause, len(others) < len(parts))
