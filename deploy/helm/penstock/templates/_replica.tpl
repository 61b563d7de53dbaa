{{/* The pod of a replica. Argument: (list $ pool), the pool as of penstock.pool */}}

{{/* Seconds until the replica's process has ended after SIGTERM: its drain, its goodbye of 10 s, and 15 to spare. */}}
{{- define "penstock.replicaStopSeconds" -}}
{{- add (ceil (dig "server" "drain_timeout_s" 30.0 (index . 1).settings)) 25 -}}
{{- end -}}

{{/* Volumes of weights and of all else that a replica writes. Argument: a pool */}}
{{- define "penstock.cacheVolume" -}}
{{- if eq .cache.kind "hostPath" -}}
hostPath: {path: {{ .cache.path }}, type: Directory}
{{- else if eq .cache.kind "persistentVolumeClaim" -}}
persistentVolumeClaim: {claimName: {{ .cache.claim }}}
{{- else -}}
emptyDir: {sizeLimit: {{ .cache.size }}}
{{- end -}}
{{- end -}}

{{- define "penstock.replicaVolumes" -}}
- name: shm
  emptyDir: {medium: Memory, sizeLimit: {{ .sharedMemory }}}
- name: tmp
  emptyDir: {sizeLimit: 1Gi}
{{- if eq .cache.kind "persistentVolumeClaim" }}
- name: home
  emptyDir: {sizeLimit: {{ .cache.size }}}
{{- end }}
{{- with .tlsSecret }}
- name: replica-tls
  secret: {secretName: {{ . }}, defaultMode: 0440}
{{- end }}
{{- end -}}

{{/* A shared claim has the weights alone: compiled kernels must be the process's own. */}}
{{- define "penstock.replicaMounts" -}}
{{- if eq .cache.kind "persistentVolumeClaim" -}}
- {name: home, mountPath: /var/cache/penstock}
- {name: cache, mountPath: /var/cache/penstock/models}
{{- else -}}
- {name: cache, mountPath: /var/cache/penstock}
{{- end }}
- {name: shm, mountPath: /dev/shm}
- {name: tmp, mountPath: /tmp}
{{- if .tlsSecret }}
- {name: replica-tls, mountPath: /run/penstock/replica-tls, readOnly: true}
{{- end }}
{{- end -}}

{{/* The Dockerfile's target for a pool. */}}
{{- define "penstock.device" -}}
{{- gt (int (dig "gpus" 0 .settings)) 0 | ternary "cuda" "cpu" -}}
{{- end -}}

{{- define "penstock.replicaMetadata" -}}
{{- $root := index . 0 -}}{{- $pool := index . 1 -}}
labels:
  {{- include "penstock.podLabels" (list $root "replica") | nindent 2 }}
  penstock.dev/pool: {{ $pool.name }}
  {{- with $pool.podLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with $pool.podAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "penstock.replicaSpec" -}}
{{- $root := index . 0 -}}{{- $pool := index . 1 -}}{{- $settings := $pool.settings -}}
{{- $gpus := int (dig "gpus" 0 $settings) -}}
{{- $spot := dig "spot" "share" 0.0 $settings | float64 -}}
{{- if gt $spot 0.0 }}{{ $_ := set $pool "tolerations" (concat $pool.tolerations $pool.spot.tolerations) }}{{ end -}}
{{- if ge $spot 1.0 }}{{ $_ := set $pool "nodeSelector" (merge (deepCopy $pool.nodeSelector) $pool.spot.nodeSelector) }}{{ end -}}
{{- if and $settings.zones (not $pool.affinity) -}}
{{- $term := dict "matchExpressions" (list (dict "key" $pool.zoneKey "operator" "In" "values" $settings.zones)) -}}
{{- $required := dict "requiredDuringSchedulingIgnoredDuringExecution" (dict "nodeSelectorTerms" (list $term)) -}}
{{- $_ := set $pool "affinity" (dict "nodeAffinity" $required) -}}
{{- end -}}
serviceAccountName: {{ include "penstock.serviceAccount" (list $root "replica") }}
automountServiceAccountToken: false
enableServiceLinks: false
terminationGracePeriodSeconds: {{ add $pool.preStopSeconds (include "penstock.replicaStopSeconds" .) }}
{{- with $pool.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{ include "penstock.placement" (list $root $pool) }}
topologySpreadConstraints:
  {{- include "penstock.spread" (list (printf "%s\npenstock.dev/pool: %s" (include "penstock.selector" (list $root "replica")) $pool.name) $pool.zoneKey) | trim | nindent 2 }}
containers:
- name: penstock
  image: {{ include "penstock.image" (list $root $pool.image (include "penstock.device" $pool)) }}
  imagePullPolicy: {{ $pool.image.pullPolicy }}
  args: [engine, --config, /etc/penstock/replica.yaml]
  env:
  - {name: PENSTOCK_HOME, value: /var/cache/penstock}
  {{- include "penstock.secretEnv" (list $root "PENSTOCK_GATEWAY_SECRET" "gateway-secret") | nindent 2 }}
  {{- include "penstock.secretEnv" (list $root "PENSTOCK_METRICS_TOKEN" "metrics-token") | nindent 2 }}
  {{- with $pool.extraEnv }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
  ports:
  - {name: {{ $pool.scheme }}, containerPort: 8000}
  startupProbe:
    httpGet: {path: /ready, port: {{ $pool.scheme }}, scheme: {{ upper $pool.scheme }}}
    periodSeconds: 5
    timeoutSeconds: 5
    failureThreshold: {{ ceil (divf (dig "start_timeout_s" 600 $settings) 5) | int }}
  livenessProbe:
    httpGet: {path: /health, port: {{ $pool.scheme }}, scheme: {{ upper $pool.scheme }}}
    periodSeconds: 10
    timeoutSeconds: 5
    failureThreshold: 6
  readinessProbe:
    httpGet: {path: /ready, port: {{ $pool.scheme }}, scheme: {{ upper $pool.scheme }}}
    periodSeconds: 5
    timeoutSeconds: 5
    failureThreshold: 1
  lifecycle:
    preStop:
      exec: {command: [sleep, {{ $pool.preStopSeconds | quote }}]}
  resources:
    {{- $resources := deepCopy (default dict $pool.resources) -}}
    {{- if $gpus -}}
    {{- $_ := set $resources "limits" (merge (dict "nvidia.com/gpu" $gpus) (default dict $resources.limits)) -}}
    {{- end -}}
    {{- toYaml $resources | nindent 4 }}
  securityContext:
    {{- toYaml $root.Values.securityContext | nindent 4 }}
  volumeMounts:
  - {name: config, mountPath: /etc/penstock, readOnly: true}
  {{- include "penstock.replicaMounts" $pool | nindent 2 }}
volumes:
- name: config
  configMap: {name: {{ include "penstock.fullname" $root }}-{{ $pool.name }}}
- name: cache
  {{- include "penstock.cacheVolume" $pool | nindent 2 }}
{{ include "penstock.replicaVolumes" $pool }}
{{- end -}}
