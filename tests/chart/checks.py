"""Turns a release into complaints about what must hold of it as a whole, beyond each object's schema.

A check knows Kubernetes' rules and no template. Every example is held against every check, and every check against a
doctored release that it has to refuse.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from roseinfer.config.options import Config
from roseinfer.config.sources import load
from roseinfer.errors import ConfigError
from roseinfer.observe.otel import FLUSH_TIMEOUT_S
from tests.chart.helm_process import Object, Rendered

Check = Callable[[Rendered], list[str]]

FAREWELL_S = 5.0  # what the server needs after the drain, besides the delivery of spans
PROBES = {"startupProbe": "/startupz", "readinessProbe": "/readyz", "livenessProbe": "/livez"}


def configured(release: Rendered) -> Config:
    """The configuration that the server reads from its file. Raises ConfigError as the server would."""
    with TemporaryDirectory() as directory:
        file = Path(directory) / "config.yaml"
        file.write_text(release.config_text)
        return load(file=file).config


def selects(selector: Object, labels: Object) -> bool:
    return bool(selector) and selector.items() <= labels.items()


def pods(release: Rendered) -> Iterator[tuple[str, Object]]:
    """(name, {metadata, spec}) of everything that becomes a pod."""
    for found in release.objects:
        name = f"{found['kind']}/{found['metadata']['name']}"
        if found["kind"] in {"Deployment", "Job"}:
            yield name, found["spec"]["template"]
        elif found["kind"] == "Pod":
            yield name, found


def containers(release: Rendered) -> Iterator[tuple[str, Object, Object]]:
    """(name, container, pod spec)"""
    for name, pod in pods(release):
        for container in [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]:
            yield f"{name}.{container['name']}", container, pod["spec"]


def container_ports(release: Rendered) -> dict[str, int]:
    return {port["name"]: port["containerPort"] for port in release.server["ports"]}


def the_program_reads_its_configuration(release: Rendered) -> list[str]:
    try:
        config = configured(release)
    except ConfigError as error:
        return [f"{error.param}: {error.message}"]
    ports = container_ports(release)
    listens = {"http": config.server.port, "ops": config.server.ops_port}
    events = {"kv-events": config.kv_events.endpoint, "kv-replay": config.kv_events.replay_endpoint}
    listens |= {name: int(address.rpartition(":")[2]) for name, address in events.items() if address}
    return [] if ports == listens else [f"the container has ports {ports} and the program listens on {listens}"]


def grace_outlasts_the_stop(release: Rendered) -> list[str]:
    config = configured(release)
    before = release.server.get("lifecycle", {}).get("preStop", {})
    slept = before.get("sleep", {}).get("seconds") or float(before.get("exec", {}).get("command", ["", 0])[1])
    needed = slept + config.server.drain_timeout_s + FLUSH_TIMEOUT_S + FAREWELL_S
    grace = release.pod["spec"]["terminationGracePeriodSeconds"]
    return [] if grace > needed else [f"the grace period is {grace} s and stopping takes {needed} s"]


def a_rollout_may_take_as_long_as_a_start(release: Rendered) -> list[str]:
    probe = release.server["startupProbe"]
    longest = probe["periodSeconds"] * probe["failureThreshold"]
    deadline = release.one("Deployment")["spec"]["progressDeadlineSeconds"]
    return [] if deadline > longest else [f"a rollout fails after {deadline} s and a start may take {longest} s"]


def selectors_match(release: Rendered) -> list[str]:
    """The Deployment, both Services, the PDB, the policy, the pool and a PodMonitor mean the serving pods alone."""
    labels = release.pod["metadata"]["labels"]
    others = [pod["metadata"].get("labels", {}) for name, pod in pods(release) if not name.startswith("Deployment/")]
    selectors = {f"Service/{each['metadata']['name']}": each["spec"]["selector"] for each in release.of("Service")}
    for kind in ("Deployment", "PodDisruptionBudget", "NetworkPolicy", "InferencePool", "PodMonitor"):
        for each in release.of(kind):
            selector = each["spec"].get("selector") or each["spec"]["podSelector"]
            selectors[f"{kind}/{each['metadata']['name']}"] = selector["matchLabels"]
    spread = release.pod["spec"].get("topologySpreadConstraints", [])
    selectors |= {f"spread {index}": each["labelSelector"]["matchLabels"] for index, each in enumerate(spread)}
    wrong = [name for name, selector in selectors.items() if not selects(selector, labels)]
    wide = [name for name, selector in selectors.items() if any(selects(selector, other) for other in others)]
    return [f"{name} does not select the serving pods" for name in wrong] + [
        f"{name} selects pods that do not serve, too" for name in wide
    ]


def probes_ask_the_front_end(release: Rendered) -> list[str]:
    ports = container_ports(release)
    complaints = []
    for probe, path in PROBES.items():
        asked = release.server[probe]["httpGet"]
        if asked["port"] not in ports:
            complaints.append(f"{probe} asks port {asked['port']}, which the container does not have")
        if asked["port"] != "http" or asked["path"] != path:
            complaints.append(f"{probe} asks {asked['path']} of {asked['port']}")
    return complaints


def services_lead_to_ports(release: Rendered) -> list[str]:
    ports = container_ports(release)
    return [
        f"Service/{found['metadata']['name']}: port {port['name']} leads to {port['targetPort']}, which is none"
        for found in release.of("Service")
        for port in found["spec"]["ports"]
        if port["targetPort"] not in ports
    ]


def the_operations_port_stays_inside(release: Rendered) -> list[str]:
    """No Service, Ingress or route that is reached from outside leads to it."""
    numbers = {"ops", container_ports(release)["ops"]}
    return [
        f"Service/{found['metadata']['name']} of the type {found['spec']['type']} opens the operations port"
        for found in release.of("Service")
        if found["spec"]["type"] != "ClusterIP" or len(found["spec"]["ports"]) > 1
        for port in found["spec"]["ports"]
        if port["targetPort"] in numbers
    ]


def a_gpu_is_requested_and_limited(release: Rendered) -> list[str]:
    resources = release.server.get("resources", {})
    requests, limits = resources.get("requests", {}), resources.get("limits", {})
    extended = {name for name in (*requests, *limits) if "/" in name}
    return [
        f"{name}: {requests.get(name)} requested, {limits.get(name)} the limit"
        for name in sorted(extended)
        if requests.get(name) != limits.get(name)
    ]


def one_owner_of_the_replicas(release: Rendered) -> list[str]:
    deployment = release.one("Deployment")
    scalers = [*release.of("HorizontalPodAutoscaler"), *release.of("ScaledObject")]
    if len(scalers) > 1:
        return ["two autoscalers"]
    if bool(scalers) == ("replicas" in deployment["spec"]):
        return ["replicas are given beside an autoscaler" if scalers else "replicas are given by nobody"]
    wrong = [each for each in scalers if each["spec"]["scaleTargetRef"]["name"] != deployment["metadata"]["name"]]
    return [f"{each['kind']} scales {each['spec']['scaleTargetRef']['name']}" for each in wrong]


def a_node_can_be_drained(release: Rendered) -> list[str]:
    """Some pod may go: with the fewest replicas that there may be, the budget leaves one."""
    deployment = release.one("Deployment")["spec"]
    fewest = deployment.get("replicas", 1)
    for scaler in release.of("HorizontalPodAutoscaler"):
        fewest = scaler["spec"]["minReplicas"]
    for scaler in release.of("ScaledObject"):
        fewest = scaler["spec"]["minReplicaCount"]
    return [
        f"PodDisruptionBudget/{found['metadata']['name']} keeps all of {fewest} replicas"
        for found in release.of("PodDisruptionBudget")
        if found["spec"].get("maxUnavailable") == 0 or found["spec"].get("minAvailable", 0) in (fewest, "100%")
    ]


def monitors_find_their_port(release: Rendered) -> list[str]:
    complaints = []
    for monitor in release.of("ServiceMonitor"):
        wanted = monitor["spec"]["selector"]["matchLabels"]
        services = [found for found in release.of("Service") if selects(wanted, found["metadata"]["labels"])]
        names = {port["name"] for found in services for port in found["spec"]["ports"]}
        missing = {endpoint["port"] for endpoint in monitor["spec"]["endpoints"]} - names
        if len(services) != 1 or missing:
            complaints.append(f"a ServiceMonitor finds {len(services)} Services, and no port {missing or '-'}")
    for monitor in release.of("PodMonitor"):
        missing = {each["port"] for each in monitor["spec"]["podMetricsEndpoints"]} - set(container_ports(release))
        complaints += [f"a PodMonitor finds no port {port}" for port in sorted(missing)]
    return complaints


def pods_are_restricted(release: Rendered) -> list[str]:
    """The `restricted` level of Kubernetes' pod security standards, a read-only root, and no token of the cluster.

    Containers that come from the values too: one that is refused keeps the whole pod out of a restricted namespace.
    """
    complaints = []
    for name, pod in pods(release):
        context = pod["spec"].get("securityContext", {})
        if not context.get("runAsNonRoot") or context.get("seccompProfile", {}).get("type") != "RuntimeDefault":
            complaints.append(f"{name}: runs as root, or without seccomp")
        if pod["spec"].get("automountServiceAccountToken", True):
            complaints.append(f"{name}: has a token of the cluster")
        if pod["spec"].get("enableServiceLinks", True):
            complaints.append(f"{name}: a Service of the namespace becomes variables, ROSEINFER_PORT for one")
    for name, container, _ in containers(release):
        context = container.get("securityContext", {})
        is_tight = context.get("readOnlyRootFilesystem") and context.get("allowPrivilegeEscalation") is False
        if not is_tight or context.get("capabilities", {}).get("drop") != ["ALL"]:
            complaints.append(f"{name}: may become more than it is")
    return complaints


def mounts_have_volumes(release: Rendered) -> list[str]:
    """And files that the configuration names are mounted; ConfigMaps, claims and accounts of the release exist."""
    complaints = []
    for name, container, spec in containers(release):
        volumes = {volume["name"] for volume in spec.get("volumes", [])}
        mounts = container.get("volumeMounts", [])
        complaints += [f"{name}: no volume {each['name']}" for each in mounts if each["name"] not in volumes]
    maps = {found["metadata"]["name"] for found in release.of("ConfigMap")}
    for name, pod in pods(release):
        named = [volume["configMap"]["name"] for volume in pod["spec"].get("volumes", []) if "configMap" in volume]
        complaints += [f"{name}: no ConfigMap {each}" for each in named if each not in maps]
    server = configured(release).server
    mounted = [Path(each["mountPath"]) for each in release.server["volumeMounts"]]
    for option in ("api_key_file", "tls_cert_file", "tls_key_file"):
        file = getattr(server, option, None)
        if file and not any(Path(file).is_relative_to(path) for path in mounted):
            complaints.append(f"server.{option} is {file}, and nothing is mounted there")
    return complaints


def any_keda_accepts_the_fallback(release: Rendered) -> list[str]:
    """Before 2.18 its webhook refuses a fallback beside a trigger of another type than AverageValue."""
    return [
        f"trigger {trigger['name']} is of the type {trigger.get('metricType')}"
        for scaled in release.of("ScaledObject")
        for trigger in scaled["spec"]["triggers"]
        if "fallback" in scaled["spec"] and trigger.get("metricType") != "AverageValue"
    ]


def routes_speak_as_pods_do(release: Rendered) -> list[str]:
    """Where pods have a certificate, whoever routes to them is told to speak TLS, and nobody else is."""
    policies = [each["spec"] for each in release.of("BackendTLSPolicy")]
    verified = {(ref["name"], ref["sectionName"]) for policy in policies for ref in policy["targetRefs"]}
    tls = configured(release).server.tls_cert_file is not None
    ports = {each["metadata"]["name"]: each["spec"]["ports"][0]["name"] for each in release.of("Service")}
    complaints = []
    for route in release.of("HTTPRoute"):
        for backend in route["spec"]["rules"][0]["backendRefs"]:
            name = backend["name"]
            if tls != ((name, ports.get(name)) in verified):
                complaints.append(f"the Gateway does not speak to {name} as its pods do")
    for ingress in release.of("Ingress"):
        annotations = ingress["metadata"].get("annotations", {})
        if tls and not any(key.endswith("/backend-protocol") and "HTTPS" in annotations[key] for key in annotations):
            complaints.append("the Ingress speaks plain HTTP to pods that speak TLS")
    return complaints


def lists_have_no_twins(release: Rendered) -> list[str]:
    """An API server merges these lists by a key, and refuses, applied on its side, two items that have the same."""
    keys = {"env": "name", "volumeMounts": "mountPath", "ports": "name"}
    lists = [
        (f"{name}: {field}", [item[key] for item in container.get(field, [])])
        for name, container, _ in containers(release)
        for field, key in keys.items()
    ]
    for name, pod in pods(release):
        spec = pod["spec"]
        lists.append((f"{name}: volumes", [volume["name"] for volume in spec.get("volumes", [])]))
        lists.append((name, [each["name"] for each in [*spec.get("initContainers", []), *spec["containers"]]]))
    lists += [
        (f"Service/{service['metadata']['name']}", [port["name"] for port in service["spec"]["ports"]])
        for service in release.of("Service")
    ]
    return [
        f"{where} has {name} twice" for where, names in lists for name in sorted(set(names)) if names.count(name) > 1
    ]


def names_fit(release: Rendered) -> list[str]:
    """Names that become labels or hosts have 63 characters at most."""
    kinds = {"Service", "Deployment", "Job", "Pod"}
    names = [found["metadata"]["name"] for found in release.objects if found["kind"] in kinds]
    return [f"{name} has {len(name)} characters" for name in names if len(name) > 63]


CHECKS: tuple[Check, ...] = (
    the_program_reads_its_configuration,
    grace_outlasts_the_stop,
    a_rollout_may_take_as_long_as_a_start,
    selectors_match,
    probes_ask_the_front_end,
    services_lead_to_ports,
    the_operations_port_stays_inside,
    a_gpu_is_requested_and_limited,
    one_owner_of_the_replicas,
    a_node_can_be_drained,
    monitors_find_their_port,
    pods_are_restricted,
    mounts_have_volumes,
    any_keda_accepts_the_fallback,
    routes_speak_as_pods_do,
    lists_have_no_twins,
    names_fit,
)
