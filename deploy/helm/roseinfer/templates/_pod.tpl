{{/* Parts of the serving pod. */}}

{{/* Asks the front end itself, since a pod that is short of cores gives them to what serves the operations port last. */}}
{{- define "roseinfer.probe" -}}
httpGet:
  path: {{ .path }}
  port: http
  {{- if eq (include "roseinfer.scheme" .root) "https" }}
  scheme: HTTPS
  {{- end }}
{{ toYaml .times }}
{{- end }}

{{/* Kubernetes sleeps by itself since 1.30; before that the image's `sleep` does. */}}
{{- define "roseinfer.preStop" -}}
{{- if semverCompare ">=1.30-0" .Capabilities.KubeVersion.Version }}
sleep:
  seconds: {{ .Values.lifecycle.preStopSeconds }}
{{- else }}
exec:
  command: [sleep, {{ .Values.lifecycle.preStopSeconds | quote }}]
{{- end }}
{{- end }}

{{- define "roseinfer.command" -}}
{{- if .Values.profiling.nsys.enabled }}
- {{ .Values.profiling.nsys.path }}
- profile
- --trace=cuda,nvtx,osrt
- --capture-range=cudaProfilerApi
- --capture-range-end=repeat
- --output=/captures/%h-%p
{{- end }}
- roseinfer
- serve
- --config
- /etc/roseinfer/config.yaml
{{- /* The image has these in its environment, which would win over the file. */}}
- --host
- {{ include "roseinfer.option" (dict "context" . "section" "server" "name" "host" "default" "") | quote }}
- --server.ops-host
- {{ include "roseinfer.option" (dict "context" . "section" "server" "name" "ops_host" "default" "") | quote }}
- --model.packed-cache
{{- $packed := printf "%s/.roseinfer/packed" .Values.modelCache.mountPath }}
- {{ include "roseinfer.option" (dict "context" . "section" "model" "name" "packed_cache" "default" $packed) | quote }}
{{- with include "roseinfer.option" (dict "context" . "section" "runner" "name" "kernels_dir" "default" "") }}
- --runner.kernels-dir
- {{ . | quote }}
{{- end }}
{{- if .Values.kvEvents.enabled }}
- --kv-events.topic
- {{ include "roseinfer.kvTopic" . | quote }}
{{- end }}
{{- end }}

{{/* For llm-d's picker the pod's address and port are its name; older ones know no other than that of the topic. */}}
{{- define "roseinfer.kvTopic" -}}
{{- $topic := printf "kv@$(POD_IP):%s@%s" (include "roseinfer.apiPort" .) (include "roseinfer.modelNames" . | fromJsonArray | first) }}
{{- include "roseinfer.option" (dict "context" . "section" "kv_events" "name" "topic" "default" $topic) }}
{{- end }}

{{/* What `env` of the values names too is left to it: an API server refuses a list with two of a name. */}}
{{- define "roseinfer.env" -}}
{{- $given := list }}
{{- range .Values.env }}
{{- $given = append $given .name }}
{{- end }}
{{- if not (has "HF_HOME" $given) }}
- name: HF_HOME
  value: {{ .Values.modelCache.mountPath | quote }}
{{- end }}
{{- /* What is here already is all that there is: the server does not ask whether there is something newer. */}}
{{- $isFetched := eq (include "roseinfer.source" . | fromYaml).kind "fetched" }}
{{- if and (or .Values.modelCache.readOnly $isFetched) (not (has "HF_HUB_OFFLINE" $given)) }}
- name: HF_HUB_OFFLINE
  value: "1"
{{- end }}
{{- if and .Values.kvEvents.enabled (not (has "POD_IP" $given)) }}
- name: POD_IP
  valueFrom:
    fieldRef:
      fieldPath: status.podIP
{{- end }}
{{- include "roseinfer.userEnv" . }}
{{- if .Values.tracing.enabled }}
{{- include "roseinfer.tracingEnv" (dict "context" . "given" $given) }}
{{- end }}
{{- end }}

