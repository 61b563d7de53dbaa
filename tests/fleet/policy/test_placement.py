from __future__ import annotations

import msgspec

from penstock.fleet.policy.observation import CapacityType, Offer, ReplicaState, ReplicaView
from penstock.fleet.policy.placement import Placement
from penstock.fleet.settings import PoolSettings, SpotSettings

SPOT, PLAIN = Offer("", CapacityType.SPOT, 1.0), Offer("", CapacityType.ON_DEMAND, 3.0)


def replica(zone: str = "", kind: CapacityType = CapacityType.ON_DEMAND) -> ReplicaView:
    return ReplicaView(zone, ReplicaState.ACTIVE, 0.0, zone=zone, capacity_type=kind)


def placement(
    settings: PoolSettings, offers: list[Offer], staying: list[ReplicaView], *, spend: float | None = None, low: int = 0
) -> Placement:
    return Placement(settings, offers, staying, spend, low, now=100.0)


def test_the_zone_with_the_fewest_is_next() -> None:
    places = placement(PoolSettings(zones=["a", "b"]), [Offer("a"), Offer("b")], [replica("a")])
    found = [places.place() for _ in range(3)]
    assert [each.zone for each in found if each] == ["b", "a", "b"]


def test_a_zone_that_is_none_of_the_pools_is_left_out() -> None:
    places = placement(PoolSettings(zones=["a"]), [Offer("z")], [])
    assert places.place() is None
    assert places.obstacle == "quota"


def test_spot_up_to_its_share_with_min_on_demand() -> None:
    settings = PoolSettings(spot=SpotSettings(share=0.5))
    places = placement(settings, [SPOT, PLAIN], [replica()], low=2)
    kinds = [each.capacity_type for each in (places.place() for _ in range(5)) if each]
    assert kinds == [CapacityType.ON_DEMAND, *[CapacityType.SPOT] * 2, CapacityType.ON_DEMAND, CapacityType.SPOT]


def test_refused_and_exhausted_offers_are_not_asked() -> None:
    refused, scarce = msgspec.structs.replace(PLAIN, refused_until=101.0), msgspec.structs.replace(PLAIN, available=1)
    places = placement(PoolSettings(), [refused, scarce], [])
    assert places.place() is not None
    assert places.place() is None
    assert places.obstacle == "quota"


def test_spend_is_not_exceeded() -> None:
    places = placement(PoolSettings(), [PLAIN], [], spend=7.0)
    assert [places.place() is not None for _ in range(3)] == [True, True, False]
    assert places.obstacle == "spend"
