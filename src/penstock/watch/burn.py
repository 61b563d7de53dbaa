"""Burn rates: how fast an error budget is used up, and when that is too fast.

A rule has two windows: the long one says that it matters, the short one that it still goes on. The rules are the usual
ones (a fiftieth of a month's budget within an hour is worth getting up for) and one at ten times, which is a ticket.
The same table makes the rules for Prometheus.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from penstock.watch.history import DAY_S, HOUR_S
from penstock.watch.kinds import Severity

MIN_BAD = 10  # events within the long window: fewer say little, however small the budget
MIN_TIMES = 100  # requests within the long window: a few slow ones are no traffic that a quantile is promised for


class BurnRule(NamedTuple):
    factor: float
    long_s: float
    short_s: float
    severity: Severity


BURN_RULES = (  # the most urgent first
    BurnRule(14.4, HOUR_S, HOUR_S / 12, Severity.PAGE),
    BurnRule(10.0, HOUR_S, HOUR_S / 12, Severity.TICKET),
    BurnRule(6.0, 6 * HOUR_S, HOUR_S / 2, Severity.TICKET),
    BurnRule(3.0, DAY_S, 2 * HOUR_S, Severity.TICKET),
    BurnRule(1.0, 3 * DAY_S, 6 * HOUR_S, Severity.TICKET),
)
WINDOWS = {
    "5m": HOUR_S / 12,
    "30m": HOUR_S / 2,
    "1h": HOUR_S,
    "2h": 2 * HOUR_S,
    "6h": 6 * HOUR_S,
    "1d": DAY_S,
    "3d": 3 * DAY_S,
}
NAMES = {seconds: name for name, seconds in WINDOWS.items()}


class Events(NamedTuple):
    good: int
    bad: int

    @property
    def total(self) -> int:
        return self.good + self.bad

    @property
    def bad_ratio(self) -> float:
        return self.bad / self.total if self.total else 0.0


def burn_rate(events: Events, allowed: float) -> float:
    """1: the budget lasts exactly as long as it is for."""
    return events.bad_ratio / allowed


def burning(windows: Mapping[float, Events], allowed: float, covered_s: float, least_total: int = 0) -> BurnRule | None:
    """The most urgent rule that holds, of the events within each window, by its seconds.

    `covered_s`: how long anybody has looked. Of a window that began earlier the rest counts as well, or a bad minute
    after a start would look like three bad days; but an hour is looked at as it comes. `least_total`: events that the
    long window must have.
    """
    for rule in BURN_RULES:
        long, short = windows[rule.long_s], windows[rule.short_s]
        seen = min(1.0, max(covered_s, HOUR_S) / rule.long_s)
        is_enough = long.bad >= MIN_BAD and long.total >= least_total
        is_long = is_enough and seen * burn_rate(long, allowed) >= rule.factor
        if is_long and burn_rate(short, allowed) >= rule.factor:
            return rule
    return None
