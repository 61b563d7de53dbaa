"""Messages to a limiter and its answers. They know no tenant beyond a name, no clock and no store."""

from __future__ import annotations

from enum import StrEnum

import msgspec

NOBODY = -1  # the caller that will not come back: nothing is kept for it when it is refused
US = 1_000_000  # microseconds, the limiter's time, in a second
MINUTE = 60 * US
REQUESTS, TOKENS = 0, 1  # positions of the two kinds in costs and slots


class Rate(msgspec.Struct, frozen=True, array_like=True):
    """Any 60 seconds hold at most `per_minute`, and all of it may come at once; of a smooth rate a sixth (`pacer`)."""

    per_minute: int
    smooth: bool = False

    def __post_init__(self) -> None:
        if self.per_minute < 1:
            raise ValueError(f"a rate is at least one per minute, not {self.per_minute}")


class Quota(msgspec.Struct, frozen=True, array_like=True):
    """Limits of one tenant; `None` is no limit."""

    requests: Rate | None = None
    tokens: Rate | None = None
    concurrency: int | None = None

    def __post_init__(self) -> None:
        if self.concurrency is not None and self.concurrency < 1:
            raise ValueError("concurrency is at least one")


class Reason(StrEnum):
    """Cause of a refusal; part of the public contract, as the `reason` of the error."""

    REQUESTS = "requests_per_minute"
    TOKENS = "tokens_per_minute"
    CONCURRENCY = "concurrency"
    TOO_LARGE = "too_large_for_limit"  # never possible under this quota; there is no time to come back at
    ACCOUNT_ERROR = "limiter_account_error"  # the shared limiter works, and fails at this tenant's account
    UNAVAILABLE = "limiter_unavailable"  # the shared limiter is out of reach, and the choice is to fail closed


class Refusal(msgspec.Struct, frozen=True, array_like=True):
    """`used` of `limit` in the last 60 seconds, or of requests at once. Open ones count with all that they reserved."""

    reason: Reason
    retry_after_s: float | None  # from then on there is room for this caller; None: coming back cannot help
    is_due: bool = False  # the caller kept its time and is first in line: let it wait a moment, not go
    limit: int = 0
    used: int = 0
    kept: int = 0  # for callers that were refused before and told when to come back
    is_paced: bool = False  # the limit has room, and a smooth rate gives it out more slowly
