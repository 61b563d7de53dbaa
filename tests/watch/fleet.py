"""A fleet on a virtual clock: requests that end as they are told to, second by second, and the watch over it."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

from penstock.core.devices import DeviceReading
from penstock.core.slo import Slo
from penstock.watch.alerts import Alert
from penstock.watch.answers import KnownAnswers, SaidToken
from penstock.watch.readings import FleetReading, PoolReading, ReplicaReading, RolloutReading
from penstock.watch.watch import Watch

MODEL = "m"
_SUNDAY = 1_763_251_200.0


class Ended(NamedTuple):
    model: str = MODEL
    replica: str = "r0"
    ending: str = "ok"
    input_tokens: int = 500
    cached_tokens: int = 250
    output_tokens: int = 100
    ttft_s: float | None = 0.2
    total_s: float | None = 2.2


@dataclass
class Fleet:
    """`rate`: requests a second; `speed`: of a stream, in tokens a second, by replica."""

    replicas: int = 4
    rate: float = 8.0
    slo: Slo = field(default_factory=Slo)
    fail: float = 0.0
    ttft_s: float = 0.2
    waiting: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        self.now, self.wall_s = 1000.0, _SUNDAY
        self.random = Random(self.seed)
        self.watch = Watch({MODEL: self.slo}, self.now)
        self.names = [f"r{number}" for number in range(self.replicas)]
        self.speeds = dict.fromkeys(self.names, 50.0)
        self.outputs = dict.fromkeys(self.names, 100.0)
        self.down: set[str] = set()
        self.starting: set[str] = set()
        self.draining: set[str] = set()
        self.resting: set[str] = set()
        self.managed: set[str] = set()
        self.boots = dict.fromkeys(self.names, "b0")
        self.restarts = dict.fromkeys(self.names, 0)
        self.memory_kills = dict.fromkeys(self.names, 0)
        self.devices: list[DeviceReading] = []
        self.pools: list[PoolReading] = []
        self.rollouts: list[RolloutReading] = []
        self.changed: list[Alert] = []
        self.owed = self.failures_owed = 0.0

    def run(self, seconds: int) -> list[Alert]:
        """Returns what began to fire or was resolved meanwhile."""
        before = len(self.changed)
        for _ in range(seconds):
            self.now += 1.0
            self.wall_s += 1.0
            self._requests()
            readings = [
                ReplicaReading(
                    model=MODEL,
                    replica=name,
                    is_usable=name not in self.down | self.starting | self.resting,
                    is_starting=name in self.starting,
                    is_reachable=name not in self.down,
                    is_draining=name in self.draining | self.resting,
                    is_resting=name in self.resting,
                    boot=self.boots[name],
                    restarts=self.restarts[name],
                    memory_kills=self.memory_kills[name],
                )
                for name in self.names
            ]
            fleet = FleetReading(readings, {MODEL: self.waiting}, self.devices, self.managed, self.pools, self.rollouts)
            self.changed += self.watch.tick(fleet, self.now, self.wall_s)
            self.devices = [device for device in self.devices if not device.xids]
        return self.changed[before:]

    def fired(self) -> set[tuple[str, str]]:
        """All there ever were: name and severity."""
        return {(alert.alert, alert.severity) for alert in self.changed if alert.is_firing}

    def probe(self, **said: tuple[SaidToken, ...] | None) -> None:
        """One round: every replica says `hello` as it should but those that are named."""
        answers = self.watch.answers.setdefault((MODEL, ""), KnownAnswers())
        answers.said(self.names, {name: said.get(name, hello(self.random)) for name in self.names}, self.wall_s)

    def _requests(self) -> None:
        self.owed += self.rate
        while self.owed >= 1.0:
            self.owed -= 1.0
            name = self.random.choice(
                [name for name in self.names if name not in self.down | self.starting] or self.names
            )
            if name in self.starting:
                self.watch.ended(Ended(replica="", ending="failed", ttft_s=None, total_s=0.0, output_tokens=0))
                continue
            self.failures_owed += self.fail
            if self.failures_owed >= 1.0:
                self.failures_owed -= 1.0
                self.watch.ended(Ended(replica=name, ending="failed", ttft_s=None, total_s=0.1, output_tokens=0))
                continue
            output = max(1, round(self.random.gauss(self.outputs[name], self.outputs[name] / 4)))
            speed = self.speeds[name] * self.random.lognormvariate(0.0, 0.1)
            ttft_s = self.ttft_s * self.random.lognormvariate(0.0, 0.2)
            self.watch.ended(Ended(replica=name, output_tokens=output, ttft_s=ttft_s, total_s=ttft_s + output / speed))


def hello(random: Random, noise: float = 0.01) -> tuple[SaidToken, ...]:
    return tuple(
        SaidToken(text, logprob + random.uniform(-noise, noise), {text: logprob, "x": logprob - 3.0})
        for text, logprob in (("h", -0.1), ("e", -0.3), ("l", -0.01), ("l", -0.2), ("o", -0.7))
    )
