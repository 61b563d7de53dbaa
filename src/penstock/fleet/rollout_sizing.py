"""Sizes of two pools between which a rollout shifts traffic: what the fleet's controller makes of its targets.

    the old version    is sized for the whole model's demand, wherever it goes: whoever goes back needs it at once
    the new version    has replicas for its share before the share moves, and for its own demand
    parked             the old version's replicas are parked and not stopped, where they can be

Both pools go on being sized by their own policy, which is given the demand or a floor. Without a rollout none of this
is there, and a pool goes down to its own bounds at its own pace.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from penstock.fleet.policy.observation import Demand
from penstock.fleet.settings import PoolSettings
from penstock.rollout.policy.state import PoolSeen
from penstock.rollout.runner import Capacity, Live
from penstock.router.routes import pool_of
from penstock.tenancy.fleet import FleetReplica
from penstock.tenancy.rollouts import Rollout

_ACTIVE, _GOING = "active", ("stopping",)


class PoolTarget(NamedTuple):
    """The part of one pool in a rollout."""

    share: float = 0.0  # of the model's traffic, that it is to have replicas for
    partner: str = ""  # the pool of the other version
    is_parked: bool = False  # its replicas are kept, parked
    is_new: bool = False


_NO_TARGET = PoolTarget()


class RolloutSizing:
    def __init__(self, pools: Mapping[str, PoolSettings]) -> None:
        self._pools = pools
        self._targets: dict[str, PoolTarget] = {}
        self._wanted: dict[str, int] = {}  # by pool, in the last round
        self._active: dict[str, int] = {}

    def follow(self, rollouts: Iterable[Live]) -> None:
        """Takes the targets of rollouts that are on."""
        self._targets = {}
        for _, state, _, targets in rollouts:
            names = {state.old: pool_of(state.model, state.old), state.new: pool_of(state.model, state.new)}
            for version, name in names.items():
                other = names[state.new if version == state.old else state.old]
                share, is_parked = targets.capacity.get(version, 0.0), version in targets.park
                if share or is_parked:
                    self._targets[name] = PoolTarget(share, other, is_parked, version == state.new)

    def target(self, pool: str) -> PoolTarget:
        return self._targets.get(pool, _NO_TARGET)

    def demand(self, pool: str, own: Demand, partner: Demand | None) -> Demand:
        """The demand that the pool is sized for: with a share of one the whole model's."""
        return together(own, partner) if self.target(pool).share >= 1.0 and partner is not None else own

    def floor(self, pool: str, *, goes_by_demand: bool, can_park: bool) -> int:
        """Active replicas at least. The new version's are counted in replicas of the old one, which are as many as the
        whole traffic needs. `goes_by_demand`: the pool's policy makes its size of the demand; one that goes by
        thresholds would see nobody, and keeps what it had. `can_park`: one that is to be parked and cannot stays."""
        target = self.target(pool)
        if target.is_parked and not can_park:
            return max(1, self._wanted.get(pool, 1))
        if not target.share:
            return 0
        if target.is_new and self.target(target.partner).share >= 1.0:
            return max(1, math.ceil(target.share * self._wanted.get(target.partner, 1) - 1e-9))
        return 1 if goes_by_demand else max(1, self._wanted.get(pool, 1))

    def kept(self, pool: str, rows: Sequence[FleetReplica]) -> int:
        """Replicas of the pool that are parked at least and not stopped."""
        return sum(row.target not in _GOING for row in rows) if self.target(pool).is_parked else 0

    def took(self, wanted: Mapping[str, int], rows: Iterable[FleetReplica]) -> None:
        """The outcome of the last round."""
        self._wanted = dict(wanted)
        self._active = {}
        for row in rows:
            if row.state == _ACTIVE:
                self._active[row.pool] = self._active.get(row.pool, 0) + 1

    def capacity(self, rollout: Rollout) -> Capacity | None:
        """None: the versions are no pools of this fleet."""
        names = pool_of(rollout.model, rollout.old), pool_of(rollout.model, rollout.new)
        if not all(name in self._pools for name in names):
            return None
        old, new = (self._seen(name, other) for name, other in (names, names[::-1]))
        prices = {
            version: settings.price_per_hour / max(1, settings.gpus)
            for version, name in zip((rollout.old, rollout.new), names, strict=True)
            if (settings := self._pools[name]).price_per_hour
        }
        return Capacity(old, new, prices)

    def _seen(self, pool: str, partner: str) -> PoolSeen:
        active = self._active.get(pool, 0)
        sized = [name for name in (pool, partner) if self.target(name).share >= 1.0 and not self.target(name).is_new]
        whole = max([1, *(self._wanted.get(name, 0) for name in sized or (pool, partner))])
        return PoolSeen(active, min(1.0, active / whole))


def together(one: Demand, other: Demand) -> Demand:
    """The demand of two pools as that of one."""
    arrivals = one.arrivals_per_s + other.arrivals_per_s

    def mean(name: str) -> float:
        ours, theirs = getattr(one, name), getattr(other, name)
        if not arrivals:
            return float(max(ours, theirs))
        return float((ours * one.arrivals_per_s + theirs * other.arrivals_per_s) / arrivals)

    means = {name: mean(name) for name in ("prompt_tokens", "output_tokens", "cached_share", "dispersion")}
    return replace(
        one,
        arrivals_per_s=arrivals,
        peak_arrivals_per_s=one.peak_arrivals_per_s + other.peak_arrivals_per_s,
        in_flight=one.in_flight + other.in_flight,
        tokens_per_s=one.tokens_per_s + other.tokens_per_s,
        **means,
    )
