"""Verdicts of gates: the new version is better, equal within a margin, worse, or nobody knows yet.

An interval that lies wholly beyond the margin says worse; one whose end is within it says equal, and better where it
lies wholly on the good side of no difference. Lengths of answers are judged on both sides.

A rollout has three comparisons: copies with copies, clients with clients, and at last all clients with those that the
old version had. The probability of a false alarm is shared out over them and their gates; a quarter of it is for gates
of tenants. To look again is free, which is what the tests are for.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, log1p

from msgspec.structs import replace

from penstock.core.rollout import Arm, Metric
from penstock.rollout.policy.evidence import MEANS, ArmsEvidence, Comparison, Evidence, offset_of
from penstock.rollout.policy.plan import OF_COPIES, GateSettings, RolloutPlan, gate_metric, is_ratio
from penstock.rollout.policy.sequential import Span, is_difference_excluded, share_difference, share_estimate
from penstock.rollout.policy.state import GateResult, Phase, RolloutState, Verdict

_FOR_ALL = 0.75  # of alpha; the rest is for tenants' gates
_MIN_PAIRS = 20  # fewer: copies are compared as if nobody knew that they were of the same requests


def evidence_for(state: RolloutState) -> Evidence:
    """Evidence without a block yet, for the gates of the rollout's plan."""
    return Evidence(state.id, state.plan.enabled_gates)


def with_tenants(state: RolloutState, evidence: Evidence) -> RolloutState:
    """The tenants that have gates of their own are chosen once in a step, by their requests alone: as soon as it has
    those that it needs."""
    needed = max(state.watched_step.min_requests, 1)
    if state.tenants or not state.plan.tenants or evidence.new_requests(state.watched) < needed:
        return state
    return replace(state, tenants=evidence.largest_tenants(state.watched, state.plan.tenants))


def judge(state: RolloutState, evidence: Evidence, *, with_intervals: bool = True) -> list[GateResult]:
    """The gates of the step that is watched. Those of what nobody measures are left out. Intervals of shares take a
    while; verdicts are the same without them."""
    watched = _Watched(state, evidence, with_intervals)
    gates = state.plan.enabled_gates
    of_all, of_tenants = alphas(state.plan)
    found = [watched.verdict(name, gate, of_all, "") for name, gate in gates.items()]
    for tenant in state.tenants:
        found += [watched.verdict(name, gate, of_tenants, tenant) for name, gate in gates.items() if gate.tenants]
    return [result for result in found if result is not None]


def alphas(plan: RolloutPlan) -> tuple[float, float]:
    """Returns alpha of one gate in one comparison, and of one tenant's."""
    gates = plan.enabled_gates.values()
    comparisons = 1 + any(step.is_shadow for step in plan.steps) + any((step.share or 1.0) < 1.0 for step in plan.steps)
    # Other tenants may be the largest in each step.
    tenants = plan.tenants * len(plan.steps) * sum(gate.tenants for gate in gates)
    for_all = _FOR_ALL if tenants else 1.0
    return plan.alpha * for_all / (comparisons * max(len(gates), 1)), plan.alpha * (1.0 - for_all) / max(tenants, 1)


