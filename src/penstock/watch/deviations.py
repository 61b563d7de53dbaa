"""The signals of one model and of its replicas, each against its own past.

What is wrong with most replicas is wrong with the model and said once; what is wrong with some is said of those.
"""

from __future__ import annotations

from collections.abc import Mapping

from penstock.watch.alerts import Condition
from penstock.watch.anomaly import Baseline
from penstock.watch.kinds import ANOMALY
from penstock.watch.mishaps import ANOMALIES
from penstock.watch.samples import Sample, Signal

_THE_MODEL = ""
_MAX_SERIES = 4096  # replicas come and go


class Deviations:
    def __init__(self, model: str, period_s: float) -> None:
        self._model = model
        self._period_s = period_s
        self._baselines: dict[tuple[str, Signal], Baseline] = {}

    def period(self, samples: Mapping[str, Sample], at_s: float) -> None:
        """One is over. A model whose replicas had nothing to do said nothing, which may be an anomaly; a replica that
        had nothing to do is none."""
        self._feed(_THE_MODEL, _together(samples), at_s)
        for replica, sample in samples.items():
            self._feed(replica, sample, at_s)

    def forget(self, replica: str) -> None:
        for signal in Signal:
            self._baselines.pop((replica, signal), None)

    def anomalies(self) -> list[tuple[str, Signal, float]]:
        """Returns the replicas that deviate, in which signal and by how much; a replica without a name is the model."""
        found: list[tuple[str, Signal, float]] = []
        for signal in Signal:
            series = {name: one for (name, kind), one in self._baselines.items() if kind is signal}
            whole = series.pop(_THE_MODEL, None)
            wrong = [(name, signal, one.effect) for name, one in series.items() if one.is_anomalous]
            if wrong and 2 * len(wrong) <= len(series):
                found += wrong
            elif whole is not None and (whole.is_anomalous or wrong):
                found.append((_THE_MODEL, signal, whole.effect))
        return found

    def conditions(self) -> list[Condition]:
        return [
            Condition(
                kind=ANOMALY,
                value=effect,
                summary=f"{self._model}: {replica or 'all replicas'}: {signal} is {effect:.2f} times its usual",
                model=self._model,
                replica=replica,
                labels=(("signal", str(signal)),),
                about=(self._model, ANOMALIES),
            )
            for replica, signal, effect in self.anomalies()
        ]

    def _feed(self, name: str, sample: Sample, at_s: float) -> None:
        for signal, reading in sample.readings(self._period_s, is_model=name == _THE_MODEL).items():
            baseline = self._baselines.get((name, signal))
            if baseline is None:
                if len(self._baselines) >= _MAX_SERIES:
                    self._baselines.clear()
                baseline = self._baselines[name, signal] = Baseline(signal)
            baseline.feed(reading, at_s)


def _together(samples: Mapping[str, Sample]) -> Sample:
    whole = Sample()
    for one in samples.values():
        whole.merge(one)
    return whole
