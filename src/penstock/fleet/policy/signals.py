"""The reaction's side of the policy: what is asked right now, whether a queue breaks the SLO, how fast replicas are.

Arrivals of 15 s are noisy: a rise counts by what is beyond the noise that this pool has shown, and whole once it has
lasted a minute; a burst of a single second is none. The noise also says how much capacity must be free, so that chance
queues stay short. Leading signals decide; measured times and tokens only correct the profile.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from penstock.core.slo import Slo
from penstock.fleet.policy.memory import PolicyMemory
from penstock.fleet.policy.observation import Demand
from penstock.fleet.policy.profile import MAX_SLOWDOWN, MAX_SPEEDUP, CapacityProfile, Mix

_RATE_S, _NOISE_S = 60.0, 900.0  # time constants
_MIX_REQUESTS = 2000.0  # whose mean is the mix; of few requests a second those of five minutes
_WINDOW_S = 15.0  # of `arrivals_per_s`
_NOISE = 1.5  # deviations that a rise must exceed
_SURGE = 6.0  # deviations of a single second, beyond which it is no chance
_BROKEN = 0.7  # of the SLO's TTFT: a queue so long leaves no time for the prompt
_BUDGET_SHARE = 0.05  # of the SLO's error budget: what chance queues may use up
_MAX_DISPERSION = 30.0
_MAX_SPARE = 0.5  # of the rate
_MIN_CAUTION = 0.4
CORRECTED_EVERY_S = 10.0


class Signals(NamedTuple):
    rate: float  # arrivals/s to serve now
    surge: float  # arrivals/s that the last seconds would ask for, if they went on
    level: float  # arrivals/s over a minute
    variance: float  # of `arrivals_per_s` around it
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
    def noise(self) -> float:
        return math.sqrt(self.variance)


def read_signals(
    demand: Demand, memory: PolicyMemory, now: float, num_active: int, profile: CapacityProfile | None, slo: Slo
) -> Signals:
    passed_s = max(0.0, now - memory.at) if memory.at is not None else 0.0
    fast, peak = demand.arrivals_per_s, demand.peak_arrivals_per_s
    # The second that stands out most is left out of its 15 s. Of a surge all others stay.
    burst, burst_at = memory.burst, memory.burst_at
    is_outlier = peak > memory.rate + _SURGE * math.sqrt(_WINDOW_S * memory.variance)
    if memory.at is not None and is_outlier and (now - burst_at > _WINDOW_S or peak - memory.rate > burst):
        burst, burst_at = peak - memory.rate, now
    if now - burst_at <= _WINDOW_S:
        fast = max(0.0, fast - burst / _WINDOW_S)
    if memory.at is None or passed_s > 10 * _RATE_S:
        level, variance = fast, fast / _WINDOW_S
    else:
        level = memory.rate + (fast - memory.rate) * passed_s / (passed_s + _RATE_S)
        off = min((fast - level) ** 2, 9 * memory.variance + 1.0)  # a jump is no noise
        variance = memory.variance + (off - memory.variance) * passed_s / (passed_s + _NOISE_S)
    variance = max(variance, level / _WINDOW_S)  # arrivals are Poisson's at least
    noise = math.sqrt(variance)
    rate = max(level, fast - _NOISE * noise)
    surge = max(rate, peak) if is_outlier else rate
    mix = _smoothed_mix(demand, memory, passed_s)
    max_rate = saturation = 0.0
    if profile is not None:
        max_rate = profile.max_rate(mix, slo, memory.slowdown)
        saturation = max(max_rate, profile.saturation(mix, slo, memory.slowdown))
    backlog = max(float(demand.waiting), float(demand.held), demand.waiting_tokens / mix.prompt_tokens)
    if not num_active:
        queue_s = math.inf if backlog else 0.0
    else:
        queue_s = backlog / (saturation * num_active) if saturation else demand.oldest_wait_s
    dispersion = min(_MAX_DISPERSION, max(1.0, variance * _WINDOW_S / level)) if level > 0 else 1.0
    late = _BUDGET_SHARE * (1 - slo.quantile)
    # Heavy traffic: P(wait > t) = exp(-2 t spare / dispersion).
    spare = min(dispersion * -math.log(late) / (2 * _BROKEN * slo.ttft_s), _MAX_SPARE * level)
    spare *= _MIN_CAUTION + (1 - _MIN_CAUTION) * memory.caution
    breaks = queue_s > _BROKEN * slo.ttft_s or demand.wait_p95_s > slo.ttft_s
    return Signals(
        rate, surge, level, variance, burst, burst_at, mix, max_rate, saturation, spare, backlog, queue_s, breaks
    )


def corrected_slowdown(
    demand: Demand, signals: Signals, memory: PolicyMemory, num_active: int, profile: CapacityProfile, slo: Slo
) -> float:
    """Correction of the profile by what is measured, bounded per round and altogether: one odd report changes little.

    Asked every ten seconds. Tokens of replicas with a queue say how fast they are; TPOT and TTFT beyond what the load
    explains say that they are slower, and never that they are faster: a pool within its SLO proves only its load.
    """
    slowdown = memory.slowdown
    if not num_active or signals.level < 0.3 * signals.max_rate * num_active:
        return slowdown
    mix = signals.mix
    told = 1.0
    if signals.queue_s > slo.ttft_s and demand.tokens_per_s > 0:
        served = demand.tokens_per_s / (mix.prompt_tokens + mix.output_tokens) / num_active
        told = signals.saturation / served
    elif signals.queue_s < slo.ttft_s and signals.level <= signals.max_rate * num_active:
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
