"""The objectives of one model and how it keeps them: told of every request once, at its end, and of every second.

Availability is about time: is a replica there that could be used? Errors are about requests: did it fail? So no event
is counted twice, and a request that a client spoilt or left is nobody's fault.
"""

from __future__ import annotations

from msgspec import Struct

from penstock.core.slo import TIMED, Objective, Slo
from penstock.watch.burn import BURN_RULES, MIN_TIMES, WINDOWS, BurnRule, Events, burn_rate, burning
from penstock.watch.history import HOUR, HOUR_S, History
from penstock.watch.quantiles import NUM_BINS, bin_of, quantile

WARNING, CRITICAL = 0.8, 1.0  # of a target
_PLACE = {objective: 2 * number for number, objective in enumerate(Objective)}  # of its good events; the bad are next
_BINS = {objective: number * NUM_BINS for number, objective in enumerate(TIMED)}
_RECENT_S = HOUR_S / 12
_FEW = 20  # times: of fewer a quantile is shown, but calls nothing critical


class ObjectiveStatus(Struct, frozen=True, kw_only=True):
    objective: str
    unit: str
    target: float
    quantile: float | None
    observed: float | None
    used: float | None
    state: str
    events: int
    bad: int
    compliance: float | None
    goal: float
    budget_left: float | None
    burn: dict[str, float]


class SloStatus(Struct, frozen=True, kw_only=True):
    model: str
    window_s: float
    covered_s: float
    state: str
    objectives: list[ObjectiveStatus]


class Burning(Struct, frozen=True):
    objective: Objective
    rule: BurnRule
    rate: float  # over the long window


