from __future__ import annotations

import msgspec

from penstock.fleet.policy.departure import departing
from penstock.fleet.policy.observation import CapacityType, ReplicaState, ReplicaView

A = ReplicaView("a", ReplicaState.ACTIVE, 0.0, zone="x", price_per_hour=2.0, started_at=1.0, cached_blocks=100)


def variant(name: str, **changes: object) -> ReplicaView:
    return msgspec.structs.replace(A, id=name, **changes)


def first(*replicas: ReplicaView, min_on_demand: int = 0, share: float = 1.0) -> str:
    return departing(replicas, replicas, 1, min_on_demand, share)[0].id


def test_the_dearest_goes() -> None:
    assert first(A, variant("b", price_per_hour=3.0), variant("c", price_per_hour=1.0)) == "b"


def test_the_coldest_cache_goes_at_the_same_price() -> None:
    assert first(A, variant("b", cached_blocks=5), variant("c", cached_blocks=7)) == "b"


def test_the_youngest_goes_otherwise() -> None:
    assert first(A, variant("b", started_at=9.0), variant("c", started_at=5.0)) == "b"


def test_zones_stay_even() -> None:
    assert first(A, variant("b"), variant("c", zone="y", price_per_hour=9.0)) in "ab"


def test_min_stays_on_demand_and_spot_within_its_share() -> None:
    spot = variant("s", capacity_type=CapacityType.SPOT, price_per_hour=1.0)
    assert first(A, spot) == "a"
    assert first(A, spot, min_on_demand=1) == "s"
    assert first(A, variant("b"), spot, share=0.4) == "s"


def test_as_many_as_are_asked_for_and_none_twice() -> None:
    replicas = [variant(str(i)) for i in range(5)]
    gone = departing(replicas, replicas, 3, 0, 1.0)
    assert len({each.id for each in gone}) == 3
    assert len(departing(replicas, replicas, 9, 0, 1.0)) == 5
