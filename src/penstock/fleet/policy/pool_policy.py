"""The policy of one pool: from what is seen to what is done, once a second.

    signals ──▶ sizing (or thresholds) ──▶ bounds, cooldowns ──▶ wanted ──▶ transitions: activate, wake, start, drain
    forecast ──▶   │                                                          │ placement, departure
                   └──▶ warm: standby and parked

`decide` is a fold over its memory; what the object itself keeps are answers that it would reckon again.
"""

from __future__ import annotations

import math

from penstock.core.slo import Slo
from penstock.fleet.policy.bounds import Bounds, ScheduledBounds
from penstock.fleet.policy.census import Census
from penstock.fleet.policy.decision import Decision
from penstock.fleet.policy.memory import PolicyMemory
from penstock.fleet.policy.observation import Durations, PoolObservation
from penstock.fleet.policy.profile import CapacityProfile
from penstock.fleet.policy.signals import CORRECTED_EVERY_S, Signals, corrected_slowdown, read_signals
from penstock.fleet.policy.sizing import Sizing, band_at, needed_for, size
from penstock.fleet.policy.thresholds import needed_by_thresholds
from penstock.fleet.policy.transitions import Transitions
from penstock.fleet.policy.warm import Surge, WarmPlan, plan_warm
from penstock.fleet.settings import PoolSettings, Signal

_MOST_SPAN_S = 10.0  # of the record of needs
_UNSEEN_S = 60.0  # a record with a longer gap says nothing
_MIN_HOLD_S = 120.0  # twice the level's time constant: before, a lull and a fall look alike
_BETWEEN_DRAINS_S = 30.0  # signals of 15 s have seen the last drain twice
_BUDGET_SHARE = 0.05  # of the SLO's error budget: what scaling may use up
_CAUTION_DAY_S = 86400.0  # a day without a broken SLO takes the forecast's plan from its p99 to its middle
_PEAK_S = 1.5 * 86400.0  # how long the busiest time is remembered
_AFTER_BURST_S = 60.0


class PoolPolicy:
    """`profile` may be set anew as replicas report; None: nothing is known yet, and the SLO's times are thresholds."""

    def __init__(self, settings: PoolSettings, slo: Slo, profile: CapacityProfile | None) -> None:
        self.settings, self.slo, self.profile = settings, slo, profile
        self._bounds = ScheduledBounds(settings)
        self._surges: dict[tuple[int, int, int, Durations], WarmPlan] = {}
        allowed = _BUDGET_SHARE * (1 - slo.quantile)
        self._relief = 1 / _CAUTION_DAY_S  # of caution, per second within the SLO
        self._alarm = self._relief / allowed

    def horizons(self, durations: Durations) -> tuple[float, ...]:
        """Times ahead, in seconds, for which `decide` wants the forecast."""
        up_s, down_s = self.settings.up_cooldown_s, self.settings.down_cooldown_s
        return tuple(sorted({durations.wake_s, durations.start_s + up_s, durations.start_s + down_s}))

    def decide(self, observation: PoolObservation, memory: PolicyMemory, now: float) -> tuple[Decision, PolicyMemory]:
        round_ = _Round(self, observation, memory, now)
        return round_.decision()


