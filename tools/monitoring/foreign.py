"""The metrics of others that dashboards and rules read: name -> the labels that are used; knows none of ours.

kube-state-metrics, cAdvisor and NVIDIA's DCGM exporter do not run where the tests run. The tests expose these names
with these labels in their place, so a name or label that is wrong here is wrong there too: compare with the exporters'
own documentation when one is added.
"""

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
