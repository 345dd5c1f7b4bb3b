{{/*
What may not be: each contradiction between values ends the rendering with the values' names.

After the sleep before SIGTERM come the drain, the farewell to what is left (4.5 seconds at most) and the delivery of facts
and spans (less than two seconds, three at most where other processes have the cores): 7.5 seconds, so 8 whole ones. A
shorter grace period lets the kubelet cut streams that were promised to end.
*/}}
{{- define "roseinfer.drainSeconds" -}}
{{- include "roseinfer.option" (dict "context" . "section" "server" "name" "drain_timeout_s" "default" 25) | float64 | ceil | int }}
{{- end }}

{{- define "roseinfer.stopSeconds" -}}
{{- add .Values.lifecycle.preStopSeconds (include "roseinfer.drainSeconds" .) 8 }}
{{- end }}

{{- define "roseinfer.graceSeconds" -}}
{{- $needed := include "roseinfer.stopSeconds" . | int }}
{{- $grace := .Values.lifecycle.terminationGracePeriodSeconds }}
{{- if kindIs "invalid" $grace }}
{{- add $needed 4 }}
{{- else if lt ($grace | int) $needed }}
{{- fail (printf "lifecycle.terminationGracePeriodSeconds is %d and must be at least %d: lifecycle.preStopSeconds, the drain and 8 s for the farewell and the delivery of spans" ($grace | int) $needed) }}
{{- else }}
{{- $grace | int }}
{{- end }}
{{- end }}

{{/* The longest start that the startup probe allows. */}}
{{- define "roseinfer.startupSeconds" -}}
{{- mul .Values.probes.startup.periodSeconds .Values.probes.startup.failureThreshold }}
{{- end }}

{{- define "roseinfer.checks" -}}
{{- if not (regexMatch "^[a-z]" (include "roseinfer.fullname" .)) }}
{{- fail (printf "the release would be called %s, and the name of a Service begins with a letter: give fullnameOverride, or the release another name" (include "roseinfer.fullname" .)) }}
{{- end }}
{{- include "roseinfer.checkPorts" . }}
{{- include "roseinfer.checkProbes" . }}
{{- include "roseinfer.checkPod" . }}
{{- include "roseinfer.checkScaling" . }}
{{- include "roseinfer.checkMonitoring" . }}
{{- include "roseinfer.checkRoutes" . }}
{{- include "roseinfer.checkKVEvents" . }}
{{- end }}

{{- define "roseinfer.checkKVEvents" -}}
{{- $events := .Values.kvEvents }}
{{- if $events.enabled }}
{{- $taken := dict (include "roseinfer.apiPort" .) "config.server.port" (include "roseinfer.opsPort" .) "config.server.ops_port" }}
{{- range $name := list "port" "replayPort" }}
{{- $port := get $events $name | int | toString }}
{{- if hasKey $taken $port }}
{{- fail (printf "kvEvents.%s and %s are the same" $name (get $taken $port)) }}
{{- end }}
{{- $_ := set $taken $port (printf "kvEvents.%s" $name) }}
{{- end }}
{{- if eq (include "roseinfer.option" (dict "context" . "section" "cache" "name" "prefix_caching" "default" true)) "false" }}
{{- fail "kvEvents.enabled and config.cache.prefix_caching is false: there are no prefixes to tell of" }}
{{- end }}
{{- $name := include "roseinfer.modelNames" . | fromJsonArray | first }}
{{- if and (contains "@" $name) (not (include "roseinfer.option" (dict "context" . "section" "kv_events" "name" "topic" "default" ""))) }}
{{- fail (printf "kvEvents.enabled and the model is served as %s: readers part the topic at each @; begin config.server.served_model_name with a name without one" $name) }}
{{- end }}
{{- if and .Values.networkPolicy.enabled (not .Values.networkPolicy.kvEventsFrom) }}
{{- fail "kvEvents.enabled and networkPolicy.kvEventsFrom is empty, so that no pod may read the events: name the picker or router there" }}
{{- end }}
{{- if and .Values.inferencePool.enabled (include "roseinfer.hasKeys" .) (not $events.renderURL) }}
{{- fail "kvEvents.enabled and inferencePool.enabled with keys (apiKeys.existingSecret): the picker, which has no key, cannot ask the API port for the tokens of a prompt; set kvEvents.renderURL to a server that it can ask, such as http://localhost:8000 for `vllm launch render` in its pod" }}
{{- end }}
{{- else if $events.renderURL }}
{{- fail "kvEvents.renderURL is given and kvEvents.enabled is false: the picker's configuration would not have it" }}
{{- end }}
{{- end }}

