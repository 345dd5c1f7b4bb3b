{{/*
Several models in one release: each entry of `models` is rendered as a release of its own, whose name is the release's
and the entry's, with the release's values and the entry's over them.
*/}}

{{/* One template for the release, or for each of its models: root, template, separator. */}}
{{- define "roseinfer.each" -}}
{{- $root := .root }}
{{- $template := .template }}
{{- $separator := get . "separator" | default (hasKey . "separator" | ternary "" "---") }}
{{- if not $root.Values.models }}
{{- include $template $root }}
{{- else }}
{{- include "roseinfer.checkModels" $root }}
{{- $names := list }}
{{- $accounts := list }}
{{- range $index, $model := $root.Values.models }}
{{- $values := mergeOverwrite (deepCopy (omit $root.Values "models")) (deepCopy (omit $model "name")) }}
{{- $release := merge (dict "Name" (printf "%s-%s" $root.Release.Name $model.name)) $root.Release }}
{{- $context := dict "Values" $values "Release" $release "Chart" $root.Chart "Files" $root.Files "Capabilities" $root.Capabilities "Template" $root.Template }}
{{- $name := include "roseinfer.fullname" $context }}
{{- if or (has $name $names) (has (printf "%s-ops" $name) $names) }}
{{- fail (printf "models[%d].name is %s, whose objects would be called %s, as those of another entry are" $index $model.name $name) }}
{{- end }}
{{- $names = append (append $names $name) (printf "%s-ops" $name) }}
{{- $account := include "roseinfer.serviceAccountName" $context }}
{{- if and $values.serviceAccount.create (has $account $accounts) }}
{{- fail (printf "models[%d].serviceAccount.name is %s, which another entry makes" $index $account) }}
{{- end }}
{{- $accounts = append $accounts $account }}
{{ $separator }}
{{ include $template $context }}
{{- end }}
{{- end }}
{{- end }}

{{- define "roseinfer.checkModels" -}}
{{- $names := list }}
{{- range $index, $model := .Values.models }}
{{- if has $model.name $names }}
{{- fail (printf "models[%d].name is %s, which another entry has" $index $model.name) }}
{{- end }}
{{- $names = append $names $model.name }}
{{- $whole := printf "%s-%s" $.Release.Name $model.name }}
{{- if gt (len $whole) 40 }}
{{- fail (printf "models[%d].name is %s, and with the release's name there are %d characters: 40 are left for both" $index $model.name (len $whole)) }}
{{- end }}
{{- end }}
{{- if .Values.fullnameOverride }}
{{- fail "fullnameOverride is given beside models, all of which would have that name" }}
{{- end }}
{{- if .Values.ingress.enabled }}
{{- fail "ingress.enabled beside models: an Ingress chooses by no model; use httpRoute" }}
{{- end }}
{{- if and .Values.serviceAccount.create .Values.serviceAccount.name }}
{{- fail "serviceAccount.name is given beside models, each of which would make it: set serviceAccount.create to false, or leave the name out" }}
{{- end }}
{{- if .Values.httpRoute.extraBackendRefs }}
{{- fail "httpRoute.extraBackendRefs is given beside models: give a model the same served_model_name and a weight" }}
{{- end }}
{{- end }}
