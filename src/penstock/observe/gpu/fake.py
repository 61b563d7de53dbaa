"""A fake source of readings, for tests and drills: GPUs that are as they are told to be."""

from __future__ import annotations

import msgspec

from penstock.core.devices import DeviceReading


class FakeGpus:
    """Two calm ones, or those that are given. Errors are told once, as a driver does."""

    def __init__(self, *devices: DeviceReading) -> None:
        given = devices or tuple(
            DeviceReading(
                device=f"GPU-{index}",
                name="Fake GPU",
                utilization=0.5,
                memory_used_bytes=1 << 30,
                memory_total_bytes=4 << 30,
                power_w=300.0,
                power_limit_w=700.0,
                temperature_c=50.0,
                clock_hz=1.9e9,
                clock_max_hz=1.98e9,
                ecc_corrected=0,
                ecc_uncorrected=0,
            )
            for index in range(2)
        )
        self._devices = {device.device: device for device in given}
        self._number = 0
        self.is_closed = False

    def change(self, device: str, **fields: object) -> None:
        self._devices[device] = msgspec.structs.replace(self._devices[device], **fields)

    def raise_xid(self, device: str, *xids: int) -> None:
        self.change(device, xids=xids)

    def read(self) -> list[DeviceReading]:
        self._number += 1
        readings = [msgspec.structs.replace(device, number=self._number) for device in self._devices.values()]
        for device in self._devices:
            self.change(device, xids=())
        return readings

    def close(self) -> None:
        self.is_closed = True