class ModelObjectives:
    def __init__(self, model: str, slo: Slo, now: float) -> None:
        self.model = model
        self.slo = slo
        self.kept = [objective for objective in Objective if slo.target(objective) is not None]
        self._events = History(2 * len(Objective), now)
        self._bins = History(len(TIMED) * NUM_BINS, now, HOUR)

    # -- facts

    def ended(self, is_ok: bool, ttft_s: float | None, tpot_s: float | None, total_s: float | None) -> None:
        """A request that was ok, or failed. A time is None where it was not measured."""
        self._count(Objective.ERRORS, is_ok)
        slo = self.slo
        if ttft_s is not None:
            self._time(Objective.TTFT, ttft_s / slo.ttft_s)
        if tpot_s is not None and slo.tpot_s is not None:
            self._time(Objective.TPOT, tpot_s / slo.tpot_s)
        if is_ok and total_s is not None and slo.latency_s is not None:
            self._time(Objective.LATENCY, total_s / slo.latency_s)

    def second(self, is_available: bool, seconds: int = 1) -> None:
        self._events.totals[_PLACE[Objective.AVAILABILITY] + (not is_available)] += seconds

    def tick(self, now: float) -> None:
        self._events.tick(now)
        self._bins.tick(now)

    # -- what follows

    def events(self, objective: Objective) -> Events:
        """All that there ever were."""
        place = _PLACE[objective]
        return Events(*self._events.totals[place : place + 2])

    def burning(self, now: float) -> list[Burning]:
        """Returns the objectives that use up their budgets too fast, each with its most urgent rule."""
        spans = {span for rule in BURN_RULES for span in (rule.long_s, rule.short_s)}
        added = {span: self._events.over(span, now) for span in spans}
        found = []
        for objective in self.kept:
            allowed = self.slo.allowed(objective)
            windows = {span: self._within(objective, span, counts) for span, counts in added.items()}
            least_total = MIN_TIMES if objective in TIMED else 0
            rule = burning(windows, allowed, now - self._events.began_at, least_total)
            if rule is not None:
                found.append(Burning(objective, rule, burn_rate(windows[rule.long_s], allowed)))
        return found

    def recent(self, objective: Objective, q: float, now: float) -> tuple[float | None, int]:
        """A quantile of the last five minutes, as a part of its target, and of how many."""
        counts = self._counts(objective, _RECENT_S, now)
        return quantile(counts, q), sum(counts)

    def status(self, now: float) -> SloStatus:
        spans = [*WINDOWS.values(), self.slo.window_s]
        added = {span: self._events.over(span, now) for span in spans}
        found = [self._status(objective, added, now) for objective in self.kept]
        states = [one.state for one in found]
        worst = next((state for state in ("critical", "warning", "ok") if state in states), "unknown")
        covered_s = min(now - self._events.began_at, self.slo.window_s)
        return SloStatus(
            model=self.model, window_s=self.slo.window_s, covered_s=round(covered_s, 1), state=worst, objectives=found
        )

    def last_hour(self, objective: Objective, now: float) -> Events:
        return self._within(objective, HOUR_S, self._events.over(HOUR_S, now))

    def used(self, objective: Objective, now: float) -> float | None:
        """Returns what the last hour used, as a part of the target; None: nothing was measured."""
        if objective in TIMED:
            return quantile(self._counts(objective, HOUR_S, now), self.slo.quantile)
        events = self.last_hour(objective, now)
        return burn_rate(events, self.slo.allowed(objective)) if events.total else None

    def budget_used(self, objective: Objective, now: float) -> float:
        """The part of the whole window's budget. What was not seen of the window was well, and as busy."""
        span_s = self.slo.window_s
        events = self._within(objective, span_s, self._events.over(span_s, now))
        seen = 1.0 if objective is Objective.AVAILABILITY else min(1.0, (now - self._events.began_at) / span_s)
        return seen * burn_rate(events, self.slo.allowed(objective))

    # -- inside

    def _count(self, objective: Objective, is_good: bool) -> None:
        self._events.totals[_PLACE[objective] + (not is_good)] += 1

    def _time(self, objective: Objective, part: float) -> None:
        self._count(objective, part <= 1.0)
        self._bins.totals[_BINS[objective] + bin_of(part)] += 1

    def _counts(self, objective: Objective, window_s: float, now: float) -> list[int]:
        first = _BINS[objective]
        return self._bins.over(window_s, now)[first : first + NUM_BINS]

    def _within(self, objective: Objective, span_s: float, added: list[int]) -> Events:
        """Returns the events of a window. Seconds of availability that were not seen count as good: a process that has
        just begun knows of a few seconds, and one of them is not a third of an hour."""
        place = _PLACE[objective]
        good, bad = added[place : place + 2]
        if objective is Objective.AVAILABILITY and good + bad:
            good = max(good, int(span_s) - bad)
        return Events(good, bad)

    def _status(self, objective: Objective, added: dict[float, list[int]], now: float) -> ObjectiveStatus:
        allowed, target, used = self.slo.allowed(objective), self.slo.target(objective), self.used(objective, now)
        assert target is not None
        events = self._within(objective, self.slo.window_s, added[self.slo.window_s])
        good, bad = added[self.slo.window_s][_PLACE[objective] : _PLACE[objective] + 2]
        is_timed = objective in TIMED
        is_telling = not is_timed or self.last_hour(objective, now).total >= _FEW
        rates = {
            name: round(burn_rate(self._within(objective, span, added[span]), allowed), 4)
            for name, span in WINDOWS.items()
        }
        return ObjectiveStatus(
            objective=str(objective),
            unit="s" if is_timed else "ratio",
            target=round(target, 9),
            quantile=self.slo.quantile if is_timed else None,
            observed=None if used is None else round(used * target, 9),
            used=None if used is None else round(used, 6),
            state=state_of(used) if is_telling else "unknown",
            events=good + bad,
            bad=bad,
            compliance=round(1.0 - events.bad_ratio, 9) if events.total else None,
            goal=round(1.0 - allowed, 9),
            budget_left=round(1.0 - self.budget_used(objective, now), 6) if events.total else None,
            burn=rates if events.total else {},
        )


def state_of(used: float | None) -> str:
    if used is None:
        return "unknown"
    return "critical" if used >= CRITICAL else "warning" if used >= WARNING else "ok"
