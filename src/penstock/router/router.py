"""Filter, score, pick. Everything a policy may decide is in the lists it is made of; the loop knows none of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.core.replica import ReplicaSnapshot
from penstock.router.filters import DEFAULT_FILTERS, Filter, prefer_ready, prefer_warm
from penstock.router.pickers import Picker, best
from penstock.router.request import EdgeRequest
from penstock.router.scorers import Scorer, least_loaded, session_affinity


class Weighted(NamedTuple):
    name: str
    weight: float
    scorer: Scorer


@dataclass(slots=True)
class Choice:
    """A pick and why: kept with the request, shown in the console, replayed against other policies."""

    replica: ReplicaSnapshot | None  # None: every replica was dropped
    candidates: Sequence[ReplicaSnapshot] = ()
    scores: dict[str, list[float]] = field(default_factory=dict)  # by scorer, in the order of the candidates
    totals: list[float] = field(default_factory=list)
    dropped: dict[str, str] = field(default_factory=dict)  # replica id to reason


# A session's replica wins over any difference in load that bounded load lets stand.
DEFAULT_SCORERS = (Weighted("least_loaded", 1.0, least_loaded), Weighted("session", 2.0, session_affinity()))


class Router:
    def __init__(
        self,
        filters: Sequence[Filter] = DEFAULT_FILTERS,
        scorers: Sequence[Weighted] = DEFAULT_SCORERS,
        picker: Picker = best,
    ) -> None:
        self._filters = tuple(filters)
        self._scorers = tuple(scorers)
        self._picker = picker

    def usable(
        self, request: EdgeRequest, replicas: Sequence[ReplicaSnapshot], now: float
    ) -> tuple[Sequence[ReplicaSnapshot], dict[str, str]]:
        """Those that pass every filter, and for each other one the reason."""
        dropped: dict[str, str] = {}
        for reason, keeps in self._filters:
            kept = [replica for replica in replicas if keeps(request, replica, now)]
            if len(kept) != len(replicas):
                ids = {replica.id for replica in kept}
                dropped.update((replica.id, reason) for replica in replicas if replica.id not in ids)
                replicas = kept
        return replicas, dropped

    def pick(self, request: EdgeRequest, replicas: Sequence[ReplicaSnapshot], now: float) -> Choice:
        usable, dropped = self.usable(request, replicas, now)
        return self.pick_among(request, usable, now, dropped)

    def pick_among(
        self, request: EdgeRequest, usable: Sequence[ReplicaSnapshot], now: float, dropped: dict[str, str]
    ) -> Choice:
        """Score and pick, for who has already filtered."""
        if not usable:
            return Choice(None, dropped=dropped)
        usable = prefer_warm(prefer_ready(usable, now), request.draw)
        scores: dict[str, list[float]] = {}
        totals: list[float] = []
        for name, weight, scorer in self._scorers:
            scores[name] = values = scorer(request, usable)
            if totals:
                totals = [total + weight * value for total, value in zip(totals, values, strict=True)]
            else:
                totals = [weight * value for value in values]
        return Choice(usable[self._picker(totals, request.draw)], usable, scores, totals, dropped)
