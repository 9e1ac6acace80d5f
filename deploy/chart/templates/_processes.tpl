{{/*
The routers or a pool: StatefulSet, the Service that names its pods, and a limit of evictions.
Takes (dict "root" $ "component" NAME "own" VALUES).
*/}}
{{- define "baton.processes" -}}
{{- $root := .root -}}
{{- $values := .root.Values -}}
{{- $own := .own -}}
{{- $isRouter := eq .component "router" -}}
{{- $role := ternary "router" ($own.role | default "") $isRouter -}}
{{- $full := printf "%s-%s" $root.Release.Name .component -}}
{{- if gt (len $full) 52 }}
{{- fail (printf "%s has more than 52 characters, to which Kubernetes adds in labels: choose a shorter release name" $full) }}
{{- end }}
{{- $isScaled := and (not $isRouter) (gt (int (dig "autoscaling" "maxReplicas" 0 $own)) 0) -}}
{{- $settings := include "baton.settings" $root | fromJson -}}
{{- if not $isRouter -}}
{{- $engine := dict "device" (ternary "cuda" "cpu" (gt (int $own.gpus) 0)) -}}
{{- if gt (int $own.gpus) 1 }}{{ $_ := set $engine "tensor_parallel_size" (int $own.gpus) }}{{ end -}}
{{- $settings = omit (mergeOverwrite $settings (dict "engine" $engine)) "router" -}}
{{- end -}}
{{- $settings = mergeOverwrite $settings (deepCopy $own.settings) -}}
{{- $section := get $settings (ternary "router" "node" $isRouter) | default dict -}}
{{- $grace := add (ceil (dig "shutdown_timeout_s" 30 $section)) 15 -}}
{{- $tls := and $isRouter (dig "ssl_certfile" "" $section) -}}
{{- $blocks := dig "cacheFolder" "size" "" $own -}}
{{- $limits := deepCopy ($own.resources.limits | default dict) -}}
{{- if and (not $isRouter) (gt (int $own.gpus) 0) }}{{ $_ := set $limits "nvidia.com/gpu" (toString (int $own.gpus)) }}{{ end -}}
{{- $requests := mergeOverwrite (deepCopy ($own.resources.requests | default dict)) (deepCopy $limits) -}}
{{- with dig "requests" "cpu" "" $own.resources }}{{ $_ := set $requests "cpu" . }}{{ end -}}
{{- $rdma := false -}}
{{- range $name, $_ := $limits }}{{ if hasPrefix "rdma/" $name }}{{ $rdma = true }}{{ end }}{{ end -}}
{{- $key := include "baton.keySecret" $root -}}
{{- $claim := include "baton.modelClaim" $root -}}
{{- $annotations := mergeOverwrite (deepCopy $values.podAnnotations) (deepCopy $own.podAnnotations) -}}
{{- $_ := set $annotations "baton/secrets" (include "baton.secretDigest" . | trim) -}}
apiVersion: v1
kind: Service
metadata:
  {{- include "baton.metadata" . | nindent 2 }}
spec:
  clusterIP: None
  selector:
    {{- include "baton.labels" . | nindent 4 }}
  {{- if $isRouter }}
  publishNotReadyAddresses: true  # it is ready when it has nodes, which must reach it before that
  {{- end }}
---
apiVersion: apps/v1
kind: StatefulSet
metadata:
  {{- include "baton.metadata" . | nindent 2 }}