{{- define "roseinfer.checkPorts" -}}
{{- if not (include "roseinfer.opsPort" . | int) }}
{{- fail "config.server.ops_port is 0, which turns it off: the scrape needs it" }}
{{- end }}
{{- if eq (include "roseinfer.opsPort" .) (include "roseinfer.apiPort" .) }}
{{- fail "config.server.port and config.server.ops_port are the same" }}
{{- end }}
{{- if not (include "roseinfer.apiPort" . | int) }}
{{- fail "config.server.port is 0, which takes any: the Service has to know it" }}
{{- end }}
{{- range $name := list "host" "ops_host" }}
{{- $host := include "roseinfer.option" (dict "context" $ "section" "server" "name" $name "default" "") }}
{{- if or (hasPrefix "127." $host) (has $host (list "localhost" "::1")) }}
{{- fail (printf "config.server.%s is %s, which the kubelet and the Service cannot reach" $name $host) }}
{{- end }}
{{- end }}
{{- end }}

{{- define "roseinfer.checkProbes" -}}
{{- range $name := list "startup" "readiness" "liveness" }}
{{- $probe := get $.Values.probes $name }}
{{- if gt ($probe.timeoutSeconds | int) (mul $probe.periodSeconds $probe.failureThreshold | int) }}
{{- fail (printf "probes.%s.timeoutSeconds is longer than its period times its failureThreshold: it can never fail in time" $name) }}
{{- end }}
{{- end }}
{{- $step := include "roseinfer.option" (dict "context" . "section" "engine" "name" "step_timeout_s" "default" 30) | float64 }}
{{- if ge $step (include "roseinfer.startupSeconds" . | float64) }}
{{- fail "config.engine.step_timeout_s is longer than the start that probes.startup allows (periodSeconds times failureThreshold)" }}
{{- end }}
{{- end }}

