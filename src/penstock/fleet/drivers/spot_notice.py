"""Interruption notices of a cloud's metadata endpoint, for a machine that is spot capacity itself.

Providers answer 404 until the machine is about to be taken away, then 200. AWS names the time:
`{"action": "terminate", "time": "2026-11-16T18:00:00Z"}`; Google answers TRUE, 30 seconds ahead.
"""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec

_SOON_S = 30.0  # where the notice has no time


def seconds_left(status: int, body: bytes, now: float) -> float | None:
    """Returns the seconds that the machine has by this answer; None: no notice."""
    if status != 200 or body.strip().upper() == b"FALSE":
        return None
    try:
        at = datetime.fromisoformat(msgspec.json.decode(body)["time"])
    except (msgspec.DecodeError, ValueError, KeyError, TypeError):
        return _SOON_S
    return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp() - now
