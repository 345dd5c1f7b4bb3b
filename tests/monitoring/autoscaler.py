"""Kubernetes' HorizontalPodAutoscaler in small: demand over time becomes replicas over time. Knows no Prometheus.

After the documentation of `autoscaling/v2`: the wanted replicas of an external metric of type AverageValue are the
total divided by the target, rounded up, unless the ratio to what is there is within the tolerance; then come the
stabilisation windows, then the policies. KEDA hands its triggers to such an autoscaler.
"""

import math
from dataclasses import dataclass, field

from monitoring import scaling

SYNC_PERIOD_S = 15
TOLERANCE = 0.1


@dataclass(slots=True)
class Autoscaler:
    """Its state between two looks at the metric."""

    target: float
    least: int
    most: int
    replicas: int
    wanted: list[tuple[float, int]] = field(default_factory=list)  # when, how many the formula gave
    changes: list[tuple[float, int]] = field(default_factory=list)  # when, by how many replicas

    def look(self, now_s: float, demand: float) -> int:
        """The replicas from now on."""
        self.wanted.append((now_s, self._formula(demand)))
        stable = max(self.replicas, min(self._since(now_s, scaling.SCALE_UP_WINDOW_S)))
        stable = min(stable, max(self._since(now_s, scaling.SCALE_DOWN_WINDOW_S)))
        allowed = self._limited(now_s, min(max(stable, self.least), self.most))
        if allowed != self.replicas:
            self.changes.append((now_s, allowed - self.replicas))
            self.replicas = allowed
        return self.replicas

    def _formula(self, demand: float) -> int:
        if abs(demand / (self.target * self.replicas) - 1) <= TOLERANCE:
            return self.replicas
        return math.ceil(demand / self.target)

    def _since(self, now_s: float, window_s: float) -> list[int]:
        return [wanted for at_s, wanted in self.wanted if at_s >= now_s - window_s]

    def _limited(self, now_s: float, wanted: int) -> int:
        """No more than the policies allow within their periods."""
        if wanted > self.replicas:
            added = self._changed(now_s, scaling.SCALE_UP_PERIOD_S, sign=1)
            before = self.replicas - added
            return min(wanted, math.ceil(before * (1 + scaling.SCALE_UP_PERCENT / 100)))
        removed = -self._changed(now_s, scaling.SCALE_DOWN_PERIOD_S, sign=-1)
        return max(wanted, self.replicas + removed - scaling.SCALE_DOWN_PODS)

    def _changed(self, now_s: float, period_s: float, sign: int) -> int:
        return sum(change for at_s, change in self.changes if at_s > now_s - period_s and change * sign > 0)
