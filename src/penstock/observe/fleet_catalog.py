"""Every metric of a fleet's controller. Gateways export them from the store, each the same: take `max by (pool)`."""

from __future__ import annotations

from penstock.observe.catalog import Metric

_POOL = ("pool",)

REPLICAS = Metric("penstock_fleet_replicas", "gauge", "Replicas of a pool, by state.", (*_POOL, "state"))
WANTED = Metric("penstock_fleet_wanted_replicas", "gauge", "Active replicas that the controller wants.", _POOL)
LIMITS = Metric("penstock_fleet_limit_replicas", "gauge", "Bounds of a pool: min and max.", (*_POOL, "limit"))
BOUND = Metric(
    "penstock_fleet_bound",
    "gauge",
    "1 while a bound decides: min, max, spend, quota or schedule.",
    (*_POOL, "bound"),
)
DEMAND = Metric("penstock_fleet_requests_per_second", "gauge", "Demand: requests a second that gateways see.", _POOL)
FORECAST = Metric(
    "penstock_fleet_forecast_requests_per_second",
    "gauge",
    "Demand expected by the time that a replica started now is ready, by quantile.",
    (*_POOL, "quantile"),
)
DECISIONS = Metric(
    "penstock_fleet_decisions_total",
    "counter",
    "Actions decided, by kind: start, wake, activate, deactivate, park, stop. From zero with each controller.",
    (*_POOL, "action"),
)
FAILURES = Metric(
    "penstock_fleet_failures_total",
    "counter",
    "Replicas that failed to start (start), or were lost later (lost). From zero with each controller.",
    (*_POOL, "kind"),
)
FAILED_STARTS = Metric(
    "penstock_fleet_failed_starts", "gauge", "Starts in a row that failed; 0 after one that succeeded.", _POOL
)
CHANGE_SECONDS = Metric(
    "penstock_fleet_change_seconds",
    "gauge",
    "Measured p95 of a change of state: start, wake, activate, park, drain.",
    (*_POOL, "change"),
)
START_SECONDS = Metric(
    "penstock_fleet_oldest_start_seconds", "gauge", "How long the slowest start under way has taken.", _POOL
)
REVERSALS = Metric(
    "penstock_fleet_reversals",
    "gauge",
    "Steps up or down of the last hour that were taken back within five minutes.",
    _POOL,
)
MODEL_STATE = Metric(
    "penstock_fleet_model_state",
    "gauge",
    "1 for the state of a model that shares a device: loaded, loading, draining, leaving, parked, waking or unloaded.",
    (*_POOL, "state"),
)
MODEL_MEMORY = Metric(
    "penstock_fleet_model_memory_bytes",
    "gauge",
    "Memory of the shared device that a model holds by the memory plan, all of it (held) and its KV cache (kv).",
    (*_POOL, "part"),
)
MODEL_PINNED = Metric("penstock_fleet_model_pinned", "gauge", "1 while a model may not leave its shared device.", _POOL)
MODEL_WAITING = Metric(
    "penstock_fleet_model_waiting_requests", "gauge", "Requests held until their model is on its shared device.", _POOL
)
MODEL_MOVES = Metric(
    "penstock_fleet_model_moves_total",
    "counter",
    "Times that a model came to its shared device (load) and left it (unload). From zero with each controller.",
    (*_POOL, "move"),
)
DEVICE_MEMORY = Metric(
    "penstock_fleet_device_memory_bytes",
    "gauge",
    "Memory of a device that models share: for all of them (total), and what they hold (held).",
    ("device", "part"),
)
COST = Metric("penstock_fleet_cost_per_hour", "gauge", "Money per hour of a pool's replicas in their states.", _POOL)
STATUS_AGE = Metric(
    "penstock_fleet_status_age_seconds", "gauge", "Time since a controller last looked at a pool.", _POOL
)

FLEET_CATALOG: tuple[Metric, ...] = tuple(value for value in list(globals().values()) if isinstance(value, Metric))
