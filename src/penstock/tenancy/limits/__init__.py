"""Exact limits: requests per minute, tokens per minute, concurrency; in one process, on one host, across hosts.

From below: `quota` (messages), `window` (one limit over fine slots), `pacer` (a smooth one), `places` (times told to
refused callers), `account` (one tenant), `limiter` (one process), `journal` and `shared` (one host, by a Unix socket),
`redis` (many hosts).
"""
