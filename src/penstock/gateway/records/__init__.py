"""Records of requests.

facts               one request, over: what all the others are told
recorder            facts come in here; counts for /metrics
accounting, bill, token_usage, device_time     the end of a request: what it used and what that costs
timeline, trace, tracing    times of one request; where it went; its spans
request_log, prompt_log, tenant_files   a log line for each request, its words if wanted, a file per tenant
decision_log, decisions     why each request went to its replica, to be replayed
version_comparison, shadow_counts       versions side by side; copies
"""