{{- define "roseinfer.checkPod" -}}
{{- $selecting := include "roseinfer.selectorLabels" . | fromYaml }}
{{- range $name, $_ := .Values.podLabels }}
{{- if hasKey $selecting $name }}
{{- fail (printf "podLabels.%s is one of the labels by which Services, the PodDisruptionBudget and monitors find the pods" $name) }}
{{- end }}
{{- end }}
{{- include "roseinfer.checkTwins" . }}
{{- $names := list }}
{{- range $index, $variable := .Values.env }}
{{- if has $variable.name $names }}
{{- fail (printf "env[%d]: %s is there twice" $index $variable.name) }}
{{- end }}
{{- $names = append $names $variable.name }}
{{- if and (hasPrefix "ROSEINFER_" $variable.name) (ne $variable.name "ROSEINFER_API_KEYS") }}
{{- fail (printf "env[%d]: %s would win over the ConfigMap, out of sight of the chart; give it in config" $index $variable.name) }}
{{- end }}
{{- end }}
{{- range $kind := list "requests" "limits" }}
{{- if hasKey (get ($.Values.resources | default dict) $kind | default dict) $.Values.gpu.resourceName }}
{{- fail (printf "resources.%s has %s; give gpu.count, which sets requests and limits alike" $kind $.Values.gpu.resourceName) }}
{{- end }}
{{- end }}
{{- $limits := get (.Values.resources | default dict) "limits" | default dict }}
{{- range $name, $request := get (.Values.resources | default dict) "requests" | default dict }}
{{- $limit := get $limits $name }}
{{- if and (hasKey $limits $name) (gt (include "roseinfer.amount" $request | float64) (include "roseinfer.amount" $limit | float64)) }}
{{- fail (printf "resources.requests.%s is %v and resources.limits.%s is %v: Kubernetes refuses a request above its limit" $name $request $name $limit) }}
{{- end }}
{{- end }}
{{- include "roseinfer.checkStrategy" . }}
{{- $source := include "roseinfer.source" . | fromYaml }}
{{- if and .Values.modelCache.prefetchJob.enabled $source.kind (ne $source.kind "fetched") }}
{{- fail (printf "modelCache.prefetchJob.enabled and model.source is %s: there is nothing to fetch" .Values.model.source) }}
{{- end }}
{{- if and (eq $source.kind "image") (semverCompare "<1.31-0" .Capabilities.KubeVersion.Version) }}
{{- fail (printf "model.source is %s and this is Kubernetes %s: image volumes came with 1.31" .Values.model.source .Capabilities.KubeVersion.Version) }}
{{- end }}
{{- if and .Values.modelCache.prefetchJob.enabled (not .Values.modelCache.enabled) }}
{{- fail "modelCache.prefetchJob.enabled needs modelCache.enabled: pods cannot see what a job fetched elsewhere" }}
{{- end }}
{{- with .Values.modelCache }}
{{- if and .prefetchJob.enabled (not .existingClaim) (not (has "ReadWriteMany" .accessModes)) }}
{{- fail (printf "modelCache.prefetchJob.enabled and modelCache.accessModes is %s: job and pods may come to different nodes, and each would wait for the other; take ReadWriteMany, or leave the job out, so that the pod fetches for itself" (.accessModes | join " and ")) }}
{{- end }}
{{- end }}
{{- if and .Values.modelCache.readOnly (not .Values.modelCache.enabled) }}
{{- fail "modelCache.readOnly needs modelCache.enabled: nothing would ever fill a cache of the pod's own" }}
{{- end }}
{{- with .Values.modelCache }}
{{- if and .readOnly .enabled (not .existingClaim) (not .prefetchJob.enabled) }}
{{- fail "modelCache.readOnly without modelCache.existingClaim or modelCache.prefetchJob.enabled: nothing would ever fill the claim" }}
{{- end }}
{{- end }}
{{- $device := include "roseinfer.option" (dict "context" . "section" "runner" "name" "device" "default" "auto") }}
{{- if and .Values.gpu.count (eq $device "cpu") }}
{{- fail (printf "gpu.count is %v and config.runner.device is cpu: the GPU would be paid for and not be used" .Values.gpu.count) }}
{{- end }}
{{- if and (not .Values.gpu.count) (eq $device "cuda") }}
{{- fail "config.runner.device is cuda and gpu.count is 0: the pod would get no GPU" }}
{{- end }}
{{- if and (include "roseinfer.oneNode" .) (not .Values.modelCache.existingClaim) (or (gt (.Values.replicaCount | int) 1) (ne .Values.autoscaling.type "none")) }}
{{- fail (printf "modelCache.accessModes is %s, which is one node's, and there may be several replicas: take ReadWriteMany" (include "roseinfer.oneNode" .)) }}
{{- end }}
{{- if and .Values.profiling.enabled (not (include "roseinfer.hasKeys" .)) }}
{{- fail "profiling.enabled needs apiKeys.existingSecret: off the loopback /debug/* is answered to those with a key only" }}
{{- end }}
{{- if and .Values.profiling.nsys.enabled (not .Values.profiling.enabled) }}
{{- fail "profiling.nsys.enabled needs profiling.enabled" }}
{{- end }}
{{- $path := include "roseinfer.option" (dict "context" . "section" "model" "name" "path" "default" "roseinfer/demo") }}
{{- $revision := include "roseinfer.option" (dict "context" . "section" "model" "name" "revision" "default" "") }}
{{- if and $revision (or (hasPrefix "/" $path) (contains "://" $path) (eq $path "roseinfer/demo")) }}
{{- fail (printf "config.model.revision is %s and the model is %s, which has no revisions: only what comes from Hugging Face has" $revision $path) }}
{{- end }}
{{- $captures := include "roseinfer.option" (dict "context" . "section" "observe" "name" "capture_dir" "default" "") }}
{{- $isWritable := false }}
{{- range include "roseinfer.volumeMounts" . | fromYamlArray }}
{{- if and (not .readOnly) (hasPrefix (printf "%s/" (trimSuffix "/" .mountPath)) (printf "%s/" $captures)) }}
{{- $isWritable = true }}
{{- end }}
{{- end }}
{{- if and (hasPrefix "/" $captures) (not $isWritable) (get (.Values.securityContext | default dict) "readOnlyRootFilesystem") }}
{{- fail (printf "config.observe.capture_dir is %s, and nothing is mounted there that the server can write to: take a folder of /tmp, or mount a volume by extraVolumes and extraVolumeMounts" $captures) }}
{{- end }}
{{- if and .Values.tracing.enabled (not .Values.tracing.endpoint) }}
{{- fail "tracing.enabled needs tracing.endpoint" }}
{{- end }}
{{- end }}

