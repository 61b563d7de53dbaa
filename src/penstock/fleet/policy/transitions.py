"""Actions by which a pool comes to the replicas that are wanted, in the states that are planned.

Capacity is taken from standby, then parked, then started; what is too much goes a state down. It knows no demand: how
many are wanted, and why, was decided before.
"""

from __future__ import annotations

from penstock.fleet.policy.bounds import Bounds
from penstock.fleet.policy.census import Census
from penstock.fleet.policy.decision import Action, ActionKind
from penstock.fleet.policy.departure import departing
from penstock.fleet.policy.memory import PolicyMemory
from penstock.fleet.policy.observation import CapacityType, PoolObservation, ReplicaState, ReplicaView
from penstock.fleet.policy.placement import Placement
from penstock.fleet.policy.warm import WarmPlan
from penstock.fleet.settings import PoolSettings

_STOP_EARLY_S = 2.0  # before an interruption's deadline


class Transitions:
    """One round's actions. `bound` names what kept a start from being made, `warm_bound` a start into reserve."""

    def __init__(
        self, settings: PoolSettings, observation: PoolObservation, census: Census, memory: PolicyMemory, now: float
    ) -> None:
        self.settings, self.seen, self.census, self.memory, self.now = settings, observation, census, memory, now
        self.actions: list[Action] = []
        self.bound = self.warm_bound = ""

    def reach(self, wanted: int, warm: WarmPlan, bounds: Bounds, reason: str) -> tuple[float | None, float]:
        """Returns `surplus_at` and `moved_at` of the memory."""
        settings, census, now, memory = self.settings, self.census, self.now, self.memory
        gap = wanted - census.num_ready
        standby, parked = list(census.standby), list(census.parked)
        lacks_warm = warm.standby > len(standby) + census.to_standby or warm.parked > len(parked) + census.to_parked
        placement: Placement | None = None
        surplus_at = None
        if gap > 0 or lacks_warm or census.doomed:
            placement = self._placement(bounds)
            gap = self._fill(gap, standby, parked, placement, reason)
            if lacks_warm and gap <= 0:
                self._fill_warm(warm, standby, parked, placement)
        self._leave_doomed()
        num_surplus = len(census.active) - wanted
        if num_surplus > 0:
            self._shrink(num_surplus, warm, bounds, wanted)
        elif not self.actions:
            surplus = len(standby) + census.to_standby > warm.standby or len(parked) + census.to_parked > warm.kept
            if surplus:
                surplus_at = memory.surplus_at if memory.surplus_at is not None else now
                if now - surplus_at >= settings.down_cooldown_s and not census.num_draining:
                    self._release(standby, parked, warm)
            elif (settings.zones or settings.spot.share) and self._may_move(wanted):
                moved = self._move(placement or self._placement(bounds))
                return None, now if moved else memory.moved_at
        return surplus_at, memory.moved_at

    def _placement(self, bounds: Bounds) -> Placement:
        settings, census = self.settings, self.census
        spend_left = self.seen.spend_left_per_hour
        if settings.max_spend_per_hour is not None:
            spent = sum(self._price(each, each.state) for each in self.seen.replicas)
            left = settings.max_spend_per_hour - spent
            spend_left = left if spend_left is None else min(left, spend_left)
        return Placement(settings, self.seen.offers, census.staying, spend_left, bounds.min, self.now)

    def _price(self, replica: ReplicaView, state: ReplicaState) -> float:
        if state is ReplicaState.PARKED:
            return self.settings.parked_price_per_hour or 0.0
        return replica.price_per_hour

    def _fill(
        self, gap: int, standby: list[ReplicaView], parked: list[ReplicaView], placement: Placement, reason: str
    ) -> int:
        """Standby first, then parked, then those on their way into reserve, then starts. Returns what is left."""
        while gap > 0 and standby:
            replica = standby.pop()
            self.actions.append(Action(ActionKind.ACTIVATE, reason, replica.id, zone=replica.zone))
            gap -= 1
        while gap > 0 and parked:
            replica = parked.pop()
            more = replica.price_per_hour - self._price(replica, ReplicaState.PARKED)
            if not placement.affords(more):
                self.bound = "spend"
                return gap
            placement.pay(more)
            self.actions.append(Action(ActionKind.WAKE, reason, replica.id, zone=replica.zone))
            gap -= 1
        gap -= self.census.to_standby + self.census.to_parked
        while gap > 0 and self._start(placement, ReplicaState.ACTIVE, reason):
            gap -= 1
        return gap

    def _fill_warm(
        self, warm: WarmPlan, standby: list[ReplicaView], parked: list[ReplicaView], placement: Placement
    ) -> None:
        for _ in range(warm.standby - len(standby) - self.census.to_standby):
            if len(parked) > warm.parked:
                self.actions.append(
                    Action(ActionKind.WAKE, warm.reason or "standby is set", parked.pop().id, ReplicaState.STANDBY)
                )
            elif not self._start(placement, ReplicaState.STANDBY, warm.reason or "standby is set"):
                return
        for _ in range(warm.parked - len(parked) - self.census.to_parked):
            if not self._start(placement, ReplicaState.PARKED, warm.reason or "parked is set"):
                return

    def _start(self, placement: Placement, to: ReplicaState, reason: str) -> bool:
        starts = sum(each.kind is ActionKind.START for each in self.actions)
        has_room = len(self.census.staying) + starts < self.settings.max
        offer = placement.place() if has_room else None
        if offer is None:
            if to is ReplicaState.ACTIVE:
                self.bound = placement.obstacle if has_room else self.bound or "max"
            else:
                self.warm_bound = placement.obstacle if has_room else "max"
            return False
        self.actions.append(Action(ActionKind.START, reason, to=to, zone=offer.zone, capacity_type=offer.capacity_type))
        return True

    def _leave_doomed(self) -> None:
        """Replacements are in `actions` before. The last replica of a pool serves until another does, or has to go."""
        drain_s = self.seen.durations.drain_s
        for replica in self.census.doomed:
            assert replica.deadline is not None
            left_s = replica.deadline - self.now
            is_last = replica.state is ReplicaState.ACTIVE and not self.census.active
            if is_last and left_s > drain_s + 2 * _STOP_EARLY_S:
                continue
            self.actions.append(
                Action(
                    ActionKind.STOP,
                    f"interrupted: gone in {max(0.0, left_s):.0f} s",
                    replica.id,
                    ReplicaState.STOPPING,
                    replica.zone,
                    replica.capacity_type,
                    max(0.0, left_s - _STOP_EARLY_S),
                )
            )

    def _shrink(self, number: int, warm: WarmPlan, bounds: Bounds, wanted: int) -> None:
        census, settings = self.census, self.settings
        standby = len(census.standby) + census.to_standby
        parked = len(census.parked) + census.to_parked
        reason = f"{wanted} active replicas hold the SLO"
        for replica in departing(census.active, census.staying, number, bounds.min, settings.spot.share):
            if standby < warm.standby:
                kind, to = ActionKind.DEACTIVATE, ReplicaState.STANDBY
                standby += 1
            elif parked < warm.kept:
                kind, to = ActionKind.PARK, ReplicaState.PARKED
                parked += 1
            else:
                kind, to = ActionKind.STOP, ReplicaState.STOPPING
            self.actions.append(Action(kind, reason, replica.id, to, replica.zone, replica.capacity_type))

    def _release(self, standby: list[ReplicaView], parked: list[ReplicaView], warm: WarmPlan) -> None:
        """One that is more than planned, a state further down."""
        if len(standby) > warm.standby:
            can_park = len(parked) + self.census.to_parked < warm.kept
            to = ReplicaState.PARKED if can_park else ReplicaState.STOPPING
            kind, chosen = ActionKind.PARK if can_park else ActionKind.STOP, standby
        elif len(parked) > warm.kept:
            kind, to, chosen = ActionKind.STOP, ReplicaState.STOPPING, parked
        else:
            return
        for replica in departing(chosen, self.census.staying, 1, 0, 1.0):
            self.actions.append(Action(kind, "more than planned", replica.id, to, replica.zone, replica.capacity_type))

    # Zones and spot capacity that come back

    def _may_move(self, wanted: int) -> bool:
        census, settings = self.census, self.settings
        return (
            len(census.active) == wanted > 0
            and not census.coming
            and not census.num_draining
            and self.now - self.memory.moved_at >= settings.spot.retry_s
            and len(census.staying) < settings.max
        )

    def _move(self, placement: Placement) -> bool:
        """Starts a replica where one is missing; the one that is too many then goes by `departing`."""
        zones = [placement.zones[zone] for zone in self.settings.zones]
        is_uneven = bool(zones) and max(zones) - min(zones) > 1
        if not is_uneven and not placement.can_use_spot:
            return False
        least = min(zones, default=0)
        offer = placement.place()
        if offer is None:
            return False
        if is_uneven and placement.zones[offer.zone] == least + 1:
            reason = f"zone {offer.zone} has room again"
        elif offer.capacity_type is CapacityType.SPOT:
            reason = "spot capacity is offered again"
        else:
            return False
        self.actions.append(Action(ActionKind.START, reason, zone=offer.zone, capacity_type=offer.capacity_type))
        return True
