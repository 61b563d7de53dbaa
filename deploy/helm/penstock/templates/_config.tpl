{{/* Configuration files of penstock, made from values. tests/deploy loads each with penstock's own settings. */}}

{{/* A pool with everything that holds for all replicas, as YAML. Argument: (list $ pool). `name`: of its objects;
     `model`: that clients ask for; `key`: penstock's own name of it, MODEL@VERSION if it has a version. */}}
{{- define "penstock.pool" -}}
{{- $root := index . 0 -}}{{- $pool := index . 1 -}}
{{- $found := mergeOverwrite (deepCopy $root.Values.replicas) (dict "scaledBy" "controller" "settings" dict) (deepCopy $pool) -}}
{{- $_ := set $found "model" $found.name -}}
{{- $_ := set $found "key" $found.name -}}
{{- if $found.version -}}
{{- $_ := set $found "key" (printf "%s@%s" $found.name $found.version) -}}
{{- $_ := set $found "name" (printf "%s-%s" $found.name $found.version) -}}
{{- end -}}
{{- if $root.Values.replicaTls.secretName -}}
{{- $files := dict "tls_cert" "/run/penstock/replica-tls/tls.crt" "tls_key" "/run/penstock/replica-tls/tls.key" -}}
{{- $_ := set $found "tlsSecret" $root.Values.replicaTls.secretName -}}
{{- $_ := set $found.settings "server" (merge (default dict $found.settings.server) $files) -}}
{{- end -}}
{{- $_ := set $found "scheme" (empty $found.tlsSecret | ternary "http" "https") -}}
{{- if dig "gpus" 0 $found.settings }}{{ $_ := set $found "tolerations" (concat $found.gpuTolerations $found.tolerations) }}{{ end -}}
{{- toYaml $found -}}
{{- end -}}

