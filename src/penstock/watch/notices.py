"""Messages about alerts: those of one name and model are told together, once, and again only if they change,
if they go on for hours, or when they are over."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from penstock.watch.alerts import Alert

Group = tuple[str, str]  # the alert's name and the model


class Notice(Struct, frozen=True):
    """One message: all alerts of a group, those that fire and those that are over."""

    group: Group
    alerts: tuple[Alert, ...]

    @property
    def status(self) -> str:
        return "firing" if any(alert.is_firing for alert in self.alerts) else "resolved"


class _Pile:
    __slots__ = ("alerts", "due_at", "was_told")

    def __init__(self, due_at: float) -> None:
        self.alerts: dict[str, Alert] = {}
        self.due_at = due_at
        self.was_told = False


class Notices:
    def __init__(self, *, wait_s: float = 10.0, interval_s: float = 60.0, repeat_s: float = 4 * 3600.0) -> None:
        """Others of a group are waited for; later ones are told after an interval; all are told again after long."""
        self._wait_s = wait_s
        self._interval_s = interval_s
        self._repeat_s = repeat_s
        self._piles: dict[Group, _Pile] = {}

    def take(self, changed: Iterable[Alert], now: float) -> None:
        for alert in changed:
            group = (alert.alert, alert.model)
            pile = self._piles.get(group)
            if pile is None:
                if not alert.is_firing:
                    continue  # nobody was told that it fired
                pile = self._piles[group] = _Pile(now + self._wait_s)
            pile.alerts[alert.id] = alert
            if pile.was_told:
                pile.due_at = min(pile.due_at, now + (self._interval_s if alert.is_firing else self._wait_s))

    def due(self, now: float) -> list[Notice]:
        found = []
        for group, pile in list(self._piles.items()):
            if now < pile.due_at:
                continue
            if not pile.was_told:  # what came and went before anybody was told is not worth a message
                pile.alerts = {key: alert for key, alert in pile.alerts.items() if alert.is_firing}
            if pile.alerts:
                found.append(Notice(group, tuple(pile.alerts.values())))
            pile.alerts = {key: alert for key, alert in pile.alerts.items() if alert.is_firing}
            pile.was_told, pile.due_at = True, now + self._repeat_s
            if not pile.alerts:
                del self._piles[group]
        return found
