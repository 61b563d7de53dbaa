"""Exact limits: requests per minute, tokens per minute, concurrency; in one process, on one host, across hosts.

From below: `quota` (what is said), `bucket` (one rate, exactly), `places` (times told to refused callers), `account`
(one tenant), `limiter` (one process), `shared` (one host, over a Unix socket), `redis` (many hosts).
"""
