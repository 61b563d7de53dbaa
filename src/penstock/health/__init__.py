"""Replica health as pure policy: probes' verdicts, circuit breaker, slow start, watchdog, retries, quarantine, speeds.

Time is an argument, and nothing here sends, waits or logs. The gateway and the simulator run the same code.
"""
