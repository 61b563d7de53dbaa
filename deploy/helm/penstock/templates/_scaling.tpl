{{/* The signal that an HPA or KEDA scales a pool by: `metric` and `labels` of the external metric, which the rules in
deploy/prometheus/adapter.yml make, `query` the same for KEDA, `perReplica` how much of it one replica is for. With a
controller it is what that wants; without, the requests that are open or wait. Argument: (list $ pool) */}}
{{- define "penstock.trigger" -}}
{{- $pool := index . 1 -}}
{{- if (index . 0).Values.fleet.enabled -}}
metric: penstock_pool_wanted_replicas
labels: {pool: {{ $pool.key }}}
query: max(penstock_fleet_wanted_replicas{pool="{{ $pool.key }}"})
perReplica: 1
{{- else -}}
metric: penstock_pool_requests
labels: {model: {{ $pool.key }}}
query: sum({__name__=~"penstock_gateway_requests_open|penstock_gateway_queue_length",model="{{ $pool.key }}"})
perReplica: {{ $pool.requestsPerReplica }}
{{- end -}}
{{- end -}}
