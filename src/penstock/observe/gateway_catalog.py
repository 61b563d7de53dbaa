"""Every metric a gateway exports. Labels are names that the operator chose or that the code knows, never a client's
words, so that nobody outside decides how many series there are."""

from __future__ import annotations

from penstock.observe.catalog import LATENCY_BUCKETS_S, Metric

REQUESTS = Metric(
    "penstock_gateway_requests_total",
    "counter",
    "Requests to the models that ended, and how: ok, refused, failed or client_gone, with a reason for what was not "
    "ok. The model is empty where none was found.",
    ("model", "surface", "outcome", "reason"),
)
REQUESTS_OPEN = Metric("penstock_gateway_requests_open", "gauge", "Requests at replicas now.", ("model",))
STREAMS_OPEN = Metric("penstock_gateway_streams_open", "gauge", "Streams at replicas now.", ("model",))
TTFT = Metric(
    "penstock_gateway_ttft_seconds",
    "histogram",
    "Time from a streamed request's arrival to its answer's beginning.",
    ("model",),
    LATENCY_BUCKETS_S,
)
REQUEST_LATENCY = Metric(
    "penstock_gateway_request_seconds",
    "histogram",
    "Time from a request's arrival to its end, of those that were ok.",
    ("model",),
    LATENCY_BUCKETS_S,
)
QUEUE_WAIT = Metric(
    "penstock_gateway_queue_wait_seconds",
    "histogram",
    "Time from a request's arrival until it was first sent to a replica: the limiter and the queue.",
    ("model",),
    LATENCY_BUCKETS_S,
)
TOKENS = Metric(
    "penstock_gateway_tokens_total",
    "counter",
    "Tokens used, by kind: input (cached ones included), cached, output.",
    ("model", "kind"),
)
TENANT_TOKENS = Metric(
    "penstock_gateway_tenant_tokens_total",
    "counter",
    "The same by tenant: the first 200 that this process saw by name, all others together as `other`.",
    ("tenant", "kind"),
)
USAGE_MISSING = Metric(
    "penstock_gateway_usage_missing_total",
    "counter",
    "Answers whose server did not say what they used. They are charged by counted events, or for what was reserved.",
    ("model",),
)
DEVICE_SECONDS = Metric(
    "penstock_gateway_device_seconds_total",
    "counter",
    "Device time that requests took, as penstock replicas measured it; of clients that left, an estimate.",
    ("model",),
)
TENANT_DEVICE_SECONDS = Metric(
    "penstock_gateway_tenant_device_seconds_total",
    "counter",
    "The same by tenant, the first 200 by name.",
    ("tenant",),
)
KV_BLOCK_SECONDS = Metric(
    "penstock_gateway_kv_block_seconds_total",
    "counter",
    "Blocks of KV cache that requests held, times seconds, as penstock replicas measured it.",
    ("model",),
)
COST = Metric(
    "penstock_gateway_cost_total",
    "counter",
    "Money that requests cost, by the model's price, in the operator's currency.",
    ("model",),
)
RETRIES = Metric(
    "penstock_gateway_retries_total", "counter", "Requests sent to another replica before their first byte.", ("model",)
)
KV_SOURCES = Metric(
    "penstock_gateway_kv_sources_total",
    "counter",
    "Requests whose replica was named another to pull KV blocks of the prompt from: prefill (that computes it), prefix "
    "(that holds more of it), moved (a stream that a draining replica gave back).",
    ("model", "reason"),
)
KV_ALONE = Metric(
    "penstock_gateway_kv_alone_total",
    "counter",
    "Requests whose replica could pull KV blocks and was named no source: short_prompt, warm_prefix, no_source, "
    "no_gain (to compute them is as fast), never (by the model's `split`).",
    ("model", "reason"),
)
HANDOVERS = Metric(
    "penstock_gateway_kv_handovers_total",
    "counter",
    "Prompts that a vLLM or SGLang server was asked to compute for another: handed_over; or it was not (the request "
    "cannot be shared: not_shared; the server was gone: unreachable, answered with an error: refused, named no KV "
    "blocks: no_params, took too long: slow, or was lost: lost), and the other computed it, or it was tried elsewhere; "
    "not_pulled counts again what was handed over and the other could not get, and computed.",
    ("model", "outcome"),
)
HANDOVER_TIME = Metric(
    "penstock_gateway_kv_handover_seconds",
    "histogram",
    "Time that a vLLM or SGLang server took to compute a prompt for another, of those that were handed over.",
    ("model",),
    LATENCY_BUCKETS_S,
)
PREFILL_ANSWERS = Metric(
    "penstock_gateway_prefill_answers_total",
    "counter",
    "Requests that were sent to a replica with the role prefill because no other could answer them.",
    ("model",),
)
CARRIED_ON = Metric(
    "penstock_gateway_streams_carried_on_total",
    "counter",
    "Streams that went on at another replica when theirs could not.",
    ("model",),
)
QUARANTINED = Metric(
    "penstock_gateway_requests_quarantined_total",
    "counter",
    "Requests that two replicas were lost with: refused, and refused again when they come back.",
    ("model",),
)
FALLBACKS = Metric(
    "penstock_gateway_fallbacks_total",
    "counter",
    "Requests that went to another model of their chain, and why.",
    ("model", "to", "reason"),
)
RULES = Metric(
    "penstock_gateway_rules_total",
    "counter",
    "Requests for a model that is chosen by rules, by the rule that fired and where it leads; in a dry_run it would.",
    ("model", "rule", "to", "mode"),
)
RULE_TOKENS = Metric(
    "penstock_gateway_rule_tokens_total",
    "counter",
    "Tokens of those requests, by kind: input, output.",
    ("model", "rule", "kind"),
)
RULE_SAVINGS = Metric(
    "penstock_gateway_rule_savings",
    "gauge",
    "Money that a rule has saved so far, by the prices of the model it chose and of the default; in a dry run, that it "
    "would have saved. Below zero: it has cost more.",
    ("model", "rule"),
)
SHADOWS = Metric(
    "penstock_gateway_shadow_requests_total",
    "counter",
    "Copies of requests for a version in the shadow, and what became of them: ok, failed, dropped (there was no room), "
    "cut_off (a request had to wait).",
    ("model", "outcome"),
)
SHADOW_TOKENS = Metric(
    "penstock_gateway_shadow_tokens_total",
    "counter",
    "Tokens of those copies, by kind; nobody pays for them.",
    ("model", "kind"),
)
SHADOW_TTFT = Metric(
    "penstock_gateway_shadow_ttft_seconds",
    "histogram",
    "Time from the sending of a streamed copy to its first bytes.",
    ("model",),
    LATENCY_BUCKETS_S,
)
SHADOW_LATENCY = Metric(
    "penstock_gateway_shadow_request_seconds",
    "histogram",
    "Time from the sending of a copy to its end, if ok.",
    ("model",),
    LATENCY_BUCKETS_S,
)
ROLLOUT_COMPARISONS = Metric(
    "penstock_gateway_rollout_comparisons_total",
    "counter",
    "Answers of a model under a rollout that were compared or checked, by what was done (pair, validity, embedding, "
    "judge, divergence) and what became of it: ok; dropped (too many were under way), too_large, unreadable, no_answer "
    "(of the model that was asked, or it was busy), no_such_request (it cannot be scored), other_tokens.",
    ("model", "what", "outcome"),
)
ROLLOUT_LOST = Metric(
    "penstock_gateway_rollout_lost_total",
    "counter",
    "What this gateway measured of rollouts and could not keep or write, by kind: observations, blocks, feedback.",
    ("kind",),
)
LIMIT_REFUSALS = Metric(
    "penstock_gateway_limit_refusals_total",
    "counter",
    "Requests refused for a tenant's own limits and budgets.",
    ("reason",),
)
QUEUE_LENGTH = Metric(
    "penstock_gateway_queue_length", "gauge", "Requests that wait at the gateway.", ("model", "class")
)
HELD = Metric(
    "penstock_gateway_held_requests",
    "gauge",
    "Requests that wait at the gateway because no replica of their model takes work.",
    ("model",),
)
HOLD_WAIT = Metric(
    "penstock_gateway_hold_wait_seconds",
    "histogram",
    "Time that requests were held because no replica of their model took work, of those that were then sent to one.",
    ("model",),
    LATENCY_BUCKETS_S,
)
REPLICA_STATE = Metric(
    "penstock_gateway_replica_state",
    "gauge",
    "1 for the state a replica is in, as this gateway sees it: ready, degraded, draining, starting, out; or "
    "parked, waking, standby, parking, stopping, if a controller keeps it so.",
    ("model", "replica", "state"),
)
REPLICA_BREAKER = Metric(
    "penstock_gateway_replica_breaker",
    "gauge",
    "1 for the state of a replica's circuit breaker.",
    ("model", "replica", "state"),
)
REPLICA_REQUESTS = Metric(
    "penstock_gateway_replica_requests", "gauge", "Requests of this gateway at a replica now.", ("model", "replica")
)
REPLICA_KV_EXACT = Metric(
    "penstock_gateway_replica_kv_exact",
    "gauge",
    "1 if the router has the model's tokenizer and knows every KV block of a replica from its events; 0: it goes by "
    "what it has sent there.",
    ("model", "replica"),
)
TLS_EXPIRY = Metric(
    "penstock_gateway_tls_certificate_expiry_timestamp_seconds",
    "gauge",
    "When the gateway's certificate ends, or the first of those above it, as Unix time; only with TLS.",
)
LOG_LINES_LOST = Metric(
    "penstock_gateway_log_lines_lost_total", "counter", "Request log lines dropped because nobody took them in time."
)
DECISIONS_LOST = Metric(
    "penstock_gateway_decisions_lost_total",
    "counter",
    "Entries of the decision log dropped because the disk did not take them, or not in time.",
)
TRACES_LOST = Metric(
    "penstock_gateway_traces_lost_total",
    "counter",
    "Requests whose spans were to be pushed and could not be, or not in time.",
)
USAGE_LOST = Metric(
    "penstock_gateway_usage_lost_total",
    "counter",
    "Requests whose usage is not in the store and will not be: store_gone (it was gone for too long), set_aside (the "
    "store cannot hold the record, which is named in the log).",
    ("reason",),
)
BACKGROUND_ERRORS = Metric(
    "penstock_gateway_background_errors_total",
    "counter",
    "Errors that nobody expected in the work beside requests (ledger, followers, logs, exporters, alerts). It goes on.",
    ("work",),
)
BACKGROUND_DEAD = Metric(
    "penstock_gateway_background_dead",
    "gauge",
    "1 for a thread or task that has ended and should not have: the gateway is not ready until it is started again.",
    ("work",),
)

