"""The reaction's side of the policy: what is asked right now, whether a queue breaks the SLO, how fast replicas are.

Level and noise are told apart by the dispersion of the arrivals of single seconds. A rise of 15 s counts by what is
beyond the noise, and whole once it has lasted a minute; a burst of a single second is none. The noise also says how
much capacity must be free, so that chance queues stay short. Leading signals decide; measured times and tokens only
correct the profile.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from penstock.core.slo import Slo
from penstock.fleet.policy.memory import PolicyMemory
from penstock.fleet.policy.observation import Demand
from penstock.fleet.policy.profile import MAX_SLOWDOWN, MAX_SPEEDUP, CapacityProfile, Mix

_RATE_S = 60.0  # time constant of the level
_NOISE_S, _CALM_S = 60.0, 600.0  # of noise that grows, and that abates: bursts come again after some calm minutes
_MIX_REQUESTS = 2000.0  # whose mean is the mix; of few requests a second those of five minutes
_WINDOW_S = 15.0  # of `arrivals_per_s`
_NOISE = 1.5  # deviations that a rise must exceed
_SURGE = 6.0  # deviations of a single second, beyond which it is no chance
_BROKEN = 0.7  # of the SLO's TTFT: a queue so long leaves no time for the prompt
_BUDGET_SHARE = 0.05  # of the SLO's error budget: what chance queues may use up
_MAX_SPARE = 3.0  # of the rate: what a replica beyond that keeps is a twentieth of what one in use serves
_MIN_CAUTION = 0.4  # of the spare that theory asks for, while the SLO is kept; chosen by simulation
CORRECTED_EVERY_S = 10.0
_LATENCIES_S = 60.0  # in the times of so many seconds a queue is still seen after its end, and calm after its begin


class Signals(NamedTuple):
    rate: float  # arrivals/s to serve now
    surge: float  # arrivals/s that the last seconds would ask for, if they went on
    level: float  # arrivals/s over a minute
    dispersion: float  # variance of the arrivals of a second over their mean
    burst: float
    burst_at: float
    mix: Mix
    max_rate: float  # of one replica, within the SLO; 0: there is no profile yet
    saturation: float  # of one replica with a queue
    spare: float  # requests/s beyond the rate that the pool must be able to work off
    backlog: float  # requests that wait
    queue_s: float  # how long they keep the active replicas busy
    breaks_slo: bool  # the queue does

    @property
    def level_noise(self) -> float:
        """Deviation of the level by chance, as a share of it."""
        return math.sqrt(self.dispersion / (2 * _RATE_S * self.level)) if self.level else 0.0


def read_signals(
    demand: Demand, memory: PolicyMemory, now: float, num_active: int, profile: CapacityProfile | None, slo: Slo
) -> Signals:
    passed_s = max(0.0, now - memory.at) if memory.at is not None else 0.0
    fast, peak = demand.arrivals_per_s, demand.peak_arrivals_per_s
    # The second that stands out most is left out of its 15 s. Of a surge all others stay.
    burst, burst_at = memory.burst, memory.burst_at
    is_outlier = peak > memory.rate + _SURGE * math.sqrt(memory.dispersion * memory.rate)
    if memory.at is not None and is_outlier and (now - burst_at > _WINDOW_S or peak - memory.rate > burst):
        burst, burst_at = peak - memory.rate, now
    if now - burst_at <= _WINDOW_S:
        fast = max(0.0, fast - burst / _WINDOW_S)
    if memory.at is None or passed_s > 10 * _RATE_S:
        level, dispersion = fast, demand.dispersion
    else:
        level = memory.rate + (fast - memory.rate) * passed_s / (passed_s + _RATE_S)
        tau_s = _NOISE_S if demand.dispersion > memory.dispersion else _CALM_S
        dispersion = memory.dispersion + (demand.dispersion - memory.dispersion) * passed_s / (passed_s + tau_s)
    dispersion = max(1.0, dispersion)  # arrivals are Poisson's at least
    rate = max(level, fast - _NOISE * math.sqrt(dispersion * level / _WINDOW_S))
    surge = max(rate, peak) if is_outlier else rate
    mix = _smoothed_mix(demand, memory, passed_s)
    max_rate = saturation = 0.0
    if profile is not None:
        max_rate = profile.max_rate(mix, slo, memory.slowdown)
        saturation = max(max_rate, profile.saturation(mix, slo, memory.slowdown))
    backlog = float(max(demand.waiting, demand.held))
    if demand.prompt_tokens or memory.prompt_tokens:  # nobody knows how many requests tokens are before the first ends
        backlog = max(backlog, demand.waiting_tokens / mix.prompt_tokens)
    if not num_active:
        queue_s = math.inf if backlog else 0.0
    else:
        queue_s = backlog / (saturation * num_active) if saturation else demand.oldest_wait_s
    late = _BUDGET_SHARE * (1 - slo.quantile)
    # Heavy traffic: P(wait > t) = exp(-2 t spare / dispersion).
    spare = min(dispersion * -math.log(late) / (2 * _BROKEN * slo.ttft_s), _MAX_SPARE * level)
    spare *= _MIN_CAUTION + (1 - _MIN_CAUTION) * memory.caution
    breaks = queue_s > _BROKEN * slo.ttft_s or demand.wait_p95_s > slo.ttft_s
    return Signals(
        rate, surge, level, dispersion, burst, burst_at, mix, max_rate, saturation, spare, backlog, queue_s, breaks
    )


def corrected_slowdown(
    demand: Demand,
    signals: Signals,
    memory: PolicyMemory,
    now: float,
    num_active: int,
    profile: CapacityProfile,
    slo: Slo,
) -> float:
    """Correction of the profile by what is measured, bounded per round and altogether: one odd report changes little.

    Asked every ten seconds. Tokens of replicas that have had a queue for a minute say how fast they are; TPOT and TTFT
    beyond what load and queues explain say that they are slower, and never that they are faster: a pool within its SLO
    proves only its load.
    """
    slowdown = memory.slowdown
    if not num_active or signals.level < 0.3 * signals.max_rate * num_active:
        return slowdown
    mix = signals.mix
    told = 1.0
    has_queued_s = now - memory.queued_since if memory.queued_since is not None else 0.0
    if has_queued_s >= _LATENCIES_S and signals.queue_s > slo.ttft_s and demand.tokens_per_s > 0:
        served = demand.tokens_per_s / (mix.prompt_tokens + mix.output_tokens) / num_active
        told = signals.saturation / served
    elif (
        not signals.breaks_slo
        and now - memory.queued_at > _LATENCIES_S
        and signals.level <= signals.max_rate * num_active
    ):
        predicted = profile.predict(mix, slo, signals.level / num_active, slowdown)
        is_late = demand.ttft_p95_s > max(slo.ttft_s, predicted.ttft_p_s)
        is_slow = slo.tpot_s is not None and demand.tpot_p95_s > max(slo.tpot_s, predicted.tpot_p_s)
        told = 1.1 if is_late or is_slow else 1.0
    slowdown *= math.pow(min(1.25, max(0.8, told)), 0.05)
    return min(MAX_SLOWDOWN, max(1 / MAX_SPEEDUP, slowdown))


def _smoothed_mix(demand: Demand, memory: PolicyMemory, passed_s: float) -> Mix:
    if demand.prompt_tokens <= 0:  # nobody has asked lately
        return Mix(max(1.0, memory.prompt_tokens), max(1.0, memory.output_tokens), memory.cached_share)
    tau_s = min(300.0, max(10.0, _MIX_REQUESTS / max(1.0, demand.arrivals_per_s)))
    weight = passed_s / (passed_s + tau_s) if memory.prompt_tokens else 1.0
    return Mix(
        max(1.0, memory.prompt_tokens + (demand.prompt_tokens - memory.prompt_tokens) * weight),
        max(1.0, memory.output_tokens + (demand.output_tokens - memory.output_tokens) * weight),
        memory.cached_share + (demand.cached_share - memory.cached_share) * weight,
    )
