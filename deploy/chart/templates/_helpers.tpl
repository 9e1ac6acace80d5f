{{/* Labels of a component's objects and pods: (dict "root" $ "component" NAME). */}}
{{- define "baton.labels" -}}
app.kubernetes.io/name: baton
app.kubernetes.io/instance: {{ .root.Release.Name }}
{{- with .component }}
app.kubernetes.io/component: {{ . }}
{{- end }}
{{- end }}

{{- define "baton.metadata" -}}
name: {{ .root.Release.Name }}-{{ .component }}
namespace: {{ .root.Release.Namespace }}
labels:
  {{- include "baton.labels" . | nindent 2 }}
{{- end }}

{{/* A selector of every node, and of no router. */}}
{{- define "baton.nodes" -}}
matchLabels:
  {{- include "baton.labels" (dict "root" .) | nindent 2 }}
matchExpressions:
  - {key: app.kubernetes.io/component, operator: NotIn, values: [router, model]}
{{- end }}

{{- define "baton.image" -}}
{{- $tag := .Values.image.tag | default .Chart.AppVersion -}}
{{ .Values.image.repository }}{{ ternary "@" ":" (hasPrefix "sha256:" $tag) }}{{ $tag }}
{{- end }}

{{/* The claim of the model's volume; empty without one. */}}
{{- define "baton.modelClaim" -}}
{{- if .Values.modelStorage.claim }}{{ .Values.modelStorage.claim }}
{{- else if .Values.modelStorage.create.size }}{{ .Release.Name }}-model
{{- end }}
{{- end }}

{{- define "baton.modelFolder" -}}
{{ .Values.modelStorage.path | printf "/model/%s" | trimSuffix "/" }}
{{- end }}

{{/* The file that the Job writes last, one for each model. */}}
{{- define "baton.modelMark" -}}
{{ include "baton.modelFolder" . }}/.complete-{{ .Values.model | sha256sum | trunc 12 }}
{{- end }}

{{/* The names of Secrets: of the cluster's key and of other secrets; empty without one. */}}
{{- define "baton.keySecret" -}}
{{- if .Values.clusterKey.existingSecret }}{{ .Values.clusterKey.existingSecret }}
{{- else if or .Values.clusterKey.value (not (dig "keys" "insecure" false .Values.settings)) }}{{ .Release.Name }}-key
{{- end }}
{{- end }}
{{- define "baton.apiKeysSecret" -}}
{{- if .Values.apiKeys.existingSecret }}{{ .Values.apiKeys.existingSecret }}
{{- else if .Values.apiKeys.values }}{{ .Release.Name }}-api-keys
{{- end }}
{{- end }}
{{- define "baton.huggingFaceSecret" -}}
{{- if .Values.huggingFace.existingSecret }}{{ .Values.huggingFace.existingSecret }}
{{- else if .Values.huggingFace.token }}{{ .Release.Name }}-hugging-face
{{- end }}
{{- end }}

{{- define "baton.huggingFaceEnv" -}}
{{- with include "baton.huggingFaceSecret" . }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef: {name: {{ . }}, key: {{ ternary $.Values.huggingFace.existingSecretKey "token" (ne $.Values.huggingFace.existingSecret "") }}}
{{- end }}
{{- end }}

{{- define "baton.serviceAccount" -}}
{{- if .Values.serviceAccount.name }}{{ .Values.serviceAccount.name }}
{{- else if .Values.serviceAccount.create }}{{ .Release.Name }}
{{- end }}
{{- end }}

{{/* A setting's value as `--set` takes it, in which Kubernetes replaces nothing. */}}
{{- define "baton.text" -}}
{{- $text := kindIs "string" . | ternary . (toJson .) -}}
{{- if kindIs "slice" . }}{{ $text = join "," . }}{{ end -}}
{{ $text | replace "$(" "$$(" }}
{{- end }}

{{/* The arguments of a process as JSON: (dict "root" $ "role" ROLE "settings" SETTINGS). */}}
{{- define "baton.args" -}}
{{- $words := list .role -}}
{{- range $section, $settings := .settings -}}
{{- range $name, $value := $settings -}}
{{- if not (kindIs "invalid" $value) -}}
{{- $words = concat $words (list "--set" (printf "%s.%s=%s" $section $name (include "baton.text" $value))) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{ toJson $words }}
{{- end }}

{{/* Settings that all processes share, as JSON. */}}
{{- define "baton.settings" -}}
{{- $own := dict -}}
{{- if include "baton.keySecret" . }}{{ $_ := set $own "keys" (dict "file" "/run/baton/cluster.key") }}{{ end -}}
{{- if include "baton.modelClaim" . -}}
{{- $model := dict "path" (include "baton.modelFolder" .) -}}
{{- with .Values.model }}{{ $_ := set $model "served_model_name" . }}{{ end -}}
{{- $_ := set $own "model" $model -}}
{{- else if .Values.model -}}
{{- $_ := set $own "model" (dict "path" .Values.model) -}}
{{- end -}}
{{ mergeOverwrite $own (deepCopy .Values.settings) | toJson }}
{{- end }}

{{/* The values of a pool: those of `node`, then its own; as JSON. */}}
{{- define "baton.pool" -}}
{{- mergeOverwrite (deepCopy .root.Values.node) (deepCopy .pool) | toJson }}
{{- end }}

{{/* What the pods of a component have, merged from the values: (dict "root" $ "component" NAME "own" VALUES). */}}
{{- define "baton.podFields" -}}
{{- $labels := include "baton.labels" . | fromYaml -}}
{{- $spread := dict "maxSkew" 1 "topologyKey" "kubernetes.io/hostname" "whenUnsatisfiable" "ScheduleAnyway" "labelSelector" (dict "matchLabels" $labels) -}}
{{- $fields := dict "topologySpreadConstraints" (list $spread) -}}
{{- range $name := list "nodeSelector" "tolerations" "affinity" -}}
{{- with get $.own $name }}{{ $_ := set $fields $name . }}{{ end -}}
{{- end -}}
{{- with .root.Values.imagePullSecrets }}{{ $_ := set $fields "imagePullSecrets" . }}{{ end -}}
{{- with include "baton.serviceAccount" .root }}{{ $_ := set $fields "serviceAccountName" . }}{{ end -}}
{{- mergeOverwrite $fields (deepCopy .root.Values.pod) (deepCopy .own.pod) | toYaml }}
{{- end }}
