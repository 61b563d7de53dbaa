"""Tiers where a block of a KV cache is kept."""

from __future__ import annotations

import enum


class Tier(enum.Enum):
    DEVICE = "device"
    HOST = "host"  # in memory that must be copied before the device can read it; the block is not on the device
