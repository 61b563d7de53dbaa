"""What is said to a limiter and what it answers. It knows no tenant beyond a name, no clock and no store."""

from __future__ import annotations

from enum import StrEnum

import msgspec

NOBODY = -1  # the caller that will not come back: nothing is kept for it when it is refused
US = 1_000_000  # microseconds, the limiter's time, in a second
UNIT = 60 * US  # one token or request in a bucket's integers: `per_minute` units flow in each microsecond


class Rate(msgspec.Struct, frozen=True, array_like=True):
    """`per_minute` in the long run, `burst_s` seconds' worth at once."""

    per_minute: int
    burst_s: float = 10.0

    def __post_init__(self) -> None:
        if self.per_minute < 1 or self.burst_s <= 0:
            raise ValueError(f"a rate is at least one per minute with a burst above zero, not {self}")

    @property
    def capacity(self) -> int:
        return self.per_minute * round(self.burst_s * US)

    @property
    def largest(self) -> int:
        """One request may take more than the burst, out of a full bucket (see `bucket`); a minute's worth at most."""
        return max(self.capacity, self.per_minute * UNIT)


class Quota(msgspec.Struct, frozen=True, array_like=True):
    """What one tenant may have; `None` is no limit."""

    requests: Rate | None = None
    tokens: Rate | None = None
    concurrency: int | None = None

    def __post_init__(self) -> None:
        if self.concurrency is not None and self.concurrency < 1:
            raise ValueError("concurrency is at least one")


class Reason(StrEnum):
    """Why not; part of the public contract, as the `code` of the refusal."""

    REQUESTS = "requests_per_minute"
    TOKENS = "tokens_per_minute"
    CONCURRENCY = "concurrency"
    TOO_LARGE = "too_large_for_burst"  # never possible under this quota; there is no time to come back at
    ACCOUNT_ERROR = "limiter_account_error"  # the shared limiter works, and fails at this tenant's account
    UNAVAILABLE = "limiter_unavailable"  # the shared limiter is out of reach, and the choice is to fail closed


class Refusal(msgspec.Struct, frozen=True):
    reason: Reason
    retry_after_s: float | None  # a place is kept from then on; None when coming back cannot help
    is_due: bool = False  # the caller kept its time and is first in line for a free slot: let it wait, not go
