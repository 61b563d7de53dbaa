"""Results of a simulation: every request counted once, times as quantiles, in memory that does not grow with them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import msgspec

from penstock.core.slo import Slo
from penstock.sim.flight import Flight
from penstock.sim.quantiles import Quantiles
from penstock.sim.replica import SimReplica

_PLOTTED = 120  # points of time, at most twice as many


class Times(msgspec.Struct, frozen=True):
    mean: float | None
    p50: float | None
    p95: float | None
    p99: float | None


class Result(msgspec.Struct, frozen=True):
    """Seconds and tokens. A share is between 0 and 1."""

    policy: str
    profile: str
    num_replicas: int
    requests: int
    answered: int
    shed: dict[str, int]  # refused or lost, by reason
    seconds: float  # simulated, from the first arrival to the last end
    ttft_s: Times
    tpot_s: Times
    e2e_s: Times
    goodput: float  # requests that kept the SLO, per second in which requests came
    kept_slo: float  # share of all that were asked
    output_tokens_per_s: float
    hit_rate: float  # of the answered requests' prompt tokens, found in the cache where they ran first
    busiest: float  # the most work of a replica, over the mean
    utilisation: float  # work done over the replicas' time: without what is idle, and without what a step costs anyway
    busy: float  # share of the time in which a step was running
    preemptions: int
    evictions: int
    moves: int  # of requests, away from replicas that were lost
    steps: int
    roles: dict[str, int] = {}  # replicas of each; empty: all have both
    device_hours: float = 0.0  # of all devices of all replicas, busy or not
    num_events: int = 0
    cpu_s: float = 0.0  # what it took of a core to simulate
    ttft_curve: list[tuple[float, float]] = []
    loads: list[float] = []  # work of each replica over the mean, the largest first
    timeline: list[tuple[float, float | None, float | None]] = []  # second, p50 and p95 of TTFT of those that came then


class Tally:
    def __init__(self, slo: Slo) -> None:
        self._slo = slo
        self.ttft_s, self.tpot_s, self.e2e_s = Quantiles(), Quantiles(), Quantiles()
        self.requests = self.answered = self.kept = self.moves = 0
        self.prompt_tokens = self.cached_tokens = self.output_tokens = 0
        self.shed: Counter[str] = Counter()
        self.last_s = self.asked_s = 0.0
        self._bucket_s = 1.0
        self._timeline: dict[int, Quantiles] = {}

    def ended(self, flight: Flight) -> None:
        ask = flight.ask
        assert flight.ended_s is not None
        self.requests += 1
        self.moves += flight.moves
        self.last_s = flight.ended_s
        self.asked_s = max(self.asked_s, ask.at_s)
        if flight.shed:
            self.shed[flight.shed] += 1
            return
        assert flight.first_s is not None
        ttft_s, tpot_s = flight.first_s - ask.at_s, None
        self.answered += 1
        self.prompt_tokens += ask.prompt_tokens
        self.cached_tokens += flight.cached_tokens
        self.output_tokens += ask.output_tokens
        self.ttft_s.add(ttft_s)
        self.e2e_s.add(flight.ended_s - ask.at_s)
        if ask.output_tokens > 1:
            tpot_s = (flight.ended_s - flight.first_s) / (ask.output_tokens - 1)
            self.tpot_s.add(tpot_s)
        self.kept += ttft_s <= self._slo.ttft_s and (
            tpot_s is None or self._slo.tpot_s is None or tpot_s <= self._slo.tpot_s
        )
        self._plot(ask.at_s, ttft_s)

    def _plot(self, at_s: float, ttft_s: float) -> None:
        bucket = int(at_s / self._bucket_s)
        while bucket >= 2 * _PLOTTED:  # the scale doubles; what was plotted finely is dropped to the first of each pair
            self._bucket_s *= 2
            self._timeline = {number // 2: kept for number, kept in sorted(self._timeline.items(), reverse=True)}
            bucket = int(at_s / self._bucket_s)
        self._timeline.setdefault(bucket, Quantiles()).add(ttft_s)

    def result(self, policy: str, profile: str, replicas: Iterable[SimReplica], **facts: Any) -> Result:
        all_of_them = list(replicas)
        work = [replica.work_s for replica in all_of_them]
        seconds = max(self.last_s, 1e-9)
        mean = sum(work) / len(work)
        return Result(
            policy=policy,
            profile=profile,
            num_replicas=len(all_of_them),
            requests=self.requests,
            answered=self.answered,
            shed=dict(self.shed),
            seconds=self.last_s,
            ttft_s=_times(self.ttft_s),
            tpot_s=_times(self.tpot_s),
            e2e_s=_times(self.e2e_s),
            goodput=self.kept / max(self.asked_s, 1e-9),
            kept_slo=self.kept / max(1, self.requests),
            output_tokens_per_s=self.output_tokens / seconds,
            hit_rate=self.cached_tokens / max(1, self.prompt_tokens),
            busiest=max(work) / mean if mean else 1.0,
            utilisation=mean / seconds,
            busy=sum(replica.busy_s for replica in all_of_them) / len(all_of_them) / seconds,
            preemptions=sum(replica.preemptions for replica in all_of_them),
            evictions=sum(replica.cache.pool.counters.evictions for replica in all_of_them),
            moves=self.moves,
            roles=roles if (roles := _roles(all_of_them)).keys() != {"both"} else {},
            steps=sum(replica.steps for replica in all_of_them),
            device_hours=sum(replica.profile.devices for replica in all_of_them) * self.last_s / 3600,
            ttft_curve=self.ttft_s.curve(),
            loads=sorted((one / mean for one in work), reverse=True) if mean else [],
            timeline=[(number * self._bucket_s, q.at(0.5), q.at(0.95)) for number, q in sorted(self._timeline.items())],
            **facts,
        )


def _roles(replicas: Iterable[SimReplica]) -> dict[str, int]:
    counts: Counter[str] = Counter(replica.role for replica in replicas)
    return dict(counts)


def _times(quantiles: Quantiles) -> Times:
    return Times(quantiles.mean, quantiles.at(0.5), quantiles.at(0.95), quantiles.at(0.99))
