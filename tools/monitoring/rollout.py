"""The dashboard of pods: which are ready, start, drain or restart, and what scales them."""

from monitoring.board import IN_NAMESPACE, IN_POD, SHOWN, Board, choices
from monitoring.panels import AMBER, BLUE, GREEN, RED, Placed, Query, lines, number, rows, seconds, states
from monitoring.promql import foreign
from monitoring.scaling import DEMAND_THRESHOLD, demand
from roseinfer.records import LifecycleState

IN_DEPLOYMENT = 'deployment=~"$deployment"'
IN_AUTOSCALER = 'horizontalpodautoscaler=~"$deployment"'
IN_CONTAINER = 'container!=""'

VARIABLES = (
    choices(
        "deployment",
        "Deployment",
        f"label_values(kube_deployment_spec_replicas{{{IN_NAMESPACE}}}, deployment)",
        "Deployments whose name contains roseinfer, and their autoscalers; edit the variable if yours is called "
        "otherwise",
    )
    .regex("/roseinfer/")
    .all_value(".*roseinfer.*"),
)

COLOURS = {
    LifecycleState.STARTING: "purple",
    LifecycleState.LOADING: "purple",
    LifecycleState.WARMUP: BLUE,
    LifecycleState.READY: GREEN,
    LifecycleState.DRAINING: AMBER,
    LifecycleState.FAILED: RED,
}


def board() -> Board:
    return Board(
        "rollout",
        "Rollout",
        "Pods on Kubernetes: states, starts, restarts, versions, autoscaling and the limits of containers. Needs "
        "kube-state-metrics and, for the last row, cAdvisor.",
        {
            "State of each server": _states(),
            "Replicas": _replicas(),
            "While it changes": _changes(),
            "Starts": _starts(),
            "Autoscaling": _scaling(),
            "Containers": _containers(),
        },
        VARIABLES,
    )


def _states() -> list[Placed]:
    numbered = " or ".join(
        f"max by (pod, instance) ({SHOWN.series('lifecycle_state', state=state)} == 1) * {index}"
        for index, state in enumerate(LifecycleState, 1)
    )
    names = {float(index): (str(state), COLOURS[state]) for index, state in enumerate(LifecycleState, 1)}
    return [
        states(
            "Lifecycle",
            "none",
            "What each server says of itself. Long purple or blue: see *Start by stage*. Red: its log says why, and it "
            "exits. Orange for longer than the drain allows: see RoseinferStuckDraining in docs/operations.md.",
            Query(numbered, "{{pod}} {{instance}}"),
            names=names,
        )
    ]


def _replicas() -> list[Placed]:
    def of_deployment(name: str) -> str:
        return f"sum({foreign(name, IN_NAMESPACE, IN_DEPLOYMENT)})"

    restarts = foreign("kube_pod_container_status_restarts_total", IN_NAMESPACE, IN_POD)
    waiting = foreign("kube_pod_container_status_waiting_reason", IN_NAMESPACE, IN_POD)
    ended = foreign("kube_pod_container_status_last_terminated_reason", IN_NAMESPACE, IN_POD)
    return [
        lines(
            "Replicas",
            "Wanted, updated and available. Available stays below wanted after a rollout: look at the states "
            "above and at *Waiting and ended containers*; roll back with `kubectl rollout undo`.",
            Query(of_deployment("kube_deployment_spec_replicas"), "wanted"),
            Query(of_deployment("kube_deployment_status_replicas_updated"), "updated"),
            Query(of_deployment("kube_deployment_status_replicas_available"), "available"),
        ),
        lines(
            "Restarts",
            "Container restarts. Exit code 70 is a step that raised: `kubectl logs --previous`. OOMKilled: a "
            "larger memory limit, or a smaller KV cache.",
            Query(f"sum by (pod) (increase({restarts}[$__rate_interval]))", "{{pod}}"),
        ),
        lines(
            "Waiting and ended containers",
            "Reasons that Kubernetes gives. ImagePullBackOff: name or credentials of the image. CrashLoopBackOff: "
            "the log of the last run. Error or OOMKilled: see *Restarts*.",
            Query(f"sum by (reason) ({waiting} > 0) or on () vector(0)", "waiting: {{reason}}"),
            Query(f"sum by (reason) ({ended} > 0) or on () vector(0)", "ended: {{reason}}"),
        ),
    ]


