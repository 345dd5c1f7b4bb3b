{{/* Names and labels. */}}

{{- define "roseinfer.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 50 | trimSuffix "-" }}
{{- end }}

{{/*
At most 50 characters, so that every suffix of ours fits into a name of 63; a release's name may have dots, a Service's not.
*/}}
{{- define "roseinfer.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" }}
{{- else if contains (include "roseinfer.name" .) .Release.Name }}
{{- .Release.Name | replace "." "-" | trunc 50 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name (include "roseinfer.name" .) | replace "." "-" | trunc 50 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{- define "roseinfer.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/name: {{ include "roseinfer.name" . }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end }}

{{/* The labels of an object, with the values' own over them: context, more. */}}
{{- define "roseinfer.labelsWith" -}}
{{- mergeOverwrite (include "roseinfer.labels" .context | fromYaml) (.more | default dict) | toYaml }}
{{- end }}

{{/*
Labels of pods of one component. They name no version: another chart with the same pod is no rollout. Nor do they follow
nameOverride: with fullnameOverride beside it a Deployment would keep its name, whose selector cannot be changed.
*/}}
{{- define "roseinfer.podLabels" -}}
app.kubernetes.io/name: {{ .context.Chart.Name | quote }}
app.kubernetes.io/instance: {{ .context.Release.Name | quote }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{/* The pods that serve, and no others of the release. */}}
{{- define "roseinfer.selectorLabels" -}}
{{- include "roseinfer.podLabels" (dict "context" . "component" "server") }}
{{- end }}

{{- define "roseinfer.serviceAccountName" -}}
{{- if .Values.serviceAccount.create }}
{{- default (include "roseinfer.fullname" .) .Values.serviceAccount.name }}
{{- else }}
{{- default "default" .Values.serviceAccount.name }}
{{- end }}
{{- end }}

{{- define "roseinfer.image" -}}
{{- $image := .Values.image }}
{{- $name := empty $image.registry | ternary $image.repository (printf "%s/%s" $image.registry $image.repository) }}
{{- if $image.digest }}
{{- printf "%s@%s" $name $image.digest }}
{{- else }}
{{- $tag := printf "%s-%s" .Chart.AppVersion (empty .Values.gpu.count | ternary "cpu" "cuda") }}
{{- printf "%s:%s" $name (default $tag $image.tag) }}
{{- end }}
{{- end }}

{{- define "roseinfer.claimName" -}}
{{- default (printf "%s-models" (include "roseinfer.fullname" .)) .Values.modelCache.existingClaim }}
{{- end }}

{{/* The access modes of a claim that one node alone can mount; empty where many can, or there is no claim. */}}
{{- define "roseinfer.oneNode" -}}
{{- $modes := .Values.modelCache.accessModes }}
{{- if and .Values.modelCache.enabled (not (or (has "ReadWriteMany" $modes) (has "ReadOnlyMany" $modes))) }}
{{- $modes | join " and " }}
{{- end }}
{{- end }}

{{/*
What model.source means: `path` for config.model.path, `kind` of what brings it there, and what that kind needs. An image
or a claim is mounted in a folder of the model's name, after which the server calls the model.
*/}}
{{- define "roseinfer.source" -}}
{{- $source := .Values.model.source | default "" }}
{{- $rest := regexReplaceAll "^[a-z0-9]+://" $source "" | trimSuffix "/" }}
{{- $shapes := dict "hf://OWNER/NAME or hf://OWNER/NAME@REVISION" "^hf://[\\w.-]+(/[\\w.-]+)?(@[^@\\s]+)?/?$" "s3://BUCKET/FOLDER" "^s3://[^/]+/.*[^/]/*$" "gs://BUCKET/FOLDER" "^gs://[^/]+/.*[^/]/*$" "pvc://CLAIM or pvc://CLAIM/FOLDER" "^pvc://[a-z0-9]([-a-z0-9.]*[a-z0-9])?(/|$)" }}
{{- range $shape, $pattern := $shapes }}
{{- if and (hasPrefix (printf "%s://" (splitList "://" $shape | first)) $source) (not (regexMatch $pattern $source)) }}
{{- fail (printf "model.source is %s, which is not of the form %s" $source $shape) }}
{{- end }}
{{- end }}
{{- if has ".." (splitList "/" $rest) }}
{{- fail (printf "model.source is %s: it has .. in it" $source) }}
{{- end }}
{{- if hasPrefix "hf://" $source }}
kind: fetched
path: {{ $rest | splitList "@" | first | quote }}
revision: {{ regexReplaceAll "^[^@]*@?" $rest "" | quote }}
{{- else if or (hasPrefix "s3://" $source) (hasPrefix "gs://" $source) }}
kind: fetched
path: {{ $source | trimSuffix "/" | quote }}
{{- else if hasPrefix "oci://" $source }}
{{- if not (regexMatch "^([A-Za-z0-9.-]+(:[0-9]+)?/)?[a-z0-9]+([._/-]+[a-z0-9]+)*(:[A-Za-z0-9_][A-Za-z0-9_.-]*|(:[A-Za-z0-9_][A-Za-z0-9_.-]*)?@sha256:[0-9a-f]{64})$" $rest) }}
{{- fail (printf "model.source is %s: an image has a tag or a digest, and its model lies at its root" $source) }}
{{- end }}
kind: image
reference: {{ $rest | quote }}
{{- $mount := printf "/mnt/models/%s" ($rest | splitList "@" | first | splitList "/" | last | splitList ":" | first) }}
mount: {{ $mount }}
path: {{ $mount | quote }}
{{- else if hasPrefix "pvc://" $source }}
kind: claim
claim: {{ $rest | splitList "/" | first | quote }}
mount: /mnt/models/{{ $rest | splitList "/" | first }}
path: {{ printf "/mnt/models/%s" $rest | quote }}
{{- else if hasPrefix "/" $source }}
kind: directory
path: {{ $source | quote }}
{{- else if $source }}
{{- fail (printf "model.source is %s: it begins with hf://, s3://, gs://, oci:// or pvc://, or with the / of a directory" $source) }}
{{- else }}
kind: ""
{{- end }}
{{- end }}

{{/* Whether an init container fetches the model; empty where nothing does, or the job. */}}
{{- define "roseinfer.fetchesItself" -}}
{{- $kind := (include "roseinfer.source" . | fromYaml).kind }}
{{- and (eq $kind "fetched") (not .Values.modelCache.readOnly) (not .Values.modelCache.prefetchJob.enabled) | ternary "true" "" }}
{{- end }}

{{/* What the prefetch job leaves in the cache and pods wait for: one mark for each model and revision. */}}
{{- define "roseinfer.prefetchId" -}}
{{- $model := get (include "roseinfer.config" . | fromYaml) "model" | default dict }}
{{- printf "%s@%s" (get $model "path" | default "roseinfer/demo") (get $model "revision" | default "main") | sha256sum | trunc 12 }}
{{- end }}

{{- define "roseinfer.prefetchMark" -}}
{{ .Values.modelCache.mountPath }}/.roseinfer/{{ include "roseinfer.prefetchId" . }}
{{- end }}

{{/* `https` where the API port has a certificate, which the operations port never has. */}}
{{- define "roseinfer.scheme" -}}
{{- include "roseinfer.option" (dict "context" . "section" "server" "name" "tls_cert_file" "default" "") | empty | ternary "http" "https" }}
{{- end }}