BATCHES = Metric(
    "penstock_gateway_batches_total",
    "counter",
    "Batches that ended at this gateway, and how: completed, failed, cancelled or expired.",
    ("status",),
)
BATCHES_RUNNING = Metric("penstock_gateway_batches_running", "gauge", "Batches whose lease this gateway has.")
BATCH_ROWS = Metric(
    "penstock_gateway_batch_rows_total",
    "counter",
    "Rows of batches that are over, and how: completed, failed, cancelled or expired.",
    ("outcome",),
)
BATCH_ROWS_IN_FLIGHT = Metric(
    "penstock_gateway_batch_rows_in_flight", "gauge", "Rows of batches at replicas, or on their way.", ("model",)
)
BATCH_RETRIES = Metric(
    "penstock_gateway_batch_retries_total",
    "counter",
    "Rows of batches that were asked again after an answer of no use.",
)

PIPELINES_OPEN = Metric("penstock_gateway_pipelines_open", "gauge", "Requests for a pipeline now.", ("pipeline",))
PIPELINE_STEPS = Metric(
    "penstock_gateway_pipeline_steps_total",
    "counter",
    "Attempts at steps of pipelines, and how they ended: ok, failed, timeout, or cancelled because the client left or "
    "another step failed. A fallback is a step, STEP.fallback.",
    ("pipeline", "step", "outcome"),
)
PIPELINE_STEP_TIME = Metric(
    "penstock_gateway_pipeline_step_seconds",
    "histogram",
    "Time that an attempt at a step took, of those that were ok; that of a step with steps inside has theirs in it.",
    ("pipeline", "step"),
    LATENCY_BUCKETS_S,
)
PIPELINE_STEP_RETRIES = Metric(
    "penstock_gateway_pipeline_step_retries_total",
    "counter",
    "Attempts at steps after their first.",
    ("pipeline", "step"),
)
PIPELINE_STEP_TOKENS = Metric(
    "penstock_gateway_pipeline_step_tokens_total",
    "counter",
    "Tokens that model steps used, by kind: input, output. They are in the counts of their models, too.",
    ("pipeline", "step", "kind"),
)
PIPELINE_STEP_COST = Metric(
    "penstock_gateway_pipeline_step_cost_total",
    "counter",
    "What tenants were charged for steps; it is in the counts of their models, too.",
    ("pipeline", "step"),
)
PIPELINE_PYTHON_CALLS = Metric(
    "penstock_gateway_pipeline_python_calls",
    "gauge",
    "Calls of a Python step now: running, or waiting for one of its processes.",
    ("pipeline", "step", "state"),
)
PIPELINE_PYTHON_RESTARTS = Metric(
    "penstock_gateway_pipeline_python_restarts_total",
    "counter",
    "Processes of a Python step that ended and were started again: they died, overran or ran out of memory.",
    ("pipeline", "step"),
)

GATEWAY_CATALOG: tuple[Metric, ...] = tuple(value for value in list(globals().values()) if isinstance(value, Metric))
