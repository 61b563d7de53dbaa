"""The policy's memory: what one round hands to the next, so that `decide` is a pure fold and survives restarts."""

from __future__ import annotations

from msgspec import Struct


class PolicyMemory(Struct, frozen=True, omit_defaults=True):
    """Empty at a pool's beginning. Times are the policy's clock."""

    wanted: int | None = None  # active replicas, as last decided
    at: float = 0.0  # of the last round
    up_at: float = -1e9  # the last step up
    down_at: float = -1e9
