"""The policy's memory: what one round hands to the next, so that `decide` is a pure fold and survives restarts."""

from __future__ import annotations

from msgspec import Struct


class PolicyMemory(Struct, frozen=True, omit_defaults=True):
    """Empty at a pool's beginning. Times are the policy's clock."""

    wanted: int | None = None  # active replicas, as last decided
    at: float | None = None  # of the last round
    up_at: float = -1e9  # the last step up
    down_at: float = -1e9
    busy_at: float | None = None  # when somebody last asked
    rate: float = 0.0  # arrivals/s, over a minute
    dispersion: float = 1.0  # variance of the arrivals of a second over their mean, over some minutes
    burst: float = 0.0  # arrivals/s beyond the rate in a single second, and when
    burst_at: float = -1e9
    prompt_tokens: float = 0.0  # mean request, over some minutes
    output_tokens: float = 0.0
    cached_share: float = 0.0
    slowdown: float = 1.0  # of replicas against the profile, as measured
    corrected_at: float = 0.0
    queued_at: float = -1e9  # when a queue last broke the SLO, and since when it has
    queued_since: float | None = None
    caution: float = 0.5  # how far from p50 to p99 of the forecast capacity is planned
    needs: tuple[tuple[int, int], ...] = ()  # (span of seconds, most replicas needed in it), oldest first
    peak: float = 0.0  # replicas needed at the busiest time of the last day or so
    surplus_at: float | None = None  # since when there is more in standby or parked than planned
    moved_at: float = -1e9  # a replica was last moved to another zone or capacity type