spec:
  {{- if not $isScaled }}
  replicas: {{ int $own.replicas }}
  {{- end }}
  serviceName: {{ $full }}
  {{- if $blocks }}
  persistentVolumeClaimRetentionPolicy: {whenDeleted: Delete, whenScaled: Retain}
  volumeClaimTemplates:
    - metadata: {name: blocks}
      spec:
        accessModes: [ReadWriteOnce]
        {{- with $own.cacheFolder.storageClass }}
        storageClassName: {{ . }}
        {{- end }}
        resources:
          requests: {storage: {{ $blocks }}}
  {{- end }}
  podManagementPolicy: Parallel
  selector:
    matchLabels:
      {{- include "baton.labels" . | nindent 6 }}
  template:
    metadata:
      labels:
        {{- include "baton.labels" . | nindent 8 }}
        {{- with $own.podLabels }}{{ toYaml . | nindent 8 }}{{ end }}
      annotations:
        {{- toYaml $annotations | nindent 8 }}
    spec:
      automountServiceAccountToken: false
      enableServiceLinks: false  # their variables would begin with BATON_, as settings do
      terminationGracePeriodSeconds: {{ $grace }}
      {{- include "baton.podSecurity" . | nindent 6 }}
      {{- include "baton.podFields" . | nindent 6 }}
      {{- if or $key $values.modelStorage.download }}
      initContainers:
        {{- if $key }}
        - name: key  # a copy for the process alone: a Secret's volume is open to the pod's group
          {{- include "baton.container" $root | nindent 10 }}
          command: [install, -m, "600", /run/secrets/baton/cluster.key, /run/baton/cluster.key]
          resources:
            requests: {cpu: 10m, memory: 16Mi}
          volumeMounts:
            - {name: secret, mountPath: /run/secrets/baton, readOnly: true}
            - {name: key, mountPath: /run/baton}
        {{- end }}
        {{- if $values.modelStorage.download }}
        - name: model  # waits for the Job that fetches it
          {{- include "baton.container" $root | nindent 10 }}
          command: [sh, -c, "until [ -e {{ include "baton.modelMark" $root }} ]; do sleep 5; done"]
          resources:
            requests: {cpu: 10m, memory: 16Mi}
          volumeMounts:
            - {name: model, mountPath: /model, readOnly: true}
        {{- end }}
      {{- end }}
      containers:
        - name: baton
          {{- include "baton.container" $root | nindent 10 }}
            {{- if $rdma }}
              add: [IPC_LOCK]  # RDMA pins the memory of the KV pool
            {{- end }}
          args: {{ include "baton.args" (dict "role" $role "settings" $settings) }}
          env:
            {{- include "baton.processEnv" . | nindent 12 }}
            {{- range $name, $text := $own.env }}
            - {name: {{ $name }}, value: {{ $text | replace "$(" "$$(" | toJson }}}
            {{- end }}
            {{- with $own.extraEnv }}{{ toYaml . | nindent 12 }}{{ end }}
          {{- if $own.secretEnv }}
          envFrom:
            - secretRef: {name: {{ $full }}}
          {{- end }}
          ports:
            {{- if $isRouter }}
            - {name: http, containerPort: {{ int $own.port }}}
            - {name: control, containerPort: {{ int $own.controlPort }}}
            - {name: metrics, containerPort: 9090}
            {{- else }}
            {{- with int $own.peerPort }}
            - {name: peers, containerPort: {{ . }}}
            {{- end }}
            - {name: http, containerPort: {{ int $own.httpPort }}}
            {{- end }}
          resources:
            requests:
              {{- toYaml $requests | nindent 14 }}
            {{- with $limits }}
            limits:
              {{- toYaml . | nindent 14 }}
            {{- end }}
          startupProbe:
            httpGet: {path: /live, port: http{{ if $tls }}, scheme: HTTPS{{ end }}}
            timeoutSeconds: 2
            periodSeconds: 2
            failureThreshold: {{ div (include "baton.startSeconds" $root | int) 2 }}
          livenessProbe:
            httpGet: {path: /live, port: http{{ if $tls }}, scheme: HTTPS{{ end }}}
            timeoutSeconds: 2
            periodSeconds: 5
            failureThreshold: 6
          readinessProbe:
            httpGet: {path: {{ ternary "/health" "/ready" $isRouter }}, port: http{{ if $tls }}, scheme: HTTPS{{ end }}}
            timeoutSeconds: 2
            periodSeconds: 2
            failureThreshold: 2
          {{- if $isRouter }}
          lifecycle:
            preStop:  # it first leaves the Service, which takes a moment to reach kube-proxy
              exec: {command: [sleep, "5"]}
          {{- end }}
          volumeMounts:
            - {name: scratch, mountPath: /tmp}
            - {name: cache, mountPath: /var/cache/baton}
            - {name: shared-memory, mountPath: /dev/shm}
            {{- if $blocks }}
            - {name: blocks, mountPath: /var/lib/baton/blocks}
            {{- end }}
            {{- if $claim }}
            - {name: model, mountPath: /model, readOnly: true}
            {{- end }}
            {{- if $key }}
            - {name: key, mountPath: /run/baton}
            {{- end }}
            {{- with $own.extraVolumeMounts }}{{ toYaml . | nindent 12 }}{{ end }}
      volumes:
        - name: scratch
          emptyDir: {}
        - name: cache
          {{- if $values.cache.claim }}
          persistentVolumeClaim: {claimName: {{ $values.cache.claim }}}
          {{- else }}
          emptyDir: {}
          {{- end }}
        - name: shared-memory  # ranks and NCCL share more than the 64 MiB that runtimes give
          emptyDir: {medium: Memory, sizeLimit: {{ $own.sharedMemory }}}
        {{- if $claim }}
        - name: model
          persistentVolumeClaim: {claimName: {{ $claim }}, readOnly: true}
        {{- end }}
        {{- with $key }}
        - name: secret
          secret: {secretName: {{ . }}}
        - name: key
          emptyDir: {medium: Memory, sizeLimit: 1Mi}
        {{- end }}
        {{- with $own.extraVolumes }}{{ toYaml . | nindent 8 }}{{ end }}
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  {{- include "baton.metadata" . | nindent 2 }}
spec:
  maxUnavailable: 1
  selector:
    matchLabels:
      {{- include "baton.labels" . | nindent 6 }}
{{- end }}

