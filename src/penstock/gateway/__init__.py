"""The gateway: authentication, admission, routing, and the bytes of requests and answers.

The folders are the map:

app.py              the application: one call per request, from its key to its way through the proxy
tenant_services.py  keys, limits, budgets and usage: what the gateway uses of tenancy
proxy/      one request: what is read of it, its limits, its replica, failover, its answer
tokens/     how many tokens a prompt has, and the hashes of its prefixes
replicas/   the replicas: membership, reports, probes, KV events, LoRA adapters, other engines' dialects
pipelines/  pipelines: steps behind one model's name, each a request of its own
responses/  responses that are kept, and those made in the background
records/    what is recorded of a request: metrics, logs, traces, decisions, accounting
monitor/    the state of the gateway and of its replicas, alerts, answer probes
rollouts/   what is measured of rollouts: versions side by side, copies, feedback
demand/     demand of each pool for the controller of a fleet, and what that says of pools
admin/      the admin API and /metrics
settings/   the configuration file, and routes that were changed at run time
"""
