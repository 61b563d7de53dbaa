"""Alerts that fire and are resolved, from conditions that hold now.

A condition that must last is pending first; one that stops for a moment goes on firing, so that nothing flaps; and one
that something more urgent explains stays silent, so that one fault is one alert. The board knows neither objectives nor
replicas.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from hashlib import sha256

import msgspec
from msgspec import Struct

from penstock.watch.kinds import AlertKind, Severity

About = tuple[str, str]  # a model, and an objective of it
HOLD_S = 60.0  # what has stopped for so long is over
_AFTERMATH_S = 3600.0  # objectives look back as far: what explained a ticket does so for as long after its end
_MAX_KEPT = 200
_KEPT_S = 86400.0


class Condition(Struct, frozen=True, kw_only=True):
    """Something that holds now. `about`: what it is a sign of; `explains`: what it is the cause of."""

    kind: AlertKind
    summary: str
    value: float
    model: str = ""
    replica: str = ""
    labels: tuple[tuple[str, str], ...] = ()
    about: About | None = None
    explains: frozenset[About] = frozenset()

    @property
    def all_labels(self) -> dict[str, str]:
        named = (("model", self.model), ("replica", self.replica))
        return {name: value for name, value in (*named, *self.labels) if value}

    @property
    def key(self) -> str:
        parts = [self.kind.name, *(f"{name}={value}" for name, value in sorted(self.all_labels.items()))]
        return sha256("\n".join(parts).encode()).hexdigest()[:16]


class Alert(Struct, frozen=True, kw_only=True):
    """An alert as the admin API shows it; times are Unix seconds."""

    id: str
    alert: str
    severity: str
    state: str
    model: str
    replica: str
    labels: dict[str, str]
    summary: str
    value: float
    since: float
    resolved_at: float | None
    runbook: str

    @property
    def is_firing(self) -> bool:
        return self.resolved_at is None


class _Case:
    __slots__ = ("alert", "condition", "first_at", "last_at")

    def __init__(self, condition: Condition, now: float) -> None:
        self.condition = condition
        self.first_at = self.last_at = now
        self.alert: Alert | None = None  # pending, or hidden


class AlertBoard:
    def __init__(self, hold_s: float = HOLD_S) -> None:
        self._hold_s = hold_s
        self._cases: dict[str, _Case] = {}
        self._resolved: deque[Alert] = deque(maxlen=_MAX_KEPT)
        self._explained_at: dict[About, float] = {}

    @property
    def firing(self) -> list[Alert]:
        return [case.alert for case in self._cases.values() if case.alert is not None]

    def shown(self, wall_s: float) -> list[Alert]:
        """Returns the alerts that fire and those that did, the newest first."""
        recent = [one for one in self._resolved if wall_s - (one.resolved_at or wall_s) < _KEPT_S]
        return sorted([*self.firing, *recent], key=lambda one: one.since, reverse=True)

    def update(self, conditions: Iterable[Condition], now: float, wall_s: float) -> list[Alert]:
        """Returns the alerts that began to fire, and those that are resolved."""
        for condition in conditions:
            case = self._cases.setdefault(condition.key, _Case(condition, now))
            case.condition, case.last_at = condition, now
        changed = [*self._resolve(now, wall_s), *self._fire(now, wall_s)]
        for case in self._cases.values():
            if case.alert is not None and case.last_at == now:
                found = case.condition
                case.alert = msgspec.structs.replace(case.alert, summary=found.summary, value=round(found.value, 6))
        return changed

    def _resolve(self, now: float, wall_s: float) -> list[Alert]:
        changed = []
        for key, case in list(self._cases.items()):
            if case.alert is None and case.last_at < now:  # what is not yet an alert must hold without a pause
                del self._cases[key]
            elif case.alert is not None and now - case.last_at >= self._hold_s:
                del self._cases[key]
                over = msgspec.structs.replace(case.alert, state="resolved", resolved_at=wall_s)
                self._resolved.append(over)
                changed.append(over)
        return changed

    def _fire(self, now: float, wall_s: float) -> list[Alert]:
        due = [
            case
            for case in self._cases.values()
            if case.alert is not None or now - case.first_at >= case.condition.kind.for_s
        ]
        changed = []
        for case in due:
            for about in case.condition.explains:
                self._explained_at[about] = now
        for case in due:
            if case.alert is None and not (self._is_aftermath(case.condition, now) or _is_hidden(case.condition, due)):
                case.alert = _alert(case.condition, wall_s)
                changed.append(case.alert)
        return changed

    def _is_aftermath(self, condition: Condition, now: float) -> bool:
        is_ticket = condition.kind.severity is Severity.TICKET
        explained_at = self._explained_at.get(condition.about) if condition.about is not None else None
        return is_ticket and explained_at is not None and now - explained_at < _AFTERMATH_S


def _is_hidden(condition: Condition, due: Iterable[_Case]) -> bool:
    about, rank = condition.about, condition.kind.rank
    if about is None:
        return False
    return any(
        (about in other.condition.explains and other.condition.kind.rank >= rank)
        or (about == other.condition.about and other.condition.kind.rank > rank)
        for other in due
    )


def _alert(condition: Condition, wall_s: float) -> Alert:
    kind = condition.kind
    return Alert(
        id=condition.key,
        alert=kind.name,
        severity=str(kind.severity),
        state="firing",
        model=condition.model,
        replica=condition.replica,
        labels=condition.all_labels,
        summary=condition.summary,
        value=round(condition.value, 6),
        since=wall_s,
        resolved_at=None,
        runbook=kind.page,
    )
