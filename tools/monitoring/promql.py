"""Makes PromQL from names of the catalogue of metrics, and refuses names and labels that no server exposes.

A name is written without its prefix, `step_seconds_bucket` for `roseinfer_step_seconds_bucket`. A matcher is a keyword:
`phase="decode"`, and with alternatives `code="overloaded|not_ready"`, each of which must be a value of that label.
"""

from dataclasses import dataclass

from roseinfer.observe.metrics.catalogue import CATALOGUE, InfoAtScrape, Row
from roseinfer.observe.metrics.histogram import TOKEN_S, WAIT_S

ROWS = {row.name: row for row in CATALOGUE}
OF_HISTOGRAMS = ("_bucket", "_sum", "_count")

# The metrics of others that dashboards and rules read, and the labels that are used. kube-state-metrics,
# cAdvisor and NVIDIA's DCGM exporter do not run where the tests run, and the stand-ins of the tests have the same names
# and labels: compare with the exporters' own documentation when one is added.

_POD = frozenset({"namespace", "pod"})
_CONTAINER = _POD | {"container"}
_DEPLOYMENT = frozenset({"namespace", "deployment"})
_AUTOSCALER = frozenset({"namespace", "horizontalpodautoscaler"})

# With honorLabels the workload is in `pod` and `namespace`, without in `exported_pod` and `exported_namespace`.
_GPU = _POD | {"exported_pod", "exported_namespace", "gpu", "Hostname", "modelName"}

PROMETHEUS = {
    "up": frozenset({"job", "instance"}) | _POD,
    "ALERTS": frozenset({"alertname", "alertstate", "severity"}) | _POD,
}

KUBERNETES = {
    "kube_deployment_spec_replicas": _DEPLOYMENT,
    "kube_deployment_status_replicas_available": _DEPLOYMENT,
    "kube_deployment_status_replicas_updated": _DEPLOYMENT,
    "kube_pod_status_ready": _POD | {"condition"},
    "kube_pod_container_status_restarts_total": _CONTAINER,
    "kube_pod_container_status_waiting_reason": _CONTAINER | {"reason"},
    "kube_pod_container_status_last_terminated_reason": _CONTAINER | {"reason"},
    "kube_pod_container_resource_limits": _CONTAINER | {"resource"},
    "kube_horizontalpodautoscaler_spec_max_replicas": _AUTOSCALER,
    "kube_horizontalpodautoscaler_spec_min_replicas": _AUTOSCALER,
    "kube_horizontalpodautoscaler_status_current_replicas": _AUTOSCALER,
    "kube_horizontalpodautoscaler_status_desired_replicas": _AUTOSCALER,
    "container_cpu_usage_seconds_total": _CONTAINER,
    "container_cpu_cfs_throttled_seconds_total": _CONTAINER,
    "container_memory_working_set_bytes": _CONTAINER,
}

GPU = {
    "DCGM_FI_PROF_GR_ENGINE_ACTIVE": _GPU,
    "DCGM_FI_PROF_SM_ACTIVE": _GPU,
    "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": _GPU,
    "DCGM_FI_PROF_DRAM_ACTIVE": _GPU,
    "DCGM_FI_PROF_PCIE_RX_BYTES": _GPU,
    "DCGM_FI_PROF_PCIE_TX_BYTES": _GPU,
    "DCGM_FI_DEV_FB_USED": _GPU,
    "DCGM_FI_DEV_FB_FREE": _GPU,
    "DCGM_FI_DEV_POWER_USAGE": _GPU,
    "DCGM_FI_DEV_GPU_TEMP": _GPU,
    "DCGM_FI_DEV_SM_CLOCK": _GPU,
    "DCGM_FI_DEV_XID_ERRORS": _GPU,
}

FOREIGN = PROMETHEUS | KUBERNETES | GPU


def row_of(name: str) -> Row:
    """The row whose series is called `name`; a KeyError if there is none."""
    if name in ROWS and ROWS[name].kind != "histogram":
        return ROWS[name]
    family = next((name.removesuffix(suffix) for suffix in OF_HISTOGRAMS if name.endswith(suffix)), name)
    if family in ROWS and ROWS[family].kind == "histogram" and family != name:
        return ROWS[family]
    raise KeyError(f"{name} is no series of the catalogue")


def own_labels(name: str) -> frozenset[str]:
    """The labels that our server gives to a series; those of the target come from Prometheus."""
    row = row_of(name)
    labels = {row.label.name} if row.label else set()
    labels |= {"model_name"} if row.is_per_model else set()
    labels |= {"le"} if name.endswith("_bucket") else set()
    labels |= set(row.source.names) if isinstance(row.source, InfoAtScrape) else set()
    return frozenset(labels)


def bound(seconds: float) -> str:
    """A bucket's bound as `le` has it; a ValueError if no ladder of latencies has that bound."""
    if seconds not in {*WAIT_S, *TOKEN_S}:
        raise ValueError(f"{seconds} s is no bound of a bucket")
    return repr(float(seconds))


def matcher(label: str, value: str) -> str:
    return f'{label}=~"{value}"' if any(sign in value for sign in "|*+") else f'{label}="{value}"'


def foreign(name: str, *matchers: str) -> str:
    """A selector of another project's series, with PromQL's matchers; a KeyError if the name is not listed."""
    labels = FOREIGN[name]
    for each in matchers:
        assert each.partition("=")[0].rstrip("!") in labels, f"{name} has no such label: {each}"
    return f"{name}{{{','.join(matchers)}}}" if matchers else name


@dataclass(frozen=True, slots=True)
class Queries:
    """Expressions over the servers that `pods` and `models` select, with rates over `window`."""

    window: str
    pods: str = ""
    models: str = ""

    def series(self, name: str, **matchers: str) -> str:
        full = f"roseinfer_{name}"
        row, labels = row_of(full), own_labels(full)
        for label, value in matchers.items():
            assert label in labels, f"{full} has no label {label}"
            if row.label and row.label.name == label and row.label.values and "$" not in value:
                unknown = set(value.split("|")) - set(row.label.values)
                assert not unknown, f"{full} has no {label} {unknown}"
        own = [matcher(label, value) for label, value in matchers.items()]
        parts = [*own, self.models if row.is_per_model else "", self.pods]
        inside = ",".join(part for part in parts if part)
        return f"{full}{{{inside}}}" if inside else full

    def rate(self, name: str, **matchers: str) -> str:
        return f"rate({self.series(name, **matchers)}[{self.window}])"

    def total(self, name: str, by: str = "", **matchers: str) -> str:
        """Rate of a counter, summed."""
        return f"{_sum(by)}({self.rate(name, **matchers)})"

    def sum(self, name: str, by: str = "", **matchers: str) -> str:
        """Values of a gauge, summed."""
        return f"{_sum(by)}({self.series(name, **matchers)})"

    def quantile(self, quantile: float, name: str, by: str = "", **matchers: str) -> str:
        labels = f"le, {by}" if by else "le"
        return f"histogram_quantile({quantile:g}, {self.total(f'{name}_bucket', labels, **matchers)})"


def _sum(by: str) -> str:
    return f"sum by ({by}) " if by else "sum"
