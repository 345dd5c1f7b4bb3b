"""Values that cannot be meant are refused, with the path of what is wrong."""

import pytest
import yaml

from tests.chart.helm_process import CHART, NEWEST, HelmProcess, Object, Refused

MISTAKES = [  # values, what the message has to contain
    ("{replicaCuont: 2}", "additional properties 'replicaCuont' not allowed"),
    ("{replicaCount: '2'}", "at '/replicaCount': got string, want integer"),
    ("{replicaCount: -1}", "at '/replicaCount'"),
    ("{image: {tga: x}}", "at '/image': additional properties 'tga'"),
    ("{image: {pullPolicy: Sometimes}}", "at '/image/pullPolicy'"),
    ("{image: {digest: latest}}", "at '/image/digest'"),
    ("{config: {sever: {}}}", "at '/config': additional properties 'sever'"),
    ("{config: {server: {prot: 1}}}", "at '/config/server': additional properties 'prot'"),
    ("{config: {server: {port: 70000}}}", "at '/config/server/port'"),
    ("{config: {cache: {block_size: 7}}}", "at '/config/cache/block_size'"),
    ("{config: {model: {dtype: int4}}}", "at '/config/model/dtype'"),
    ("{config: {scheduler: {max_num_seqs: many}}}", "at '/config/scheduler/max_num_seqs'"),
    ("{config: {tracing: {flush_timeout_s: 1}}}", "flush_timeout_s"),
    ("{gpu: {count: 2}}", "at '/gpu/count'"),
    ("{gpu: {resourceName: gpu}}", "at '/gpu/resourceName'"),
    ("{resources: {limits: {memory: lots}}}", "at '/resources/limits/memory'"),
    ("{service: {type: Loadbalancer}}", "at '/service/type'"),
    ("{modelCache: {accessModes: [RWX]}}", "at '/modelCache/accessModes/0'"),
    ("{modelCache: {size: 50}}", "at '/modelCache/size'"),
    ("{autoscaling: {type: vpa}}", "at '/autoscaling/type'"),
    ("{autoscaling: {targetShare: 70}}", "at '/autoscaling/targetShare'"),
    ("{autoscaling: {minReplicas: 0}}", "at '/autoscaling/minReplicas'"),
    ("{metrics: {interval: 15}}", "at '/metrics/interval'"),
    ("{metrics: {compat: tgi}}", "at '/metrics/compat'"),
    ("{prometheusRule: {slo: {ttft: {thresholdSeconds: 0.3}}}}", "at '/prometheusRule/slo/ttft/thresholdSeconds'"),
    ("{prometheusRule: {slo: {itl: {objective: 99}}}}", "at '/prometheusRule/slo/itl/objective'"),
    ("{tracing: {protocol: grpc}}", "at '/tracing': additional properties 'protocol'"),
    ("{httpRoute: {backendTLS: {hostname: 'https://a'}}}", "at '/httpRoute/backendTLS/hostname'"),
    ("{kvEvents: {renderURL: 'localhost:8000'}}", "at '/kvEvents/renderURL'"),
    ("{networkPolicy: {metricsFrom: [{}]}}", "at '/networkPolicy/metricsFrom/0'"),
    ("{networkPolicy: {metricsFrom: [{podSelectr: {}}]}}", "at '/networkPolicy/metricsFrom/0'"),
    ("{inferencePool: {failureMode: Open}}", "at '/inferencePool/failureMode'"),
    ("{lifecycle: {preStopSeconds: -1}}", "at '/lifecycle/preStopSeconds'"),
    ("{probes: {startup: {initialDelaySeconds: 60}}}", "at '/probes/startup'"),
    ("{env: [{name: A, vaule: b}]}", "at '/env/0'"),
    ("{env: [{name: A, value: b, valueFrom: {}}]}", "at '/env/0': maxProperties"),
    ("{image: {registry: 'https://example.com'}}", "at '/image/registry'"),
    ("{image: {registry: example.com/}}", "at '/image/registry'"),
    ("{image: {repository: 'a/b:1.0'}}", "at '/image/repository'"),
    ("{image: {tag: '1.0 '}}", "at '/image/tag'"),
    ("{apiKeys: {key: a/b}}", "at '/apiKeys/key'"),
    ("{hfToken: {key: a b}}", "at '/hfToken/key'"),
    ("{imagePullSecrets: [{}]}", "at '/imagePullSecrets/0': missing property 'name'"),
    ("{modelCache: {mountPath: '/models:a'}}", "at '/modelCache/mountPath'"),
    ("{modelCache: {storageClass: '-'}}", "at '/modelCache/storageClass'"),
    ("{resources: {limits: {gpu: 1}}}", "at '/resources/limits': additional properties 'gpu'"),
    ("{nodeSelector: {a b: c}}", "at '/nodeSelector': additional properties 'a b'"),
    ("{podLabels: {a: b c}}", "at '/podLabels/a'"),
    ("{metrics: {labels: {a: b c}}}", "at '/metrics/labels/a'"),
    ("{dashboards: {label: a b}}", "at '/dashboards/label'"),
    ("{pdb: {maxUnavailable: '150%'}}", "at '/pdb/maxUnavailable'"),
    ("{httpRoute: {parentRefs: [{namespace: a}]}}", "at '/httpRoute/parentRefs/0': missing property 'name'"),
    ("{extraVolumes: [{emptyDir: {}}]}", "at '/extraVolumes/0': missing property 'name'"),
    ("{extraVolumeMounts: [{name: a}]}", "at '/extraVolumeMounts/0': missing property 'mountPath'"),
    ("{extraVolumeMounts: [{name: a, mountPath: b}]}", "at '/extraVolumeMounts/0/mountPath'"),
    ("{extraContainers: [{name: a}]}", "at '/extraContainers/0': missing property 'image'"),
    ("{initContainers: [{image: a}]}", "at '/initContainers/0': missing property 'name'"),
    ("{extraManifests: [{}]}", "at '/extraManifests/0': missing properties 'apiVersion'"),
    ("{tracing: {endpoint: 'collector:4317'}}", "at '/tracing/endpoint'"),
    ("{replicaCount: 3000000000}", "at '/replicaCount': maximum"),
    ("{model: {timeoutSeconds: 3000000000}}", "at '/model/timeoutSeconds': maximum"),
    ("{probes: {startup: {failureThreshold: 3000000000}}}", "at '/probes/startup/failureThreshold': maximum"),
    (
        "{httpRoute: {hostnames: [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p, q]}}",
        "at '/httpRoute/hostnames': maxItems",
    ),
    ("{extraContainers: [{name: A_b, image: c}]}", "at '/extraContainers/0/name'"),
    ("{initContainers: [{name: a, image: b c}]}", "at '/initContainers/0/image'"),
    ("{extraVolumes: [{name: A_b}]}", "at '/extraVolumes/0/name'"),
    ("{podAnnotations: {a b: c}}", "at '/podAnnotations': additional properties 'a b'"),
    ("{ingress: {annotations: {-: c}}}", "at '/ingress/annotations': additional properties '-'"),
    ("{extraManifests: [{apiVersion: v1, kind: Pod, metadata: a}]}", "at '/extraManifests/0/metadata'"),
    ("{strategy: {maxSurge: 1}}", "at '/strategy': additional properties 'maxSurge'"),
    ("{autoscaling: {hpa: {metricName: a b}}}", "at '/autoscaling/hpa/metricName'"),
]

