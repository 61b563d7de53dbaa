"""Rollouts over the event simulator: latency comes from steps, batches, queues and caches, not from a model of noise.

Each version has a fleet of its own, and the new one's steps may take longer. Requests are taken down as gateways do it
and folded by the gateway's own code. Copies are sent to both fleets when the client has its answer, under names of
their own: no cache has them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from random import Random

from penstock.core.rollout import Arm, Block, Metric, RolloutOrder
from penstock.gateway.rollouts.folding import BlockFolder
from penstock.gateway.rollouts.observation import Observation, Timing, pair_ratios
from penstock.rollout.policy.plan import RolloutStep
from penstock.router.sticky import race, session_bucket
from penstock.sim.flight import Ask, Flight
from penstock.sim.profile import Profile
from penstock.sim.simulation import Simulation

_COPY_NAMES = 1 << 40  # prompts of copies are cached apart


def slower(profile: Profile, factor: float) -> Profile:
    """Steps of any kind take so many times as long."""
    seconds = {one.name: getattr(profile.cost, one.name) * factor for one in fields(profile.cost)}
    return replace(profile, cost=replace(profile.cost, **seconds | {"expert_share": profile.cost.expert_share}))


class Fleet:
    """The replicas of one version, and what its requests took."""

    def __init__(self, profile: Profile, replicas: int) -> None:
        self._done: dict[int, Flight] = {}
        self._simulation = Simulation(profile, replicas, ended=self._ended)

    def run(self, asks: Sequence[Ask]) -> list[tuple[Flight, Timing | None]]:
        """Returns the flights in the order in which they were asked; None: it was refused or failed."""
        self._simulation.run(asks)
        by_replica: dict[str, list[Flight]] = {}
        for flight in self._done.values():
            by_replica.setdefault(flight.replica, []).append(flight)
        loads = {name: _Load(flights) for name, flights in by_replica.items()}
        ended = [self._done[number] for number in sorted(self._done)]
        return [(flight, _timing(flight, loads[flight.replica])) for flight in ended]

    def _ended(self, flight: Flight) -> None:
        self._done[flight.number] = flight


class _Load:
    """Requests at one replica, summed over time."""

    def __init__(self, flights: Sequence[Flight]) -> None:
        changes = sorted(
            change for one in flights if one.ended_s is not None for change in ((one.ask.at_s, 1), (one.ended_s, -1))
        )
        self._times, self._counts, self._areas = [0.0], [0], [0.0]
        for at, change in changes:
            self._areas.append(self._until(at))
            self._times.append(at)
            self._counts.append(self._counts[-1] + change)

    def mean(self, began: float, ended: float) -> float:
        """Others at the replica while one request was there."""
        here = self._area(ended) - self._area(began)
        return max(here / max(ended - began, 1e-9) - 1.0, 0.0)

    def _until(self, at: float) -> float:
        return self._areas[-1] + self._counts[-1] * (at - self._times[-1])

    def _area(self, at: float) -> float:
        place = bisect_right(self._times, at) - 1
        return self._areas[place] + self._counts[place] * (at - self._times[place])


def _timing(flight: Flight, load: _Load) -> Timing | None:
    if flight.shed or flight.first_s is None or flight.ended_s is None:
        return None
    ask = flight.ask
    return Timing(
        round(load.mean(ask.at_s, flight.ended_s)),
        max(ask.prompt_tokens - flight.cached_tokens, 0),
        ask.output_tokens,
        flight.first_s - ask.at_s,
        flight.ended_s - ask.at_s,
    )


def blocks_of_step(
    asks: Iterable[Ask],
    step: RolloutStep,
    number: int,
    old: Profile,
    new: Profile,
    replicas: tuple[int, int],
    *,
    rollout: str = "r",
    began: float = 0.0,
    seed: int = 0,
) -> list[Block]:
    """Returns what gateways measure while these requests come. `replicas`: numbers of the old and the new version."""
    order = RolloutOrder(rollout, "m", "v1", "v2", number)
    folder = BlockFolder("g")
    fleets = Fleet(old, replicas[0]), Fleet(new, replicas[1])
    observations: list[Observation] = []

    def tell(arm: Arm, flight: Flight, timing: Timing | None) -> None:
        at = began + (flight.ended_s or flight.ask.at_s)
        observations.append(
            Observation(order, arm, at, flight.ask.tenant, ((Metric.ERRORS, float(timing is None)),), timing)
        )

    if step.is_shadow:
        source = Random(seed)
        clients = list(asks)
        copies = [_copy(ask) for ask in clients if source.random() < (step.shadow or 0.0)]
        both = [
            [found for found in fleet.run(_merged(clients if fleet is fleets[0] else [], copies)) if _is_copy(found[0])]
            for fleet in fleets
        ]
        for before, after in zip(*both, strict=True):
            tell(Arm.OLD_COPY, *before)
            tell(Arm.NEW_COPY, *after)
            if before[1] is not None and after[1] is not None:
                ratios = pair_ratios(before[1], after[1])
                last = max(before[0].ended_s or 0.0, after[0].ended_s or 0.0)
                observations.append(Observation(order, Arm.PAIR, began + last, after[0].ask.tenant, ratios))
    else:
        weights = [("old", 1.0 - (step.share or 0.0)), ("new", step.share or 0.0)]
        split: dict[str, list[Ask]] = {"old": [], "new": []}
        for ask in asks:
            split[race(session_bucket(ask.session or ""), weights)].append(ask)
        for arm, fleet, mine in ((Arm.OLD, fleets[0], split["old"]), (Arm.NEW, fleets[1], split["new"])):
            for flight, timing in fleet.run(mine) if mine else []:
                tell(arm, flight, timing)
    found: list[Block] = []
    for observation in sorted(observations, key=lambda one: one.at):
        found += folder.close(observation.at)
        folder.add(observation)
    return found + folder.close_all(found[-1].at + 60.0 if found else began)


def _copy(ask: Ask) -> Ask:
    """It comes when the client has its answer, about."""
    names = tuple(name + _COPY_NAMES for name in ask.names)
    return ask._replace(at_s=ask.at_s + 5.0, names=names, session=None)


def _is_copy(flight: Flight) -> bool:
    return flight.ask.session is None


def _merged(clients: Sequence[Ask], copies: Sequence[Ask]) -> list[Ask]:
    return sorted([*clients, *copies], key=lambda ask: ask.at_s)