{{- define "baton.podSecurity" -}}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  seccompProfile: {type: RuntimeDefault}
{{- end }}

{{/* What all containers share; what a container adds to its capabilities may follow. */}}
{{- define "baton.container" -}}
image: {{ include "baton.image" . }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop: [ALL]
{{- end }}

{{/* The longest start of a pool, in seconds. */}}
{{- define "baton.startSeconds" -}}
{{- $longest := 0 -}}
{{- $shared := dig "node" "start_timeout_s" 120 .Values.settings -}}
{{- range $name, $pool := .Values.pools -}}
{{- $own := include "baton.pool" (dict "root" $ "pool" $pool) | fromJson -}}
{{- $longest = max $longest (int (dig "node" "start_timeout_s" $shared $own.settings)) -}}
{{- end -}}
{{ $longest }}
{{- end }}

{{/* The variables of a process: where it listens, whom it dials, where it keeps files. */}}
{{- define "baton.processEnv" -}}
{{- $root := .root -}}
{{- $router := .root.Values.router -}}
- name: POD_IP
  valueFrom:
    fieldRef: {fieldPath: status.podIP}
{{- if eq .component "router" }}
- {name: BATON_ROUTER_PORT, value: "{{ int $router.port }}"}
- {name: BATON_ROUTER_CONTROL, value: "tcp://*:{{ int $router.controlPort }}"}
{{- if not (dig "router" "host" (dig "router" "host" "" $root.Values.settings) $router.settings) }}
- {name: BATON_ROUTER_HOST, value: "*"}
{{- end }}
- {name: BATON_ROUTER_OWN_PORT, value: "9090"}
{{- with include "baton.apiKeysSecret" $root }}
- name: BATON_ROUTER_API_KEYS
  valueFrom:
    secretKeyRef: {name: {{ . }}, key: {{ ternary $root.Values.apiKeys.existingSecretKey "api-keys" (ne $root.Values.apiKeys.existingSecret "") }}}
{{- end }}
{{- else }}
{{- $dialled := list -}}
{{- range $index := until (int $router.replicas) -}}
{{- $dialled = append $dialled (printf "tcp://%s-router-%d.%s-router:%d" $root.Release.Name $index $root.Release.Name (int $router.controlPort)) -}}
{{- end }}
- name: BATON_NODE_ID
  valueFrom:
    fieldRef: {fieldPath: metadata.name}
- {name: BATON_NODE_ROUTERS, value: {{ join "," $dialled | quote }}}
- {name: BATON_NODE_BIND, value: "tcp://[$(POD_IP)]{{ with int .own.peerPort }}:{{ . }}{{ end }}"}
- {name: BATON_NODE_HTTP, value: "*:{{ int .own.httpPort }}"}
{{- if dig "cacheFolder" "size" "" .own }}
- {name: BATON_CACHE_FOLDER, value: /var/lib/baton/blocks/cached}
{{- end }}
{{- end }}
- {name: HOME, value: /var/cache/baton}
- {name: XDG_CACHE_HOME, value: /var/cache/baton}
- {name: HF_HOME, value: /var/cache/baton}
{{- if and $root.Values.model (not (include "baton.modelClaim" $root)) }}
{{- include "baton.huggingFaceEnv" $root }}
{{- end }}
{{- end }}

{{/* What changes when a secret of the component does, so that its pods begin anew. */}}
{{- define "baton.secretDigest" -}}
{{- $values := .root.Values -}}
{{- list $values.clusterKey (ternary $values.apiKeys dict (eq .component "router")) $values.huggingFace .own.secretEnv | toJson | sha256sum | trunc 16 }}
{{- end }}
