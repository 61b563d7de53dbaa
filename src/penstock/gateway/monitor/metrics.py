"""The watch's findings as metrics: taken down once a second, whoever reads them, the objectives of models in turns."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.core.slo import TIMED
from penstock.gateway.monitor.alert_sender import CourierView
from penstock.gateway.monitor.answer_prober import ProbeView
from penstock.observe import watch_catalog as catalog
from penstock.observe.catalog import Metric
from penstock.observe.registry import Labels, Registry
from penstock.watch.watch import Watch

_TURNS = 5
_OBJECTIVES = (
    catalog.SLO_GOAL,
    catalog.SLO_TARGET,
    catalog.SLO_USED,
    catalog.SLO_COMPLIANCE,
    catalog.SLO_BUDGET,
    catalog.SLO_BURN,
)


class WatchMetrics:
    def __init__(self) -> None:
        self.registry = Registry(catalog.WATCH_CATALOG)
        self._found: dict[Metric, dict[Labels, float]] = {metric: {} for metric in _OBJECTIVES}
        self._num_looks = 0

    def look(self, watch: Watch, probes: Iterable[ProbeView], senders: Iterable[CourierView], now: float) -> None:
        for number, model in enumerate(watch.models):
            if (number + self._num_looks) % _TURNS == 0 or not self._num_looks:
                self._count_events(watch, model)
                self._objectives(watch, model, now)
        for metric, values in self._found.items():
            self.registry.replace(metric, values)
        self._num_looks += 1
        replace = self.registry.replace
        firing: dict[Labels, float] = {
            (one.alert, one.severity, one.model, one.replica, one.labels.get("objective", "")): 1
            for one in watch.board.firing
        }
        replace(catalog.ALERTS_FIRING, firing)
        replace(
            catalog.ALERT_MESSAGES,
            {(one.to, what): getattr(one, what) for one in senders for what in ("sent", "failed", "lost")},
        )
        speeds = watch.speeds()
        replace(
            catalog.REPLICA_SPEED,
            {(s.model, s.replica): s.beside_siblings for s in speeds if s.beside_siblings is not None},
        )
        replace(catalog.REPLICA_PENALTY, {(s.model, s.replica): s.penalty for s in speeds})
        self._probes(probes)

    def _count_events(self, watch: Watch, model: str) -> None:
        objectives = watch.objectives(model)
        for objective in objectives.kept:
            events = objectives.events(objective)
            for met, number in (("true", events.good), ("false", events.bad)):
                self.registry.count(catalog.SLO_EVENTS, model, objective, met).value = number

    def _objectives(self, watch: Watch, model: str, now: float) -> None:
        found = self._found
        for one in watch.objectives(model).status(now).objectives:
            key = (model, one.objective)
            found[catalog.SLO_GOAL][key] = one.goal
            if one.objective in TIMED:
                found[catalog.SLO_TARGET][key] = one.target
            for metric, value in (
                (catalog.SLO_USED, one.used),
                (catalog.SLO_COMPLIANCE, one.compliance),
                (catalog.SLO_BUDGET, one.budget_left),
            ):
                if value is not None:
                    found[metric][key] = value
            found[catalog.SLO_BURN].update({(*key, window): rate for window, rate in one.burn.items()})

    def _probes(self, probes: Iterable[ProbeView]) -> None:
        asked: dict[Labels, float] = {}
        drift: dict[Labels, float] = {}
        for one in probes:
            key = (one.model, one.adapter, one.replica)
            asked |= {
                (*key, "ok"): one.asked - one.failed - one.wrong,
                (*key, "failed"): one.failed,
                (*key, "wrong"): one.wrong,
            }
            if one.drift is not None:
                drift[key] = one.drift
        self.registry.replace(catalog.PROBES, asked)
        self.registry.replace(catalog.PROBE_DRIFT, drift)
