"""Says what one engine asks of a Ray cluster."""

import ray

from roseinfer.config.options import Config


def resources_of(config: Config) -> dict[str, float]:
    """One GPU, or on CPUs `runner.num_threads` cores, or 1; `auto` is CUDA where the cluster has a GPU."""
    device = config.runner.device
    if device == "auto":
        device = "cuda" if ray.is_initialized() and ray.cluster_resources().get("GPU") else "cpu"
    if device == "cuda":
        return {"num_cpus": 1, "num_gpus": 1}
    return {"num_cpus": config.runner.num_threads or 1, "num_gpus": 0}