POOL = "inferencePool: {enabled: true, endpointPickerRef: {name: a}}"
CONTRADICTIONS = [
    ("{lifecycle: {terminationGracePeriodSeconds: 142}}", "lifecycle.terminationGracePeriodSeconds is 142 and must be"),
    ("{lifecycle: {preStopSeconds: 100, terminationGracePeriodSeconds: 150}}", "must be at least 228"),
    ("{lifecycle: {drainTimeoutSeconds: 600, terminationGracePeriodSeconds: 600}}", "lifecycle.preStopSeconds"),
    ("{config: {server: {drain_timeout_s: 5}}}", "config.server.drain_timeout_s is 5, and lifecycle.drainTimeoutSec"),
    ("{config: {server: {ops_port: 0}}}", "config.server.ops_port is 0"),
    ("{config: {server: {port: 0}}}", "config.server.port is 0"),
    ("{config: {server: {port: 8001}}}", "config.server.port and config.server.ops_port are the same"),
    ("{config: {server: {ops_host: 127.0.0.1}}}", "config.server.ops_host is 127.0.0.1, which the kubelet"),
    ("{config: {server: {host: localhost}}}", "config.server.host is localhost"),
    ("{config: {server: {api_key_file: /a}}, apiKeys: {existingSecret: s}}", "config.server.api_key_file is /a, and"),
    (
        "{config: {tracing: {ratio: 1}}, tracing: {enabled: true, endpoint: 'http://a'}}",
        "tracing.samplerRatio says 0.01",
    ),
    ("{config: {observe: {nvtx: false}}, profiling: {nvtx: true}}", "config.observe.nvtx is false, and profiling.nvtx"),
    ("{config: {engine: {step_timeout_s: 700}}}", "config.engine.step_timeout_s"),
    ("{probes: {readiness: {timeoutSeconds: 60}}}", "probes.readiness.timeoutSeconds"),
    ("{env: [{name: ROSEINFER_SERVER__PORT, value: '1'}]}", "env[0]: ROSEINFER_SERVER__PORT"),
    ("{env: [{name: A, value: '1'}, {name: A, value: '2'}]}", "env[1]: A is there twice"),
    ("{extraVolumes: [{name: tmp, emptyDir: {}}]}", "extraVolumes[0].name is tmp, which another volume has"),
    (
        "{extraContainers: [{name: a, image: b}, {name: a, image: b}]}",
        "extraContainers[1].name is a, which another container has",
    ),
    ("{initContainers: [{name: server, image: a}]}", "initContainers[0].name is server, which another container has"),
    ("{extraVolumeMounts: [{name: a, mountPath: /models/}]}", "extraVolumeMounts[0].mountPath is /models, where"),
    ("{resources: {limits: {nvidia.com/gpu: 1}}}", "resources.limits has nvidia.com/gpu"),
    ("{modelCache: {prefetchJob: {enabled: true}}}", "modelCache.prefetchJob.enabled needs modelCache.enabled"),
    ("{modelCache: {readOnly: true}}", "modelCache.readOnly needs modelCache.enabled"),
    ("{modelCache: {enabled: true, readOnly: true}}", "modelCache.readOnly without modelCache.existingClaim"),
    ("{gpu: {count: 1}, config: {runner: {device: cpu}}}", "gpu.count is 1 and config.runner.device is cpu"),
    ("{config: {runner: {device: cuda}}}", "config.runner.device is cuda and gpu.count is 0"),
    ("{replicaCount: 2, modelCache: {enabled: true}}", "modelCache.accessModes is ReadWriteOnce"),
    (
        "{replicaCount: 2, modelCache: {enabled: true, accessModes: [ReadWriteOncePod]}}",
        "modelCache.accessModes is ReadWriteOncePod",
    ),
    (
        "{modelCache: {enabled: true, prefetchJob: {enabled: true}}}",
        "modelCache.prefetchJob.enabled and modelCache.accessModes is ReadWriteOnce: job and pods may come",
    ),
    (
        "{modelCache: {enabled: true, accessModes: [ReadOnlyMany], prefetchJob: {enabled: true}}}",
        "modelCache.prefetchJob.enabled and modelCache.accessModes is ReadOnlyMany",
    ),
    (
        "{config: {model: {revision: v2}}, model: {source: 'pvc://models/a'}}",
        "config.model.revision is v2 and the model is /mnt/models/models/a, which has no revisions",
    ),
    (
        "{config: {observe: {capture_dir: /captures}}}",
        "config.observe.capture_dir is /captures, and nothing is mounted there that the server can write to",
    ),
    ("{profiling: {enabled: true}}", "profiling.enabled needs apiKeys.existingSecret"),
    ("{profiling: {nsys: {enabled: true}}}", "profiling.nsys.enabled needs profiling.enabled"),
    ("{tracing: {enabled: true}}", "tracing.enabled needs tracing.endpoint"),
    (
        "{tracing: {enabled: true, endpoint: 'http://a'}, networkPolicy: {restrictEgress: true}}",
        "networkPolicy.otlpEgress is empty",
    ),
    ("{autoscaling: {type: keda}}", "autoscaling.keda.serverAddress is empty"),
    ("{autoscaling: {type: hpa, minReplicas: 5, maxReplicas: 4}}", "autoscaling.minReplicas is above"),
    ("{replicaCount: 3, autoscaling: {type: hpa}}", "replicaCount is 3 and autoscaling.type is hpa"),
    (
        "{autoscaling: {type: keda, keda: {serverAddress: 'http://a', cooldownPeriod: 60}}}",
        "autoscaling.keda.cooldownPeriod must be above the drain",
    ),
    (
        "{autoscaling: {type: keda, keda: {serverAddress: 'http://a', fallback: {replicas: 9}}}}",
        "autoscaling.keda.fallback.replicas is outside",
    ),
    ("{pdb: {minAvailable: 1, maxUnavailable: null}}", "pdb.minAvailable is 1 of 1 replicas"),
    ("{pdb: {maxUnavailable: 0}}", "pdb.maxUnavailable is 0"),
    ("{pdb: {minAvailable: 1}}", "pdb needs one of minAvailable and maxUnavailable"),
    ("{metrics: {serviceMonitor: {enabled: true}}}", "networkPolicy.metricsFrom is empty"),
    ("{metrics: {serviceMonitor: {enabled: true}, podMonitor: {enabled: true}}}", "scraped twice"),
    (
        "{metrics: {podMonitor: {enabled: true}, scrapedElsewhere: true}}",
        "metrics.scrapedElsewhere beside metrics.serviceMonitor.enabled or metrics.podMonitor.enabled",
    ),
    ("{autoscaling: {type: hpa}}", "autoscaling.type is hpa and nothing scrapes the operations port"),
    ("{autoscaling: {type: keda, keda: {serverAddress: 'http://a'}}}", "say by metrics.scrapedElsewhere"),
    ("{autoscaling: {type: hpa}, metrics: {scrapedElsewhere: true}}", "networkPolicy.metricsFrom is empty"),
    (
        "{networkPolicy: {restrictEgress: true}, model: {source: 'hf://a/b'}}",
        "networkPolicy.extraEgress is empty, so that pods cannot fetch hf://a/b",
    ),
    ("{metrics: {compat: vllm}}", "it needs prometheusRule.enabled"),
    (
        "{inferencePool: {enabled: true, endpointPickerRef: {name: a}}, apiKeys: {existingSecret: s}}",
        "inferencePool.enabled with keys (apiKeys.existingSecret): the picker, which has none, reads the operations",
    ),
    (
        "{inferencePool: {enabled: true, endpointPickerRef: {name: a}}, tls: {existingSecret: s}}",
        "inferencePool.enabled with TLS on the API port",
    ),
    ("{kvEvents: {enabled: true}}", "networkPolicy.kvEventsFrom is empty"),
    ("{kvEvents: {renderURL: 'http://a'}}", "kvEvents.renderURL is given and kvEvents.enabled is false"),
    (
        "{kvEvents: {enabled: true, port: 8001}, networkPolicy: {enabled: false}}",
        "kvEvents.port and config.server.ops_port are the same",
    ),
    (
        "{kvEvents: {enabled: true, replayPort: 5557}, networkPolicy: {enabled: false}}",
        "kvEvents.replayPort and kvEvents.port are the same",
    ),
    (
        "{kvEvents: {enabled: true}, networkPolicy: {enabled: false}, config: {server: {served_model_name: [a@b, c]}}}",
        "kvEvents.enabled and the model is served as a@b: readers part the topic at each @",
    ),
    (
        "{kvEvents: {enabled: true}, networkPolicy: {enabled: false}, config: {cache: {prefix_caching: false}}}",
        "config.cache.prefix_caching is false",
    ),
    (
        f"{{kvEvents: {{enabled: true}}, networkPolicy: {{enabled: false}}, apiKeys: {{existingSecret: s}}, {POOL}}}",
        "set kvEvents.renderURL to a server that it can ask",
    ),
    (
        "{kvEvents: {enabled: true}, networkPolicy: {enabled: false}, config: {kv_events: {endpoint: 'tcp://*:1'}}}",
        "config.kv_events.endpoint is tcp://*:1, and kvEvents.port says tcp://*:5557",
    ),
    ("{inferencePool: {enabled: true}}", "inferencePool.enabled needs inferencePool.endpointPickerRef.name"),
    ("{httpRoute: {enabled: true}}", "httpRoute.enabled needs httpRoute.parentRefs"),
    ("{ingress: {enabled: true}}", "ingress.enabled needs ingress.hosts"),
    (
        "{ingress: {enabled: true, hosts: [a, 'https://b']}}",
        "ingress.hosts[1] is https://b, which is no name of a host",
    ),
    ("{ingress: {enabled: true, hosts: ['*']}}", "ingress.hosts[0] is *, which is no name"),
    ("{ingress: {enabled: true, hosts: ['{{ .Release.Name']}}", "ingress.hosts has {{ without }}"),
    (
        "{httpRoute: {enabled: true, parentRefs: [{name: a}], hostnames: [a_b]}}",
        "httpRoute.hostnames[0] is a_b, which is no name of a host",
    ),
    (
        "{httpRoute: {enabled: true, parentRefs: [{name: a}], extraBackendRefs: [{name: b}]}}",
        "httpRoute.extraBackendRefs[0] is the Service b and has no port",
    ),
    ("{podAnnotations: {a: '{{ .Values.absent.b }}'}}", "podAnnotations asks for .Values.absent, which is no value"),
    ("{extraManifests: ['{{ b']}", "extraManifests[0] has {{ without }}"),
    ("{resources: {limits: {memory: 2Gi}}}", "resources.requests.memory is 4Gi and resources.limits.memory is 2Gi"),
    ("{resources: {limits: {cpu: 1500m}}}", "resources.requests.cpu is 2 and resources.limits.cpu is 1500m"),
    (
        "{resources: {requests: {memory: 5000000000}}}",
        "resources.requests.memory is 5e+09 and resources.limits.memory is 4Gi",
    ),
    (
        "{strategy: {type: Recreate, rollingUpdate: {maxSurge: 1}}}",
        "strategy.rollingUpdate is given and strategy.type is",
    ),
    ("{strategy: {rollingUpdate: {maxSurge: 0, maxUnavailable: 0%}}}", "no pod could ever be replaced"),
    ("{extraVolumeMounts: [{name: a, mountPath: /a}]}", "extraVolumeMounts[0].name is a, and there is no such volume"),
    (
        "{metrics: {podMonitor: {enabled: true}, interval: 5s}, networkPolicy: {enabled: false}}",
        "metrics.scrapeTimeout is 10s and metrics.interval is 5s",
    ),
    ("{service: {ipFamilyPolicy: SingleStack, ipFamilies: [IPv4, IPv6]}}", "service.ipFamilies has two"),
    (
        "{ingress: {enabled: true, hosts: [a]}, tls: {existingSecret: s}}",
        "ingress.enabled with TLS on the API port: the proxy would speak plain HTTP",
    ),
    (
        "{httpRoute: {enabled: true, parentRefs: [{name: a}]}, tls: {existingSecret: s}}",
        "httpRoute.enabled with TLS on the API port needs httpRoute.backendTLS.hostname",
    ),
    (
        "{httpRoute: {enabled: true, parentRefs: [{name: a}]}, config: {server: {tls_cert_file: /a}}}",
        "needs httpRoute.backendTLS.hostname",
    ),
    ("{httpRoute: {backendTLS: {hostname: a}}}", "httpRoute.backendTLS.hostname without httpRoute.enabled"),
    ("{httpRoute: {backendTLS: {caConfigMap: a}}}", "httpRoute.backendTLS.caConfigMap needs"),
    ("{ingress: {backendTLS: true}}", "ingress.backendTLS without ingress.enabled and TLS on the API port"),
]


