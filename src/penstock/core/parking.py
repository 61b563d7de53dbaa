"""Parking: an engine's process stays alive, and gives the device's memory back until it is woken."""

from __future__ import annotations

import msgspec


class MemoryChange(msgspec.Struct, frozen=True):
    """Effect of parking or waking on an engine's memory."""

    seconds: dict[str, float] = {}  # by phase, in their order
    num_bytes: int = 0  # given back, or taken again, as the device's driver or the system counts them
