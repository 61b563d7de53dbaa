"""The time at which a model without an active replica will have one, as its fleet's controller says."""

from __future__ import annotations

from typing import NamedTuple


class Expected(NamedTuple):
    """Times are by the caller's clock."""

    hold_s: float  # how long requests without a deadline of their own may wait; 0: they are refused
    ready_at: float | None  # None: no replica is on its way
    start_s: float  # how long one takes from the first request that waits; 0: not known
    until: float  # how long this is believed: a controller that is silent says nothing
    refusal: str = ""  # why none will come, in words; empty: one may

    def eta_s(self, since: float, now: float) -> float | None:
        """Seconds until a replica takes a request that waits `since` then; None: nobody knows."""
        if self.ready_at is not None:
            return max(0.0, self.ready_at - now)
        return max(0.0, since + self.start_s - now) if self.start_s > 0 else None