@pytest.mark.parametrize(("values", "words"), MISTAKES + CONTRADICTIONS)
def test_values_are_refused_with_their_path(helm: HelmProcess, values: str, words: str) -> None:
    with pytest.raises(Refused) as refused:
        helm.render(yaml.safe_load(values))
    assert words in str(refused.value)


@pytest.mark.parametrize(
    "values",
    [
        "{resources: {requests: {cpu: 1500m, memory: 4294967296}, limits: {cpu: 1.5, memory: 4096Mi}}}",
        "{metrics: {podMonitor: {enabled: yes}, interval: 1m, scrapeTimeout: 59s1000ms}, networkPolicy: {enabled: no}}",
        "{image: {registry: 'example.com:5000/team', repository: a/b-c, tag: v1.0_x}}",
        '{prometheusRule: {enabled: true, runbook: "https://a/it\'s", grafana: "https://b/\'c"}}',
        "{extraVolumes: [{name: '{{ .Release.Name }}-a', emptyDir: {}}], podAnnotations: {'{{ .Release.Name }}/a': b}}",
        "{tracing: {enabled: true, endpoint: $(COLLECTOR)}, env: [{name: COLLECTOR, value: 'http://a:4318'}]}",
        "{pdb: {maxUnavailable: 100%}, strategy: {type: Recreate}}",
        "{podAnnotations: {a: '{\"b\":{\"c\":{}}}', d: '{{ .Values.image.repository }}-{{ printf `{{` }}'}}",
    ],
)
def test_what_just_holds_is_accepted(helm: HelmProcess, values: str) -> None:
    assert helm.invalid(helm.render(yaml.safe_load(values)), NEWEST) == []


