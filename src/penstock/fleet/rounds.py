"""A round of the policy as it is recorded: all that went in, and what came out, so that it can be decided again.

Rounds that acted or changed the number wanted are kept, and one a minute beside them: some 1 kB and 0.15 kB a replica.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import msgspec
from msgspec import Struct

from penstock.core.config import build
from penstock.core.slo import Slo
from penstock.fleet.policy.decision import Decision
from penstock.fleet.policy.memory import PolicyMemory
from penstock.fleet.policy.observation import PoolObservation
from penstock.fleet.policy.pool_policy import PoolPolicy
from penstock.fleet.policy.profile import CapacityProfile, ReplicaCosts
from penstock.fleet.settings import PoolSettings

UNUSED = frozenset(
    {
        "model",
        "engine",
        "server",
        "slo",
        "hold_s",
        "start_timeout_s",
        "drain_timeout_s",
        "gpus",
        "kubernetes",
        "advisory",
    }
)


class PolicyRound(Struct, frozen=True, omit_defaults=True):
    observation: PoolObservation
    memory: PolicyMemory  # as it was before
    decision: Decision
    settings: dict[str, Any] = {}  # those of the pool that a policy reads and that are not their defaults
    slo: dict[str, Any] = {}  # likewise
    costs: ReplicaCosts | None = None  # of a replica; None: none had reported yet

    def policy(self, settings: PoolSettings | None = None, slo: Slo | None = None) -> PoolPolicy:
        """The policy that decided, or one with other settings on the same replicas."""
        return PoolPolicy(
            settings or build(PoolSettings, self.settings),
            slo or build(Slo, self.slo),
            CapacityProfile(self.costs) if self.costs is not None else None,
        )


_policy_round_decoder = msgspec.json.Decoder(PolicyRound)


def record(policy: PoolPolicy, observation: PoolObservation, memory: PolicyMemory, decision: Decision) -> PolicyRound:
    settings = {name: value for name, value in _changed(policy.settings).items() if name not in UNUSED}
    costs = policy.profile.costs if policy.profile is not None else None
    return PolicyRound(observation, memory, decision, settings, _changed(policy.slo), costs)


def _changed(settings: PoolSettings | Slo) -> dict[str, Any]:
    """Settings that are not their defaults, as plain values."""
    usual = dataclasses.asdict(type(settings)())
    return {name: value for name, value in dataclasses.asdict(settings).items() if value != usual[name]}


def read_rounds(documents: Iterable[str]) -> list[PolicyRound]:
    """Rounds of a store. Those that cannot be read were written by another version, and are left out."""
    found = []
    for document in documents:
        with suppress(msgspec.DecodeError):
            found.append(_policy_round_decoder.decode(document))
    return found
