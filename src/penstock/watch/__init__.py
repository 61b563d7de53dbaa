"""Monitoring: objectives and their budgets, alerts, known answers, anomalies.

Everything here is decided from what it is told, at a time it is told; the gateway's shell asks, listens and sends.
"""
