"""The policy of one pool: from what is seen to what is done."""

from __future__ import annotations

import math

from penstock.core.slo import Slo
from penstock.fleet.policy.decision import Action, ActionKind, Decision
from penstock.fleet.policy.memory import PolicyMemory
from penstock.fleet.policy.observation import Durations, PoolObservation, ReplicaState
from penstock.fleet.policy.profile import CapacityProfile, Mix
from penstock.fleet.settings import PoolSettings


class PoolPolicy:
    def __init__(self, settings: PoolSettings, slo: Slo, profile: CapacityProfile) -> None:
        self.settings, self.slo, self.profile = settings, slo, profile

    def horizons(self, durations: Durations) -> tuple[float, ...]:
        """Times ahead, in seconds, for which `decide` wants the forecast."""
        up_s, down_s = self.settings.up_cooldown_s, self.settings.down_cooldown_s
        return tuple(sorted({durations.wake_s + up_s, durations.start_s + up_s, durations.start_s + down_s}))

    def decide(self, observation: PoolObservation, memory: PolicyMemory, now: float) -> tuple[Decision, PolicyMemory]:
        demand, settings = observation.demand, self.settings
        rate = max([demand.arrivals_per_s, *(band.p90 for band in observation.forecast[:2])])
        mix = Mix(max(1.0, demand.prompt_tokens), max(1.0, demand.output_tokens), demand.cached_share)
        needed = math.ceil(rate / self.profile.max_rate(mix, self.slo) * (1 - 1e-9))
        wanted = min(settings.max, max(settings.min, needed))
        before = memory.wanted if memory.wanted is not None else settings.min
        up_at, down_at = memory.up_at, memory.down_at
        if wanted > before and now - up_at >= settings.up_cooldown_s:
            up_at = now
        elif wanted < before and now - max(up_at, down_at) >= settings.down_cooldown_s:
            wanted, down_at = before - 1, now
        else:
            wanted = min(settings.max, max(settings.min, before))
        live = [each for each in observation.replicas if each.target is not ReplicaState.STOPPING]
        actions: list[Action] = []
        for _ in range(wanted - len(live)):
            actions.append(Action(ActionKind.START, f"{wanted} replicas are wanted"))
        active = [each for each in live if each.state is ReplicaState.ACTIVE]
        for each in active[: max(0, len(live) - wanted)]:
            actions.append(Action(ActionKind.STOP, f"{wanted} replicas are enough", each.id))
        decision = Decision(observation.pool, now, wanted, actions=tuple(actions), numbers={"rate": rate})
        return decision, PolicyMemory(wanted, now, up_at, down_at)
