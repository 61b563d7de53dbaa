"""One request's life at the gateway, in the order in which it meets these files.

request_view        fields of the request that the gateway reads
tenant_access       what its tenant may use
routed_request      the request with its route: one object that never changes
rule_facts, rule_routing    which model, where routing rules say so
rate_limit          tokens and requests reserved from the tenant's limits
journey             the state machine of one request: queue, replica, answer, failover, end
proxied_request     the same over HTTP: what the journey says is done here
upstream_request    the replica's side of it: what is sent, and how that ended
failover            another replica, after a backoff or a wait
direct_request      a request of the gateway's own: one replica, one try
admission_queue     requests that wait
holding             those that wait because no replica takes work, and what their clients are told meanwhile
answer_headers      request id, replica, and why it was picked
replica_attempt     one attempt at one replica
whole_answer        an answer that its client gets as a whole, and the gateway token by token
transcript          what is kept of the answer, so that another replica can carry it on
stranded            streams that wait for a replica to come back
fallback            the next model, where this one cannot serve the request
shadow              copies for a version that is being tried
refusals            what a client is told when its request is shed
cache_salt          salts that keep tenants apart in other engines' prefix caches
public_endpoints    /health, /ready, /v1/models
"""
