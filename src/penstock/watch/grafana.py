"""A dashboard for Grafana, as its JSON model: objectives first, then what users feel, then what may be the cause."""

from __future__ import annotations

from typing import NamedTuple

_M = '{model=~"$model"}'
_WIDTH, _HEIGHT, _PER_ROW = 24, 8, 3
_OBJECTIVE, _REPLICA = "model, objective", "model, replica"


class Query(NamedTuple):
    expr: str
    legend: str


class Panel:
    def __init__(self, title: str, unit: str, *queries: Query, kind: str = "timeseries") -> None:
        self.title, self.unit, self.queries, self.kind = title, unit, queries, kind


def _legend(labels: str) -> str:
    return " ".join(f"{{{{{label}}}}}" for label in labels.split(", "))


def _over(how: str, metric: str, by: str) -> Query:
    return Query(f"{how} by ({by}) ({metric}{_M})", _legend(by))


def _rate(metric: str, by: str) -> Query:
    return Query(f"sum by ({by}) (rate({metric}{_M}[5m]))", _legend(by))


def _of_pools(metric: str, by: str) -> Query:
    """Every gateway exports the same."""
    return Query(f'max by ({by}) ({metric}{{pool=~"$model"}})', _legend(by))


def _quantiles(metric: str, *quantiles: float) -> list[Query]:
    bins = f"sum by (model, le) (rate({metric}_bucket{_M}[5m]))"
    return [Query(f"histogram_quantile({q:g}, {bins})", f"{{{{model}}}} p{q * 100:g}") for q in quantiles]


_TTFT_TARGET = Query(
    'max by (model) (penstock_slo_target_seconds{model=~"$model", objective="ttft"})', "{{model}} target"
)
_STEP_P95 = "histogram_quantile(0.95, sum by (instance, le) (rate(penstock_step_seconds_bucket[5m])))"
_COST = (
    f"1000 * sum by (model) (rate(penstock_gateway_cost_total{_M}[5m])) / "
    'sum by (model) (rate(penstock_gateway_tokens_total{model=~"$model", kind=~"input|output"}[5m]))'
)
_HITS = "rate(penstock_prefix_hit_tokens_total[5m]) / rate(penstock_prefix_query_tokens_total[5m])"
_FIRING = Query("sum by (severity) (penstock_alerts_firing) or vector(0)", "{{severity}}")

