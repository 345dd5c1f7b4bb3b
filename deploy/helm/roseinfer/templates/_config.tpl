{{/*
The program's configuration as YAML: the values' `config`, over what a pod needs, under what other values decide.

What another value decides cannot be given in `config` too, unless it is the same: the template fails and names both.
*/}}
{{- define "roseinfer.config" -}}
{{- /* An empty address is every one of IPv4 and of IPv6, whichever the node has. */}}
{{- $server := dict "host" "" "port" 8000 "ops_host" "" "ops_port" 8001 }}
{{- $runner := dict }}
{{- if .Values.gpu.count }}
{{- $_ := set $runner "device" "cuda" }}
{{- else if and (include "roseinfer.cores" .) (not (has (.Values.model.source | default (dig "model" "path" "" (.Values.config | default dict))) (list "" "roseinfer/demo"))) }}{{/* that needs one */}}
{{- $_ := set $runner "num_threads" (include "roseinfer.cores" . | int) }}
{{- end }}
{{- $tree := mergeOverwrite (dict "server" $server "runner" $runner) (deepCopy (.Values.config | default dict)) }}
{{- range $decided := include "roseinfer.decided" . | fromYamlArray }}
{{- $section := get $tree $decided.section | default dict }}
{{- $given := get (get ($.Values.config | default dict) $decided.section | default dict) $decided.name }}
{{- if and (not (kindIs "invalid" $given)) (ne (toString $given) "") (ne (toString $given) (toString $decided.value)) }}
{{- fail (printf "config.%s.%s is %v, and %s says %v: give one of them" $decided.section $decided.name $given $decided.by $decided.value) }}
{{- end }}
{{- $_ := set $section $decided.name $decided.value }}
{{- $_ := set $tree $decided.section $section }}
{{- end }}
{{- toYaml $tree }}
{{- end }}

{{/* A list of {section, name, value, by}: options of the program that other values than `config` decide. */}}
{{- define "roseinfer.decided" -}}
{{- $decided := list }}
{{- $source := include "roseinfer.source" . | fromYaml }}
{{- if $source.kind }}
{{- $decided = append $decided (dict "section" "model" "name" "path" "value" $source.path "by" "model.source") }}
{{- if $source.revision }}
{{- $decided = append $decided (dict "section" "model" "name" "revision" "value" $source.revision "by" "model.source") }}
{{- end }}
{{- end }}
{{- if not (kindIs "invalid" .Values.lifecycle.drainTimeoutSeconds) }}
{{- $decided = append $decided (dict "section" "server" "name" "drain_timeout_s" "value" .Values.lifecycle.drainTimeoutSeconds "by" "lifecycle.drainTimeoutSeconds") }}
{{- end }}
{{- if .Values.apiKeys.existingSecret }}
{{- $decided = append $decided (dict "section" "server" "name" "api_key_file" "value" "/etc/roseinfer/keys/api-keys" "by" "apiKeys.existingSecret") }}
{{- end }}
{{- if .Values.tls.existingSecret }}
{{- $decided = append $decided (dict "section" "server" "name" "tls_cert_file" "value" "/etc/roseinfer/tls/tls.crt" "by" "tls.existingSecret") }}
{{- $decided = append $decided (dict "section" "server" "name" "tls_key_file" "value" "/etc/roseinfer/tls/tls.key" "by" "tls.existingSecret") }}
{{- end }}
{{- if .Values.tracing.enabled }}
{{- if not (contains "$(" (.Values.tracing.endpoint | default "")) }}{{/* which Kubernetes fills in, in a variable alone */}}
{{- $decided = append $decided (dict "section" "tracing" "name" "endpoint" "value" .Values.tracing.endpoint "by" "tracing.endpoint") }}
{{- end }}
{{- $decided = append $decided (dict "section" "tracing" "name" "ratio" "value" .Values.tracing.samplerRatio "by" "tracing.samplerRatio") }}
{{- end }}
{{- if .Values.kvEvents.enabled }}
{{- $decided = append $decided (dict "section" "kv_events" "name" "endpoint" "value" (printf "tcp://*:%d" (int .Values.kvEvents.port)) "by" "kvEvents.port") }}
{{- $decided = append $decided (dict "section" "kv_events" "name" "replay_endpoint" "value" (printf "tcp://*:%d" (int .Values.kvEvents.replayPort)) "by" "kvEvents.replayPort") }}
{{- end }}
{{- if .Values.profiling.enabled }}
{{- $decided = append $decided (dict "section" "observe" "name" "capture_dir" "value" "/captures" "by" "profiling.enabled") }}
{{- end }}
{{- if .Values.profiling.nvtx }}
{{- $decided = append $decided (dict "section" "observe" "name" "nvtx" "value" true "by" "profiling.nvtx") }}
{{- end }}
{{- toYaml $decided }}
{{- end }}

