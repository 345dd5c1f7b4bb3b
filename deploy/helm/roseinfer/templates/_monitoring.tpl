{{/* Series of this release's pods, as Prometheus' operator labels them. */}}
{{- define "roseinfer.selector" -}}
namespace="{{ .Release.Namespace }}",pod=~"{{ include "roseinfer.fullname" . }}-[a-z0-9]+-[a-z0-9]+"
{{- end }}

{{/* A query of files/, with this release's series in the place of $selector. */}}
{{- define "roseinfer.query" -}}
{{- $text := .context.Files.Get (printf "files/%s.promql" .query) | trim }}
{{- $text | replace "$selector" (include "roseinfer.selector" .context) }}
{{- end }}

{{/* A group of recording rules that shows this release's series under vLLM's names. */}}
{{- define "roseinfer.compatRules" -}}
{{- $names := .Files.Get "files/compat-vllm.yaml" | fromYaml }}
{{- $selector := include "roseinfer.selector" . }}
- name: roseinfer.compat
  rules:
    {{- range $theirs, $ours := $names.gauges }}
    - record: {{ $theirs }}
      expr: {{ printf "%s{%s}" $ours $selector | quote }}
    {{- end }}
    {{- range $theirs, $ours := $names.histograms }}
    {{- range $part := list "bucket" "sum" "count" }}
    - record: {{ $theirs }}_{{ $part }}
      expr: {{ printf "%s_%s{%s}" $ours $part $selector | quote }}
    {{- end }}
    {{- end }}
{{- end }}
