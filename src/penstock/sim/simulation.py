"""A fleet and its gateway, from a profile and a policy; asked in order of time, whatever the number."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal, get_args

from penstock.admission.settings import AdmissionSettings
from penstock.core.settings import Role
from penstock.core.slo import Slo
from penstock.router.legs import Split
from penstock.router.strategies import RoutingSettings, StrategyName
from penstock.sim.events import Events
from penstock.sim.flight import Ask, Flight
from penstock.sim.gateway import Chosen, SimGateway
from penstock.sim.network import KvLink, SimFabric
from penstock.sim.oracle import best_place
from penstock.sim.profile import Profile
from penstock.sim.replica import SimReplica
from penstock.sim.result import Result, Tally

Policy = Literal[StrategyName, "oracle"]
POLICIES: tuple[str, ...] = (*get_args(StrategyName), "oracle")

_GOLDEN = 0.6180339887498949


class Simulation:
    """`routing` may be "oracle", of which nothing is `chosen`; that and `ended` are told as the door tells them. With a
    `kv_link` replicas pull KV blocks from each other."""

    def __init__(
        self,
        profile: Profile,
        replicas: int | Sequence[Role],
        routing: RoutingSettings | Literal["oracle"] | None = None,
        *,
        slo: Slo | None = None,
        admission: AdmissionSettings | None = None,
        publishes: bool = True,
        takes_many: bool = True,
        kv_link: KvLink | None = None,
        split: Split = "auto",
        ended: Callable[[Flight], None] | None = None,
        chosen: Chosen | None = None,
    ) -> None:
        self.profile = profile
        self.events = Events()
        slo = slo or profile.slo
        self.tally = Tally(slo)
        self._has_oracle = routing == "oracle"
        settings = RoutingSettings("token_aware") if isinstance(routing, str) else routing or RoutingSettings()
        self.policy = "oracle" if self._has_oracle else settings.strategy
        self._told = ended
        self._is_asked = True
        self.gateway = SimGateway(
            self.events,
            settings,
            self._ended,
            admission=admission,
            publishes=publishes,
            split=split,
            slo=slo,
            chosen=chosen,
        )
        self._fabric = SimFabric(self.events, kv_link) if kv_link is not None else None
        self.replicas: dict[str, SimReplica] = {}
        self._takes_many = takes_many
        both: Sequence[Role] = ("both",)
        roles = [*both] * replicas if isinstance(replicas, int) else replicas
        for number, role in enumerate(roles):
            self.add(f"r{number}", role)

    # -- what is asked

    def ask(self, ask: Ask) -> None:
        """One request, when its time comes."""
        self.events.at(ask.at_s, self._submit, ask)

    def run_until(self, when: float) -> None:
        self.events.run_until(when)

    def run(self, asks: Iterable[Ask], *, progress: Callable[[float, int], None] | None = None) -> Result:
        """Simulates to the end of the last request. `progress` is told of seconds and requests, now and then."""
        began = time.process_time()
        self._is_asked = False
        self._ask_next(iter(asks))
        gc.freeze()  # the fleet stays: of a thousand replicas it is millions of objects to look through
        try:
            num_events = self._run(progress)
        finally:
            gc.unfreeze()
        return self.result(num_events=num_events, cpu_s=time.process_time() - began)

    def _run(self, progress: Callable[[float, int], None] | None) -> int:
        count, step, gateway = 0, self.events.step, self.gateway
        while not self._is_asked or gateway.num_open:
            step()
            count += 1
            if progress is not None and count % 65536 == 0:
                progress(self.events.now, gateway.num_flights)
        return count

    def result(self, **facts: float) -> Result:
        return self.tally.result(self.policy, self.profile.name, self.replicas.values(), **facts)

    # -- what happens to replicas

    def add(self, name: str, role: Role = "both") -> None:
        """A new replica; of a name that drains, the same one again."""
        if name in self.replicas:
            self.gateway.undrain(name)
            return
        replica = SimReplica(
            name,
            self.profile,
            self.events,
            self.gateway,
            takes_many=self._takes_many,
            role=role,
            fabric=self._fabric,
        )
        self.gateway.follow(replica, len(self.replicas) * _GOLDEN % 1.0)
        self.replicas[name] = replica

    def drain(self, name: str) -> None:
        """It finishes what it has and gets nothing new."""
        self.gateway.drain(name)

    def remove(self, name: str) -> None:
        self.gateway.remove(name)
        self.replicas.pop(name).leave_network()

    def kill(self, name: str) -> None:
        """Its process dies with what it holds."""
        self.replicas[name].hang()
        self.replicas[name].leave_network()
        self.gateway.lost(name)

    def revive(self, name: str) -> None:
        self.replicas[name].restart()
        self.gateway.back(name)

    # -- inside

    def _ask_next(self, asks: Iterator[Ask]) -> None:
        ask = next(asks, None)
        if ask is None:
            self._is_asked = True
        else:
            self.events.at(ask.at_s, self._come, ask, asks)

    def _come(self, ask: Ask, asks: Iterator[Ask]) -> None:
        self._submit(ask)
        self._ask_next(asks)

    def _submit(self, ask: Ask) -> None:
        if self._has_oracle:
            self.gateway.place(ask, best_place(ask, self.gateway.num_flights, self.replicas.values()))
        else:
            self.gateway.submit(ask)

    def _ended(self, flight: Flight) -> None:
        self.tally.ended(flight)
        if self._told is not None:
            self._told(flight)
