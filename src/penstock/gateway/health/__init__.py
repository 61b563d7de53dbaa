"""Is a replica to be used: circuit breaker, probes, slow start, watchdog, as state machines that are told the time.

Everything here but `probe.py` is pure; `probe.py` asks the replicas.
"""