class _Round:
    """One call of `decide`."""

    def __init__(self, policy: PoolPolicy, observation: PoolObservation, memory: PolicyMemory, now: float) -> None:
        self.policy, self.settings, self.seen, self.memory, self.now = policy, policy.settings, observation, memory, now
        self.census = Census(observation.replicas)
        self.passed_s = max(0.0, now - memory.at) if memory.at is not None else 0.0
        self.transitions = Transitions(policy.settings, observation, self.census, memory, now)

    def decision(self) -> tuple[Decision, PolicyMemory]:
        policy, memory, census, now = self.policy, self.memory, self.census, self.now
        demand, num_active = self.seen.demand, len(census.active)
        signals = read_signals(demand, memory, now, num_active, policy.profile, policy.slo)
        bounds = policy._bounds.at(now).raised(self.seen.floor)
        is_busy = demand.arrivals_per_s > 0 or demand.in_flight > 0 or signals.backlog > 0 or demand.held > 0
        is_new = memory.busy_at is None and census.num_ready > 0
        busy_at = now if is_busy or is_new else memory.busy_at or -1e9
        sizing = self._size(signals, busy_at)
        needs = self._needs(sizing.held)
        before = min(bounds.max, max(bounds.min, memory.wanted if memory.wanted is not None else census.num_ready))
        before = min(before, max(bounds.min, census.num_ready, sizing.held))  # what has not come is not waited for
        wanted, up_at, down_at = self._step(sizing, bounds, before, needs)
        peak = memory.peak * (1 - min(1.0, self.passed_s / _PEAK_S))
        peak = peak if sizing.urgent else max(peak, sizing.needed)
        warm = self._plan_warm(signals, wanted, peak)
        if self.settings.parked != 0:
            warm = warm._replace(kept=max(warm.kept, self.seen.kept))
        surplus_at, moved_at = self.transitions.reach(wanted, warm, bounds, self._why(sizing))
        actions = tuple(self.transitions.actions)
        slowdown, corrected_at = memory.slowdown, memory.corrected_at
        if policy.profile is not None and now - corrected_at >= CORRECTED_EVERY_S:
            slowdown = corrected_slowdown(demand, signals, memory, now, num_active, policy.profile, policy.slo)
            corrected_at = now
        remembered = PolicyMemory(
            wanted=wanted,
            at=now,
            up_at=up_at,
            down_at=down_at,
            busy_at=busy_at,
            rate=signals.level,
            dispersion=signals.dispersion,
            burst=signals.burst,
            burst_at=signals.burst_at,
            prompt_tokens=signals.mix.prompt_tokens,
            output_tokens=signals.mix.output_tokens,
            cached_share=signals.mix.cached_share,
            slowdown=slowdown,
            corrected_at=corrected_at,
            queued_at=now if signals.breaks_slo else memory.queued_at,
            queued_since=(memory.queued_since or now) if signals.breaks_slo else None,
            caution=self._caution(signals, is_busy),
            needs=needs,
            peak=peak,
            surplus_at=surplus_at,
            moved_at=moved_at,
        )
        has_changed = bool(actions) or wanted != memory.wanted
        decision = Decision(
            pool=self.seen.pool,
            at=now,
            wanted=wanted,
            standby=warm.standby,
            parked=warm.kept,
            actions=actions,
            reason=self._reason(sizing, signals, wanted, warm) if has_changed else "",
            bound=self.transitions.bound,
            warm_bound=self.transitions.warm_bound,
            numbers=self._numbers(sizing, signals, wanted) if has_changed else {},
        )
        return decision, remembered

    # How many

    def _size(self, signals: Signals, busy_at: float) -> Sizing:
        settings, census, policy = self.settings, self.census, self.policy
        if settings.scale_on or policy.profile is None:
            sizing = self._by_thresholds(signals)
        else:
            sizing = size(
                signals,
                self.seen.forecast if settings.predict else (),
                self.seen.durations,
                up_cooldown_s=settings.up_cooldown_s,
                caution=self.memory.caution,
                num_ready=census.num_ready,
                reserve=census.reserve,
                is_surge_declared=settings.surge > 1,
            )
        if settings.min > 0:
            return sizing
        if not self._may_sleep(busy_at):
            woken = not self.memory.wanted
            return sizing._replace(
                needed=max(1, sizing.needed),
                held=max(1, sizing.held),
                urgent=sizing.urgent or woken,
                reason="a request waits" if woken and sizing.needed <= 1 else sizing.reason,
            )
        return Sizing(0, 0, 0, False, 0.0, "idle")

    def _may_sleep(self, busy_at: float) -> bool:
        """Whether a pool with `min: 0` may go to zero: nobody has asked for a while, and nobody is expected."""
        idle_s = self.settings.idle_s
        if self.now - busy_at < (idle_s if self.memory.wanted else 1e-9):
            return False
        expected = max((band.p50 for band in self.seen.forecast), default=0.0) if self.settings.predict else 0.0
        return expected * idle_s < 1.0

    def _by_thresholds(self, signals: Signals) -> Sizing:
        slo, demand = self.policy.slo, self.seen.demand
        scale_on: dict[Signal, float] = dict(self.settings.scale_on)
        if not scale_on:
            scale_on = {"wait_s": slo.ttft_s / 2, "ttft_s": slo.ttft_s, "kv_usage": 0.9}
            if slo.tpot_s is not None:
                scale_on["tpot_s"] = slo.tpot_s
        needed, reason = needed_by_thresholds(scale_on, demand, max(1, self.census.num_ready))
        is_urgent = signals.breaks_slo and not self.census.coming  # signals lag: what comes has not told yet
        return Sizing(needed, needed, needed, is_urgent, signals.rate, reason)

    @property
    def _hold_s(self) -> float:
        """The time that less must have been enough: a replica not needed may cost what its return costs twice."""
        return min(self.settings.down_cooldown_s, max(_MIN_HOLD_S, 2 * self.seen.durations.start_s))

    def _needs(self, held: int) -> tuple[tuple[int, int], ...]:
        """The record of needs, for steps down."""
        needs, span = self.memory.needs, self._span(self.now)
        if needs and needs[-1][0] == span:
            return needs if held <= needs[-1][1] else (*needs[:-1], (span, held))
        oldest = self._span(self.now - self._hold_s)
        if needs and needs[-1][0] < self._span(self.now - _UNSEEN_S):
            needs = ()  # nobody looked for a while
        return (*(each for each in needs if each[0] >= oldest), (span, held))

    def _span(self, at: float) -> int:
        """Number of the span of the record that a moment is in; a cooldown has ten at least."""
        return int(at // min(_MOST_SPAN_S, max(1.0, self.settings.down_cooldown_s / 10)))

    def _step(
        self, sizing: Sizing, bounds: Bounds, before: int, needs: tuple[tuple[int, int], ...]
    ) -> tuple[int, float, float]:
        """Active replicas wanted, and when the last steps were."""
        settings, memory, now = self.settings, self.memory, self.now
        up_at, down_at = memory.up_at, memory.down_at
        wanted = min(bounds.max, max(bounds.min, sizing.needed))
        if sizing.needed > bounds.max:
            self.transitions.bound = bounds.max_name
        elif sizing.needed < bounds.min:
            self.transitions.bound = bounds.min_name
        if wanted > before:
            has_waited = now - up_at >= settings.up_cooldown_s or wanted <= before + self.census.reserve
            is_sure = sizing.firm > before or now - down_at >= settings.down_cooldown_s or before < bounds.min
            if sizing.urgent or (has_waited and is_sure):
                return wanted, now, down_at
            return before, up_at, down_at
        held = max(bounds.min, max(need for _, need in needs))
        is_whole = needs[0][0] <= self._span(now - self._hold_s)
        has_rested = now - up_at > settings.down_cooldown_s and now - down_at >= min(_BETWEEN_DRAINS_S, self._hold_s)
        if held < before and is_whole and has_rested:
            return before - (before - held + 1) // 2, up_at, now  # half of the way, then the signals are read again
        return before, up_at, down_at

    def _caution(self, signals: Signals, is_busy: bool) -> float:
        """More with each second that a queue breaks the SLO, less with each in which none does: in balance when
        scaling uses up its share of the error budget."""
        caution, passed_s = self.memory.caution, min(self.passed_s, 10.0)
        if self.now - signals.burst_at < _AFTER_BURST_S:
            return caution  # no plan would have held it
        if signals.queue_s > self.policy.slo.ttft_s:
            return min(1.0, caution + self.policy._alarm * passed_s)
        return max(0.0, caution - self.policy._relief * passed_s) if is_busy else caution

    # In which state

    def _plan_warm(self, signals: Signals, wanted: int, peak: float) -> WarmPlan:
        settings, durations, policy = self.settings, self.seen.durations, self.policy
        room = max(0, settings.max - wanted)
        beyond = min(room, max(0, math.ceil(peak - 1e-9) - wanted))
        if settings.surge > 1 and signals.saturation and signals.level > 0:
            level, saturation = (round(50 * math.log(each)) for each in (signals.level, signals.saturation))
            key = (wanted, level, saturation, durations)
            if (plan := policy._surges.get(key)) is None:
                if len(policy._surges) > 1000:
                    policy._surges.clear()
                rate = settings.surge * math.exp(level / 50)
                surge = Surge(rate, wanted, math.exp(saturation / 50), 0.7 * policy.slo.ttft_s)
                plan = policy._surges[key] = plan_warm(settings, durations, surge, 0, 0)
            if beyond > plan.kept and settings.parked is None and not settings.parked_price_per_hour:
                return plan._replace(kept=beyond)
            return plan
        spread = 0
        if settings.predict and signals.max_rate and settings.parked is None:
            band = band_at(self.seen.forecast, durations.start_s + settings.up_cooldown_s)
            spread = min(room, max(0, needed_for(band.p99, signals) - wanted)) if band is not None else 0
        return plan_warm(settings, durations, None, spread, beyond)

    # Why

    def _why(self, sizing: Sizing) -> str:
        at_least = self.policy._bounds.at(self.now).raised(self.seen.floor).min
        before = self.memory.wanted
        if before is not None and sizing.needed <= before and self.census.num_ready < before:
            if self.census.doomed:
                return f"in place of {', '.join(each.id for each in self.census.doomed)}, which is taken away"
            return f"{before - self.census.num_ready} of {before} replicas are missing"
        if self.census.num_ready < at_least and sizing.needed <= at_least and not sizing.urgent:
            return f"the pool has at least {at_least}" + (", for a rollout" if self.seen.floor == at_least else "")
        match sizing.reason:
            case "queue":
                return f"a queue breaks the TTFT of {self.policy.slo.ttft_s:g} s"
            case "surge":
                return f"a surge to {sizing.rate:.3g} requests/s"
            case "forecast":
                return f"{sizing.rate:.3g} requests/s are expected"
            case "demand":
                return f"{sizing.rate:.3g} requests/s"
            case other:
                return other

    def _reason(self, sizing: Sizing, signals: Signals, wanted: int, warm: WarmPlan) -> str:
        said = self._why(sizing)
        if signals.max_rate and sizing.reason in ("queue", "surge", "forecast", "demand"):
            said = f"{said}, {signals.max_rate:.3g} per replica within the SLO: {sizing.needed} needed"
        if bound := self.transitions.bound:
            said = f"{said}; bound by {bound}"
        elif wanted > sizing.needed:
            said = f"{said}; {sizing.held} held by the last {self._hold_s:.0f} s and the forecast"
        return f"{said}; {warm.reason}" if warm.reason else said

    def _numbers(self, sizing: Sizing, signals: Signals, wanted: int) -> dict[str, float]:
        numbers = {
            "rate": signals.rate,
            "planned_rate": sizing.rate,
            "needed": float(sizing.needed),
            "held": float(sizing.held),
            "max_rate": signals.max_rate,
            "backlog": signals.backlog,
            "caution": self.memory.caution,
            "slowdown": self.memory.slowdown,
        }
        for band in self.seen.forecast[:2]:
            numbers[f"forecast_p50_{band.horizon_s:.0f}s"] = band.p50
            numbers[f"forecast_p99_{band.horizon_s:.0f}s"] = band.p99
        if self.policy.profile is not None and wanted and sizing.rate > 0:
            told = self.policy.profile.predict(signals.mix, self.policy.slo, sizing.rate / wanted, self.memory.slowdown)
            numbers |= {
                "predicted_ttft_s": told.ttft_p_s,
                "predicted_tpot_s": told.tpot_p_s,
                "predicted_kv_usage": told.kv_usage,
            }
        return {name: round(value, 4) if math.isfinite(value) else -1.0 for name, value in numbers.items()}
