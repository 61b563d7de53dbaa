"""A fake pool on a virtual clock: it does at once, or after the given durations, what the policy decides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from penstock.core.slo import Slo
from penstock.fleet.policy.decision import Action, ActionKind, Decision
from penstock.fleet.policy.memory import PolicyMemory
from penstock.fleet.policy.observation import (
    Demand,
    Durations,
    ForecastBand,
    Offer,
    PoolObservation,
    ReplicaState,
    ReplicaView,
)
from penstock.fleet.policy.pool_policy import PoolPolicy
from penstock.fleet.policy.profile import CapacityProfile, Mix, ReplicaCosts
from penstock.fleet.settings import PoolSettings

MONDAY = 4 * 86400.0
SLO = Slo(ttft_s=1.0, tpot_s=0.05)
COSTS = ReplicaCosts(
    fixed_s=1e-3, read_s=4e-3, linear_token_s=2e-5, kv_token_s=4e-9, sequence_s=1e-5, kv_tokens=600_000
)
MIX = Mix(500.0, 100.0)
RATE = CapacityProfile(COSTS).max_rate(MIX, SLO)  # of one replica


def demand(rate: float, **more: float) -> Demand:
    """A steady one."""
    return Demand(
        **{
            "arrivals_per_s": rate,
            "peak_arrivals_per_s": rate,
            "prompt_tokens": MIX.prompt_tokens,
            "output_tokens": MIX.output_tokens,
            "in_flight": 1 if rate else 0,
            **more,
        }  # type: ignore[arg-type]
    )


def views(
    number: int, state: ReplicaState = ReplicaState.ACTIVE, *, first: int = 0, **more: object
) -> list[ReplicaView]:
    return [
        ReplicaView(f"r{i}", state, MONDAY - 1000, state, started_at=MONDAY - 1000 + i, **more)  # type: ignore[arg-type]
        for i in range(first, first + number)
    ]


@dataclass
class FakePool:
    settings: PoolSettings = field(default_factory=lambda: PoolSettings(min=1, max=20, standby=0, parked=0))
    slo: Slo = SLO
    durations: Durations = field(default_factory=Durations)
    offers: Sequence[Offer] = (Offer(),)
    replicas: dict[str, ReplicaView] = field(default_factory=dict)
    forecast: tuple[ForecastBand, ...] = ()
    now: float = MONDAY
    memory: PolicyMemory = field(default_factory=PolicyMemory)
    decisions: list[Decision] = field(default_factory=list)  # those that did something
    num_started: int = 0

    def __post_init__(self) -> None:
        self.policy = PoolPolicy(self.settings, self.slo, CapacityProfile(COSTS))
        self._done_at: dict[str, float] = {}

    def add(self, added: Sequence[ReplicaView]) -> None:
        self.replicas |= {each.id: each for each in added}

    def observation(self, demand: Demand) -> PoolObservation:
        return PoolObservation(
            "pool", demand, tuple(self.replicas.values()), self.durations, self.forecast, tuple(self.offers)
        )

    def run(self, seconds: int, demand_at: Demand | Callable[[int], Demand]) -> Decision:
        """The last decision."""
        for second in range(seconds):
            decision = self.step(demand_at(second) if callable(demand_at) else demand_at)
        return decision

    def step(self, demand: Demand) -> Decision:
        for name in [name for name, at in self._done_at.items() if at <= self.now]:
            del self._done_at[name]
            replica = self.replicas[name]
            if replica.target is ReplicaState.STOPPING:
                del self.replicas[name]
            else:
                self.replicas[name] = msgspec.structs.replace(replica, state=replica.target, since=self.now)
        decision, self.memory = self.policy.decide(self.observation(demand), self.memory, self.now)
        for action in decision.actions:
            self._apply(action)
        if decision.actions:
            self.decisions.append(decision)
        self.now += 1.0
        return decision

    def _apply(self, action: Action) -> None:
        if action.kind is ActionKind.START:
            self.num_started += 1
            name, state, took_s = f"new{self.num_started}", ReplicaState.STARTING, self.durations.start_s
            price = next(
                (
                    offer.price_per_hour
                    for offer in self.offers
                    if (offer.zone, offer.capacity_type) == (action.zone, action.capacity_type)
                ),
                0.0,
            )
            self.replicas[name] = ReplicaView(
                name, state, self.now, action.to, action.zone, action.capacity_type, price, self.now
            )
        else:
            name = action.replica
            state, took_s = {
                ActionKind.WAKE: (ReplicaState.WAKING, self.durations.wake_s),
                ActionKind.ACTIVATE: (ReplicaState.STANDBY, self.durations.activate_s),
            }.get(action.kind, (ReplicaState.DRAINING, self.durations.drain_s))
            self.replicas[name] = msgspec.structs.replace(
                self.replicas[name], state=state, target=action.to, since=self.now
            )
        self._done_at[name] = self.now + took_s

    def count(self, state: ReplicaState) -> int:
        return sum(each.state is state for each in self.replicas.values())

    @property
    def num_active(self) -> int:
        return self.count(ReplicaState.ACTIVE)
