"""Traces and metrics, pushed in OpenTelemetry's own form (OTLP) over HTTP or gRPC: the extra `penstock[otel]`."""
