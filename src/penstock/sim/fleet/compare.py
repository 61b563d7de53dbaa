"""Policies side by side under one demand. Each begins with the replicas that the first minutes need."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from msgspec.structs import replace

from penstock.core.errors import ConfigError
from penstock.core.slo import Slo
from penstock.fleet.policy.observation import Durations
from penstock.fleet.settings import PoolSettings
from penstock.sim.fleet.baselines.hpa import Hpa, Keda
from penstock.sim.fleet.baselines.planner import Planner
from penstock.sim.fleet.baselines.static import StaticPeak
from penstock.sim.fleet.demand import DemandCurve
from penstock.sim.fleet.fluid import run_fluid
from penstock.sim.fleet.oracle import Oracle, best_plan
from penstock.sim.fleet.policy import Autoscaler, Ours, capacity_profile
from penstock.sim.fleet.requests import run_requests
from penstock.sim.fleet.result import FleetResult, Prices
from penstock.sim.fleet.serving import Serving
from penstock.sim.fleet.signals import Signals
from penstock.sim.profile import Profile

POLICIES: Sequence[str] = ("ours", "static", "hpa", "keda", "planner", "oracle")
_HPA_LOAD = 0.7  # of a replica's most: requests in flight then are the target
_BEGIN_S = 600
_ROOM = 1.25  # more than the mean of a busy minute needs


@dataclass(frozen=True)
class Case:
    curve: DemandCurve
    profile: Profile
    slo: Slo
    settings: PoolSettings
    durations: Durations
    target: float = 0.995
    prices: Prices = field(default_factory=Prices)
    is_by_request: bool = False  # request by request, not as a fluid

    def num_for(self, first: int, seconds: int) -> int:
        """Replicas for the busiest minute of so many seconds, with room."""
        serving, curve = Serving(self.profile, self.slo), self.curve
        rates = [0.0]
        for at in range(first, min(first + seconds, curve.seconds), 60):
            prompt, output = float(curve.prompt_tokens[at]), float(curve.output_tokens[at])
            rates.append(float(curve.arrivals[at : at + 60].mean()) / serving.work(prompt, output).rate)
        return min(self.settings.max, max(self.settings.min, math.ceil(_ROOM * max(rates))))


def compare(
    case: Case, policies: Sequence[str], *, progress: Callable[[str, int, int], None] | None = None
) -> list[FleetResult]:
    """The oracle is always run, for the ratio; it is in the results where it was asked for."""
    if unknown := [name for name in policies if name not in POLICIES]:
        raise ConfigError(f"no policy '{unknown[0]}'; there are {', '.join(POLICIES)}", param="policy")
    signals = Signals(case.curve)

    def simulate(policy: Autoscaler, num_active: int) -> FleetResult:
        if case.is_by_request:
            return run_requests(
                case.curve,
                policy,
                case.profile,
                case.slo,
                case.durations,
                num_active=num_active,
                prices=case.prices,
            )
        return run_fluid(
            case.curve,
            policy,
            case.profile,
            case.slo,
            case.durations,
            num_active=num_active,
            signals=signals,
            prices=case.prices,
            progress=partial(progress, policy.name) if progress else None,
        )

    serving = partial(Serving, case.profile, case.slo)
    plan = best_plan(case.curve, serving, case.durations, case.target, case.settings.min)
    ideal = simulate(Oracle(plan, case.curve.begins_at), int(plan.starts[0]))
    begin = case.num_for(0, _BEGIN_S)
    found = [ideal if name == "oracle" else simulate(make_policy(name, case), begin) for name in policies]
    return [
        replace(
            each,
            device_hours=each.replica_hours * case.profile.devices,
            over_oracle=each.replica_hours / ideal.replica_hours,
        )
        for each in found
    ]


def make_policy(name: str, case: Case) -> Autoscaler:
    least, most = case.settings.min, case.settings.max
    match name:
        case "ours":
            return Ours(case.settings, case.slo, capacity_profile(case.profile))
        case "static":
            return StaticPeak(case.num_for(0, case.curve.seconds))
        case "hpa":
            return Hpa(_in_flight(case), least=least, most=most)
        case "keda":
            return Keda(least=least, most=most)
        case _:
            return Planner(capacity_profile(case.profile), case.slo, least=least, most=most)


def _in_flight(case: Case) -> float:
    """Requests of the mean kind that one replica has at a load that leaves room."""
    curve, serving = case.curve, Serving(case.profile, case.slo)
    weights = np.maximum(curve.arrivals, 1e-9)
    prompt = float(np.average(curve.prompt_tokens, weights=weights))
    output = float(np.average(curve.output_tokens, weights=weights))
    rate = _HPA_LOAD * serving.work(prompt, output).rate
    for _ in range(60):
        serving.tick(rate, prompt, output, 1)
    return max(1.0, serving.in_flight)
