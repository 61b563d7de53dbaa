"""Reasons for lower clocks of a GPU than it could have: the bits of NVML's and DCGM's reasons, by name."""

from __future__ import annotations

# Bit 0 is left out: a GPU that has nothing to do is not held down by anything.
REASONS = {
    1 << 1: "clock_setting",  # somebody set them so
    1 << 2: "power_cap",  # at the power limit: usual under full load, and no fault
    1 << 3: "hw_slowdown",  # half or less: too hot, or power fails; one of the two below says which
    1 << 4: "sync_boost",
    1 << 5: "sw_thermal",  # the driver keeps it below its temperature
    1 << 6: "hw_thermal",  # the chip is too hot
    1 << 7: "power_brake",  # the power supply asks for it
    1 << 8: "display_clock",
}


def reasons(bits: int) -> tuple[str, ...]:
    return tuple(name for bit, name in REASONS.items() if bits & bit)
