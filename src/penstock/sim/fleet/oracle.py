"""The oracle: the fewest replica-hours that keep the SLO's target, the whole demand known ahead, starts paid for.

Needed at a second: the fewest replicas for which no window that ends there brings more work than they do in it and in
the time that a first token may wait. Level k (the k-th replica) is needed while that is k or more, and is planned by
itself: being there costs its seconds, each begin costs a start and a drain besides, and each needed second without it
loses its share of that second's requests. At a price per lost request the best plan of a level is a walk over its
needed spans (on or off); the price is searched at which the simulated share of requests within the SLO just reaches the
target. So the oracle does not start fifty replicas for one second's burst, unless the target asks for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from penstock.fleet.policy.decision import Action, ActionKind, Decision
from penstock.fleet.policy.observation import Durations, ForecastBand, PoolObservation, ReplicaState
from penstock.sim.fleet.demand import Counts, DemandCurve, Numbers
from penstock.sim.fleet.serving import Serving

_SPANS_S = (1, 2, 3, 5, 8, 13, 21, 34, 60)
_BURST_WORK = 0.8  # of a request's work, within the few seconds in which its decodes have not all come
_JOINED_S = 5  # needed spans so close are one
_DRAIN_S = 10.0
_SEARCHES = 12
_SIMULATIONS = 5
_MARGIN = 0.0001  # of the target, so that a search ends above it


class Plan(NamedTuple):
    """Replicas that are active in each second, and that are to be started and stopped at its end."""

    active: Counts
    starts: Counts
    stops: Counts

    @property
    def replica_seconds(self) -> int:
        """Those of starts included."""
        return int(np.cumsum(self.starts - self.stops).sum())


class Oracle:
    """Acts as planned. It stops replicas that are active, since those that start are for later."""

    name = "oracle"

    def __init__(self, plan: Plan, begins_at: float) -> None:
        self._starts, self._stops = plan.starts.tolist(), plan.stops.tolist()
        self._begins_at = begins_at

    def observe(self, now: float, arrivals_per_s: float) -> tuple[ForecastBand, ...]:
        return ()

    def decide(self, observation: PoolObservation, now: float) -> Decision:
        second = min(len(self._starts) - 1, int(now - self._begins_at))
        active = [each.id for each in observation.replicas if each.state is ReplicaState.ACTIVE]
        change = self._starts[second] - self._stops[second]
        actions = [Action(ActionKind.START, self.name)] * change
        actions += [Action(ActionKind.STOP, self.name, each) for each in active[: max(0, -change)]]
        return Decision(observation.pool, now, len(active), actions=tuple(actions))


def needed_replicas(curve: DemandCurve, serving: Serving) -> Numbers:
    """Replicas, and parts of one, for each second."""
    changes = np.flatnonzero(np.diff(curve.prompt_tokens) + np.diff(curve.output_tokens)) + 1
    begins = np.concatenate([[0], changes])
    lengths = np.diff(np.concatenate([begins, [curve.seconds]]))
    rates = [serving.work(float(curve.prompt_tokens[at]), float(curve.output_tokens[at])).rate for at in begins]
    work = curve.arrivals / np.repeat(rates, lengths)
    total = np.concatenate([[0.0], np.cumsum(work)])
    slack_s = 0.85 * serving.slo.ttft_s
    most: Numbers = np.zeros(curve.seconds)
    for span in _SPANS_S:
        first = np.maximum(0, np.arange(1, curve.seconds + 1) - span)
        factor = _BURST_WORK if span <= 3 else 1.0
        most = np.maximum(most, factor * (total[1:] - total[first]) / (span + slack_s))
    return most


class Level(NamedTuple):
    """Spans of seconds that need the k-th replica, and the requests that its share of each span is."""

    begins: Counts
    ends: Counts
    requests: Numbers


def needed_levels(needed: Counts, arrivals: Counts, least: int) -> list[Level]:
    shares = arrivals / np.maximum(1, needed)
    return [_level(needed >= level, shares) for level in range(least + 1, int(needed.max()) + 1)]


def _level(is_needed: np.ndarray, shares: Numbers) -> Level:
    edges = np.diff(np.concatenate([[0], is_needed.astype(np.int8), [0]]))
    begins, ends = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)
    if len(begins) > 1:
        far = np.flatnonzero(begins[1:] - ends[:-1] > _JOINED_S)
        begins, ends = begins[np.concatenate([[0], far + 1])], ends[np.concatenate([far, [len(ends) - 1]])]
    total = np.concatenate([[0.0], np.cumsum(np.where(is_needed, shares, 0.0))])
    return Level(begins, ends, total[ends] - total[begins])


def plan_levels(levels: Sequence[Level], seconds: int, start_s: float, price_s: float, least: int) -> Plan:
    """`price_s`: replica-seconds that one request within the SLO is worth."""
    lead = math.ceil(start_s) + 1
    begins, starts, stops = np.zeros((3, seconds + 1), dtype=np.int64)
    begins[0] = starts[0] = least
    for level in levels:
        for begin, end in _level_spans(level, price_s, start_s + _DRAIN_S):
            starts[max(0, begin - lead)] += 1
            begins[begin] += 1
            stops[end] += 1
    return Plan(np.cumsum(begins - stops)[:seconds], starts[:seconds], stops[:seconds])


def _level_spans(level: Level, price_s: float, begin_cost: float) -> list[tuple[int, int]]:
    worth = (price_s * level.requests - (level.ends - level.begins)).tolist()
    starts, stops = level.begins.tolist(), level.ends.tolist()
    on, off = -math.inf, 0.0
    goes_on: list[bool] = []  # if on at a span: whether it was on since the one before
    was_on: list[bool] = []  # if off after a span: whether it was on in it
    before = 0
    for begin, end, gain in zip(starts, stops, worth, strict=True):
        kept, begun = on - (begin - before), off - begin_cost
        goes_on.append(kept > begun)
        new_on = gain + max(kept, begun)
        was_on.append(new_on > off)
        on, off = new_on, max(off, new_on)
        before = end
    spans: list[tuple[int, int]] = []
    is_on, last_end = False, 0
    for index in range(len(starts) - 1, -1, -1):
        if not is_on and was_on[index]:
            is_on, last_end = True, stops[index]
        if is_on and not goes_on[index]:
            spans.append((starts[index], last_end))
            is_on = False
    return spans


def best_plan(
    curve: DemandCurve, serving: Callable[[], Serving], durations: Durations, target: float, least: int
) -> Plan:
    """The cheapest plan that keeps `target`; if none does, the one that keeps most. What a plan is expected to keep is
    off by what queues carry from one second to the next, so what to expect is searched with simulations."""
    needed = np.ceil(needed_replicas(curve, serving()) - 1e-9).astype(np.int64)
    levels = needed_levels(needed, curve.arrivals, least)
    found: list[tuple[bool, float, Plan]] = []
    low, high, expected_target = 0.0, 1.0, target
    for _ in range(_SIMULATIONS):
        plan, expected = _expected_plan(curve, needed, levels, durations.start_s, expected_target, least)
        share = kept_share(curve, serving(), plan.active)
        is_kept = share >= target
        found.append((is_kept, -float(plan.replica_seconds) if is_kept else share, plan))
        low, high = (low, expected) if is_kept else (expected, high)
        guess = expected + target + _MARGIN - share
        expected_target = guess if low < guess < high else (low + high) / 2 if low else guess
    return max(found, key=lambda each: each[:2])[2]


def _expected_plan(
    curve: DemandCurve, needed: Counts, levels: Sequence[Level], start_s: float, target: float, least: int
) -> tuple[Plan, float]:
    """The plan at the price at which the requests that it is short for leave `target` of all; and what they leave."""
    arrivals, requests = curve.arrivals, max(1, int(curve.arrivals.sum()))
    low, high = 0.001, 1000.0
    best = plan_levels(levels, curve.seconds, start_s, high, least), 1.0
    for _ in range(_SEARCHES):
        price_s = math.sqrt(low * high)
        plan = plan_levels(levels, curve.seconds, start_s, price_s, least)
        short = np.maximum(0, needed - plan.active) / np.maximum(1, needed)
        expected = 1 - float((arrivals * short).sum()) / requests
        if expected >= target:
            high, best = price_s, (plan, expected)
        else:
            low = price_s
    return best


def kept_share(curve: DemandCurve, serving: Serving, active: Counts) -> float:
    """Returns the share of all requests that are within the SLO if so many replicas are active in each second."""
    kept, before = 0.0, 0
    for arrivals, prompt, output, num_active in zip(
        curve.arrivals.tolist(),
        curve.prompt_tokens.tolist(),
        curve.output_tokens.tolist(),
        active.tolist(),
        strict=True,
    ):
        for left in range(before, num_active, -1):
            serving.leave(left)
        kept += serving.tick(arrivals, prompt, output, num_active).in_slo
        before = num_active
    return kept / max(1, int(curve.arrivals.sum()))
