"""Broken invariants into what an operator is told of them. Knows none of them, and not how they are checked."""

import logging
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from roseinfer.records import Invariant, Observer, Violation

_log = logging.getLogger(__name__)


class Integrity(Observer):
    """How often the invariants were checked, how often each did not hold, and what was said of it last."""

    def __init__(self) -> None:
        self.num_checks = 0
        self.last_check_unix_s: float | None = None
        self._num_found = Counter[Invariant]()
        self._last: dict[Invariant, tuple[float, str]] = {}  # when, and the detail

    def on_rest(self, violations: Sequence[Violation]) -> None:
        self.num_checks += 1
        self.last_check_unix_s = time.time()
        for violation in violations:
            self._num_found[violation.invariant] += 1
            self._last[violation.invariant] = self.last_check_unix_s, violation.detail
            _log.error(
                "an invariant does not hold", extra={"invariant": violation.invariant, "detail": violation.detail}
            )

    def report(self) -> dict[str, Any]:
        """As JSON can say it: every invariant, broken or not."""
        return {
            "num_checks": self.num_checks,
            "last_check_unix_s": self.last_check_unix_s,
            "is_sound": not self._num_found,
            "invariants": {
                invariant: {
                    "num_violations": self._num_found[invariant],
                    "last_violation_unix_s": self._last[invariant][0] if invariant in self._last else None,
                    "last_detail": self._last[invariant][1] if invariant in self._last else None,
                }
                for invariant in Invariant
            },
        }
