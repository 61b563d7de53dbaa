"""Failover: where a request goes when its replica could not serve it, or not to the end.

Another replica of the same model, after a backoff if the client has seen nothing yet; for a stream that has begun, at
once, or when one comes back (`stranded`). The next model, where there is one, is for `fallback` to say.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from random import Random

from penstock.admission.admission import Admission
from penstock.gateway.proxy.journey import Journey, Leg, SendLater
from penstock.gateway.proxy.stranded import StrandedStreams
from penstock.gateway.replicas.replica_set import ReplicaSet
from penstock.gateway.tokens.pools import Pools
from penstock.health.retries import RetryBudget
from penstock.http.clock import TimerClock
from penstock.router.request import EdgeRequest
from penstock.router.router import Choice


class Failover:
    def __init__(
        self,
        admission: Admission,
        replicas: ReplicaSet,
        pools: Pools,
        stranded: StrandedStreams,
        clock: TimerClock,
        random: Random,
    ) -> None:
        self.retries = RetryBudget()
        self.stranded = stranded
        self._admission = admission
        self._replicas = replicas
        self._pools = pools
        self._clock = clock
        self._random = random

    def pick(self, request: EdgeRequest, journey: Journey) -> Choice | None:
        """The choice of another replica; None: there is none for it."""
        losses, avoid = journey.tries.losses, self._avoided(journey)
        choice = None
        if losses.replicas:
            ready, near = self._pools[request.model].ready_replicas - avoid, self._in_zones_of(losses.replicas)
            near = near if ready - near else frozenset()
            apart = losses.apart(ready - near)
            if near or apart:
                choice = self._reroute(request, avoid | near | apart, journey)
        return choice or self._reroute(request, avoid, journey)

    def can_move(self, request: EdgeRequest, journey: Journey) -> bool:
        """Whether another replica could go on now with a stream that has begun."""
        return journey.tries.may_move and self._admission.has_other(
            request.id, self._clock.now(), self._avoided(journey)
        )

    def back_off(self, action: SendLater, backed_off: Callable[[tuple[Leg, ...]], None]) -> None:
        self._clock.call_later(action.max_s * self._random.random(), backed_off, action.legs)

    def _in_zones_of(self, lost: Set[str]) -> frozenset[str]:
        """Replicas in the same zones: a zone is lost as a whole, and its last replicas a moment after its first."""
        replicas = self._replicas
        zones = {replicas[one].zone for one in lost if one in replicas} - {""}
        return frozenset(one.id for one in replicas.values() if one.zone in zones) if zones else frozenset()

    def _avoided(self, journey: Journey) -> frozenset[str]:
        """Replicas that it must not go to next."""
        replicas, tries = self._replicas, journey.tries
        avoid = frozenset(tries.replicas)
        if journey.is_begun:  # only a penstock replica carries on what another began
            avoid |= {replica.id for replica in replicas.values() if not replica.relays}
        return avoid | tries.losses.forbidden(replicas) if tries.losses.replicas else avoid

    def _reroute(self, request: EdgeRequest, avoid: frozenset[str], journey: Journey) -> Choice | None:
        is_begun, now = journey.is_begun, self._clock.now()
        known_tokens = request.kv_tokens if is_begun else request.prompt_tokens
        origin = journey.legs[0].replica if journey.legs else ""
        return self._admission.reroute(request.id, now, avoid, known_tokens, is_begun=is_begun, origin=origin)