{{/*
Where spans go, by the variable of OpenTelemetry's SDK: Kubernetes fills $(NODE_IP) in, for a collector on each node, and
other variables of `env`, which therefore come first. The SDK adds a path to the one, and takes the other as it is.
*/}}
{{- define "roseinfer.tracingEnv" -}}
{{- $endpoint := .context.Values.tracing.endpoint }}
{{- $name := regexMatch "^[^/]*//[^/]+/." $endpoint | ternary "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT" "OTEL_EXPORTER_OTLP_ENDPOINT" }}
{{- if and (contains "$(NODE_IP)" $endpoint) (not (has "NODE_IP" .given)) }}
- name: NODE_IP
  valueFrom:
    fieldRef:
      fieldPath: status.hostIP
{{- end }}
{{- if not (has $name .given) }}
- name: {{ $name | quote }}
  value: {{ $endpoint | quote }}
{{- end }}
{{- end }}

{{/* What a download needs as much as the server: the token, and the values' own proxies, mirrors and authorities. */}}
{{- define "roseinfer.userEnv" -}}
{{- $given := list }}
{{- range .Values.env }}
{{- $given = append $given .name }}
{{- end }}
{{- with .Values.hfToken }}
{{- if and .existingSecret (not (has "HF_TOKEN" $given)) }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ .existingSecret | quote }}
      key: {{ .key | quote }}
{{- end }}
{{- end }}
{{- with .Values.env }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* What the serving pod and the job that fetches its model have in common: who they are, and where they may run. */}}
{{- define "roseinfer.placement" -}}
serviceAccountName: {{ include "roseinfer.serviceAccountName" . | quote }}
automountServiceAccountToken: {{ .Values.serviceAccount.automount | default false }}
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- with .Values.schedulerName }}
schedulerName: {{ . | quote }}
{{- end }}
{{- with .Values.podSecurityContext }}
securityContext:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- $tolerations := .Values.tolerations | default list }}
{{- if .Values.gpu.count }}{{/* the taint of nodes with GPUs, whatever the device plugin calls a part of one */}}
{{- $tolerations = prepend $tolerations (dict "key" "nvidia.com/gpu" "operator" "Exists" "effect" "NoSchedule") }}
{{- end }}
{{- with $tolerations | uniq }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.affinity }}
affinity:
  {{- include "roseinfer.template" (dict "name" "affinity" "value" . "context" $) | nindent 2 }}
{{- end }}
{{- end }}

{{/* Requests and limits, the GPU in both. */}}
{{- define "roseinfer.resources" -}}
{{- $resources := deepCopy (.Values.resources | default dict) }}
{{- if .Values.gpu.count }}
{{- range $kind := list "requests" "limits" }}
{{- $part := get $resources $kind | default dict }}
{{- $_ := set $part $.Values.gpu.resourceName ($.Values.gpu.count | int) }}
{{- $_ := set $resources $kind $part }}
{{- end }}
{{- end }}
{{- toYaml $resources }}
{{- end }}

{{- define "roseinfer.volumes" -}}
- name: config
  configMap:
    name: {{ include "roseinfer.fullname" . }}
- name: tmp
  emptyDir: {}
{{- if or .Values.modelCache.prefetchJob.enabled (include "roseinfer.fetchesItself" .) }}
- name: scripts
  configMap:
    name: {{ include "roseinfer.fullname" . }}-scripts
{{- end }}
- name: models
{{- if .Values.modelCache.enabled }}
  persistentVolumeClaim:
    claimName: {{ include "roseinfer.claimName" . | quote }}
{{- else }}
  emptyDir: {}
{{- end }}
{{- $source := include "roseinfer.source" . | fromYaml }}
{{- if eq $source.kind "image" }}
- name: source
  image:
    reference: {{ $source.reference | quote }}
    pullPolicy: IfNotPresent
{{- else if eq $source.kind "claim" }}
- name: source
  persistentVolumeClaim:
    claimName: {{ $source.claim | quote }}
    readOnly: true
{{- end }}
{{- if .Values.shm.enabled }}
- name: shm
  emptyDir:
    medium: Memory
    sizeLimit: {{ .Values.shm.sizeLimit | quote }}
{{- end }}
{{- with .Values.apiKeys }}
{{- if .existingSecret }}
- name: keys
  secret:
    secretName: {{ .existingSecret | quote }}
    items:
      - key: {{ .key | quote }}
        path: api-keys
{{- end }}
{{- end }}
{{- with .Values.tls.existingSecret }}
- name: tls
  secret:
    secretName: {{ . | quote }}
{{- end }}
{{- if .Values.profiling.enabled }}
- name: captures
  emptyDir:
    sizeLimit: {{ .Values.profiling.captureSizeLimit | quote }}
{{- end }}
{{- with .Values.extraVolumes }}
{{ include "roseinfer.template" (dict "name" "extraVolumes" "value" . "context" $) }}
{{- end }}
{{- end }}

