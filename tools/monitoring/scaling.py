"""The demand that an autoscaler follows: its query, its threshold and how fast it may act.

`demand` is what dashboards/autoscaling.promql holds, `queue_wait` dashboards/queue_wait.promql. Both are of all servers
together, so that a KEDA trigger or an HPA's external metric of type AverageValue divides them among the replicas.
"""

from monitoring.promql import Queries

# 0.7 times the concurrency at the knee of a load test, rounded down: 17 with the embedded model on two cores, of which
# docs/fleet.md has the command and the spread.
DEMAND_THRESHOLD = 11.0

# How fast replicas may come and go, as in the `behavior` of a HorizontalPodAutoscaler. Up at once, since a queue grows
# at once; down late and one by one, since a stream that is cut is worse than a replica too many.
SCALE_UP_WINDOW_S, SCALE_UP_PERCENT, SCALE_UP_PERIOD_S = 0, 100, 60
SCALE_DOWN_WINDOW_S, SCALE_DOWN_PODS, SCALE_DOWN_PERIOD_S = 600, 1, 300


def demand(over: Queries) -> str:
    """One element, 0 where no request is there; none where no server is scraped, which must not look like no demand.

    A server has both series from its start on, before the model is loaded.
    """
    return f"{over.sum('num_requests_waiting')} + {over.sum('num_requests_running')}"


def queue_wait(over: Queries) -> str:
    """The guard beside it: seconds that all but one in twenty wait at most, times the servers that are ready.

    0 without requests; like the demand, no element where no server is scraped. The autoscaler divides an AverageValue
    among the replicas, which the product undoes: as many are asked for as by the wait alone and the type Value, beside
    which KEDA before 2.18 refuses a fallback.
    """
    ready = over.sum("lifecycle_state", state="ready")
    return f"{over.quantile(0.95, 'queue_wait_seconds')} * {ready} > 0 or 0 * {ready}"