def test_the_longest_values_that_hold_are_accepted(helm: HelmProcess) -> None:
    """One second more than the sum is enough: the bound itself is what was refused above."""
    release = helm.render({"lifecycle": {"terminationGracePeriodSeconds": 143}})
    assert release.pod["spec"]["terminationGracePeriodSeconds"] == 143


def test_the_drain_may_come_from_the_programs_options(helm: HelmProcess) -> None:
    values: Object = {"lifecycle": {"drainTimeoutSeconds": None}, "config": {"server": {"drain_timeout_s": 40}}}
    assert helm.render(values).pod["spec"]["terminationGracePeriodSeconds"] == 15 + 40 + 2 + 5 + 5
    values["config"] = {}
    assert helm.render(values).pod["spec"]["terminationGracePeriodSeconds"] == 15 + 25 + 2 + 5 + 5


def test_a_claim_that_somebody_else_made_may_be_filled_by_the_job(helm: HelmProcess) -> None:
    """Its access modes are not known here."""
    values = {"modelCache": {"enabled": True, "existingClaim": "shared", "prefetchJob": {"enabled": True}}}
    assert helm.render(values).of("Job")


def test_a_cluster_without_the_operator_says_so(helm: HelmProcess) -> None:
    """An autoscaler that was asked for and is left out would look like one that has nothing to do."""
    values = yaml.safe_load((CHART / "ci" / "keda-values.yaml").read_text())
    with pytest.raises(Refused, match=r'no matches for kind "ScaledObject" in version "keda.sh/v1alpha1"'):
        helm.render(values, apis=[])


def test_an_older_cluster_is_refused(helm: HelmProcess) -> None:
    with pytest.raises(Refused, match="kubeVersion"):
        helm.render({}, version="1.27")


def test_a_parent_chart_may_pass_its_own_values(helm: HelmProcess) -> None:
    assert helm.render({"global": {"region": "a"}, "enabled": True}).of("Deployment")