{{/* One option of the configuration that a pod gets, or the default that is given: section, name, default. */}}
{{- define "roseinfer.option" -}}
{{- $section := get (include "roseinfer.config" .context | fromYaml) .section | default dict }}
{{- $value := get $section .name }}
{{- or (kindIs "invalid" $value) (not (hasKey $section .name)) | ternary .default $value }}
{{- end }}

{{/* `true` where the API port wants a key, from wherever it has its keys; empty where it wants none. */}}
{{- define "roseinfer.hasKeys" -}}
{{- $has := include "roseinfer.option" (dict "context" . "section" "server" "name" "api_key_file" "default" "") | empty | not }}
{{- range .Values.env }}
{{- $has = or $has (eq .name "ROSEINFER_API_KEYS") }}
{{- end }}
{{- $has | ternary "true" "" }}
{{- end }}

{{/*
Whole cores of the CPU limit, or of the request where there is no limit; empty when neither is given.

A process sees all cores of its node, and a quota only as being stopped: more threads than cores wait for each other.
*/}}
{{- define "roseinfer.cores" -}}
{{- $resources := .Values.resources | default dict }}
{{- $cpu := dig "limits" "cpu" (dig "requests" "cpu" "" $resources) $resources | toString }}
{{- if hasSuffix "m" $cpu }}
{{- max 1 (div ($cpu | trimSuffix "m" | int) 1000) }}
{{- else if $cpu }}
{{- max 1 ($cpu | float64 | floor | int) }}
{{- end }}
{{- end }}

{{/*
A value that may have templates: name, value, context. What Go says against one names no value of ours, so what can be seen
beforehand is refused here: braces that nothing closes, and values that there are not.
*/}}
{{- define "roseinfer.template" -}}
{{- $text := kindIs "string" .value | ternary .value (toYaml .value) }}
{{- if contains "{{" (regexReplaceAll "(?s)\\{\\{.*?\\}\\}" $text "") }}
{{- fail (printf "%s has {{ without }}: it is a template; braces that are meant are {{ `{{` }}" .name) }}
{{- end }}
{{- range regexFindAll "(?s)\\{\\{.*?\\}\\}" $text -1 }}
{{- range regexFindAll "[.]Values[.][A-Za-z0-9_]+[.]" . -1 }}
{{- if not (hasKey $.context.Values (splitList "." . | rest | rest | first)) }}
{{- fail (printf "%s asks for %s, which is no value of this chart" $.name (trimSuffix "." .)) }}
{{- end }}
{{- end }}
{{- end }}
{{- tpl $text .context }}
{{- end }}

{{/* The names that clients give the model, as JSON; the first is the one that the server reports. */}}
{{- define "roseinfer.modelNames" -}}
{{- $names := get (get (include "roseinfer.config" . | fromYaml) "server") "served_model_name" }}
{{- $path := include "roseinfer.option" (dict "context" . "section" "model" "name" "path" "default" "roseinfer/demo") }}
{{- $names = empty $names | ternary (eq $path "roseinfer/demo" | ternary "roseinfer-demo" (base $path)) $names }}
{{- kindIs "slice" $names | ternary $names (list $names) | toJson }}
{{- end }}

{{- define "roseinfer.apiPort" -}}
{{- include "roseinfer.option" (dict "context" . "section" "server" "name" "port" "default" 8000) | int }}
{{- end }}

{{- define "roseinfer.opsPort" -}}
{{- include "roseinfer.option" (dict "context" . "section" "server" "name" "ops_port" "default" 8001) | int }}
{{- end }}