ROWS: dict[str, tuple[Panel, ...]] = {
    "Objectives": (
        Panel(
            "Error budget left",
            "percentunit",
            _over("min", "penstock_slo_budget_left_ratio", _OBJECTIVE),
            kind="bargauge",
        ),
        Panel("Compliance", "percentunit", _over("min", "penstock_slo_compliance_ratio", _OBJECTIVE), kind="stat"),
        Panel("Alerts that fire", "none", _FIRING, kind="stat"),
        Panel("Burn rate, 1 h", "none", _over("max", "penstock:slo_burn:1h", _OBJECTIVE)),
        Panel("Burn rate, 5 min", "none", _over("max", "penstock:slo_burn:5m", _OBJECTIVE)),
        Panel("Target used, last hour", "percentunit", _over("max", "penstock_slo_used_ratio", _OBJECTIVE)),
    ),
    "What users feel": (
        Panel("Time to first token", "s", *_quantiles("penstock_gateway_ttft_seconds", 0.5, 0.95, 0.99), _TTFT_TARGET),
        Panel("Whole answer", "s", *_quantiles("penstock_gateway_request_seconds", 0.5, 0.95, 0.99)),
        Panel("Wait at the gateway", "s", *_quantiles("penstock_gateway_queue_wait_seconds", 0.5, 0.95)),
        Panel("Requests by outcome", "reqps", _rate("penstock_gateway_requests_total", "outcome")),
        Panel("Tokens", "none", _rate("penstock_gateway_tokens_total", "model, kind")),
        Panel("Cost per 1,000 tokens", "none", Query(_COST, "{{model}}")),
        Panel("Open streams", "none", _over("sum", "penstock_gateway_streams_open", "model")),
    ),
    "The fleet": (
        Panel("Queue", "none", _over("sum", "penstock_gateway_queue_length", "model, class")),
        Panel("Replicas by state", "none", _over("sum", "penstock_gateway_replica_state", "model, state")),
        Panel("Requests at replicas", "none", _over("sum", "penstock_gateway_replica_requests", _REPLICA)),
        Panel("Speed beside siblings", "percentunit", _over("min", "penstock_replica_speed_ratio", _REPLICA)),
        Panel("Routing penalty", "percentunit", _over("min", "penstock_replica_penalty_ratio", _REPLICA)),
        Panel("Probes: drift", "none", _over("max", "penstock_probe_drift", "model, adapter, replica")),
    ),
    "Autoscaling": (
        Panel(
            "Replicas by state, and wanted",
            "none",
            _of_pools("penstock_fleet_replicas", "pool, state"),
            Query(_of_pools("penstock_fleet_wanted_replicas", "pool").expr, "{{pool}} wanted"),
        ),
        Panel(
            "Demand and forecast",
            "reqps",
            _of_pools("penstock_fleet_requests_per_second", "pool"),
            Query(
                _of_pools("penstock_fleet_forecast_requests_per_second", "pool, quantile").expr,
                "{{pool}} expected, {{quantile}}",
            ),
        ),
        Panel("Cost per hour", "none", _of_pools("penstock_fleet_cost_per_hour", "pool")),
        Panel(
            "Decisions",
            "none",
            Query("max by (pool, action) (increase(penstock_fleet_decisions_total[5m]))", "{{pool}} {{action}}"),
        ),
        Panel("Changes of state, p95", "s", _of_pools("penstock_fleet_change_seconds", "pool, change")),
        Panel("Starts in a row that failed", "none", _of_pools("penstock_fleet_failed_starts", "pool")),
    ),
    "The engines": (
        Panel("KV cache held", "percentunit", Query("penstock_kv_usage_ratio", "{{instance}}")),
        Panel(
            "Sequences",
            "none",
            Query("penstock_sequences_running", "{{instance}} running"),
            Query("penstock_sequences_waiting", "{{instance}} waiting"),
        ),
        Panel("Step time", "s", Query(_STEP_P95, "{{instance}} p95")),
        Panel("Prefix hits", "percentunit", Query(_HITS, "{{instance}}")),
        Panel("Generated tokens", "none", Query("rate(penstock_generated_tokens_total[5m])", "{{instance}}")),
        Panel("Preemptions", "none", Query("rate(penstock_preemptions_total[5m])", "{{instance}}")),
    ),
}


def panel_queries() -> dict[str, tuple[Query, ...]]:
    """Returns the queries of each panel by its title."""
    return {panel.title: panel.queries for panels in ROWS.values() for panel in panels}


def dashboard() -> dict[str, object]:
    panels: list[dict[str, object]] = []
    y = 0
    for title, row in ROWS.items():
        panels.append(_row(len(panels) + 1, title, y))
        y += 1
        for place, panel in enumerate(row):
            width = _WIDTH // _PER_ROW
            at = {"x": width * (place % _PER_ROW), "y": y + _HEIGHT * (place // _PER_ROW)}
            panels.append(_panel(len(panels) + 1, panel, {**at, "w": width, "h": _HEIGHT}))
        y += _HEIGHT * -(-len(row) // _PER_ROW)
    return {
        "uid": "penstock",
        "title": "penstock",
        "tags": ["penstock"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "",
        "templating": {"list": [_datasource(), _models()]},
        "annotations": {"list": [_alerts()]},
        "panels": panels,
    }


_SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def _row(number: int, title: str, y: int) -> dict[str, object]:
    place = {"x": 0, "y": y, "w": _WIDTH, "h": 1}
    return {"id": number, "type": "row", "title": title, "gridPos": place, "collapsed": False, "panels": []}


def _panel(number: int, panel: Panel, place: dict[str, int]) -> dict[str, object]:
    targets = [
        {"refId": chr(ord("A") + index), "expr": query.expr, "legendFormat": query.legend, "datasource": _SOURCE}
        for index, query in enumerate(panel.queries)
    ]
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "gridPos": place,
        "datasource": _SOURCE,
        "targets": targets,
        "fieldConfig": {"defaults": {"unit": panel.unit}, "overrides": []},
        "options": {},
    }


def _datasource() -> dict[str, object]:
    return {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"}


def _models() -> dict[str, object]:
    query = "label_values(penstock_slo_goal_ratio, model)"
    return {
        "name": "model",
        "type": "query",
        "label": "Model",
        "datasource": _SOURCE,
        "query": query,
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def _alerts() -> dict[str, object]:
    return {
        "name": "Alerts",
        "datasource": _SOURCE,
        "enable": True,
        "iconColor": "red",
        "expr": 'ALERTS{alertstate="firing"}',
        "titleFormat": "{{alertname}} {{model}}",
    }
