"""The watch over a fleet: told of requests as they end and of the fleet at each tick, it says what is wrong.

One object, so that drills run it on a virtual clock exactly as a gateway runs it on a real one. It does no I/O: `now`
runs evenly and is for durations; `wall_s` is the calendar's, for seasons and for those who read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import Struct

from penstock.core.slo import TIMED, Objective, Slo
from penstock.watch.alerts import Alert, AlertBoard, Condition
from penstock.watch.answers import KnownAnswers
from penstock.watch.deviations import Deviations
from penstock.watch.fleet_signs import FleetSigns
from penstock.watch.kinds import PROBE_FAILING, SLOW, WRONG_ANSWERS
from penstock.watch.mishaps import Mishaps, explained
from penstock.watch.objectives import ModelObjectives
from penstock.watch.readings import FleetReading
from penstock.watch.rollout_signs import rollout_conditions
from penstock.watch.samples import EndedRequest, Sample
from penstock.watch.scaling_signs import scaling_conditions
from penstock.watch.siblings import MIN_SHARE, Siblings
from penstock.watch.slo_signs import slo_conditions

_PROBES_IN_A_ROW = 2
_LONGEST_TICK_S = 60  # of a gap in the ticks: a machine that slept was not down
_TURNS = 5  # ticks in which every model's objectives are looked at once


class SpeedView(Struct, frozen=True, kw_only=True):
    model: str
    replica: str
    beside_siblings: float | None
    penalty: float


class _Model:
    def __init__(self, name: str, slo: Slo, now: float, sample_s: float, wait_s: float) -> None:
        """`wait_s`: until it is first sampled; the work of many models is spread."""
        self.objectives = ModelObjectives(name, slo, now)
        self.siblings = Siblings()
        self.deviations = Deviations(name, sample_s)
        self.replicas: dict[str, Sample] = {}
        self.sampled_at = now + wait_s - sample_s


class Watch:
    def __init__(self, slos: Mapping[str, Slo], now: float, *, sample_s: float = 60.0, hold_s: float = 60.0) -> None:
        """`slos`: by model. `sample_s`: how long replicas are measured before they are compared; `hold_s`: what has
        stopped for so long is over."""
        self.board = AlertBoard(hold_s)
        self.answers: dict[tuple[str, str], KnownAnswers] = {}  # by model and adapter; the prober tells them
        self._models = {
            name: _Model(name, slo, now, sample_s, sample_s * (1.0 + number / len(slos)))
            for number, (name, slo) in enumerate(slos.items())
        }
        self._has_been_up: set[str] = set()  # models: availability and errors count from then on
        self._mishaps = Mishaps()
        self._signs = FleetSigns(now)
        self._sample_s = sample_s
        self._found: dict[str, list[Condition]] = {}  # of objectives: they are looked at in turns
        self._num_ticks = 0
        self._ticked_at = now
        self._signs_sampled_at = now

    # -- facts

    def ended(self, request: EndedRequest) -> None:
        """Counts every request, once. One that a client spoilt or left says nothing, nor one that came too early."""
        model = self._models.get(request.model)
        is_ok = request.ending == "ok"
        is_failed = request.ending == "failed" and request.model in self._has_been_up
        if model is None or not (is_ok or is_failed):
            return
        ttft_s, total_s, output = request.ttft_s, request.total_s, request.output_tokens
        tpot_s = None
        if ttft_s is not None and total_s is not None and output > 1:
            tpot_s = (total_s - ttft_s) / (output - 1)
        model.objectives.ended(is_ok, ttft_s, tpot_s, total_s)
        if is_ok and request.replica:
            sample = model.replicas.get(request.replica)
            if sample is None:
                sample = model.replicas[request.replica] = Sample()
            sample.add(request)

    def quarantined(self, model: str, tenant: str, fingerprint: str, now: float) -> None:
        self._mishaps.quarantined(model, tenant, fingerprint, now)

    def model_added(self, name: str, slo: Slo, now: float) -> None:
        """A model that appeared at run time, or whose objectives have changed: those are counted anew then."""
        known = self._models.get(name)
        if known is None:
            self._models[name] = _Model(name, slo, now, self._sample_s, self._sample_s)
        elif known.objectives.slo != slo:
            known.objectives = ModelObjectives(name, slo, now)

    def model_removed(self, name: str) -> None:
        self._models.pop(name, None)
        self._found.pop(name, None)
        self._has_been_up.discard(name)
        for key in [key for key in self.answers if key[0] == name]:
            del self.answers[key]

    def replica_removed(self, model: str, replica: str) -> None:
        """Everything that was kept of it is forgotten. Its alerts end as their conditions do."""
        if (known := self._models.get(model)) is not None:
            known.replicas.pop(replica, None)
            known.siblings.forget(replica)
            known.deviations.forget(replica)
        for (name, _), answers in self.answers.items():
            if name == model:
                answers.forget(replica)
        self._mishaps.forget(replica)
        self._signs.forget(replica)

    def tick(self, fleet: FleetReading, now: float, wall_s: float) -> list[Alert]:
        """Returns the alerts that began to fire, and those that are resolved."""
        self._count_seconds(fleet, now)
        self._compare(now, wall_s)
        if now - self._signs_sampled_at >= 60.0:
            self._signs_sampled_at = now
            self._signs.sample(fleet)
        return self.board.update(self._conditions(fleet, now), now, wall_s)

    # -- what follows

    def objectives(self, model: str) -> ModelObjectives:
        return self._models[model].objectives

    @property
    def models(self) -> Iterable[str]:
        return self._models

    def speeds(self) -> list[SpeedView]:
        penalties = self.penalties()
        return [
            SpeedView(
                model=name,
                replica=replica,
                beside_siblings=speed.beside_siblings,
                penalty=penalties.get((name, replica), 1.0),
            )
            for name, model in self._models.items()
            for replica, speed in model.siblings.speeds().items()
        ]

    def penalties(self) -> dict[tuple[str, str], float]:
        """Returns by model and replica the factor on its share, where it is not 1: one that is slow gets as much less,
        one that is wrong next to nothing."""
        found = {
            (name, replica): speed.penalty
            for name, model in self._models.items()
            for replica, speed in model.siblings.speeds().items()
            if speed.is_slow
        }
        for (name, _), answers in self.answers.items():
            for replica, status in answers.statuses.items():
                if answers.known is not None and status.state == "wrong" and status.row >= _PROBES_IN_A_ROW:
                    found[name, replica] = MIN_SHARE
        return found

    # -- inside

    def _count_seconds(self, fleet: FleetReading, now: float) -> None:
        seconds = min(int(now) - int(self._ticked_at), _LONGEST_TICK_S)
        self._ticked_at = now
        usable = {reading.model for reading in fleet.replicas if reading.is_usable}
        self._has_been_up |= usable
        resting = {one.model for one in fleet.replicas} | fleet.managed
        resting -= {one.model for one in fleet.replicas if not one.is_resting}
        for name, model in self._models.items():
            if name in self._has_been_up and name not in resting and seconds > 0:
                model.objectives.second(name in usable, seconds)
            model.objectives.tick(now)

    def _compare(self, now: float, wall_s: float) -> None:
        for model in self._models.values():
            if now - model.sampled_at < self._sample_s:
                continue
            model.sampled_at = now
            model.siblings.period(model.replicas)
            model.deviations.period(model.replicas, wall_s)
            model.replicas = {}

    def _conditions(self, fleet: FleetReading, now: float) -> list[Condition]:
        found = [*self._mishaps.conditions(fleet, now), *self._signs.conditions(fleet, self._has_been_up, now)]
        found += scaling_conditions(pool for pool in fleet.pools if pool.model in self._models)
        found += rollout_conditions(fleet.rollouts)
        found += self._probe_conditions()
        self._num_ticks += 1
        for number, (name, model) in enumerate(self._models.items()):
            if (number + self._num_ticks) % _TURNS == 0:
                self._found[name] = [*slo_conditions(model.objectives, now), *model.deviations.conditions()]
            found += self._found.get(name, ())
            for replica, speed in model.siblings.speeds().items():
                if speed.is_slow and speed.beside_siblings is not None:
                    summary = f"{name}: {replica} makes {speed.beside_siblings:.2f} of its siblings' tokens/s"
                    found.append(
                        Condition(
                            kind=SLOW,
                            summary=summary,
                            value=speed.beside_siblings,
                            model=name,
                            replica=replica,
                            explains=explained(name, TIMED),
                        )
                    )
        return found

    def _probe_conditions(self) -> list[Condition]:
        found = []
        for (model, adapter), answers in self.answers.items():
            for replica, status in answers.statuses.items():
                if status.row < _PROBES_IN_A_ROW or status.state not in ("wrong", "failed"):
                    continue
                kind = WRONG_ANSWERS if status.state == "wrong" else PROBE_FAILING
                who = f"{model}{f' with {adapter}' if adapter else ''}: {replica}"
                found.append(
                    Condition(
                        kind=kind,
                        summary=f"{who}, asked what is known: {status.reason}",
                        value=status.drift or 0.0,
                        model=model,
                        replica=replica,
                        labels=(("adapter", adapter),),
                        about=(model, "probes"),
                        explains=explained(model, (*TIMED, Objective.ERRORS)),
                    )
                )
        return found
