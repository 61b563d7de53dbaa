"""Metrics of replicas whose models take tensors."""

from __future__ import annotations

from penstock.observe.catalog import (
    BATCH_BUCKETS,
    EMBEDDED_TEXTS,
    EMBEDDED_TOKENS,
    ENGINE_READY,
    LATENCY_BUCKETS_S,
    REQUEST_LATENCY,
    REQUESTS,
    REQUESTS_OPEN,
    STARTUP,
    Metric,
)

_MODEL = ("model", "version")
TENSOR_REQUESTS = Metric(
    "penstock_tensor_requests_total",
    "counter",
    "Requests for tensors by how they ended: ok, or the reason or code of an error.",
    (*_MODEL, "outcome"),
)
TENSOR_ROWS = Metric("penstock_tensor_rows_total", "counter", "Rows of the batch dimension that were computed.", _MODEL)
TENSOR_EXECUTIONS = Metric("penstock_tensor_executions_total", "counter", "Batches that were executed.", _MODEL)
TENSOR_BATCH_SIZE = Metric(
    "penstock_tensor_batch_size", "histogram", "Rows in each batch that was executed.", _MODEL, BATCH_BUCKETS
)
TENSOR_QUEUE = Metric(
    "penstock_tensor_queue_seconds",
    "histogram",
    "Time from a request's arrival at the batcher until its batch was begun.",
    _MODEL,
    LATENCY_BUCKETS_S,
)
TENSOR_COMPUTE = Metric(
    "penstock_tensor_compute_seconds", "histogram", "Time that the model took for a batch.", _MODEL, LATENCY_BUCKETS_S
)
TENSOR_WAITING = Metric("penstock_tensor_waiting", "gauge", "Requests that wait for a batch.", _MODEL)
TENSOR_INSTANCES = Metric("penstock_tensor_instances", "gauge", "Instances of a model's version.", (*_MODEL, "device"))

OWN = (
    TENSOR_REQUESTS,
    TENSOR_ROWS,
    TENSOR_EXECUTIONS,
    TENSOR_BATCH_SIZE,
    TENSOR_QUEUE,
    TENSOR_COMPUTE,
    TENSOR_WAITING,
    TENSOR_INSTANCES,
)
TENSOR_CATALOG = (
    REQUESTS,
    REQUESTS_OPEN,
    REQUEST_LATENCY,
    ENGINE_READY,
    STARTUP,
    EMBEDDED_TEXTS,
    EMBEDDED_TOKENS,
    *OWN,
)