{{- define "roseinfer.checkStrategy" -}}
{{- $strategy := .Values.strategy | default dict }}
{{- $rolling := get $strategy "rollingUpdate" | default dict }}
{{- if and $rolling (eq (get $strategy "type") "Recreate") }}
{{- fail "strategy.rollingUpdate is given and strategy.type is Recreate" }}
{{- end }}
{{- if and (has (toString $rolling.maxSurge) (list "0" "0%")) (has (toString $rolling.maxUnavailable) (list "0" "0%")) }}
{{- fail "strategy.rollingUpdate has maxSurge and maxUnavailable of 0: no pod could ever be replaced" }}
{{- end }}
{{- end }}

{{/* Of two items of a name an API server refuses the list, or takes one of them. */}}
{{- define "roseinfer.checkTwins" -}}
{{- $taken := list "server" "fetch-model" "wait-for-model" }}
{{- range $list := list "initContainers" "extraContainers" }}
{{- range $index, $container := get $.Values $list | default list }}
{{- if has $container.name $taken }}
{{- fail (printf "%s[%d].name is %s, which another container has" $list $index $container.name) }}
{{- end }}
{{- $taken = append $taken $container.name }}
{{- end }}
{{- end }}
{{- $taken = list "config" "tmp" "scripts" "models" "source" "shm" "keys" "tls" "captures" }}
{{- range $index, $volume := .Values.extraVolumes }}
{{- if has $volume.name $taken }}
{{- fail (printf "extraVolumes[%d].name is %s, which another volume has" $index $volume.name) }}
{{- end }}
{{- $taken = append $taken $volume.name }}
{{- end }}
{{- $taken = list "/tmp" "/scripts" "/etc/roseinfer/config.yaml" "/etc/roseinfer/keys" "/etc/roseinfer/tls" }}
{{- if .Values.shm.enabled }}
{{- $taken = append $taken "/dev/shm" }}
{{- end }}
{{- with (include "roseinfer.source" . | fromYaml).mount }}
{{- $taken = append $taken . }}
{{- end }}
{{- if .Values.profiling.enabled }}
{{- $taken = append $taken "/captures" }}
{{- end }}
{{- $models := .Values.modelCache.mountPath | trimSuffix "/" }}
{{- if has $models $taken }}
{{- fail (printf "modelCache.mountPath is %s, where something else is mounted" $models) }}
{{- end }}
{{- $taken = append $taken $models }}
{{- $volumes := list }}
{{- range include "roseinfer.volumes" . | fromYamlArray }}
{{- $volumes = append $volumes .name }}
{{- end }}
{{- range $index, $mount := .Values.extraVolumeMounts }}
{{- $path := $mount.mountPath | default "" | trimSuffix "/" }}
{{- if has $path $taken }}
{{- fail (printf "extraVolumeMounts[%d].mountPath is %s, where something else is mounted" $index $path) }}
{{- end }}
{{- if not (has $mount.name $volumes) }}
{{- fail (printf "extraVolumeMounts[%d].name is %s, and there is no such volume: give it in extraVolumes" $index $mount.name) }}
{{- end }}
{{- $taken = append $taken $path }}
{{- end }}
{{- end }}

