"""The departure of a replica when fewer are enough: the one goes whose loss costs least."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from penstock.fleet.policy.observation import CapacityType, ReplicaView


def departing(
    candidates: Sequence[ReplicaView],
    staying: Sequence[ReplicaView],
    number: int,
    min_on_demand: int,
    spot_share: float,
) -> list[ReplicaView]:
    """`candidates` may go; `staying` are all that count for zones and spot share, candidates too.

    Zones stay within one of each other first, then `min` on demand and the spot share; then price, cached blocks,
    streams, and age: the youngest goes, its cache is the coldest.
    """
    zones = Counter(each.zone for each in staying)
    spot = sum(each.capacity_type is CapacityType.SPOT for each in staying)
    total = len(staying)
    left = list(candidates)
    gone: list[ReplicaView] = []
    while left and len(gone) < number:
        fullest = max(zones.values())
        can_lose_on_demand = total - spot > min_on_demand and spot <= spot_share * (total - 1) + 1e-9

        def loss(each: ReplicaView, fullest: int = fullest, may: bool = can_lose_on_demand) -> tuple[object, ...]:
            is_spot = each.capacity_type is CapacityType.SPOT
            return (
                zones[each.zone] < fullest,
                not is_spot and not may,
                -each.price_per_hour,
                each.cached_blocks,
                each.in_flight,
                -each.started_at,
                each.id,
            )

        chosen = min(left, key=loss)
        left.remove(chosen)
        gone.append(chosen)
        zones[chosen.zone] -= 1
        total -= 1
        spot -= chosen.capacity_type is CapacityType.SPOT
    return gone
