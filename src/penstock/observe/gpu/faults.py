"""Errors of a GPU that mean that it must get no new work, and why. Readings in, a reason out; no clock, no I/O.

A replica stays out of work once its GPU had such an error: only a fresh process, and often a reset of the GPU, makes
sure that what it computes is right. All other errors are counted and told, and the process that caused one dies of it.
"""

from __future__ import annotations

from penstock.core.devices import DeviceReading

FATAL_XIDS = {
    46: "it stopped processing and has to be reset",
    48: "its memory had an error that cannot be corrected",
    62: "its own controller halted",
    64: "broken memory could not be taken out of use",
    79: "it has fallen off the bus",
    94: "its memory had an error that hit this process: nothing that the process holds there is sure any more",
    95: "its memory had an error that may have hit any process",
    109: "it hung while switching between processes",
    110: "a security fault: it has to be reset",
    119: "its system processor does not answer",
    120: "its system processor failed",
    140: "its memory had errors from which it did not recover",
    143: "it could not be initialized",
    158: "it hung for good",
}


class DeviceFaults:
    """The faults in one process' life: what a device counted before is not held against it."""

    def __init__(self) -> None:
        self._uncorrected: dict[str, int] = {}  # when it was first seen
        self.found: dict[str, str] = {}  # device -> why; the first reason stays

    def take(self, reading: DeviceReading) -> str | None:
        """Returns what is wrong with the device, if anything is or ever was."""
        reason = self._reason(reading)
        if reason is not None:
            self.found.setdefault(reading.device, reason)
        return self.found.get(reading.device)

    def _reason(self, reading: DeviceReading) -> str | None:
        for xid in reading.xids:
            if xid in FATAL_XIDS:
                return f"Xid {xid}: {FATAL_XIDS[xid]}"
        if reading.is_lost:
            return "it no longer answers its driver"
        if reading.has_bad_rows:
            return "it has broken memory that could not be replaced"
        if reading.ecc_uncorrected is not None:
            before = self._uncorrected.setdefault(reading.device, reading.ecc_uncorrected)
            if reading.ecc_uncorrected > before:
                return f"{reading.ecc_uncorrected - before} errors of its memory could not be corrected"
        return None
