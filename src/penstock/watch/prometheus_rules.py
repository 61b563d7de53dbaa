"""The same alerts as rules for Prometheus, made from the same tables: burn rates from the counts of good and bad
events, whatever the models and their targets are; the rest from what gateways export."""

from __future__ import annotations

from penstock.core.slo import TIMED
from penstock.watch import kinds
from penstock.watch.burn import BURN_RULES, MIN_BAD, MIN_TIMES, WINDOWS, BurnRule
from penstock.watch.burn import NAMES as WINDOW_NAMES
from penstock.watch.kinds import AlertKind, Severity
from penstock.watch.objectives import CRITICAL, WARNING

Rule = dict[str, object]
_BY = "by (model, objective)"
_TIMED = "|".join(map(str, TIMED))

GATEWAY_DOWN = AlertKind("GatewayDown", Severity.PAGE, "no gateway can be scraped", "gateway-down", for_s=60.0)

# What a gateway decides from more than it exports is taken from it as it is.
_AS_DECIDED = (
    kinds.GPU_XID,
    kinds.OOM_KILL,
    kinds.CRASH,
    kinds.POISON,
    kinds.MODEL_DOWN,
    kinds.WRONG_ANSWERS,
    kinds.SLOW,
    kinds.GPU_IDLE,
    kinds.GPU_FULL,
    kinds.FRAGMENTED,
    kinds.PROBE_FAILING,
    kinds.CONTROLLER_DOWN,
    kinds.AT_BOUND,
    kinds.START_SLOW,
    kinds.STARTS_FAILING,
    kinds.FLAPPING,
    kinds.ROLLOUT_ABORTED,
    kinds.ROLLOUT_STUCK,
    kinds.ANOMALY,
)


def rules_document(runbooks: str = kinds.RUNBOOKS) -> dict[str, object]:
    """A file of rules: to be written as YAML."""
    return {
        "groups": [
            {"name": "penstock-slo", "interval": "15s", "rules": [*_recorded(), *_burn_alerts(runbooks)]},
            {"name": "penstock-alerts", "interval": "15s", "rules": [*_direct(runbooks), *_decided(runbooks)]},
        ]
    }


def alert_names() -> list[str]:
    return [kind.name for kind in (*kinds.KINDS, GATEWAY_DOWN)]


def _recorded() -> list[Rule]:
    bad = 'rate(penstock_slo_events_total{{met="false"}}[{0}])'
    every = "rate(penstock_slo_events_total[{0}])"
    found: list[Rule] = [
        {"record": "penstock:slo_allowed:ratio", "expr": f"1 - max {_BY} (penstock_slo_goal_ratio)"},
    ]
    for window in WINDOWS:
        ratio = f"(sum {_BY} ({bad.format(window)}) / sum {_BY} ({every.format(window)}))"
        found.append({"record": f"penstock:slo_burn:{window}", "expr": f"{ratio} / penstock:slo_allowed:ratio"})
    return found


def _burn_alerts(runbooks: str) -> list[Rule]:
    fast = " or ".join(map(_burning, [rule for rule in BURN_RULES if rule.severity is Severity.PAGE]))
    slow = " or ".join(map(_burning, [rule for rule in BURN_RULES if rule.severity is Severity.TICKET]))
    summary = "{{ $labels.model }}: the {{ $labels.objective }} budget burns {{ $value | humanize }} times too fast"
    return [
        _alert(kinds.BURNING_FAST, fast, summary, runbooks),
        _alert(kinds.BURNING, f"({slow}) unless ({fast})", summary, runbooks),
    ]


def _burning(rule: BurnRule) -> str:
    long, short = WINDOW_NAMES[rule.long_s], WINDOW_NAMES[rule.short_s]
    enough = f'sum {_BY} (increase(penstock_slo_events_total{{met="false"}}[{long}])) >= {MIN_BAD}'
    burns = f"penstock:slo_burn:{long} >= {rule.factor:g} and penstock:slo_burn:{short} >= {rule.factor:g}"
    return f"(({burns} and {enough}) unless {_times(long)} < {MIN_TIMES})"


def _times(window: str) -> str:
    """The number of requests that a time was measured of."""
    return f'sum {_BY} (increase(penstock_slo_events_total{{objective=~"{_TIMED}"}}[{window}]))'


def _direct(runbooks: str) -> list[Rule]:
    ttft = "penstock_gateway_ttft_seconds"
    p99 = f"histogram_quantile(0.99, sum by (model, le) (rate({ttft}_bucket[5m])))"
    target = 'max by (model) (penstock_slo_target_seconds{objective="ttft"})'
    enough = f"sum by (model) (increase({ttft}_count[5m])) >= {MIN_TIMES}"
    found = [
        _alert(GATEWAY_DOWN, "absent(penstock_slo_goal_ratio)", "no gateway can be scraped", runbooks),
        _alert(
            kinds.TTFT_FAR_OVER,
            f"({p99} > 2 * {target}) and {enough}",
            "{{ $labels.model }}: TTFT p99 is {{ $value | humanizeDuration }}",
            runbooks,
        ),
        _alert(
            kinds.QUEUE,
            "sum by (model) (max_over_time(penstock_gateway_queue_length[15s])) > 0",
            "{{ $labels.model }}: {{ $value }} requests wait at the gateways",
            runbooks,
        ),
    ]
    timed = f'max {_BY} (penstock_slo_used_ratio{{objective=~"{_TIMED}"}}) and {_times("1h")} >= {MIN_TIMES}'
    bad = f'sum {_BY} (penstock_slo_events_total{{met="false"}}) >= {MIN_BAD}'
    budget = f'1 - min {_BY} (penstock_slo_budget_left_ratio{{objective!~"{_TIMED}"}}) and {bad}'
    for level, bounds in (
        ("warning", f">= {WARNING:g} < {CRITICAL:g}"),
        ("critical", f">= {CRITICAL:g}"),
    ):
        rule = _alert(
            kinds.AT_RISK,
            f"(({timed}) {bounds}) or (({budget}) {bounds})",
            "{{ $labels.model }}: {{ $value | humanizePercentage }} of {{ $labels.objective }} is used",
            runbooks,
        )
        labels = rule["labels"]
        assert isinstance(labels, dict)
        labels["level"] = level
        found.append(rule)
    return found


def _decided(runbooks: str) -> list[Rule]:
    """Returns rules for what the gateway decides, without a time to last: the gateway has waited for it."""
    return [
        _alert(
            kind,
            f'max by (model, replica, objective) (penstock_alerts_firing{{alert="{kind.name}"}}) > 0',
            "{{ $labels.model }} {{ $labels.replica }}: " + kind.means,
            runbooks,
            for_s=0.0,
        )
        for kind in _AS_DECIDED
    ]


def _alert(kind: AlertKind, expr: str, summary: str, runbooks: str, for_s: float | None = None) -> Rule:
    wait_s = kind.for_s if for_s is None else for_s
    return {
        "alert": kind.name,
        "expr": expr,
        **({"for": f"{wait_s:.0f}s"} if wait_s else {}),
        "labels": {"severity": str(kind.severity)},
        "annotations": {
            "summary": summary,
            "description": kind.means,
            "runbook_url": f"{runbooks.rstrip('/')}/{kind.runbook}.md",
        },
    }