def _changes() -> list[Placed]:
    return [
        lines(
            "Refused while it changed",
            "Requests that met a server that was not ready or was gone. Above 0 during a rollout: the balancer "
            "learnt it too late; a longer preStop, or a readiness probe every second.",
            Query(SHOWN.total("requests_rejected_total", "code", code="not_ready|engine_dead"), "{{code}}"),
            unit="reqps",
        ),
        lines(
            "Streams while draining",
            "Requests that draining servers still have to finish. Above 0 when the drain ends, they are cut: a "
            "longer lifecycle.drainTimeoutSeconds.",
            Query(
                f"sum({SHOWN.series('http_inflight_streams')} and ignoring(state) "
                f"{SHOWN.series('lifecycle_state', state='draining')} == 1) or on () vector(0)",
                "in flight",
            ),
        ),
        rows(
            "Versions",
            "Which version each pod runs. Two versions outside a rollout: one is stuck.",
            Query(f"count by (version, python, pod, instance) ({SHOWN.series('build_info')})"),
            hidden=("Value",),
            width=8,
        ),
    ]


def _starts() -> list[Placed]:
    ready = foreign("kube_pod_status_ready", 'condition="true"', IN_NAMESPACE, IN_POD)
    return [
        seconds(
            "Start by stage",
            "Seconds of each stage of the slowest start. load: a faster volume or the model cache. capture: fewer "
            "CUDA graphs. The startup probe must allow for the sum.",
            Query(f"max by (stage) ({SHOWN.series('startup_seconds')})", "{{stage}}"),
            is_stacked=True,
            width=12,
        ),
        number(
            "Slowest start",
            "Sum of the stages of the slowest server. What a new replica costs before it helps: the autoscaler "
            "must scale that much earlier.",
            Query(f"max(sum by (pod, instance) ({SHOWN.series('startup_seconds')}))"),
            width=6,
            height=8,
            decimals=1,
            unit="s",
        ),
        number(
            "Ready pods",
            "Pods that Kubernetes sends requests to. Compare with servers that call themselves ready: a "
            "difference is a probe that cannot reach them.",
            Query(f"sum({ready})"),
            (None, RED),
            (1, GREEN),
            width=6,
            height=8,
        ),
    ]


def _scaling() -> list[Placed]:
    def of_autoscaler(name: str) -> str:
        return f"max({foreign(f'kube_horizontalpodautoscaler_{name}', IN_NAMESPACE, IN_AUTOSCALER)})"

    return [
        lines(
            "Replicas of the autoscaler",
            "Wanted at max while requests wait: raise the limit, or add GPUs. Wanted moves up and down within "
            "minutes: the threshold is too near the load of one replica.",
            Query(of_autoscaler("status_desired_replicas"), "wanted"),
            Query(of_autoscaler("status_current_replicas"), "current"),
            Query(of_autoscaler("spec_min_replicas"), "min"),
            Query(of_autoscaler("spec_max_replicas"), "max"),
            width=12,
        ),
        lines(
            "Demand of a replica",
            "Waiting and running requests for each ready server, which is what scales "
            "(dashboards/autoscaling.promql). Above the line, the shipped threshold, replicas are added. Set it "
            "to 0.7 times the knee of your own load test.",
            Query(f"({demand(SHOWN)}) / clamp_min({SHOWN.sum('engine_up')}, 1)", "waiting + running"),
            width=12,
            limit=DEMAND_THRESHOLD,
        ),
    ]


def _containers() -> list[Placed]:
    selected = (IN_NAMESPACE, IN_POD, IN_CONTAINER)
    cpu = foreign("container_cpu_usage_seconds_total", *selected)
    throttled = foreign("container_cpu_cfs_throttled_seconds_total", *selected)
    memory = foreign("container_memory_working_set_bytes", *selected)

    def limit(resource: str) -> str:
        matcher = f'resource="{resource}"'
        return f"max({foreign('kube_pod_container_resource_limits', matcher, IN_NAMESPACE, IN_POD)})"

    return [
        lines(
            "CPU",
            "Cores in use and the limit of one pod. At the limit the engine is throttled, which is `unknown` on "
            "roseinfer / Jitter: raise the limit, or set none.",
            Query(f"sum by (pod) (rate({cpu}[$__rate_interval]))", "{{pod}}"),
            Query(limit("cpu"), "limit"),
        ),
        seconds(
            "CPU throttling",
            "Seconds a second in which the kernel kept a container from running. Any is jitter: raise the limit.",
            Query(f"sum by (pod) (rate({throttled}[$__rate_interval]))", "{{pod}}"),
        ),
        lines(
            "Memory",
            "Working set and the limit of one pod. It grows at the start and then stays; growth over days is "
            "worth a report.",
            Query(f"sum by (pod) ({memory})", "{{pod}}"),
            Query(limit("memory"), "limit"),
            unit="bytes",
        ),
    ]