{{/* Label selector of a Deployment's pods, by which gateways and the controller find them. Argument: (list $ pool) */}}
{{- define "penstock.poolSelector" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/instance={{ $root.Release.Name }},app.kubernetes.io/component=replica,penstock.dev/pool={{ (index . 1).name }}
{{- end -}}

{{- define "penstock.gatewayConfig" -}}
{{- $models := dict -}}
{{- range $given := .Values.pools -}}
{{- $pool := fromYaml (include "penstock.pool" (list $ $given)) -}}
{{- $model := merge (dict "secret_env" "PENSTOCK_GATEWAY_SECRET") (fromYaml (include "penstock.replicaTrust" $)) -}}
{{- with $pool.settings.slo }}{{ $_ := set $model "slo" . }}{{ end -}}
{{- with $pool.settings.price_per_hour }}{{ $_ := set $model "price" (dict "replica_hour" .) }}{{ end -}}
{{- if ne $pool.scaledBy "controller" -}}
{{- $_ := set $model "kubernetes" (list (dict "selector" (include "penstock.poolSelector" (list $ $pool)))) -}}
{{- $_ := set $model "hold_s" (dig "hold_s" 120 $pool.settings) -}}
{{- end -}}
{{- if $pool.version -}}
{{- $route := default dict (get $models $pool.model) -}}
{{- $versions := merge (dict $pool.version $model) (default dict $route.versions) -}}
{{- $_ := set $models $pool.model (merge (dict "versions" $versions) $route) -}}
{{- else -}}
{{- $_ := set $models $pool.model $model -}}
{{- end -}}
{{- end -}}
{{- $config := dict "host" "0.0.0.0" "port" 8000 "admin_host" "0.0.0.0" "admin_port" 8001 "models" $models -}}
{{- $_ := set $config "without_limiter" .Values.limiter.onLoss -}}
{{- with .Values.fleet.config.slo }}{{ $_ := set $config "slo" . }}{{ end -}}
{{- if .Values.gateway.cacheSalt }}{{ $_ := set $config "cache_salt_env" "PENSTOCK_CACHE_SALT" }}{{ end -}}
{{- if .Values.gateway.tls.secretName -}}
{{- $_ := set $config "tls_cert" "/run/penstock/tls/tls.crt" -}}
{{- $_ := set $config "tls_key" "/run/penstock/tls/tls.key" -}}
{{- end -}}
{{- toYaml (mergeOverwrite $config (deepCopy .Values.gateway.config)) -}}
{{- end -}}

{{/* Settings by which replicas with a certificate are trusted: of a model at a gateway, and of the controller. */}}
{{- define "penstock.replicaTrust" -}}
{{- if .Values.replicaTls.secretName -}}
ca_file: /run/penstock/replica-tls/ca.crt
server_name: {{ include "penstock.replicaServerName" . }}
{{- end -}}
{{- end -}}

{{/* The file of `penstock epp`: a gateway's, without the public port's certificate. */}}
{{- define "penstock.endpointPickerConfig" -}}
{{- $config := omit (fromYaml (include "penstock.gatewayConfig" .)) "tls_cert" "tls_key" -}}
{{- $picking := dict "host" "0.0.0.0" "port" 9002 "health_port" 9003 -}}
{{- if .Values.endpointPicker.tls.secretName -}}
{{- $_ := set $picking "tls_cert" "/run/penstock/tls/tls.crt" -}}
{{- $_ := set $picking "tls_key" "/run/penstock/tls/tls.key" -}}
{{- end -}}
{{- $own := dict "admin_port" 9090 "endpoint_picker" $picking -}}
{{- toYaml (mergeOverwrite $config $own (deepCopy .Values.endpointPicker.config)) -}}
{{- end -}}

{{- define "penstock.fleetConfig" -}}
{{- $pools := dict -}}
{{- range $given := .Values.pools -}}
{{- $pool := fromYaml (include "penstock.pool" (list $ $given)) -}}
{{- $pods := dict "selector" (include "penstock.poolSelector" (list $ $pool)) -}}
{{- $own := dict "advisory" true -}}
{{- if eq $pool.scaledBy "controller" -}}
{{- $pods = fromYaml (include "penstock.podSettings" (list $ $pool)) -}}
{{- $own = dict -}}
{{- end -}}
{{- $_ := set $own "kubernetes" (mergeOverwrite $pods (default dict $pool.settings.kubernetes)) -}}
{{- $_ := set $pools $pool.key (merge $own $pool.settings) -}}
{{- end -}}
{{- $cluster := dict "secret" (include "penstock.secretName" .) -}}
{{- $_ := set $cluster "service_account" (include "penstock.serviceAccount" (list . "replica")) -}}
{{- $config := dict "name" (include "penstock.fullname" .) "driver" "kubernetes" "gateway" nil -}}
{{- $config = merge $config (dict "kubernetes" $cluster "pools" $pools) -}}
{{- if .Values.replicaTls.secretName }}{{ $_ := set $config "replica_tls" (fromYaml (include "penstock.replicaTrust" .)) }}{{ end -}}
{{- toYaml (mergeOverwrite $config (deepCopy .Values.fleet.config)) -}}
{{- end -}}

{{/* Settings of the pods that the controller starts for a pool. Argument: (list $ pool), the pool as of penstock.pool */}}
{{- define "penstock.podSettings" -}}
{{- $root := index . 0 -}}{{- $pool := index . 1 -}}
image: {{ include "penstock.image" (list $root $pool.image (include "penstock.device" $pool)) }}
zone_key: {{ $pool.zoneKey }}
pre_stop_s: {{ $pool.preStopSeconds }}
node_selector: {{ toJson $pool.nodeSelector }}
tolerations: {{ toJson $pool.tolerations }}
spot_node_selector: {{ toJson $pool.spot.nodeSelector }}
spot_tolerations: {{ toJson $pool.spot.tolerations }}
{{- with $pool.resources }}
resources: {{ toJson . }}
{{- end }}
cache_volume:
  {{- include "penstock.cacheVolume" $pool | nindent 2 }}
template:
  metadata:
    {{- include "penstock.replicaMetadata" . | nindent 4 }}
  spec:
    {{- include "penstock.placement" (list $root (pick $pool "priorityClassName" "affinity")) | nindent 4 }}
    {{- with $pool.runtimeClassName }}
    runtimeClassName: {{ . }}
    {{- end }}
    containers:
    - name: penstock
      imagePullPolicy: {{ $pool.image.pullPolicy }}
      securityContext:
        {{- toYaml $root.Values.securityContext | nindent 8 }}
      {{- with $pool.extraEnv }}
      env:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      volumeMounts:
        {{- include "penstock.replicaMounts" $pool | nindent 8 }}
    volumes:
      {{- include "penstock.replicaVolumes" $pool | nindent 6 }}
{{- end -}}

{{/* The file of `penstock engine` in a Deployment's pods. Argument: (list $ pool), the pool as of penstock.pool */}}
{{- define "penstock.replicaConfig" -}}
{{- $root := index . 0 -}}{{- $pool := index . 1 -}}{{- $settings := $pool.settings -}}
{{- $config := dict "model" (default $pool.model $settings.model) -}}
{{- with $settings.engine }}{{ $_ := set $config "engine" . }}{{ end -}}
{{- $slo := mergeOverwrite (deepCopy (default dict $root.Values.fleet.config.slo)) (default dict $settings.slo) -}}
{{- with $slo }}{{ $_ := set $config "slo" . }}{{ end -}}
{{- $server := dict "host" "0.0.0.0" "port" 8000 "name" $pool.model -}}
{{- $_ := set $config "server" (mergeOverwrite $server (default dict $settings.server)) -}}
{{- toYaml $config -}}
{{- end -}}
