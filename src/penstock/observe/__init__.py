"""Telemetry: the metric catalog and its Prometheus form, OTLP, logs, GPU health."""