{{/* Kubernetes refuses these changes of what is there, in words that name none of our values. */}}
{{- define "roseinfer.checkClaim" -}}
{{- with lookup "v1" "PersistentVolumeClaim" .Release.Namespace (include "roseinfer.claimName" .) }}
{{- $class := $.Values.modelCache.storageClass }}
{{- if and $class .spec.storageClassName (ne $class .spec.storageClassName) }}
{{- fail (printf "modelCache.storageClass is %s and the claim %s has %s, which cannot be changed: name a new claim by modelCache.existingClaim" $class .metadata.name .spec.storageClassName) }}
{{- end }}
{{- if ne (.spec.accessModes | sortAlpha | join ", ") ($.Values.modelCache.accessModes | sortAlpha | join ", ") }}
{{- fail (printf "modelCache.accessModes is %s and the claim %s has %s, which cannot be changed: name a new claim by modelCache.existingClaim" ($.Values.modelCache.accessModes | join ", ") .metadata.name (.spec.accessModes | join ", ")) }}
{{- end }}
{{- $size := dig "resources" "requests" "storage" "" .spec | toString }}
{{- if and $size (lt (include "roseinfer.amount" $.Values.modelCache.size | float64) (include "roseinfer.amount" $size | float64)) }}
{{- fail (printf "modelCache.size is %s and the claim %s has %s, which can grow and not shrink" $.Values.modelCache.size .metadata.name $size) }}
{{- end }}
{{- end }}
{{- end }}

{{/* How much a quantity of Kubernetes' is: a number, or a text with one of the usual suffixes. */}}
{{- define "roseinfer.amount" -}}
{{- if kindIs "string" . }}
{{- $scales := dict "m" 0.001 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "P" 1e15 "Ki" 1024.0 "Mi" 1048576.0 "Gi" 1073741824.0 "Ti" 1099511627776.0 "Pi" 1125899906842624.0 }}
{{- mulf (regexFind "^[0-9.]+" . | float64) (get $scales (regexFind "[A-Za-z]*$" .) | default 1.0) }}
{{- else }}
{{- . }}
{{- end }}
{{- end }}

{{- define "roseinfer.checkService" -}}
{{- $service := .Values.service }}
{{- with lookup "v1" "Service" .Release.Namespace (include "roseinfer.fullname" .) }}
{{- $class := .spec.loadBalancerClass | default "" }}
{{- if and (eq .spec.type "LoadBalancer") (eq $service.type "LoadBalancer") (ne $class ($service.loadBalancerClass | default "")) }}
{{- fail (printf "service.loadBalancerClass is %q and the Service %s has %q, which cannot be changed: delete that Service first, or install beside it" ($service.loadBalancerClass | default "") .metadata.name $class) }}
{{- end }}
{{- if and $service.ipFamilies .spec.ipFamilies (ne (first $service.ipFamilies) (first .spec.ipFamilies)) }}
{{- fail (printf "service.ipFamilies begins with %s and the Service %s with %s, which cannot be changed: delete that Service first, or install beside it" (first $service.ipFamilies) .metadata.name (first .spec.ipFamilies)) }}
{{- end }}
{{- end }}
{{- end }}

