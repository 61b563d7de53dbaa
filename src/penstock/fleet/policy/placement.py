"""The placement of a new replica: the zone with the fewest, spot capacity up to its share, within quota and spend."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from penstock.fleet.policy.observation import CapacityType, Offer, ReplicaView
from penstock.fleet.settings import PoolSettings


class Placement:
    """One round's: each replica that is placed counts for those after it."""

    def __init__(
        self,
        settings: PoolSettings,
        offers: Sequence[Offer],
        staying: Iterable[ReplicaView],
        spend_left: float | None,
        min_on_demand: int,
        now: float,
    ) -> None:
        self._settings, self._spend_left, self._min_on_demand = settings, spend_left, min_on_demand
        self._left = [
            (offer, offer.available)
            for offer in offers
            if offer.refused_until <= now and (not settings.zones or offer.zone in settings.zones or not offer.zone)
        ]
        self.zones = Counter(dict.fromkeys(settings.zones, 0))
        self._spot = self._total = 0
        for replica in staying:
            self.zones[replica.zone] += 1
            self._total += 1
            self._spot += replica.capacity_type is CapacityType.SPOT
        self.obstacle = ""  # spend or quota, where `place` found none

    def place(self) -> Offer | None:
        """The offer to start the next replica with; None: see `obstacle`."""
        usable = [i for i, (_, left) in enumerate(self._left) if left is None or left > 0]
        usable = [i for i in usable if self._left[i][0].capacity_type is not CapacityType.SPOT or self._has_spot_room()]
        if not usable:
            self.obstacle = "quota"
            return None
        usable = [i for i in usable if self.affords(self._left[i][0].price_per_hour)]
        if not usable:
            self.obstacle = "spend"
            return None
        chosen = min(usable, key=self._rank)
        offer, left = self._left[chosen]
        self._left[chosen] = (offer, None if left is None else left - 1)
        self.pay(offer.price_per_hour)
        self.zones[offer.zone] += 1
        self._total += 1
        self._spot += offer.capacity_type is CapacityType.SPOT
        return offer

    def affords(self, price_per_hour: float) -> bool:
        return self._spend_left is None or price_per_hour <= self._spend_left + 1e-9

    def pay(self, price_per_hour: float) -> None:
        if self._spend_left is not None:
            self._spend_left -= price_per_hour

    @property
    def can_use_spot(self) -> bool:
        """Spot capacity is offered, and one more would be within its share if it took the place of another."""
        offered = any(o.capacity_type is CapacityType.SPOT and (n is None or n > 0) for o, n in self._left)
        return offered and self._is_within_share(self._spot + 1, self._total)

    def _has_spot_room(self) -> bool:
        return self._is_within_share(self._spot + 1, self._total + 1)

    def _is_within_share(self, spot: int, total: int) -> bool:
        return spot <= self._settings.spot.share * total + 1e-9 and total - spot >= self._min_on_demand

    def _rank(self, index: int) -> tuple[int, bool, float, int]:
        offer = self._left[index][0]
        return (
            self.zones[offer.zone],
            offer.capacity_type is not CapacityType.SPOT,
            offer.price_per_hour,
            index,
        )
