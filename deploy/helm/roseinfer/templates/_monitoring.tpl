{{/* Series of this release's pods, as Prometheus' operator labels them. */}}
{{- define "roseinfer.selector" -}}
namespace="{{ .Release.Namespace }}",pod=~"{{ include "roseinfer.podPattern" . }}"
{{- end }}

{{/*
The names of the Deployment's pods: its own name, a hash of 1 to 10 characters for the ReplicaSet, and 5 at random.
Kubernetes cuts all that stands before those 5 at 58 characters: with a full name of 47 or more the hash loses its
hyphen and its end, and the pod's name has 63 characters.
*/}}
{{- define "roseinfer.podPattern" -}}
{{- $name := include "roseinfer.fullname" . }}
{{- $whole := "[a-z0-9]{1,10}-[a-z0-9]{5}" }}
{{- if gt (len $name) 46 }}
{{- printf "%s-(%s|[a-z0-9]{%d})" $name $whole (sub 62 (len $name)) }}
{{- else }}
{{- printf "%s-%s" $name $whole }}
{{- end }}
{{- end }}

{{/* A query of files/, with this release's series in the place of $selector. */}}
{{- define "roseinfer.query" -}}
{{- $text := .context.Files.Get (printf "files/%s.promql" .query) | trim }}
{{- $text | replace "$selector" (include "roseinfer.selector" .context) }}
{{- end }}

{{/* A group of recording rules that shows this release's histograms under vLLM's names, for dashboards. */}}
{{- define "roseinfer.compatRules" -}}
{{- $names := .Files.Get "files/compat-vllm.yaml" | fromYaml }}
{{- $selector := include "roseinfer.selector" . }}
- name: roseinfer.compat
  rules:
    {{- range $theirs, $ours := $names.histograms }}
    {{- range $part := list "bucket" "sum" "count" }}
    - record: {{ $theirs }}_{{ $part }}
      expr: {{ printf "%s_%s{%s}" $ours $part $selector | quote }}
    {{- end }}
    {{- end }}
{{- end }}

{{/* Targets of this release, by the job that the monitor gives them; without one, by their pods. */}}
{{- define "roseinfer.targets" -}}
{{- if or .Values.metrics.serviceMonitor.enabled .Values.metrics.podMonitor.enabled -}}
namespace="{{ .Release.Namespace }}",job="{{ include "roseinfer.fullname" . }}"
{{- else -}}
{{ include "roseinfer.selector" . }}
{{- end }}
{{- end }}

{{/* What the rules record has no pod, and two releases may share a job and a model: it has the release's name. */}}
{{- define "roseinfer.recordedSelector" -}}
namespace="{{ .Release.Namespace }}",release="{{ include "roseinfer.fullname" . }}"
{{- end }}

{{/* What tells the addresses of this release's dashboards from another's. */}}
{{- define "roseinfer.releaseId" -}}
{{- printf "%s/%s" .Release.Namespace (include "roseinfer.fullname" .) | sha256sum | trunc 8 }}
{{- end }}

{{- define "roseinfer.dashboard" -}}
{{- $slo := .context.Values.prometheusRule.slo }}
{{- $text := .text }}
{{- range $word, $objective := dict "TTFT" $slo.ttft.objective "ITL" $slo.itl.objective "AVAIL" $slo.availability.objective }}
{{- $burning := subf 1 (mulf 14.4 (subf 1 ($objective | float64))) | toString }}
{{- $text = $text | replace (printf "\"@%s_OBJECTIVE@\"" $word) (toString $objective) | replace (printf "\"@%s_BURNING@\"" $word) $burning }}
{{- end }}
{{- $text
  | replace "@RELEASE_ID@" (include "roseinfer.releaseId" .context)
  | replace "@RELEASE@" (include "roseinfer.fullname" .context)
  | replace "@NAMESPACE@" .context.Release.Namespace
  | replace "@PODS@" (include "roseinfer.podPattern" .context)
  | replace "\"@DEMAND@\"" (include "roseinfer.targetDemand" .context)
  | replace "@TTFT_SECONDS@" (include "roseinfer.bound" $slo.ttft.thresholdSeconds)
  | replace "@ITL_SECONDS@" (include "roseinfer.bound" $slo.itl.thresholdSeconds) }}
{{- end }}

{{/* A number as `le` has it: with a point. */}}
{{- define "roseinfer.bound" -}}
{{- $text := toString . }}
{{- contains "." $text | ternary $text (printf "%s.0" $text) }}
{{- end }}

{{/*
The rules for this release. Only placeholders are replaced: what stands in double braces is Prometheus's. A GPU's series
say whose it is in exported_namespace, or in namespace where labels are honoured and the other label is absent.
*/}}
{{- define "roseinfer.rules" -}}
{{- $step := include "roseinfer.option" (dict "context" . "section" "engine" "name" "step_timeout_s" "default" 30) | float64 }}
{{- $slo := .Values.prometheusRule.slo }}
{{- $text := .Files.Get "files/rules.yaml" }}
{{- if .Values.dashboards.enabled }}
{{- $text = regexReplaceAll "/d/roseinfer-([a-z]+)" $text (printf "/d/roseinfer-${1}-%s" (include "roseinfer.releaseId" .)) }}
{{- end }}
{{- $text
  | replace "@SELECTOR@" (include "roseinfer.selector" .)
  | replace "@RECORDED_SELECTOR@" (include "roseinfer.recordedSelector" .)
  | replace "@TARGETS@" (include "roseinfer.targets" .)
  | replace "@GPU_SELECTOR@" (printf "exported_namespace=~\"%s|\"" .Release.Namespace)
  | replace "@POD_SELECTOR@" (include "roseinfer.selector" .)
  | replace "@STALL_SECONDS@" (divf $step 6 | toString)
  | replace "@RUNBOOK@" (.Values.prometheusRule.runbook | replace "'" "''")
  | replace "@GRAFANA@" (.Values.prometheusRule.grafana | default "" | trimSuffix "/" | replace "'" "''")
  | replace "@START_SECONDS@" (div (include "roseinfer.startupSeconds" . | int) 2 | toString)
  | replace "@FETCH_SECONDS@" (.Values.model.timeoutSeconds | int | toString)
  | replace "@DRAIN_SECONDS@" (div (include "roseinfer.drainSeconds" . | int) 2 | toString)
  | replace "@TTFT_SECONDS@" (include "roseinfer.bound" $slo.ttft.thresholdSeconds)
  | replace "@ITL_SECONDS@" (include "roseinfer.bound" $slo.itl.thresholdSeconds)
  | replace "@TTFT_OBJECTIVE@" (toString $slo.ttft.objective)
  | replace "@ITL_OBJECTIVE@" (toString $slo.itl.objective)
  | replace "@AVAIL_OBJECTIVE@" (toString $slo.availability.objective) }}
{{- end }}
