"""Every metric of the watch over a fleet: objectives, alerts, probes and speeds. A gateway exports them."""

from __future__ import annotations

from penstock.observe.catalog import Metric

_OBJECTIVE = ("model", "objective")
_REPLICA = ("model", "replica")

SLO_EVENTS = Metric(
    "penstock_slo_events_total",
    "counter",
    "Events that were as an objective wants them, or not: seconds for availability, requests for the others.",
    (*_OBJECTIVE, "met"),
)
SLO_GOAL = Metric("penstock_slo_goal_ratio", "gauge", "Share of these events that must be good.", _OBJECTIVE)
SLO_TARGET = Metric("penstock_slo_target_seconds", "gauge", "Target of an objective that is a time.", _OBJECTIVE)
SLO_USED = Metric(
    "penstock_slo_used_ratio",
    "gauge",
    "How much of a target the last hour used: from 0.8 on it is a warning, from 1 on critical.",
    _OBJECTIVE,
)
SLO_COMPLIANCE = Metric("penstock_slo_compliance_ratio", "gauge", "Share of good events over the window.", _OBJECTIVE)
SLO_BUDGET = Metric(
    "penstock_slo_budget_left_ratio",
    "gauge",
    "What is left of the window's error budget; below 0 beyond it.",
    _OBJECTIVE,
)
SLO_BURN = Metric(
    "penstock_slo_burn_rate",
    "gauge",
    "How many times too fast the budget is used up, by window.",
    (*_OBJECTIVE, "window"),
)
ALERTS_FIRING = Metric(
    "penstock_alerts_firing",
    "gauge",
    "1 for every alert that fires now.",
    ("alert", "severity", *_REPLICA, "objective"),
)
ALERT_MESSAGES = Metric(
    "penstock_alert_messages_total",
    "counter",
    "Messages about alerts, and what became of them: sent, failed, lost.",
    ("to", "outcome"),
)
PROBES = Metric(
    "penstock_probes_total",
    "counter",
    "Known questions asked, and how they were answered: ok, failed, wrong.",
    ("model", "adapter", "replica", "outcome"),
)
PROBE_DRIFT = Metric(
    "penstock_probe_drift",
    "gauge",
    "Largest difference of a log-probability from the known answer's.",
    ("model", "adapter", "replica"),
)
REPLICA_SPEED = Metric(
    "penstock_replica_speed_ratio", "gauge", "Tokens per second of a stream, beside those of the siblings.", _REPLICA
)
REPLICA_PENALTY = Metric(
    "penstock_replica_penalty_ratio", "gauge", "Factor on a replica's share of the traffic: 1 is none.", _REPLICA
)

WATCH_CATALOG: tuple[Metric, ...] = tuple(value for value in list(globals().values()) if isinstance(value, Metric))
