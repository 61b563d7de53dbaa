"""A run request by request: the simulator's engines and gateway, with replicas that come and go by decisions.

Arrivals lie evenly in their second; lengths are exponentially distributed around the curve's means, as in the fluid
model. A replica that drains gets no new request and leaves when its last stream has ended.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from penstock.core.slo import Slo
from penstock.fleet.policy.observation import Demand, Durations, PoolObservation, ReplicaState
from penstock.sim.fleet.demand import DemandCurve
from penstock.sim.fleet.policy import POOL, Autoscaler
from penstock.sim.fleet.replicas import PoolReplicas
from penstock.sim.fleet.result import FleetResult, FleetTally, Prices
from penstock.sim.fleet.signals import SMOOTHED_S, Signals
from penstock.sim.flight import Ask, Flight
from penstock.sim.profile import Profile
from penstock.sim.simulation import Simulation

_LATENCIES_S = 30.0  # of which a controller sees quantiles


def requests_of(curve: DemandCurve, profile: Profile, seed: int) -> Iterator[Ask]:
    random = np.random.default_rng([seed, 2])
    longest = profile.max_context_tokens // 2
    for second, count in enumerate(curve.arrivals.tolist()):
        if not count:
            continue
        times = np.sort(random.uniform(0.0, 1.0, count)).tolist()
        prompts = random.exponential(curve.prompt_tokens[second], count).tolist()
        outputs = random.exponential(curve.output_tokens[second], count).tolist()
        for offset, prompt, output in zip(times, prompts, outputs, strict=True):
            yield Ask(second + offset, min(longest, 1 + int(prompt)), min(longest, 1 + int(output)))


def run_requests(
    curve: DemandCurve,
    policy: Autoscaler,
    profile: Profile,
    slo: Slo,
    durations: Durations,
    *,
    num_active: int,
    seed: int = 0,
    prices: Prices = Prices(),  # noqa: B008 (frozen)
) -> FleetResult:
    return _Run(curve, policy, profile, slo, durations, num_active).result(seed, prices)


class _Ended(NamedTuple):
    """A request that has ended."""

    at_s: float
    ttft_s: float
    tpot_s: float
    tokens: int  # of prompt and output


class _Run:
    def __init__(
        self,
        curve: DemandCurve,
        policy: Autoscaler,
        profile: Profile,
        slo: Slo,
        durations: Durations,
        num_active: int,
    ) -> None:
        self._curve, self._policy, self._slo, self._durations = curve, policy, slo, durations
        self._seen = Signals(curve)
        self._kept = [0] * curve.seconds  # requests within the SLO, by the second in which they came
        self._shed = [0] * curve.seconds
        self._states: list[list[tuple[ReplicaState, int]]] = []
        self._forecasts: list[tuple[float, float] | None] = []
        self._flights: deque[_Ended] = deque()
        self._tally = FleetTally(curve.seconds, slo.quantile, broken_from=curve.surge_at or 0)
        self._draining: set[str] = set()
        self._sim = Simulation(profile, 0, slo=slo, ended=self._ended)
        self._pool = PoolReplicas(
            durations,
            num_active,
            now=curve.begins_at,
            activated=self._sim.add,
            drains=self._drain,
            gone=self._remove,
        )

    def result(self, seed: int, prices: Prices) -> FleetResult:
        began = time.process_time()
        for second in range(self._curve.seconds):
            self._sim.events.at(second + 1.0, self._control, second)
        self._sim.run(requests_of(self._curve, self._sim.profile, seed))
        self._sim.run_until(self._curve.seconds)
        for second, states in enumerate(self._states):
            arrivals = int(self._curve.arrivals[second])
            self._tally.second(arrivals, self._kept[second], self._shed[second], states, self._forecasts[second])
        return self._tally.result(self._policy.name, self._curve.name, prices, time.process_time() - began)

    def _ended(self, flight: Flight) -> None:
        second, output = int(flight.ask.at_s), flight.ask.output_tokens
        if flight.shed or flight.first_s is None or flight.ended_s is None:
            self._shed[second] += 1
            return
        ttft_s = flight.first_s - flight.ask.at_s
        tpot_s = (flight.ended_s - flight.first_s) / (output - 1) if output > 1 else 0.0
        self._flights.append(_Ended(flight.ended_s, ttft_s, tpot_s, flight.ask.prompt_tokens + output))
        self._kept[second] += ttft_s <= self._slo.ttft_s and tpot_s <= (self._slo.tpot_s or tpot_s)

    def _drain(self, replica: str) -> float:
        self._sim.drain(replica)
        self._draining.add(replica)
        return float("inf")

    def _remove(self, replica: str) -> None:
        self._draining.discard(replica)
        if replica in self._sim.replicas:  # others were never active
            self._sim.remove(replica)

    def _control(self, second: int) -> None:
        now = self._curve.begins_at + second + 1
        for replica in [each for each in self._draining if not self._sim.replicas[each].num_open]:
            self._draining.discard(replica)
            self._pool.drained(replica, now)
        self._pool.advance(now)
        bands = self._policy.observe(now, self._seen.arrivals[second])
        self._states.append(self._pool.states)
        self._forecasts.append((bands[0].p50, bands[0].p90) if bands else None)
        observation = PoolObservation(POOL, self._demand(second), self._pool.views, self._durations, bands)
        decision = self._policy.decide(observation, now)
        if decision.actions:
            self._tally.decided(decision, observation)
            self._pool.act(decision.actions, now)

    def _demand(self, second: int) -> Demand:
        seen, gateway = self._seen, self._sim.gateway
        active = [each for name, each in self._sim.replicas.items() if name not in self._draining]
        loads = [each.measured().load for each in active]
        queued = gateway.num_waiting
        waiting = queued + sum(each.num_waiting for each in loads)
        prompt = seen.prompt_tokens[second]
        while self._flights and self._flights[0].at_s <= second + 1 - _LATENCIES_S:
            self._flights.popleft()
        ttfts, tpots = sorted(each.ttft_s for each in self._flights), sorted(each.tpot_s for each in self._flights)
        tokens = sum(each.tokens for each in self._flights if each.at_s > second + 1 - SMOOTHED_S)
        kv = max((each.kv_active_tokens for each in loads), default=0) / self._sim.profile.kv_tokens
        return Demand(
            arrivals_per_s=seen.rate[second],
            peak_arrivals_per_s=seen.peak[second],
            dispersion=seen.dispersion[second],
            prompt_tokens=prompt,
            output_tokens=seen.output_tokens[second],
            waiting=waiting,
            waiting_tokens=int(queued * prompt) + sum(each.queued_tokens for each in loads),
            held=0 if active else queued,
            in_flight=gateway.num_open,
            ttft_p95_s=ttfts[int(0.95 * len(ttfts))] if ttfts else 0.0,
            tpot_p95_s=tpots[int(0.95 * len(tpots))] if tpots else 0.0,
            kv_usage=min(1.0, kv),
            memory_headroom=1.0 - min(1.0, kv),
            active_sequences=sum(each.num_running for each in loads) / max(1, len(loads)),
            tokens_per_s=tokens / SMOOTHED_S,
        )