{{- define "roseinfer.checkScaling" -}}
{{- $scaling := .Values.autoscaling }}
{{- if gt ($scaling.minReplicas | int) ($scaling.maxReplicas | int) }}
{{- fail "autoscaling.minReplicas is above autoscaling.maxReplicas" }}
{{- end }}
{{- if and (ne $scaling.type "none") (gt (.Values.replicaCount | int) 1) }}
{{- fail (printf "replicaCount is %d and autoscaling.type is %s: the autoscaler decides; give autoscaling.minReplicas" (.Values.replicaCount | int) $scaling.type) }}
{{- end }}
{{- if eq $scaling.type "keda" }}
{{- if lookup "autoscaling/v2" "HorizontalPodAutoscaler" .Release.Namespace (include "roseinfer.fullname" .) }}
{{- fail (printf "autoscaling.type is keda and the HorizontalPodAutoscaler %s is still there, beside which KEDA accepts no other: upgrade with autoscaling.type none first" (include "roseinfer.fullname" .)) }}
{{- end }}
{{- if not $scaling.keda.serverAddress }}
{{- fail "autoscaling.type is keda and autoscaling.keda.serverAddress is empty: which Prometheus is asked?" }}
{{- end }}
{{- if le ($scaling.keda.cooldownPeriod | int) (include "roseinfer.drainSeconds" . | int) }}
{{- fail "autoscaling.keda.cooldownPeriod must be above the drain (lifecycle.drainTimeoutSeconds)" }}
{{- end }}
{{- if or (lt ($scaling.keda.fallback.replicas | int) ($scaling.minReplicas | int)) (gt ($scaling.keda.fallback.replicas | int) ($scaling.maxReplicas | int)) }}
{{- fail "autoscaling.keda.fallback.replicas is outside autoscaling.minReplicas to autoscaling.maxReplicas" }}
{{- end }}
{{- end }}
{{- $smallest := eq $scaling.type "none" | ternary .Values.replicaCount $scaling.minReplicas | int }}
{{- with .Values.pdb }}
{{- if .enabled }}
{{- if eq (kindIs "invalid" .minAvailable) (kindIs "invalid" .maxUnavailable) }}
{{- fail "pdb needs one of minAvailable and maxUnavailable, and the other null" }}
{{- end }}
{{- if not (kindIs "invalid" .minAvailable) }}{{/* Kubernetes rounds a share of the replicas up */}}
{{- $kept := include "roseinfer.share" (dict "of" $smallest "share" .minAvailable) | int }}
{{- if ge $kept $smallest }}
{{- fail (printf "pdb.minAvailable is %v of %d replicas: no node could ever be drained" .minAvailable $smallest) }}
{{- end }}
{{- else if eq (include "roseinfer.share" (dict "of" $smallest "share" .maxUnavailable) | int) 0 }}
{{- fail (printf "pdb.maxUnavailable is %v: no node could ever be drained" .maxUnavailable) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{/* A number of replicas, or a percentage of them, rounded up: share, of. */}}
{{- define "roseinfer.share" -}}
{{- if kindIs "string" .share }}
{{- ceil (divf (mulf (.share | trimSuffix "%" | float64) .of) 100) | int }}
{{- else }}
{{- .share | int }}
{{- end }}
{{- end }}

{{- define "roseinfer.checkMonitoring" -}}
{{- $service := .Values.metrics.serviceMonitor.enabled }}
{{- $pod := .Values.metrics.podMonitor.enabled }}
{{- if and $service $pod }}
{{- fail "metrics.serviceMonitor.enabled and metrics.podMonitor.enabled: every sample would be scraped twice" }}
{{- end }}
{{- $elsewhere := .Values.metrics.scrapedElsewhere }}
{{- if and (or $service $pod) $elsewhere }}
{{- fail "metrics.scrapedElsewhere beside metrics.serviceMonitor.enabled or metrics.podMonitor.enabled: every sample would be scraped twice" }}
{{- end }}
{{- if and (ne .Values.autoscaling.type "none") (not (or $service $pod $elsewhere)) }}
{{- fail (printf "autoscaling.type is %s and nothing scrapes the operations port, so that demand would always be 0: enable metrics.serviceMonitor or metrics.podMonitor, or say by metrics.scrapedElsewhere that something else does" .Values.autoscaling.type) }}
{{- end }}
{{- if and (or $service $pod $elsewhere) .Values.networkPolicy.enabled (not .Values.networkPolicy.metricsFrom) }}
{{- fail "networkPolicy.metricsFrom is empty, so that what metrics.serviceMonitor, metrics.podMonitor or metrics.scrapedElsewhere stands for does not reach the operations port: name Prometheus there" }}
{{- end }}
{{- if gt (include "roseinfer.seconds" .Values.metrics.scrapeTimeout | float64) (include "roseinfer.seconds" .Values.metrics.interval | float64) }}
{{- fail (printf "metrics.scrapeTimeout is %s and metrics.interval is %s: Prometheus refuses a scrape that may outlast its interval" .Values.metrics.scrapeTimeout .Values.metrics.interval) }}
{{- end }}
{{- if and (eq .Values.metrics.compat "vllm") (not .Values.prometheusRule.enabled) }}
{{- fail "metrics.compat is vllm, which is made by recording rules: it needs prometheusRule.enabled" }}
{{- end }}
{{- if and .Values.networkPolicy.enabled .Values.networkPolicy.restrictEgress .Values.tracing.enabled (not .Values.networkPolicy.otlpEgress) }}
{{- fail "networkPolicy.otlpEgress is empty, so that no span reaches tracing.endpoint: name the collector there" }}
{{- end }}
{{- if and .Values.networkPolicy.enabled .Values.networkPolicy.restrictEgress (include "roseinfer.fetchesItself" .) (not .Values.networkPolicy.extraEgress) }}
{{- fail (printf "networkPolicy.extraEgress is empty, so that pods cannot fetch %s: name there what they fetch it from, or use modelCache.prefetchJob, which the policy does not restrict" .Values.model.source) }}
{{- end }}
{{- end }}

{{/* How long a duration of Prometheus' is, such as 1m30s. */}}
{{- define "roseinfer.seconds" -}}
{{- $seconds := 0.0 }}
{{- range regexFindAll "[0-9]+(ms|s|m|h)" . -1 }}
{{- $scale := get (dict "ms" 0.001 "s" 1.0 "m" 60.0 "h" 3600.0) (regexFind "[a-z]+" .) }}
{{- $seconds = addf $seconds (mulf (regexFind "[0-9]+" . | float64) $scale) }}
{{- end }}
{{- $seconds }}
{{- end }}

{{/* Names of hosts, which may be templates: path, hosts, context. */}}
{{- define "roseinfer.checkHosts" -}}
{{- range $index, $host := .hosts }}
{{- $name := include "roseinfer.template" (dict "name" (printf "%s[%d]" $.path $index) "value" $host "context" $.context) }}
{{- if not (regexMatch "^(\\*\\.)?[a-z0-9]([-a-z0-9]*[a-z0-9])?(\\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$" $name) }}
{{- fail (printf "%s[%d] is %s, which is no name of a host, such as example.com or *.example.com" $.path $index $name) }}
{{- end }}
{{- end }}
{{- end }}

{{- define "roseinfer.checkRoutes" -}}
{{- if .Values.ingress.enabled }}
{{- include "roseinfer.checkHosts" (dict "path" "ingress.hosts" "hosts" .Values.ingress.hosts "context" .) }}
{{- end }}
{{- if .Values.httpRoute.enabled }}
{{- include "roseinfer.checkHosts" (dict "path" "httpRoute.hostnames" "hosts" .Values.httpRoute.hostnames "context" .) }}
{{- range $index, $backend := .Values.httpRoute.extraBackendRefs }}
{{- if not (or $backend.port $backend.group) }}
{{- fail (printf "httpRoute.extraBackendRefs[%d] is the Service %s and has no port" $index $backend.name) }}
{{- end }}
{{- end }}
{{- end }}
{{- include "roseinfer.checkService" . }}
{{- $service := .Values.service }}
{{- if and (eq ($service.ipFamilyPolicy | default "") "SingleStack") (gt (len ($service.ipFamilies | default list)) 1) }}
{{- fail "service.ipFamilyPolicy is SingleStack and service.ipFamilies has two" }}
{{- end }}
{{- $open := and (eq $service.type "LoadBalancer") (not (include "roseinfer.hasKeys" .)) }}
{{- if and $open (not (or $service.loadBalancerSourceRanges $service.withoutKeys)) }}
{{- fail "service.type is LoadBalancer and there are no keys, so all who reach the address may use the model and read /metrics: give apiKeys.existingSecret or service.loadBalancerSourceRanges, or say by service.withoutKeys that this is meant" }}
{{- end }}
{{- if and $service.nodePort (eq $service.type "ClusterIP") }}
{{- fail "service.nodePort is given and service.type is ClusterIP, which has none" }}
{{- end }}
{{- range $name := list "loadBalancerClass" "loadBalancerSourceRanges" }}
{{- if and (get $service $name) (ne $service.type "LoadBalancer") }}
{{- fail (printf "service.%s is given and service.type is %s" $name $service.type) }}
{{- end }}
{{- end }}
{{- if and $service.externalTrafficPolicy (eq $service.type "ClusterIP") }}
{{- fail "service.externalTrafficPolicy is given and service.type is ClusterIP, which is not reached from outside" }}
{{- end }}
{{- if and .Values.inferencePool.enabled (include "roseinfer.hasKeys" .) .Values.networkPolicy.enabled (not .Values.networkPolicy.metricsFrom) }}
{{- fail "inferencePool.enabled with keys (apiKeys.existingSecret): the picker, which has none, reads the operations port; name it in networkPolicy.metricsFrom" }}
{{- end }}
{{- $tls := eq (include "roseinfer.scheme" .) "https" }}
{{- if and .Values.inferencePool.enabled $tls }}
{{- fail "inferencePool.enabled with TLS on the API port: the picker and the gateway speak plain HTTP to the pool; end TLS at the gateway" }}
{{- end }}
{{- if and .Values.inferencePool.enabled (not .Values.inferencePool.endpointPickerRef.name) }}
{{- fail "inferencePool.enabled needs inferencePool.endpointPickerRef.name" }}
{{- end }}
{{- if and .Values.httpRoute.enabled (not .Values.httpRoute.parentRefs) }}
{{- fail "httpRoute.enabled needs httpRoute.parentRefs: which Gateway?" }}
{{- end }}
{{- if and .Values.httpRoute.enabled $tls (not .Values.httpRoute.backendTLS.hostname) }}
{{- fail "httpRoute.enabled with TLS on the API port needs httpRoute.backendTLS.hostname, the name in the certificate: the Gateway would speak plain HTTP to pods that speak TLS; or end TLS at the Gateway" }}
{{- end }}
{{- if and .Values.httpRoute.backendTLS.hostname (not (and .Values.httpRoute.enabled $tls)) }}
{{- fail "httpRoute.backendTLS.hostname without httpRoute.enabled and TLS on the API port: there is no TLS to verify" }}
{{- end }}
{{- if and .Values.httpRoute.backendTLS.caConfigMap (not .Values.httpRoute.backendTLS.hostname) }}
{{- fail "httpRoute.backendTLS.caConfigMap needs httpRoute.backendTLS.hostname, the name that is verified" }}
{{- end }}
{{- if and .Values.ingress.enabled (not .Values.ingress.hosts) }}
{{- fail "ingress.enabled needs ingress.hosts" }}
{{- end }}
{{- if and .Values.ingress.enabled $tls (not .Values.ingress.backendTLS) }}
{{- fail "ingress.enabled with TLS on the API port: the proxy would speak plain HTTP to pods that speak TLS; tell it by an annotation of its class, such as nginx.ingress.kubernetes.io/backend-protocol, and set ingress.backendTLS; or end TLS at the Ingress" }}
{{- end }}
{{- if and .Values.ingress.backendTLS (not (and .Values.ingress.enabled $tls)) }}
{{- fail "ingress.backendTLS without ingress.enabled and TLS on the API port: the proxy would speak TLS to pods that do not" }}
{{- end }}
{{- end }}
