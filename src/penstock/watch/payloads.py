"""A notice in the words of those who get it: Alertmanager's webhook, Slack's, or a line of a log."""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec

from penstock.watch.alerts import Alert
from penstock.watch.notices import Notice

_NEVER = "0001-01-01T00:00:00Z"  # Alertmanager's: it has not ended
_MAX_SHOWN = 20


def alertmanager(notice: Notice, runbooks: str) -> bytes:
    """Version 4 of its webhook; whoever takes messages of Alertmanager takes these."""
    alerts = [_alert(alert, runbooks) for alert in notice.alerts]
    name, model = notice.group
    group = {"alertname": name, **({"model": model} if model else {})}
    common = _common([alert["labels"] for alert in alerts])
    document = {
        "version": "4",
        "groupKey": "{}:" + str(group),
        "truncatedAlerts": 0,
        "status": notice.status,
        "receiver": "penstock",
        "groupLabels": group,
        "commonLabels": common,
        "commonAnnotations": _common([alert["annotations"] for alert in alerts]),
        "externalURL": "",
        "alerts": alerts,
    }
    return msgspec.json.encode(document)


def slack(notice: Notice, runbooks: str) -> bytes:
    first = notice.alerts[0]
    mark = {"resolved": "resolved", "firing": first.severity}[notice.status]
    lines = [f"*[{mark}] {first.alert}*"]
    for alert in notice.alerts[:_MAX_SHOWN]:
        lines.append(f"• {'' if alert.is_firing else 'over: '}{_escaped(alert.summary)}")
    if len(notice.alerts) > _MAX_SHOWN:
        lines.append(f"… and {len(notice.alerts) - _MAX_SHOWN} more")
    if notice.status == "firing":
        lines.append(f"what to do: {runbook(first, runbooks)}")
    return msgspec.json.encode({"text": "\n".join(lines)})


def line(alert: Alert) -> str:
    labels = " ".join(f"{name}={value}" for name, value in alert.labels.items())
    return f"alert={alert.alert} severity={alert.severity} state={alert.state} {labels}: {alert.summary}"


def runbook(alert: Alert, runbooks: str) -> str:
    return f"{runbooks.rstrip('/')}/{alert.runbook.rpartition('/')[2]}"


def _alert(alert: Alert, runbooks: str) -> dict[str, dict[str, str] | str]:
    labels = {"alertname": alert.alert, "severity": alert.severity, **alert.labels}
    return {
        "status": alert.state,
        "labels": labels,
        "annotations": {"summary": alert.summary, "runbook_url": runbook(alert, runbooks), "value": f"{alert.value:g}"},
        "startsAt": _time(alert.since),
        "endsAt": _NEVER if alert.resolved_at is None else _time(alert.resolved_at),
        "generatorURL": "",
        "fingerprint": alert.id,
    }


def _common(mappings: list[dict[str, str] | str]) -> dict[str, str]:
    first, *others = [mapping for mapping in mappings if isinstance(mapping, dict)]
    return {key: value for key, value in first.items() if all(other.get(key) == value for other in others)}


def _time(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).isoformat().replace("+00:00", "Z")


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