@dataclass(frozen=True)
class _Watched:
    state: RolloutState
    evidence: Evidence
    with_intervals: bool

    @property
    def is_full(self) -> bool:
        """All clients are at the new version: nobody is left to compare times with."""
        return self.state.watched_step.share == 1.0

    def verdict(self, name: str, gate: GateSettings, alpha: float, tenant: str) -> GateResult | None:
        metric, quantile = gate_metric(name)
        result = GateResult(name, Verdict.UNDECIDED, gate.margin, alpha, tenant, is_ratio=is_ratio(metric))
        if metric in OF_COPIES and not self.state.watched_step.is_shadow:
            return None
        if metric is Metric.REFUSALS and self.state.phase is Phase.HOLDING:
            return None  # they tell of the hour's load, and a hold has other hours than the old version had
        if metric not in MEANS:
            return self._share(result, metric)
        if self.is_full:
            return None
        arms = self.evidence.copies if self.state.watched_step.is_shadow else self.evidence.clients
        if quantile is not None:
            return _of_quantile(result, arms, metric, quantile)
        comparison = arms.means.get((metric, tenant))
        pairs = self.evidence.pairs.means.get((metric, tenant))
        if self.state.watched_step.is_shadow and pairs is not None and pairs.new_count >= _MIN_PAIRS:
            comparison = pairs
        return None if comparison is None else _of_mean(result, comparison, metric)

    def _share(self, result: GateResult, metric: Metric) -> GateResult | None:
        spans = self._spans(metric, result.tenant)
        old_count, new_count = sum(old[1] for old, _ in spans), sum(new[1] for _, new in spans)
        if not old_count and not new_count:
            return None
        old_sum, new_sum = sum(old[0] for old, _ in spans), sum(new[0] for _, new in spans)
        estimate = share_estimate(spans)
        result = replace(
            result,
            estimate=estimate if new_count else None,
            old_count=old_count,
            new_count=new_count,
            old_value=old_sum / old_count if old_count else None,
            new_value=new_sum / new_count if new_count else None,
            method="beta-binomial mixture",
        )
        if not new_count:
            return result
        if is_difference_excluded(spans, result.margin, result.alpha):
            verdict = Verdict.WORSE if estimate > result.margin else Verdict.EQUAL
            if verdict is Verdict.EQUAL and estimate < 0.0 and is_difference_excluded(spans, 0.0, result.alpha):
                verdict = Verdict.BETTER
            result = replace(result, verdict=verdict)
        if self.with_intervals:
            interval = share_difference(spans, result.alpha)
            result = replace(result, low=interval.low, high=interval.high)
        return result

    def _spans(self, metric: Metric, tenant: str) -> list[Span]:
        """Old and new arm of each step that belongs to the comparison."""
        counts, step, steps = self.evidence.counts, self.state.watched, self.state.plan.steps
        if self.state.watched_step.is_shadow:
            arms = [
                (counts(i, metric, Arm.OLD_COPY, tenant), counts(i, metric, Arm.NEW_COPY, tenant))
                for i in range(step + 1)
            ]
        elif self.is_full:
            before = [counts(i, metric, Arm.OLD, tenant) for i in range(step + 1)]
            old = sum(total for total, _ in before), sum(count for _, count in before)
            arms = [(old, counts(step, metric, Arm.NEW, tenant))]
        else:
            arms = [
                (counts(i, metric, Arm.OLD, tenant), counts(i, metric, Arm.NEW, tenant))
                for i in range(step + 1)
                if not steps[i].is_shadow
            ]
        return [(old, new) for old, new in arms if new[1]] or arms[-1:]


def _of_mean(result: GateResult, comparison: Comparison, metric: Metric) -> GateResult:
    result = replace(
        result, old_count=comparison.old_count, new_count=comparison.new_count, method="mixture t-test of windows"
    )
    if (interval := comparison.test.interval(result.alpha)) is None:
        return result
    margin = log1p(result.margin) if result.is_ratio else result.margin
    verdict = _placed(interval.low, interval.high, margin, is_two_sided=metric is Metric.OUTPUT_TOKENS)
    shown = [
        exp(min(value, 50.0)) if result.is_ratio else value
        for value in (interval.estimate, interval.low, interval.high)
    ]
    return replace(result, verdict=verdict, estimate=shown[0], low=shown[1], high=shown[2])


def _of_quantile(result: GateResult, arms: ArmsEvidence, metric: Metric, quantile: float) -> GateResult | None:
    comparison = arms.quantiles.get((metric, quantile))
    if comparison is None or not comparison.new_count:
        return None
    beyond = comparison.is_beyond(offset_of(result.margin), result.alpha)
    verdict = Verdict.UNDECIDED
    if beyond is True:
        verdict = Verdict.WORSE
    elif beyond is False:
        verdict = Verdict.BETTER if comparison.is_beyond(0, result.alpha) is False else Verdict.EQUAL
    low, high = comparison.bounds(result.alpha)
    return replace(
        result,
        verdict=verdict,
        estimate=comparison.ratio(),
        low=low,
        high=high,
        old_count=comparison.old_count,
        new_count=comparison.new_count,
        old_value=comparison.value(comparison.old_bins),
        new_value=comparison.value(comparison.new_bins),
        method="mixture t-test of shares above the quantile",
    )


def _placed(low: float, high: float, margin: float, *, is_two_sided: bool = False) -> Verdict:
    if low > margin or (is_two_sided and high < -margin):
        return Verdict.WORSE
    if is_two_sided:
        return Verdict.EQUAL if high < margin and low > -margin else Verdict.UNDECIDED
    if high < 0.0:
        return Verdict.BETTER
    return Verdict.EQUAL if high < margin else Verdict.UNDECIDED