{{- define "roseinfer.volumeMounts" -}}
- name: config
  mountPath: /etc/roseinfer/config.yaml
  subPath: config.yaml
  readOnly: true
- name: tmp
  mountPath: /tmp
- name: models
  mountPath: {{ .Values.modelCache.mountPath | quote }}
  readOnly: {{ .Values.modelCache.readOnly }}
{{- with (include "roseinfer.source" . | fromYaml).mount }}
- name: source
  mountPath: {{ . | quote }}
  readOnly: true
{{- end }}
{{- if .Values.shm.enabled }}
- name: shm
  mountPath: /dev/shm
{{- end }}
{{- if .Values.apiKeys.existingSecret }}
- name: keys
  mountPath: /etc/roseinfer/keys
  readOnly: true
{{- end }}
{{- if .Values.tls.existingSecret }}
- name: tls
  mountPath: /etc/roseinfer/tls
  readOnly: true
{{- end }}
{{- if .Values.profiling.enabled }}
- name: captures
  mountPath: /captures
{{- end }}
{{- with .Values.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Fetches the model, in the job or before the server, with all that the server itself would have for that. */}}
{{- define "roseinfer.fetchContainer" -}}
- name: fetch-model
  image: {{ default (include "roseinfer.image" .) .Values.model.image | quote }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  command: [python, /scripts/prefetch.py, fetch, /etc/roseinfer/config.yaml, {{ include "roseinfer.prefetchMark" . | quote }}, {{ .Values.model.timeoutSeconds | quote }}]
  terminationMessagePolicy: FallbackToLogsOnError
  env:
    {{- $given := list }}
    {{- range .Values.env }}
    {{- $given = append $given .name }}
    {{- end }}
    {{- if not (has "HF_HOME" $given) }}
    - name: HF_HOME
      value: {{ .Values.modelCache.mountPath | quote }}
    {{- end }}
    {{- include "roseinfer.userEnv" . | nindent 4 }}
  {{- with .Values.envFrom }}
  envFrom:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.securityContext }}
  securityContext:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  resources:
    requests: {cpu: 500m, memory: 1Gi}
    limits: {memory: 4Gi}
  volumeMounts:
    - name: models
      mountPath: {{ .Values.modelCache.mountPath | quote }}
    - name: config
      mountPath: /etc/roseinfer/config.yaml
      subPath: config.yaml
      readOnly: true
    - name: scripts
      mountPath: /scripts
      readOnly: true
    - name: tmp
      mountPath: /tmp
    {{- with .Values.extraVolumeMounts }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end }}

{{- define "roseinfer.initContainers" -}}
{{- if include "roseinfer.fetchesItself" . }}
{{ include "roseinfer.fetchContainer" . }}
{{- end }}
{{- if .Values.modelCache.prefetchJob.enabled }}
- name: wait-for-model
  image: {{ include "roseinfer.image" . | quote }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  command: [python, /scripts/prefetch.py, wait, {{ include "roseinfer.prefetchMark" . | quote }}, {{ .Values.model.timeoutSeconds | quote }}]
  terminationMessagePolicy: FallbackToLogsOnError
  {{- with .Values.securityContext }}
  securityContext:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  resources:
    requests: {cpu: 10m, memory: 32Mi}
    limits: {memory: 64Mi}
  volumeMounts:
    - name: scripts
      mountPath: /scripts
      readOnly: true
    - name: models
      mountPath: {{ .Values.modelCache.mountPath | quote }}
      readOnly: true
{{- end }}
{{- with .Values.initContainers }}
{{ include "roseinfer.template" (dict "name" "initContainers" "value" . "context" $) }}
{{- end }}
{{- end }}

{{/* One GPU less for a moment costs less than one GPU more that is not there; the same of a claim for one node. */}}
{{- define "roseinfer.strategy" -}}
{{- $spare := not (or .Values.gpu.count (include "roseinfer.oneNode" .)) }}
{{- $rolling := dict "maxSurge" (ternary 1 0 $spare) "maxUnavailable" (ternary 0 1 $spare) }}
{{- toYaml (default (dict "type" "RollingUpdate" "rollingUpdate" $rolling) .Values.strategy) }}
{{- end }}
