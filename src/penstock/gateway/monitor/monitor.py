"""The watch over this gateway's fleet, at work: it listens to every request's end, looks once a second, asks known
questions, sends messages, and tells replicas what they have earned.

What is decided is decided in `watch`; what costs a request anything is one call of `Watch.ended`.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Mapping

from msgspec.structs import replace

from penstock.admission.admission import Admission
from penstock.core.slo import Slo
from penstock.gateway.monitor.alert_sender import AlertSender
from penstock.gateway.monitor.answer_prober import AnswerProber
from penstock.gateway.monitor.fleet_reader import FleetReader
from penstock.gateway.monitor.metrics import WatchMetrics
from penstock.gateway.monitor.pool_reader import PoolReader
from penstock.gateway.monitor.rollout_reader import RolloutReader
from penstock.gateway.records.facts import RequestFacts
from penstock.gateway.records.recorder import GatewayRecorder
from penstock.gateway.replicas.replica import Replica
from penstock.gateway.replicas.replica_set import ReplicaSet, Subscriber
from penstock.http import clock as clocks
from penstock.http.clock import TimerClock
from penstock.observe.background import Worker, outliving
from penstock.observe.redaction import redact
from penstock.router.request import EdgeRequest
from penstock.router.router import Choice
from penstock.watch import payloads
from penstock.watch.alerts import Alert
from penstock.watch.notices import Notices
from penstock.watch.settings import AlertSettings, WatchSettings
from penstock.watch.watch import Watch

log = logging.getLogger("penstock.alerts")

_LISTEN_S, _TICK = 0.25, 4  # a tick is every fourth time


class Monitor(Subscriber):
    def __init__(
        self,
        replicas: ReplicaSet,
        admission: Admission,
        recorder: GatewayRecorder,
        clock: TimerClock,
        slos: Mapping[str, Slo],
        settings: WatchSettings,
        *,
        slack: str | None = None,
    ) -> None:
        """`slos`: by pool. `slack`: an address; it may be a secret."""
        self._replicas = replicas
        self._clock = clock
        self._settings = settings
        self._resting: set[Replica] = set()
        self._reader = FleetReader(replicas, admission)
        alerts = settings.alerts
        self.watch = Watch(slos, clock.now(), sample_s=settings.sample_s, hold_s=alerts.hold_s)
        self._notices = Notices(
            wait_s=alerts.group_wait_s, interval_s=alerts.group_interval_s, repeat_s=alerts.repeat_every_s
        )
        self._senders = _senders(alerts, slack, clock)
        self._metrics = WatchMetrics()
        recorder.listeners.append(self)
        recorder.exports.append(self._metrics.registry)
        self.pools = PoolReader(recorder.exports)
        self.rollouts = RolloutReader(recorder.exports)
        self._prober = AnswerProber(self.watch, settings.probes, clock)
        for subscriber in (self, self._reader, self._prober):
            replicas.subscribe(subscriber)
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._run())]
        if settings.probes.every_s:
            self._tasks.append(loop.create_task(self._prober.run()))
        self._workers = [
            Worker.of_task(name, task) for name, task in zip(("watch", "known questions"), self._tasks, strict=False)
        ]

    def close(self) -> None:
        for worker in self._workers:
            worker.stop()
        for task in self._tasks:
            task.cancel()
        for sender in self._senders:
            sender.close()

    def replica_changed(self, replica: Replica) -> None:
        """One that rests is as good as gone: how fast or right it was says nothing of when it is back."""
        if replica.is_resting and replica not in self._resting:
            self._resting.add(replica)
            self.watch.replica_removed(replica.model, redact(replica.id))
        elif self._resting and not replica.is_resting:
            self._resting.discard(replica)

    def replica_removed(self, replica: Replica) -> None:
        self._resting.discard(replica)
        self.watch.replica_removed(replica.model, redact(replica.id))

    # -- told by the recorder

    def ended(self, facts: RequestFacts) -> None:
        name = self._reader.names.get(facts.replica, "")
        if facts.fingerprint:
            self.watch.quarantined(facts.model, facts.tenant, facts.fingerprint, self._clock.now())
        if facts.is_batch:
            return
        self.watch.ended(facts if name == facts.replica else replace(facts, replica=name))

    def chose(self, request: EdgeRequest, choice: Choice) -> None:
        pass

    # -- shown

    def slo(self) -> object:
        now = self._clock.now()
        return {"models": [self.watch.objectives(model).status(now) for model in self.watch.models]}

    def alerts(self) -> object:
        at = self._settings.alerts.runbooks
        shown = [replace(one, runbook=payloads.runbook(one, at)) for one in self.watch.board.shown(time.time())]
        return {"alerts": shown, "delivery": [one.view for one in self._senders]}

    def probes(self) -> object:
        return {"probes": self._prober.views()}

    def speeds(self) -> object:
        return {"speeds": self.watch.speeds()}

    # -- inside

    async def _run(self) -> None:
        for number in itertools.count(1):
            await clocks.sleep(self._clock, _LISTEN_S)
            with outliving("watch"):
                self._reader.listen()
                if number % _TICK == 0:
                    self._tick(self._clock.now())

    def _tick(self, now: float) -> None:
        fleet = replace(self._reader.read(now), pools=self.pools.readings(), rollouts=self.rollouts.readings())
        changed = self.watch.tick(fleet, now, time.time())
        if self._settings.alerts.log:
            for alert in changed:
                _say(alert)
        self._notices.take(changed, now)
        for notice in self._notices.due(now):
            for sender in self._senders:
                sender.take(notice)
        if self._settings.penalties:
            penalties = self.watch.penalties()
            for replica in self._replicas.values():
                replica.health.penalty = penalties.get((replica.model, self._reader.names[replica.id]), 1.0)
        self._metrics.look(self.watch, self._prober.views(), [one.view for one in self._senders], now)


def _senders(settings: AlertSettings, slack: str | None, clock: TimerClock) -> list[AlertSender]:
    found = []
    if settings.webhook:
        found.append(
            AlertSender(
                "webhook", settings.webhook, lambda notice: payloads.alertmanager(notice, settings.runbooks), clock
            )
        )
    if slack:
        found.append(AlertSender("slack", slack, lambda notice: payloads.slack(notice, settings.runbooks), clock))
    return found


def _say(alert: Alert) -> None:
    level = logging.ERROR if alert.severity == "page" and alert.is_firing else logging.WARNING
    log.log(level if alert.is_firing else logging.INFO, "%s", payloads.line(alert))
