"""Shares of a model: who uses it, and how much of each replica each may fill.

A share is reserved only while its owner is about: an installation with one class and one tenant loses nothing.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict

from penstock.admission.settings import AdmissionSettings
from penstock.core.replica import ReplicaSnapshot
from penstock.core.request import Priority
from penstock.router.request import EdgeRequest

FAIR_SHARE = "fair_share"
_FEW = 4  # sequences; below this nobody is called greedy


class Shares:
    def __init__(self, settings: AdmissionSettings) -> None:
        self._settings = settings
        self._classes: dict[Priority, float] = {}  # when each was last seen
        self._tenants: OrderedDict[str, float] = OrderedDict()  # the same, the longest unseen first
        self._held: Counter[str] = Counter()  # sequences at the replicas, by tenant

    def seen(self, request: EdgeRequest, now: float) -> None:
        self._classes[request.priority] = now
        self._tenants[request.tenant] = now
        self._tenants.move_to_end(request.tenant)
        oldest = next(iter(self._tenants))
        if now - self._tenants[oldest] > self._settings.in_use_s:
            del self._tenants[oldest]  # one for each that is seen is enough to keep up

    def hold(self, tenant: str) -> None:
        self._held[tenant] += 1

    def release(self, tenant: str) -> None:
        self._held[tenant] -= 1
        if not self._held[tenant]:
            del self._held[tenant]

    def ceiling(self, request: EdgeRequest, now: float) -> float:
        """Returns how full, from 0 to 1, the request's class may make a replica: the rest is for higher classes."""
        ceiling = 1.0
        for priority, seen_at in self._classes.items():
            if priority < request.priority and now - seen_at <= self._settings.in_use_s:
                ceiling -= self._settings.classes[priority].reserved
        return ceiling

    def places_kept(self, tenant: str, num_replicas: int) -> float:
        """Places at each replica that a tenant leaves free for those that clearly hold less.

        A queue alone cannot keep a spike from the others: it decides who is next, but every place would be taken when
        they come. Counts vary like a Poisson number, by about their square root. So "clearly" is by two deviations of
        the difference, and kept is what the others' number may grow by in a moment: two of its deviations, and one
        place for whoever is not there yet.
        """
        own = self._held[tenant]
        if own <= _FEW or len(self._tenants) < 2:
            return 0.0
        lighter = sum(n for n in self._held.values() if n < own and (own - n) ** 2 > 4 * (own + n))
        return 1.0 + 2.0 * math.sqrt(lighter / num_replicas)


def blocked_by(
    request: EdgeRequest, replica: ReplicaSnapshot, ceiling: float, places_kept: float, saved_tokens: int = 0
) -> str | None:
    """Returns what the replica has too little of for this request now; None: it may be sent there.

    Its waiting prefill stays under about one step's budget: the rest waits here, where order can still change. One that
    finds much of its prompt there may wait behind as much as that saves: it is there as soon as anywhere.
    """
    part = ceiling * replica.share
    places = part * replica.max_sequences - replica.sequences
    if places < 1.0:
        return "sequences"
    kv_places = (part * replica.limits.kv_capacity_tokens - replica.kv_used_tokens) / request.kv_tokens
    if kv_places < 1.0:
        return "kv"
    if replica.prefill_queued - saved_tokens >= part * replica.limits.chunk_tokens:
        return "prefill"
    return FAIR_SHARE if places_kept and min(places, kv_places) < 1.0 + places_kept else None
