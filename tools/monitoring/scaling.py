"""The demand that an autoscaler follows: its query, its threshold and how fast it may act.

DEMAND is what dashboards/autoscaling.promql holds, QUEUE_WAIT dashboards/queue_wait.promql. Both are of all servers
together, so that a KEDA trigger or an HPA's external metric of type AverageValue divides them among the replicas.
"""

# 0.7 times the concurrency at the knee of a load test, rounded down: 17 with the embedded model on two cores, of which
# docs/fleet.md has the command and the spread.
DEMAND_THRESHOLD = 11.0

# How fast replicas may come and go, as in the `behavior` of a HorizontalPodAutoscaler. Up at once, since a queue grows
# at once; down late and one by one, since a stream that is cut is worse than a replica too many.
SCALE_UP_WINDOW_S, SCALE_UP_PERCENT, SCALE_UP_PERIOD_S = 0, 100, 60
SCALE_DOWN_WINDOW_S, SCALE_DOWN_PODS, SCALE_DOWN_PERIOD_S = 600, 1, 300

# One element, 0 where no request is there; none where no server is scraped, which must not look like no demand. A
# server has both series from its start on, before the model is loaded.
DEMAND = "sum(roseinfer_num_requests_waiting) + sum(roseinfer_num_requests_running)"

# The guard beside it: seconds that all but one in twenty wait at most, times the servers that are ready. 0 without
# requests; like the demand, no element where no server is scraped. The autoscaler divides an AverageValue among the
# replicas, which the product undoes: as many are asked for as by the wait alone and the type Value, beside which KEDA
# before 2.18 refuses a fallback.
_READY = 'sum(roseinfer_lifecycle_state{state="ready"})'
QUEUE_WAIT = (
    "histogram_quantile(0.95, sum by (le) (rate(roseinfer_queue_wait_seconds_bucket[2m]))) "
    f"* {_READY} > 0 or 0 * {_READY}"
)
