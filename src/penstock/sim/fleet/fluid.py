"""A run in ticks of a second: the fluid model serves, the policy sees what a controller would see, and decides."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

from penstock.core.slo import Slo
from penstock.fleet.policy.observation import Demand, Durations, Offer, PoolObservation, ReplicaState
from penstock.sim.fleet.demand import DemandCurve
from penstock.sim.fleet.policy import POOL, Autoscaler
from penstock.sim.fleet.replicas import PoolReplicas
from penstock.sim.fleet.result import FleetResult, FleetTally, Prices
from penstock.sim.fleet.serving import Serving
from penstock.sim.fleet.signals import SMOOTHED_S, Signals
from penstock.sim.profile import Profile

_LATENCIES_S = 30  # of which a controller sees quantiles
_PROGRESS_S = 36_000


def run_fluid(
    curve: DemandCurve,
    policy: Autoscaler,
    profile: Profile,
    slo: Slo,
    durations: Durations,
    *,
    num_active: int,
    signals: Signals | None = None,
    prices: Prices = Prices(),  # noqa: B008 (frozen)
    offers: Sequence[Offer] = (Offer(),),
    progress: Callable[[int, int], None] | None = None,
) -> FleetResult:
    """`num_active`: replicas that there are at the beginning."""
    began = time.process_time()
    serving, seen = Serving(profile, slo), signals or Signals(curve)
    tally = FleetTally(curve.seconds, slo.quantile, broken_from=curve.surge_at or 0)
    pool = PoolReplicas(
        durations,
        num_active,
        now=curve.begins_at,
        offers=offers,
        drains=lambda _: serving.leave(pool.counts[ReplicaState.ACTIVE]),
    )
    prompts, outputs = curve.prompt_tokens.tolist(), curve.output_tokens.tolist()
    started = deque([0.0] * SMOOTHED_S, SMOOTHED_S)
    ttfts = deque([0.0] * _LATENCIES_S, _LATENCIES_S)
    kv_tokens = profile.kv_tokens
    for second in range(curve.seconds):
        now = curve.begins_at + second
        pool.advance(now + 0.5)
        active = pool.counts[ReplicaState.ACTIVE]
        arrivals, prompt, output = seen.arrivals[second], prompts[second], outputs[second]
        tick = serving.tick(arrivals, prompt, output, active)
        ttfts.append(tick.ttft_s + tick.rest_p95_s)
        started.append(tick.started)
        bands = policy.observe(now + 1, arrivals)
        forecast = (bands[0].p50, bands[0].p90) if bands else None
        tally.second(arrivals, tick.in_slo, tick.shed, pool.states, forecast, pool.num_spot)
        waiting, decoding = serving.queued, serving.decoding
        each = decoding / active if active else 0.0
        kv_usage = min(1.0, each * (prompt + output) / kv_tokens)
        observation = PoolObservation(
            POOL,
            Demand(
                arrivals_per_s=seen.rate[second],
                peak_arrivals_per_s=seen.peak[second],
                dispersion=seen.dispersion[second],
                prompt_tokens=seen.prompt_tokens[second],
                output_tokens=seen.output_tokens[second],
                waiting=int(waiting),
                waiting_tokens=int(waiting * prompt),
                held=0 if active else int(waiting),
                in_flight=int(serving.in_flight),
                oldest_wait_s=tick.ttft_s if waiting >= 1 else 0.0,
                wait_p95_s=max(0.0, tick.ttft_s - 5 * tick.step_s),
                ttft_p95_s=sorted(ttfts)[-2],
                tpot_p95_s=tick.step_s,
                latency_p99_s=tick.ttft_s + 4.6 * serving.life_s,
                kv_usage=kv_usage,
                memory_headroom=1.0 - kv_usage,
                active_sequences=each,
                tokens_per_s=sum(started) / SMOOTHED_S * (prompt + output),
            ),
            pool.views,
            durations,
            bands,
            tuple(offers),
        )
        decision = policy.decide(observation, now + 1)
        if decision.actions:
            tally.decided(decision, observation)
            pool.act(decision.actions, now + 1)
        if progress is not None and second % _PROGRESS_S == 0:
            progress(second, curve.seconds)
    return tally.result(policy.name, curve.name, prices, time.process_time() - began)
