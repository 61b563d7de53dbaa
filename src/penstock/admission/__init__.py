"""Admission: one decision over the tenant's budget, the replicas' room, the queues and the expected TTFT.

Requests wait here, not at the replicas, so that priorities and fairness mean something. Pure: no I/O, no clock, no log.
"""
