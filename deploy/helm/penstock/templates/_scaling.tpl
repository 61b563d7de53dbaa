{{/* Signals that an HPA or KEDA scales a pool by, a list: `metric` is the external metric of the rules in
deploy/prometheus/adapter.yml, `query` the same for KEDA, `perReplica` how much of it one replica is for.
Argument: (list $ pool) */}}
{{- define "penstock.triggers" -}}
{{- $pool := index . 1 -}}
{{- $model := printf "{model=%q}" $pool.name -}}
- metric: penstock_pool_requests
  query: sum(penstock_gateway_requests_open{{ $model }}) + sum(penstock_gateway_queue_length{{ $model }})
  perReplica: {{ $pool.requestsPerReplica }}
{{- end -}}
